//! Packed kernel arguments.

/// Packed kernel arguments: one 8-byte word a PTX parameter.
#[derive(Debug, Clone, Copy)]
pub struct ArgumentWords {
    words: [u64; Self::CAPACITY],
    length: usize,
}

impl ArgumentWords {
    /// The most parameters an entry may have.
    pub const CAPACITY: usize = 64;

    /// No words yet.
    pub const fn new() -> Self {
        Self { words: [0; Self::CAPACITY], length: 0 }
    }

    /// Appends one word.
    ///
    /// # Panics
    /// Beyond [`CAPACITY`](Self::CAPACITY) words.
    pub const fn push(&mut self, word: u64) {
        assert!(self.length < Self::CAPACITY, "a kernel entry takes at most 64 words of arguments");
        self.words[self.length] = word;
        self.length += 1;
    }

    /// The words so far.
    pub fn as_slice(&self) -> &[u64] {
        &self.words[..self.length]
    }
}

impl Default for ArgumentWords {
    fn default() -> Self {
        Self::new()
    }
}

/// Reads [`ArgumentWords`] back, on an emulated thread.
pub struct WordReader<'a> {
    words: &'a [u64],
}

impl<'a> WordReader<'a> {
    /// Starts at the first word.
    pub const fn new(words: &'a [u64]) -> Self {
        Self { words }
    }

    /// The next word.
    ///
    /// # Panics
    /// If there is none: the words are another kernel's.
    pub fn next_word(&mut self) -> u64 {
        let (first, rest) = self.words.split_first().expect("the argument words of this kernel");
        self.words = rest;
        *first
    }
}
