//! The input data, the same on both sides: one run of normal values, which each buffer repeats from another start.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use half::bf16;

use crate::random::Random;

/// How far the start moves from one buffer to the next; odd, so that no two buffers repeat each other.
const STEP: usize = 104_729;

/// The value of a pattern of `count` with which buffer number `buffer` begins.
pub fn start(buffer: usize, count: usize) -> usize {
    STEP * buffer % count
}

/// Random normal bf16 values, in a file that the peers read too.
pub struct Pattern {
    values: Vec<bf16>,
    folder: tempfile::TempDir,
}

impl Pattern {
    /// `count` values; the file goes with the pattern.
    ///
    /// # Errors
    /// The temporary folder cannot be written.
    pub fn new(seed: u64, count: usize) -> Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder: set TMPDIR to one that can be written")?;
        let pattern = Self { values: Random::new(seed).normal(count), folder };
        let bytes: Vec<u8> = pattern.values.iter().flat_map(|v| v.to_le_bytes()).collect();
        pattern.write("pattern", &bytes)?;
        Ok(pattern)
    }

    /// The number of values.
    pub fn count(&self) -> usize {
        self.values.len()
    }

    /// The file with the values, two bytes each, little end first.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("pattern")
    }

    /// The data of buffer number `buffer`: element `i` is value `(STEP * buffer + i) mod count` of the pattern.
    pub fn fill(&self, buffer: usize, count: u64) -> Vec<bf16> {
        let mut filled = Vec::with_capacity(count as usize);
        let mut start = start(buffer, self.values.len());
        while filled.len() < count as usize {
            let take = (count as usize - filled.len()).min(self.values.len() - start);
            filled.extend_from_slice(&self.values[start..start + take]);
            start = 0;
        }
        filled
    }

    /// The same data as `count` 32-bit words.
    pub fn fill_words(&self, buffer: usize, count: u64) -> Vec<u32> {
        let halves = self.fill(buffer, 2 * count);
        halves.chunks_exact(2).map(|pair| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16).collect()
    }

    /// Writes a file beside the pattern for the peers to compare with.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// The folder of the pattern.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_repeat_the_pattern_from_their_own_place() {
        let pattern = Pattern::new(3, 1000).unwrap();
        let start = STEP * 2 % 1000;
        let filled = pattern.fill(2, 2500);
        assert!(filled.iter().enumerate().all(|(i, v)| *v == pattern.values[(start + i) % 1000]));
        assert_ne!(filled, pattern.fill(1, 2500));
        assert_eq!(fs::read(pattern.file()).unwrap().len(), 2000);
    }
}
