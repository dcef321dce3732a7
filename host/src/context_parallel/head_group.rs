//! Some of the heads of each rank, which are traded together.

use std::ops::Range;

use oxtile_tile::launch::BufferAccess;

use super::element::ContextElement;
use super::lane::{Lane, Trade, Way};
use super::plan::Direction;
use super::trading::HeadGroup;
use crate::attention::AttentionConfig;
use crate::runtime::{Result, Stream};
use crate::symmetric::Arena;

/// Some of each rank's heads.
pub(super) struct Group<T> {
    /// The first of this rank's query heads, and how many.
    pub heads: [u64; 2],
    /// How many key heads.
    pub key_heads: u64,
    pub q: Lane<T>,
    pub k: Lane<T>,
    pub v: Lane<T>,
    pub out: Lane<T>,
    pub log_sum_exp: Lane<f32>,
    pub grad_out: Lane<T>,
    pub grads: [Lane<T>; 3],
}

/// Bytes of a token's keys in a group, at least: copy engines put rows of 256 bytes at the rate of longer ones, 378 GB/s between two H100s
/// (benches/results/tuning/rows_two_h100.txt); shorter ones were not tried.
const FULL_WIDTH: u64 = 256;

/// The most groups.
const MOST_GROUPS: u64 = 4;

/// The key heads of each group that a rank's heads are cut into, equally: rows that copy engines take at their full rate.
///
/// A first and a last group that are half as large leave less at the ends, where nothing is computed beside copies, and were slower: 3.96 for 3.43 ms forward at 32k tokens and 8 heads a
/// rank (`context_parallel_two_h100_43817dc.json`). By arithmetic the longest tile of a launch of a single head takes longer than an equal share of all its tiles on each multiprocessor.
pub(super) fn groups_of(all: &AttentionConfig, size: u64) -> Vec<u64> {
    let is_wide = |key_heads: u64| key_heads.saturating_mul(all.head_size).saturating_mul(size) >= FULL_WIDTH;
    let fits = |count: &u64| all.key_heads.is_multiple_of(*count) && is_wide(all.key_heads / count);
    let count = (1..=MOST_GROUPS).rev().find(fits).unwrap_or(1);
    vec![all.key_heads / count; count as usize]
}

/// The first of each, and how many, of sizes that follow one another.
pub(super) fn in_rows(sizes: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    sizes.iter().scan(0, |next, size| {
        let first = *next;
        *next += size;
        Some((first, *size))
    })
}

impl<T: ContextElement> Group<T> {
    /// Memory of so many key heads of each rank from the first one on, and of their query heads; of the arena if there is one.
    pub fn new(
        stream: &Stream,
        place: (Trade, Option<&Arena>),
        all: &AttentionConfig,
        of_keys @ [first, count]: [u64; 2],
        sharing: u64,
    ) -> Result<Self> {
        let AttentionConfig { queries, keys, heads, key_heads, head_size, .. } = *all;
        let value = all.value_size();
        let group = heads / key_heads;
        let of_queries = [first * group, count * group];
        let lane = |name, shape, way| Lane::new(stream, place, name, shape, of_queries, (1, way));
        let shared = |name, shape, way| Lane::new(stream, place, name, shape, of_keys, (sharing, way));
        let [of_q, of_k, of_v, of_out] =
            [[queries, heads, head_size], [keys, key_heads, head_size], [keys, key_heads, value], [queries, heads, value]];
        Ok(Self {
            heads: of_queries,
            key_heads: count,
            q: lane("traded queries", of_q, Way::Given)?,
            k: shared("traded keys", of_k, Way::Given)?,
            v: shared("traded values", of_v, Way::Given)?,
            out: lane("traded results", of_out, Way::Both)?,
            log_sum_exp: Lane::new(stream, place, "traded log-sum-exp", [queries, heads, 1], of_queries, (1, Way::Both))?,
            grad_out: lane("traded gradients of results", of_out, Way::Given)?,
            grads: [
                lane("traded gradients", of_q, Way::Taken)?,
                shared("traded gradients", of_k, Way::Taken)?,
                shared("traded gradients", of_v, Way::Taken)?,
            ],
        })
    }

    /// The most bytes that a copy within the device has at once.
    pub fn kept(&self) -> u64 {
        let tensors = self.backward().into_iter().chain(&self.grads).map(Lane::kept);
        tensors.max().unwrap_or_default()
    }

    /// Its heads among this rank's.
    pub fn range(&self) -> Range<u64> {
        let [first, count] = self.heads;
        first..first + count
    }

    /// What the forward pass gives.
    pub fn forward(&self) -> [&Lane<T>; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// What the backward pass gives.
    pub fn backward(&self) -> [&Lane<T>; 5] {
        [&self.q, &self.k, &self.v, &self.out, &self.grad_out]
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        self.backward().into_iter().chain(&self.grads).try_for_each(|lane| lane.spoil(stream))?;
        self.log_sum_exp.spoil(stream)
    }

    /// Device memory that some passes use.
    pub fn memory(&self, passes: &[Direction]) -> u64 {
        let lanes: Vec<_> = match passes.contains(&Direction::Backward) {
            // What the forward pass gives is given again.
            true => self.backward().into_iter().chain(&self.grads).collect(),
            false => self.forward().into_iter().chain([&self.out]).collect(),
        };
        lanes.into_iter().map(Lane::bytes).sum::<u64>() + self.log_sum_exp.bytes()
    }
}

impl<T: ContextElement> HeadGroup for Group<T> {
    fn accesses(&self) -> Vec<BufferAccess<'_>> {
        let tensors = self.backward().into_iter().chain(&self.grads).map(|lane| lane.natural.access(true));
        tensors.chain([self.log_sum_exp.natural.access(true)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups are equal and have all key heads, and none has rows that copy engines take slowly where a rank's heads are wide enough.
    #[test]
    fn groups_are_equal() {
        let of = |key_heads, head_size| groups_of(&AttentionConfig { key_heads, head_size, ..AttentionConfig::default() }, 2);
        assert_eq!(of(8, 128), [2; 4]);
        assert_eq!(of(12, 128), [3; 4]);
        assert_eq!(of(6, 128), [2; 3]);
        assert_eq!(of(5, 128), [5]);
        assert_eq!(of(4, 128), [1, 1, 1, 1]);
        // A head of 64 is a row of 128 bytes.
        assert_eq!(of(8, 64), [2, 2, 2, 2]);
        assert_eq!(of(4, 64), [2, 2]);
        assert_eq!(of(2, 128), [1, 1]);
        assert_eq!(of(1, 64), [1]);
        for (key_heads, head_size) in (1..40).flat_map(|heads| [64, 128, 256].map(|size| (heads, size))) {
            let sizes = of(key_heads, head_size);
            assert_eq!(sizes.iter().sum::<u64>(), key_heads);
            assert!(sizes.len() == 1 || sizes.iter().all(|size| size * head_size * 2 >= FULL_WIDTH), "{sizes:?}");
            let rows: Vec<_> = in_rows(&sizes).collect();
            assert!(rows.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0) && rows[0].0 == 0, "{rows:?}");
        }
    }
}
