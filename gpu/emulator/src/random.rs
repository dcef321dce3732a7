//! The pseudo-random numbers of the scheduler.

use std::cell::Cell;

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
pub(crate) struct Random(Cell<u64>);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(Cell::new(seed))
    }

    pub fn next(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// True once in `n`.
    pub fn once_in(&self, n: usize) -> bool {
        self.below(n) == 0
    }
}
