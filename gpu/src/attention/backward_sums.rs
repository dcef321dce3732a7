//! Tensors in `f32` that gradients are added to: steps of a ring.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile, THREAD_ROWS};

use super::shape::Checked;

/// Tensors, in `f32`, that gradients of keys and values are added to.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct KeySums {
    /// Of the keys.
    pub k: GlobalMut<f32>,
    /// Of the values.
    pub v: GlobalMut<f32>,
    /// Elements of a row of a head of `K`: a multiple of 8.
    pub size: u32,
    /// The same of `V`.
    pub value_size: u32,
}

/// Where the rows of a dense tensor of `[batches, heads, rows, size]` lie, in any order of those.
#[derive(Clone, Copy, Parameter)]
pub struct DenseRows {
    /// Batches.
    pub batches: u32,
    /// Heads of a batch.
    pub heads: u32,
    /// Rows of a head.
    pub rows: u32,
    /// The heads from one batch to the next.
    pub batch_heads: u32,
    /// The heads from one row to the next.
    pub row_heads: u32,
}

impl DenseRows {
    /// The first row of a head of all batches, counted in heads.
    #[inline(always)]
    pub(super) fn first(&self, head: u32) -> u64 {
        // No divisor is zero, as there is a head; `max(1)` saves its check.
        let heads = self.heads.max(1);
        u64::from(head / heads) * u64::from(self.batch_heads) + u64::from(head % heads)
    }

    /// Heads of all batches.
    pub(super) fn all_heads(&self) -> u64 {
        u64::from(self.batches) * u64::from(self.heads)
    }

    /// Refuses a tensor that does not hold all rows.
    pub(super) fn check(&self, name: &'static str, size: u64, found: u64) -> Checked {
        let elements = self.all_heads().saturating_mul(self.rows.into()).saturating_mul(size);
        let last = |count: u32, stride: u32| u64::from(count.saturating_sub(1)) * u64::from(stride);
        let end = last(self.batches, self.batch_heads) + last(self.rows, self.row_heads) + u64::from(self.heads);
        LaunchError::check_limit(name, if elements == 0 { 0 } else { end.saturating_mul(size) }, found)
    }
}

/// Adds a warpgroup's tile, whose first row is `row` of `rows`, to those of a tensor of heads of `size` elements: the first row's head is
/// `first`, the next row's `stride` further.
#[inline(always)]
#[track_caller]
pub(super) fn add_rows<const D: usize>(
    tile: &RegisterTile<D>,
    target: &GlobalMut<f32>,
    first: u64,
    stride: u64,
    [row, rows]: [u32; 2],
    size: u32,
) where
    Columns<D>: MatrixColumns,
{
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        let mut pair = 0;
        while pair < RegisterTile::<D>::PAIRS {
            let column = register_tile::column(pair as u32);
            if row < rows && column < size {
                let at = (first + u64::from(row) * stride) * u64::from(size) + u64::from(column);
                let (old, new) = (target.load_pair(at).map(f32::from_bits), tile.pair(half, pair));
                target.store_pair(at, [0, 1].map(|i| (old[i] + new[i]).to_bits()));
            }
            pair += 1;
        }
        half += 1;
    }
}

/// Adds the transpose of a warpgroup's tile, whose first row is `row` of `rows` and first column `column` of `size`, to those of a tensor
/// of rows of `stride` elements, of which those from `start` on are the head's.
#[inline(always)]
#[track_caller]
pub(super) fn add_transposed<const SPAN: usize>(
    tile: &RegisterTile<SPAN>,
    target: &GlobalMut<f32>,
    start: u64,
    stride: u64,
    [row, rows]: [u32; 2],
    [column, size]: [u32; 2],
) where
    Columns<SPAN>: MatrixColumns,
{
    let mut half = 0;
    while half < THREAD_ROWS {
        let column = column + register_tile::row(half as u32);
        if column < size {
            let mut i = 0;
            while i < 2 * RegisterTile::<SPAN>::PAIRS {
                let row = row + register_tile::column(i as u32 / 2) + i as u32 % 2;
                if row < rows {
                    let at = start + u64::from(row) * stride + u64::from(column);
                    target.store(at, target.load(at) + tile.pair(half, i / 2)[i % 2]);
                }
                i += 1;
            }
        }
        half += 1;
    }
}
