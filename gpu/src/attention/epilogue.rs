//! The end of a tile: its result and statistics go to device memory.

use core::f32::consts::{LN_2, LOG2_E};

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{exp2, log2, max, reciprocal};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile, Rows, StoredElement, THREAD_ROWS};
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup;

use super::softmax::Finished;
use super::team::{PART, Part, Team};

/// Stores a warpgroup's part of the result through its staging tile, and leaves the store in flight. Results in place find the store
/// before waited for.
#[inline(always)]
#[track_caller]
pub fn store<G: Team, T: StoredElement, const V: usize, const RANK: usize>(
    out: &TensorMapMut<T, PART, V, Swizzle128, RANK>,
    result: &RegisterTile<V>,
    staging: Part<T, V>,
    part: u32,
    at: [u32; RANK],
) where
    Columns<V>: MatrixColumns,
{
    if !G::IN_PLACE && warpgroup::is_leader() {
        pipeline::wait_stores_read::<0>();
    }
    warpgroup::sync(part);
    result.store_columns(0, staging);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        out.store(at, staging);
        pipeline::commit_stores();
    }
}

/// Stores one value a row, of `rows` of a head that begins at element `head`, by the first of the four lanes that share it.
#[inline(always)]
#[track_caller]
pub fn store_rows(target: &GlobalMut<f32>, head: u64, row: u32, rows: u32, values: Rows) {
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        if row < rows && thread::lane().is_multiple_of(4) {
            target.store(head + u64::from(row), values[half]);
        }
        half += 1;
    }
}

/// Stores a warpgroup's results in `f32`, of the rows below `rows` of a head that begins at row `head` of all; rows have `size` elements.
#[inline(always)]
#[track_caller]
pub fn store_sums<const V: usize>(target: &GlobalMut<f32>, head: u64, row: u32, rows: u32, size: u32, result: &RegisterTile<V>)
where
    Columns<V>: MatrixColumns,
{
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        let start = (head + u64::from(row)) * u64::from(size);
        let mut pair = 0;
        while pair < RegisterTile::<V>::PAIRS {
            let column = register_tile::column(pair as u32);
            if row < rows && column < size {
                target.store_pair(start + u64::from(column), result.pair(half, pair).map(f32::to_bits));
            }
            pair += 1;
        }
        half += 1;
    }
}

/// A running result in `f32` and its log-sum-exp.
#[derive(Clone, Copy)]
pub struct Running {
    /// The result; rows of heads of `value_size` elements.
    pub out: GlobalMut<f32>,
    /// Its log-sum-exp.
    pub log_sum_exp: GlobalMut<f32>,
    /// From one row of `out` to the next.
    pub row_stride: u64,
    /// Elements of a row of a head.
    pub value_size: u32,
}

/// Where a head of a sequence lies in a running result.
#[derive(Clone, Copy)]
pub struct Head {
    /// The first element of row 0 in `out`.
    pub out: u64,
    /// Row 0 in `log_sum_exp`.
    pub statistics: u64,
    /// Rows there are.
    pub rows: u32,
}

/// What a row becomes.
#[derive(Clone, Copy)]
pub struct Share {
    /// Whether it saw anything before; if not, what is there counts for nothing, NaN too.
    seen: bool,
    /// The factor of what was there.
    keep: f32,
    /// The factor of the sum.
    add: f32,
}

/// The share of each of a thread's rows, if there is a row that sees anything.
type Shares = [Option<Share>; THREAD_ROWS];

impl Running {
    /// Merges a warpgroup's sum of values, of the rows from `row` on: `out` and `log_sum_exp` become what they are over the keys
    /// seen before and those seen now. A row that sees nothing stays as it is. What `out` holds of a row whose `log_sum_exp` is -inf counts for
    /// nothing, NaN too.
    #[inline(always)]
    #[track_caller]
    pub fn merge<const V: usize>(&self, sum: &RegisterTile<V>, finished: &Finished, head: Head, row: u32)
    where
        Columns<V>: MatrixColumns,
    {
        let shares = self.merge_logs(finished, head, row);
        self.merge_columns(sum, shares, head, row, 0);
    }

    /// The first half of [`merge`](Self::merge): of `log_sum_exp`.
    #[inline(always)]
    #[track_caller]
    pub fn merge_logs(&self, finished: &Finished, head: Head, row: u32) -> Shares {
        [0, 1].map(|half| self.merge_statistics(finished, half, head, row + register_tile::row(half as u32)))
    }

    /// The other half: of the columns of `out` from `first` on.
    #[inline(always)]
    #[track_caller]
    pub fn merge_columns<const V: usize>(&self, sum: &RegisterTile<V>, shares: Shares, head: Head, row: u32, first: u32)
    where
        Columns<V>: MatrixColumns,
    {
        let starts = [0, 1].map(|half| head.out + u64::from(row + register_tile::row(half)) * self.row_stride);
        let mut pair = 0;
        while pair < RegisterTile::<V>::PAIRS {
            let column = first + register_tile::column(pair as u32);
            let mut half = 0;
            while half < THREAD_ROWS {
                if let Some(Share { seen, keep, add }) = shares[half]
                    && column < self.value_size
                {
                    let at = starts[half] + u64::from(column);
                    let old = if seen { self.out.load_pair(at).map(f32::from_bits) } else { [0.0; 2] };
                    let new = sum.pair(half, pair);
                    self.out.store_pair(at, [0, 1].map(|i| (old[i] * keep + new[i] * add).to_bits()));
                }
                half += 1;
            }
            pair += 1;
        }
    }

    /// Merges a row's log-sum-exp. Gives the shares of the result, if there is a row that sees anything.
    #[inline(always)]
    #[track_caller]
    fn merge_statistics(&self, finished: &Finished, half: usize, head: Head, row: u32) -> Option<Share> {
        let (inside, at) = (row < head.rows, head.statistics + u64::from(row));
        let old = if inside { self.log_sum_exp.load(at) * LOG2_E } else { f32::NEG_INFINITY };
        let new = finished.log_sum[half];
        // All lanes of a row have read before one writes.
        warp::sync();
        if !inside || new == f32::NEG_INFINITY {
            return None;
        }
        // The largest leaves out one that is NaN, which its own factor brings back.
        let largest = max(old, new);
        let (keep, add) = (exp2(old - largest), exp2(new - largest));
        let total = keep + add;
        if thread::lane().is_multiple_of(4) {
            self.log_sum_exp.store(at, (largest + log2(total)) * LN_2);
        }
        let one = reciprocal(total);
        Some(Share { seen: old != f32::NEG_INFINITY, keep: keep * one, add: add * one * finished.factor[half] })
    }
}
