//! The running result of a ring, in `f32`: each step merges what its keys give into that of the keys before.

use core::f32::consts::{LN_2, LOG2_E};

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{exp2, log2, max, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, THREAD_ROWS};

use super::shape::Checked;
use super::softmax::Finished;
use super::target::Spot;

/// A running result and its log-sum-exp. Unless `STEPS`, every step is one in the middle.
#[derive(Parameter)]
#[parameter(optional)]
pub struct Running<T: RegisterElement, const STEPS: bool> {
    /// The result, rows of heads of `size` elements.
    pub sums: GlobalMut<f32>,
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: GlobalMut<f32>,
    /// Where the last step rounds the result to, laid out as `sums`, which it only reads.
    pub rounded: Option<GlobalMut<T>>,
    /// Whether nothing was there before: the first step reads neither `sums` nor `log_sum_exp`.
    pub begins: bool,
    /// Elements of a row of a head.
    pub size: u32,
    /// Elements of `sums` from one batch to the next.
    pub batch_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u64,
    /// Elements from one row to the next.
    pub row_stride: u64,
}

/// Where a head of a sequence lies in a running result.
#[derive(Clone, Copy)]
pub struct Place {
    /// The first element of row 0 in `sums`.
    pub start: u64,
    /// Row 0 in `log_sum_exp`.
    pub statistics: u64,
    /// Rows there are.
    pub rows: u32,
}

/// What becomes of one row: the factors of what was there and of the new sum.
#[derive(Clone, Copy)]
pub struct Share {
    /// [`UNSEEN`] if the row saw nothing before.
    keep: f32,
    add: f32,
    /// Whether the row is stored: it is one, and changes.
    stored: bool,
}

/// In the place of a factor: what is there counts for nothing, NaN too. A flag of its own would take a register more, which spills.
const UNSEEN: f32 = -1.0;

/// Pairs of columns at most that are loaded before the first of them is stored: a load takes its time.
const BATCH: usize = 8;

impl<T: RegisterElement, const STEPS: bool> Running<T, STEPS> {
    const BATCH: usize = if STEPS { BATCH } else { 1 };

    /// Of a step in the middle, whose places are given by their first elements.
    #[inline(always)]
    pub fn in_the_middle(sums: GlobalMut<f32>, log_sum_exp: GlobalMut<f32>, row_stride: u64, size: u32) -> Self {
        Self { sums, log_sum_exp, rounded: None, begins: false, size, batch_stride: 0, head_stride: 0, row_stride }
    }

    /// The place of a head.
    #[inline(always)]
    pub fn place<const RANK: usize>(&self, spot: &Spot<RANK>) -> Place {
        let (batch, row) = (u64::from(spot.batch) * self.batch_stride, u64::from(spot.first) * self.row_stride);
        let start = batch + row + u64::from(spot.head) * self.head_stride;
        Place { start, statistics: spot.statistics, rows: spot.rows }
    }

    /// Merges a warpgroup's sum of values, of the rows from `row` on: result and `log_sum_exp` become what they are over the keys
    /// seen before and those seen now. A row that sees nothing stays as it is. A row whose log-sum-exp is -inf counts as zeros, whatever is there.
    #[inline(always)]
    #[track_caller]
    pub fn merge<const V: usize>(&self, sum: &RegisterTile<V>, finished: &Finished, place: Place, row: u32)
    where
        Columns<V>: MatrixColumns,
    {
        let shares = self.merge_logs(finished, place, row);
        self.merge_columns(sum, shares, place, row, 0);
    }

    /// The first half of [`merge`](Self::merge): of `log_sum_exp`.
    #[inline(always)]
    #[track_caller]
    pub fn merge_logs(&self, finished: &Finished, place: Place, row: u32) -> [Share; THREAD_ROWS] {
        [0, 1].map(|half| self.merge_log(finished, half, place, row + register_tile::row(half as u32)))
    }

    /// The other half: of the columns from `first` on.
    #[inline(always)]
    #[track_caller]
    pub fn merge_columns<const V: usize>(&self, sum: &RegisterTile<V>, shares: [Share; THREAD_ROWS], place: Place, row: u32, first: u32)
    where
        Columns<V>: MatrixColumns,
    {
        let mut half = 0;
        while half < THREAD_ROWS {
            let Share { keep, add, stored } = shares[half];
            // A factor that is NaN is of a row that has seen something.
            let (reads, adds) = (stored && (keep >= 0.0 || keep.is_nan()), !STEPS || add != 0.0);
            let start = place.start + u64::from(row + register_tile::row(half as u32)) * self.row_stride;
            let at = |pair: usize| first + register_tile::column(pair as u32);
            let mut batch = 0;
            while batch < RegisterTile::<V>::PAIRS {
                let old: [[f32; 2]; BATCH] = core::array::from_fn(|i| {
                    let (is_one, column) = (i < Self::BATCH && batch + i < RegisterTile::<V>::PAIRS, at(batch + i));
                    let read = is_one && reads && column < self.size;
                    if read { self.sums.load_pair(start + u64::from(column)).map(f32::from_bits) } else { [0.0; 2] }
                });
                let mut i = 0;
                while i < Self::BATCH {
                    let column = at(batch + i);
                    if batch + i < RegisterTile::<V>::PAIRS && stored && column < self.size {
                        let new = sum.pair(half, batch + i).map(|value| if adds { value * add } else { 0.0 });
                        let merged = [0, 1].map(|j| old[i][j] * keep + new[j]);
                        self.store(start + u64::from(column), merged);
                    }
                    i += 1;
                }
                batch += Self::BATCH;
            }
            half += 1;
        }
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, at: u64, values: [f32; 2]) {
        match self.rounded {
            Some(rounded) if STEPS => rounded.store_word(at, T::pack(values)),
            _ => self.sums.store_pair(at, values.map(f32::to_bits)),
        }
    }

    /// Merges a row's log-sum-exp.
    #[inline(always)]
    #[track_caller]
    fn merge_log(&self, finished: &Finished, half: usize, place: Place, row: u32) -> Share {
        let (inside, at) = (row < place.rows, place.statistics + u64::from(row));
        let begins = STEPS && self.begins;
        let old = if inside && !begins { self.log_sum_exp.load(at) * LOG2_E } else { f32::NEG_INFINITY };
        let new = finished.log_sum[half];
        // All lanes of a row have read before one writes.
        warp::sync();
        if new == f32::NEG_INFINITY {
            // Nothing is seen: what was there stays, but the first step makes it zeros, and the last one rounds it.
            if begins && inside && thread::lane().is_multiple_of(4) {
                self.log_sum_exp.store(at, new);
            }
            let keep = if old == f32::NEG_INFINITY { UNSEEN } else { 1.0 };
            return Share { keep, add: 0.0, stored: inside && STEPS && (begins || self.rounded.is_some()) };
        }
        // The largest leaves out one that is NaN, which its own factor brings back.
        let largest = max(old, new);
        let (keep, add) = (exp2(old - largest), exp2(new - largest));
        let total = keep + add;
        if inside && thread::lane().is_multiple_of(4) {
            self.log_sum_exp.store(at, (largest + log2(total)) * LN_2);
        }
        let one = reciprocal(total);
        let keep = if old == f32::NEG_INFINITY { UNSEEN } else { keep * one };
        Share { keep, add: add * one * finished.factor[half], stored: inside }
    }
}

impl<T: RegisterElement, const STEPS: bool> RunningArgument<'_, T, STEPS> {
    /// Checks a running result of `row_heads` heads a row and `batches` times `rows` rows, whose log-sum-exp has `statistics` elements.
    pub(super) fn check(&self, largest_size: usize, statistics: u64) -> Checked {
        LaunchError::check_multiple("target.size", 2, self.size.into())?;
        LaunchError::check_limit("target.size", self.size.into(), largest_size as u64)?;
        for (name, stride) in
            [("target.batch_stride", self.batch_stride), ("target.head_stride", self.head_stride), ("target.row_stride", self.row_stride)]
        {
            LaunchError::check_multiple(name, 2, stride)?;
        }
        LaunchError::check_alignment("target.sums", 8, self.sums.address())?;
        if let Some(rounded) = &self.rounded {
            LaunchError::check_length("target.rounded", self.sums.len(), rounded.len())?;
            LaunchError::check_alignment("target.rounded", 4, rounded.address())?;
        }
        LaunchError::check_length("target.log_sum_exp", statistics, self.log_sum_exp.len())
    }

    /// Checks that the last row of the last head of the last batch ends in the result.
    pub(super) fn check_room(&self, [batches, heads, rows]: [u64; 3]) -> Checked {
        if [batches, heads, rows].contains(&0) {
            return Ok(());
        }
        LaunchError::check_limit("target.size", self.size.into(), self.sums.len())?;
        let mut room = self.sums.len() - u64::from(self.size);
        for (name, stride, count) in [
            ("target.row_stride", self.row_stride, rows),
            ("target.head_stride", self.head_stride, heads),
            ("target.batch_stride", self.batch_stride, batches),
        ] {
            if count > 1 {
                LaunchError::check_limit(name, stride, room / (count - 1))?;
                room -= stride * (count - 1);
            }
        }
        Ok(())
    }
}
