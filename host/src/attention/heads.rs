//! Tensors of heads as maps address them, and the maps of what the forward pass reads.

use oxtile_kernels::attention::WARPGROUP_QUERIES;
use oxtile_tile::layout::{Swizzle, Swizzle128};
use oxtile_tile::num::Pod;

use super::config::{AttentionConfig, Layout};
use super::tensors::Inputs;
use crate::runtime::{Result, Stream};
use crate::tensor::{MapLayout, SequenceRows, Strided, TensorMap, Uploads};

/// The rows that a tensor has.
#[derive(Clone, Copy)]
pub(super) enum Side {
    /// Those of `Q` and of the output.
    Queries,
    /// Those of `K` and `V`.
    Keys,
}

impl AttentionConfig {
    /// Rows of a head, and heads.
    pub(super) fn side(&self, side: Side) -> [u64; 2] {
        match side {
            Side::Queries => [self.queries, self.heads],
            Side::Keys => [self.keys, self.key_heads],
        }
    }

    /// A dense tensor, `[batches, heads, rows, size]`.
    pub(super) fn dense(&self, side: Side, size: u64) -> Strided<4> {
        let ([rows, heads], batches) = (self.side(side), self.batches);
        let row = heads * size;
        let [batch, row] = if self.layout == Layout::Sbhd { [row, batches * row] } else { [rows * row, row] };
        Strided { shape: [batches, heads, rows, size], strides: [batch, size, row, 1] }
    }

    /// The same with the query heads that share keys as rows of one, where they [fold](Self::folds).
    pub(super) fn folded(&self, side: Side, size: u64) -> Strided<4> {
        let [rows, heads] = self.rows_and_heads();
        match side {
            Side::Queries if self.folds() => {
                Strided { shape: [self.batches, heads, rows, size], strides: [self.heads * size, rows * size, size, 1] }
            }
            Side::Queries | Side::Keys => self.dense(side, size),
        }
    }

    /// A tensor of rows that sequences are parts of: layouts differ in this and in the offsets.
    pub(super) fn sequence_rows(&self, side: Side, size: u64) -> SequenceRows {
        let ([rows, heads], batches) = (self.side(side), self.batches);
        let [rows, heads] = match self.layout {
            Layout::Bshd => [batches * rows, heads],
            Layout::Sbhd => [rows, batches * heads],
            Layout::Packed => [rows, heads],
        };
        SequenceRows { rows, row: heads * size, heads, head: size, size }
    }
}

/// The tensor maps of queries, keys and values.
pub(super) struct ForwardMaps<'a, T: Pod, const KEYS: usize, const D: usize, const V: usize, const RANK: usize, S = Swizzle128> {
    pub(super) q: TensorMap<'a, T, WARPGROUP_QUERIES, D, S, RANK>,
    pub(super) k: TensorMap<'a, T, KEYS, D, S, RANK>,
    pub(super) v: TensorMap<'a, T, KEYS, V, S, RANK>,
}

impl<'a, T: Pod, const KEYS: usize, const D: usize, const V: usize, const RANK: usize, S: Swizzle> ForwardMaps<'a, T, KEYS, D, V, RANK, S> {
    /// Without keys nothing is loaded by their maps, which must be of something: the queries.
    pub(super) fn new<R: MapLayout<RANK>>(
        uploads: &mut Uploads,
        stream: &Stream,
        config: &AttentionConfig,
        inputs: &Inputs<'a, T>,
        layout: fn(&AttentionConfig, Side, u64) -> R,
    ) -> Result<Self> {
        let Inputs { q, k, v, .. } = *inputs;
        let of_q = layout(config, Side::Queries, config.head_size);
        let (k, of_k, v, of_v) = match k.is_empty() {
            true => (q, of_q, q, of_q),
            false => (k, layout(config, Side::Keys, config.head_size), v, layout(config, Side::Keys, config.value_size())),
        };
        Ok(Self {
            q: TensorMap::with(uploads, stream, q, of_q)?,
            k: TensorMap::with(uploads, stream, k, of_k)?,
            v: TensorMap::with(uploads, stream, v, of_v)?,
        })
    }
}
