//! Some of the heads of each rank, which are traded together.

use std::ops::Range;

use oxtile_tile::launch::BufferAccess;

use super::element::ContextElement;
use super::lane::{Lane, Trade, Way};
use super::plan::Direction;
use crate::attention::AttentionConfig;
use crate::runtime::{Result, Stream};
use crate::symmetric::Arena;

/// Some of each rank's heads.
pub(super) struct Group<T> {
    /// The first of this rank's, and how many.
    pub heads: [u64; 2],
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

/// Into how many groups a rank's heads are cut: each has whole key heads, and rows that copy engines take at their full rate.
pub(super) fn groups_of(all: &AttentionConfig, size: u64) -> u64 {
    let is_wide = |count: &u64| {
        all.key_heads.is_multiple_of(*count) && (all.key_heads / count).saturating_mul(all.head_size).saturating_mul(size) >= FULL_WIDTH
    };
    (1..=MOST_GROUPS).rev().find(is_wide).unwrap_or(1)
}

impl<T: ContextElement> Group<T> {
    /// Memory of part `number` of `count` of the heads of each rank, of the arena if there is one.
    pub fn new(
        stream: &Stream,
        place: (Trade, Option<&Arena>),
        all: &AttentionConfig,
        part @ [number, count]: [u64; 2],
        sharing: u64,
    ) -> Result<Self> {
        let AttentionConfig { queries, keys, heads, key_heads, head_size, .. } = *all;
        let value = all.value_size();
        let lane = |name, shape, way| Lane::new(stream, place, name, shape, part, (1, way));
        let shared = |name, shape, way| Lane::new(stream, place, name, shape, part, (sharing, way));
        let [of_q, of_k, of_v, of_out] =
            [[queries, heads, head_size], [keys, key_heads, head_size], [keys, key_heads, value], [queries, heads, value]];
        Ok(Self {
            heads: [number * heads / count, heads / count],
            q: lane("traded queries", of_q, Way::Given)?,
            k: shared("traded keys", of_k, Way::Given)?,
            v: shared("traded values", of_v, Way::Given)?,
            out: lane("traded results", of_out, Way::Both)?,
            log_sum_exp: Lane::new(stream, place, "traded log-sum-exp", [queries, heads, 1], part, (1, Way::Both))?,
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

    /// Its memory of all tokens, to be written.
    pub fn accesses(&self) -> Vec<BufferAccess<'_>> {
        let tensors = self.backward().into_iter().chain(&self.grads).map(|lane| lane.natural.access(true));
        tensors.chain([self.log_sum_exp.natural.access(true)]).collect()
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
