//! Among how many tiles the query heads that share keys are split in the backward pass.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use oxtile_kernels::attention::{BACKWARD_KEYS, Span};

use super::config::AttentionConfig;

/// Multiprocessors that tiles are spread over: those of an H100 or H200. A constant, so that the bits of gradients do not depend on the
/// device.
const MULTIPROCESSORS: u64 = 132;

/// Tiles a multiprocessor from which on they are even enough.
const ENOUGH: u64 = 4;

/// What the parts of a split tile cost on their way out and in again, in blocks of queries: one for so many elements of a row of a head.
const EXTRA: u64 = 32;

impl AttentionConfig {
    /// Among how many tiles the query heads that share keys are split, a divisor of their number: the one with
    /// which the last multiprocessor ends first, where a block of keys is multiplied by blocks of `queries`.
    pub(crate) fn group_parts(&self, queries: u64) -> u64 {
        let (group, heads) = (self.group(), self.batches * self.key_heads);
        let tiles = heads * self.keys.div_ceil(BACKWARD_KEYS as u64);
        if group == 1 || tiles == 0 || tiles >= ENOUGH * MULTIPROCESSORS {
            return 1;
        }
        let bounds = self.bounds();
        // Blocks of queries that see a block of keys, for each.
        let seen = (0..self.keys as u32).step_by(BACKWARD_KEYS).map(|begin| {
            let rows = bounds.rows(Span { begin, end: begin + BACKWARD_KEYS as u32 });
            u64::from(rows.end).div_ceil(queries).saturating_sub(u64::from(rows.begin) / queries)
        });
        let seen: Vec<u64> = seen.collect();
        let time = |parts: u64| {
            let extra = if parts == 1 { 0 } else { self.head_size / EXTRA };
            last_end(seen.iter().map(|blocks| blocks * (group / parts) + extra), heads * parts)
        };
        let possible = (1..=group).filter(|parts| group.is_multiple_of(*parts));
        possible
            .take_while(|parts| *parts == 1 || tiles * parts <= 2 * ENOUGH * MULTIPROCESSORS)
            .min_by_key(|parts| time(*parts))
            .unwrap_or(1)
    }
}

/// When the last of `count` tiles of each of `lengths` ends, where the multiprocessor that is done first takes the next.
fn last_end(lengths: impl Iterator<Item = u64>, count: u64) -> u64 {
    let mut ends: BinaryHeap<_> = (0..MULTIPROCESSORS).map(|_| Reverse(0)).collect();
    let mut last = 0;
    for length in lengths {
        for _ in 0..count {
            if let Some(mut first) = ends.peek_mut() {
                first.0 += length;
                last = last.max(first.0);
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Mask;

    fn group_parts(shape: [u64; 5], mask: Mask) -> u64 {
        let [batches, keys, heads, key_heads, head_size] = shape;
        AttentionConfig { batches, queries: keys, keys, heads, key_heads, head_size, mask, ..AttentionConfig::default() }.group_parts(64)
    }

    #[test]
    fn tiles_are_split_where_they_are_few_or_uneven() {
        let causal = Mask::CausalBottomRight;
        // 128 tiles of which the longest takes twice the mean.
        assert_eq!(group_parts([1, 8192, 16, 2, 128], causal), 2);
        // All alike, one for each multiprocessor.
        assert_eq!(group_parts([1, 8192, 16, 2, 128], Mask::Full), 1);
        // 64 of them.
        assert_eq!(group_parts([1, 2048, 32, 4, 128], Mask::Full), 2);
        // Enough, nothing to split, and nothing at all.
        assert_eq!(group_parts([4, 8192, 16, 4, 128], causal), 1);
        assert_eq!(group_parts([1, 8192, 2, 2, 128], causal), 1);
        assert_eq!(group_parts([1, 0, 16, 2, 128], causal), 1);
        // A block of queries is not worth the way out.
        assert_eq!(group_parts([1, 64, 2, 1, 64], causal), 1);
    }

    #[test]
    fn the_first_that_is_done_takes_the_next() {
        assert_eq!(last_end([3, 1].into_iter(), MULTIPROCESSORS), 4);
        assert_eq!(last_end([5, 3, 2].into_iter(), MULTIPROCESSORS / 2), 5);
        assert_eq!(last_end([].into_iter(), 1), 0);
    }
}
