//! Tensors of heads as kernels address them, and the maps of what the forward pass reads.

use oxtile_kernels::attention::WARPGROUP_QUERIES;
use oxtile_tile::layout::{Swizzle, Swizzle128};
use oxtile_tile::num::Pod;

use super::config::{AttentionConfig, LIMIT, Layout};
use crate::runtime::{Error, Result, Stream};
use crate::tensor::{Heads, MapLayout, SequenceRows, Strided, TensorMap, Uploads};

/// The rows that a tensor has.
#[derive(Clone, Copy)]
pub(super) enum Side {
    /// Those of `Q` and of the output.
    Queries,
    /// Those of `K` and `V`.
    Keys,
}

/// What a kernel asks of a tensor's rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// Rows and heads of any strides.
    Strided,
    /// Rows without gaps, which it counts.
    Whole,
}

/// A dense tensor as `[batches, heads, rows, size]`.
pub(super) fn by_head(tensor: Strided<4>) -> Strided<4> {
    let Strided { shape: [batches, rows, heads, size], strides: [batch, row, head, one] } = tensor;
    Strided { shape: [batches, heads, rows, size], strides: [batch, head, row, one] }
}

impl AttentionConfig {
    /// The same of a tensor of queries, with those heads that share keys as rows of one, where they [fold](Self::folds).
    pub(super) fn folded(&self, tensor: Strided<4>) -> Strided<4> {
        let Strided { shape: [batches, .., size], strides: [batch, _, head, one] } = tensor;
        let [rows, heads] = self.rows_and_heads();
        match self.folds() {
            true => Strided { shape: [batches, heads, rows, size], strides: [batch, rows * head, head, one] },
            false => by_head(tensor),
        }
    }

    /// A tensor of rows that sequences are parts of: layouts differ in this and in the offsets. Dense sequences [fit](Self::row_step).
    pub(super) fn sequence_rows(&self, tensor: Strided<4>) -> SequenceRows {
        let Strided { shape: [batches, rows, heads, size], strides: [batch, row, head, _] } = tensor;
        let [rows, heads] = match self.layout {
            Layout::Sbhd => [rows, batches * heads],
            Layout::Bshd if batches > 1 => [(batches - 1) * (batch / row.max(1)) + rows, heads],
            Layout::Bshd | Layout::Packed => [rows, heads],
        };
        SequenceRows { rows, row, heads, head, size }
    }

    /// The rows from one sequence of a dense layout to the next, which are the same in these tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] for tensors in which kernels would not find sequences or rows.
    pub(super) fn row_step(&self, tensors: &[(&'static str, Strided<4>, Rows)]) -> Result<u64> {
        let mut first = None;
        for &(what, tensor, asked) in tensors.iter().filter(|(_, tensor, _)| !tensor.shape.contains(&0)) {
            let Strided { shape: [batches, rows, heads, size], strides: [batch, row, head, _] } = tensor;
            let refuse = |why: String| {
                let strides = format!("[batch, row, head] strides of {:?} elements", [batch, row, head]);
                Err(Error::Invalid { what, why: format!("{strides}, but {why}") })
            };
            let row_heads = if self.layout == Layout::Sbhd { batches * heads } else { heads };
            if asked == Rows::Whole && (row != row_heads * size || (heads > 1 && head != size)) {
                return refuse(format!("the kernel takes rows of {row_heads} heads without gaps: copy the tensor, or give it such rows"));
            }
            let step = match self.layout {
                Layout::Bshd if batches > 1 && (row == 0 || !batch.is_multiple_of(row)) => {
                    return refuse(
                        "the kernel takes batches that are whole rows apart in Layout::Bshd: copy the tensor, or take Layout::Sbhd if \
                         its batches are neighbours"
                            .to_owned(),
                    );
                }
                Layout::Sbhd if batches > 1 && batch != heads * head => {
                    return refuse(format!(
                        "the kernel takes batches that are {heads} heads apart in Layout::Sbhd: copy the tensor, or take Layout::Bshd if \
                         its batches are rows apart"
                    ));
                }
                Layout::Bshd if batches > 1 => batch / row,
                Layout::Bshd => rows,
                Layout::Sbhd | Layout::Packed => 0,
            };
            let (of_first, first_step) = *first.get_or_insert((what, step));
            if step != first_step {
                return refuse(format!(
                    "the kernel takes batches that are equally many rows apart: here {step}, in \"{of_first}\" {first_step}: copy one of them"
                ));
            }
            let all = (batches - 1).saturating_mul(step).saturating_add(rows);
            if all >= LIMIT {
                return refuse(format!("the kernel counts {} rows, these are {all}: give fewer batches at a time", LIMIT - 1));
            }
        }
        Ok(first.map_or(0, |(_, step)| step))
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
        [q, k, v]: [Heads<'a, T>; 3],
        [of_q, of_k, of_v]: [R; 3],
    ) -> Result<Self> {
        let (k, of_k, v, of_v) = if k.view().is_empty() { (q, of_q, q, of_q) } else { (k, of_k, v, of_v) };
        Ok(Self {
            q: TensorMap::with(uploads, stream, q.view(), of_q)?,
            k: TensorMap::with(uploads, stream, k.view(), of_k)?,
            v: TensorMap::with(uploads, stream, v.view(), of_v)?,
        })
    }
}
