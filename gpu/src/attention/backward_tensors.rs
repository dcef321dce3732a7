//! What the kernels of the backward pass on wgmma share as parameters.

use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use super::backward_workspace::{BACKWARD_KEYS, WARPGROUP_KEYS};
use super::shape::{Checked, MOST_BLOCKS};

/// What a tile of keys is multiplied by, and what is known of its queries.
#[derive(Clone, Copy, Parameter)]
pub struct BackwardTensors<T: RegisterElement, const D: usize, const QUERIES: usize, const RANK: usize> {
    /// Queries.
    pub q: TensorMap<T, QUERIES, D, Swizzle128, RANK>,
    /// Gradients of the result.
    pub grad_out: TensorMap<T, QUERIES, D, Swizzle128, RANK>,
    /// Keys.
    pub k: TensorMap<T, BACKWARD_KEYS, D, Swizzle128, RANK>,
    /// Values.
    pub v: TensorMap<T, BACKWARD_KEYS, D, Swizzle128, RANK>,
    /// [`BlockStatistics::offsets`].
    pub offsets: Global<f32>,
    /// [`BlockStatistics::deltas`].
    pub deltas: Global<f32>,
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const RANK: usize> BackwardTensorsArgument<'_, T, D, QUERIES, RANK> {
    /// Statistics of so many queries, which bulk copies read.
    pub(super) fn check(&self, queries: u64) -> Checked {
        for (name, statistics) in [("problem.tensors.offsets", &self.offsets), ("problem.tensors.deltas", &self.deltas)] {
            LaunchError::check_length(name, queries, statistics.len())?;
            LaunchError::check_alignment(name, 16, statistics.address())?;
        }
        Ok(())
    }
}

/// The gradients of keys and of values.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct KeyGradients<T: RegisterElement, const D: usize, const RANK: usize> {
    /// Of the keys.
    pub k: TensorMapMut<T, WARPGROUP_KEYS, D, Swizzle128, RANK>,
    /// Of the values.
    pub v: TensorMapMut<T, WARPGROUP_KEYS, D, Swizzle128, RANK>,
}

/// Two statistics a query, for each block of `size` queries of each head; -inf and 0 where no query is, and for queries that see nothing, so that
/// their weights are 0.
#[derive(Clone, Copy, Parameter)]
pub struct BlockStatistics {
    /// `-log2(e) log_sum_exp`.
    pub offsets: GlobalMut<f32>,
    /// The row sums of `O dO`.
    pub deltas: GlobalMut<f32>,
    /// Blocks of a head.
    pub blocks: u32,
    /// Queries of a block.
    pub size: u32,
    /// Queries of all blocks of a head.
    pub rows: u32,
}

/// Sums of `dQ` in fragments (`oxtile_tile::fragment_tile`), for each block of queries of each head. The first to add stores, so that nothing need be
/// zero before.
#[derive(Clone, Copy, Parameter)]
pub struct QuerySums {
    /// The sums: as many rows of a head size as the blocks have queries.
    pub values: GlobalMut<f32>,
    /// A zero for each block, which counts what has added to it.
    pub turns: GlobalMut<u32>,
    /// Blocks of a head.
    pub blocks: u32,
}

/// The order in which tiles of keys are taken, and in which they add to gradients of queries.
#[derive(Clone, Copy, Parameter)]
pub struct KeyOrder {
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// What is computed together: key heads of dense tensors, keys of sequences.
    pub section: u32,
    /// Whether tiles add to a block of queries one after the other, in the order of keys: the same bits in every run and under every grid.
    pub ordered: bool,
}

impl KeyOrderArgument<'_> {
    /// For key heads of dense tensors, of so many tiles.
    pub(super) fn check_heads(&self, key_blocks: u64) -> Checked {
        LaunchError::check_at_least("problem.order.section", 1, self.section.into())?;
        LaunchError::check_limit("problem.order.section", key_blocks * u64::from(self.section), MOST_BLOCKS)?;
        self.check()
    }

    /// For keys of sequences, of which a section may have any number.
    pub(super) fn check(&self) -> Checked {
        LaunchError::check_length("problem.order.counter", 1, self.counter.len())
    }
}

impl QuerySumsArgument<'_> {
    /// Sums for `heads` query heads of all batches, in blocks of `elements`; returns how many blocks that is.
    pub(super) fn check(&self, [values, turns, blocks]: [&'static str; 3], heads: u64, elements: usize) -> Result<u64, LaunchError> {
        let all = heads.saturating_mul(self.blocks.into());
        LaunchError::check_limit(blocks, all, MOST_BLOCKS)?;
        LaunchError::check_length(values, all * elements as u64, self.values.len())?;
        LaunchError::check_alignment(values, 16, self.values.address())?;
        LaunchError::check_length(turns, all, self.turns.len())?;
        Ok(all)
    }
}

impl BlockStatisticsArgument<'_> {
    /// Statistics for `heads` query heads of all batches.
    pub(super) fn check(&self, heads: u64) -> Checked {
        LaunchError::check_length("statistics.rows", u64::from(self.blocks) * u64::from(self.size), self.rows.into())?;
        LaunchError::check_limit("statistics.rows", self.rows.into(), MOST_BLOCKS)?;
        LaunchError::check_length("statistics.offsets", heads * u64::from(self.rows), self.offsets.len())?;
        LaunchError::check_length("statistics.deltas", heads * u64::from(self.rows), self.deltas.len())
    }
}
