//! Tensors of heads as maps address them, and the maps of what the forward pass reads.

use oxtile_kernels::attention::PART;
use oxtile_tile::layout::{Swizzle, Swizzle128};
use oxtile_tile::num::Pod;

use super::config::{AttentionConfig, Layout};
use super::tensors::Inputs;
use crate::runtime::{Result, Stream};
use crate::tensor::{MapLayout, SequenceRows, Strided, TensorMap, Uploads};

impl AttentionConfig {
    /// A dense tensor of `Q`'s heads, or of the output's, of rows of `size`: `[batches, heads, rows, size]`.
    pub(super) fn dense_queries(&self, size: u64) -> Strided<4> {
        self.dense(self.queries, self.heads, size)
    }

    /// The same with the heads that share keys as rows of one, where they [fold](Self::folds).
    pub(super) fn folded_queries(&self, size: u64) -> Strided<4> {
        let [rows, heads] = self.rows_and_heads();
        match self.folds() {
            true => Strided { shape: [self.batches, heads, rows, size], strides: [self.heads * size, rows * size, size, 1] },
            false => self.dense_queries(size),
        }
    }

    /// A dense tensor of `K`'s heads, or of `V`'s.
    pub(super) fn dense_keys(&self, size: u64) -> Strided<4> {
        self.dense(self.keys, self.key_heads, size)
    }

    fn dense(&self, rows: u64, heads: u64, size: u64) -> Strided<4> {
        let row = heads * size;
        let [batch, row] = if self.layout == Layout::Sbhd { [row, self.batches * row] } else { [rows * row, row] };
        Strided { shape: [self.batches, heads, rows, size], strides: [batch, size, row, 1] }
    }

    /// A tensor of `Q`'s heads, or of the output's, as rows that sequences are parts of: layouts differ in this and in the offsets.
    pub(super) fn sequence_queries(&self, size: u64) -> SequenceRows {
        self.sequence_rows(self.queries, self.heads, size)
    }

    /// The same of `K`'s heads, or of `V`'s.
    pub(super) fn sequence_keys(&self, size: u64) -> SequenceRows {
        self.sequence_rows(self.keys, self.key_heads, size)
    }

    fn sequence_rows(&self, rows: u64, heads: u64, size: u64) -> SequenceRows {
        let (rows, heads) = match self.layout {
            Layout::Bshd => (self.batches * rows, heads),
            Layout::Sbhd => (rows, self.batches * heads),
            Layout::Packed => (rows, heads),
        };
        SequenceRows { rows, row: heads * size, heads, head: size, size }
    }
}

/// Where the rows of a tensor with heads of so many elements lie.
pub(super) type LayoutOf<R> = fn(&AttentionConfig, u64) -> R;

/// The tensor maps of queries, keys and values.
pub(super) struct ForwardMaps<'a, T: Pod, const KEYS: usize, const D: usize, const V: usize, const RANK: usize, S = Swizzle128> {
    pub(super) q: TensorMap<'a, T, PART, D, S, RANK>,
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
        [of_queries, of_keys]: [LayoutOf<R>; 2],
    ) -> Result<Self> {
        let Inputs { q, k, v, .. } = *inputs;
        let of_q = of_queries(config, config.head_size);
        let (k, of_k, v, of_v) = match k.is_empty() {
            true => (q, of_q, q, of_q),
            false => (k, of_keys(config, config.head_size), v, of_keys(config, config.value_size())),
        };
        Ok(Self {
            q: TensorMap::with(uploads, stream, q, of_q)?,
            k: TensorMap::with(uploads, stream, k, of_k)?,
            v: TensorMap::with(uploads, stream, v, of_v)?,
        })
    }
}
