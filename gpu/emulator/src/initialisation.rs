//! Which bytes of an allocation were written.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// One bit a byte.
pub(crate) struct Initialisation {
    bits: Box<[AtomicU64]>,
    /// A kernel in fast mode may have written the allocation: nothing is tracked any more.
    assumed: AtomicBool,
}

impl Initialisation {
    /// The state of `bytes` bytes, none of them written.
    pub fn new(bytes: usize) -> Self {
        Self { bits: (0..bytes.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), assumed: AtomicBool::new(false) }
    }

    /// Takes all bytes as written from here on.
    #[inline(always)]
    pub fn assume(&self) {
        if !self.assumed.load(Ordering::Relaxed) {
            self.assumed.store(true, Ordering::Relaxed);
        }
    }

    /// The range was written.
    pub fn set(&self, offset: u64, bytes: u64) {
        for (word, mask) in bit_ranges(offset, bytes) {
            self.bits[word].fetch_or(mask, Ordering::Relaxed);
        }
    }

    /// What the range holds does not count any more.
    pub fn clear(&self, offset: u64, bytes: u64) {
        for (word, mask) in bit_ranges(offset, bytes) {
            self.bits[word].fetch_and(!mask, Ordering::Relaxed);
        }
    }

    /// The first byte of the range that was never written.
    pub fn first_missing(&self, offset: u64, bytes: u64) -> Option<u64> {
        if self.assumed.load(Ordering::Relaxed) {
            return None;
        }
        bit_ranges(offset, bytes).find_map(|(word, mask)| {
            let missing = mask & !self.bits[word].load(Ordering::Relaxed);
            (missing != 0).then(|| word as u64 * 64 + u64::from(missing.trailing_zeros()))
        })
    }

    /// The range was copied from `source`: a byte counts as written if its original does.
    pub fn copy(&self, offset: u64, source: &Self, source_offset: u64, bytes: u64) {
        if source.assumed.load(Ordering::Relaxed) {
            return self.set(offset, bytes);
        }
        for (word, mask) in bit_ranges(offset, bytes) {
            let bits = source.bits_from(word as i64 * 64 - offset as i64 + source_offset as i64);
            let copied = |old: u64| Some(old & !mask | bits & mask);
            self.bits[word].fetch_update(Ordering::Relaxed, Ordering::Relaxed, copied).expect("the closure always returns a value");
        }
    }

    /// The bits of 64 bytes from `start` on; those outside of the allocation are zero.
    fn bits_from(&self, start: i64) -> u64 {
        let word = |i: i64| usize::try_from(i).ok().and_then(|i| self.bits.get(i)).map_or(0, |bits| bits.load(Ordering::Relaxed));
        let (first, shift) = (start.div_euclid(64), start.rem_euclid(64));
        let high = if shift == 0 { 0 } else { word(first + 1) << (64 - shift) };
        word(first) >> shift | high
    }
}

/// Splits a byte range into (word of 64 bits, mask).
pub(crate) fn bit_ranges(offset: u64, bytes: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = offset + bytes;
    (offset / 64..end.div_ceil(64)).map(move |word| {
        let low = offset.saturating_sub(word * 64).min(64);
        let high = (end - word * 64).min(64);
        let ones = if high - low == 64 { u64::MAX } else { ((1 << (high - low)) - 1) << low };
        (word as usize, ones)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies between all offsets around word boundaries, held to one flag a byte.
    #[test]
    fn a_copy_takes_each_bytes_state_along() {
        const BYTES: u64 = 300;
        let written = |byte: u64| byte.is_multiple_of(3) || byte % 7 == 2;
        let cuts = [0, 1, 5, 63, 64, 65, 100, 128, 130];
        for (from, to, bytes) in cuts.iter().flat_map(|&a| cuts.iter().flat_map(move |&b| cuts.map(|c| (a, b, c)))) {
            let (source, target) = (Initialisation::new(BYTES as usize), Initialisation::new(BYTES as usize));
            (0..BYTES).filter(|&byte| written(byte)).for_each(|byte| source.set(byte, 1));
            (0..BYTES).filter(|byte| byte.is_multiple_of(2)).for_each(|byte| target.set(byte, 1));
            target.copy(to, &source, from, bytes);
            for byte in 0..BYTES {
                let expected = if (to..to + bytes).contains(&byte) { written(byte - to + from) } else { byte.is_multiple_of(2) };
                assert_eq!(target.first_missing(byte, 1).is_none(), expected, "byte {byte} of a copy from {from} to {to} of {bytes}");
            }
        }
    }
}
