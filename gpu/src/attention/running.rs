//! The running result of a ring, in `f32`: each step merges what its keys give into that of the keys before.

use core::f32::consts::{LN_2, LOG2_E};

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{exp2, log2, max, opaque, reciprocal};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, Rows, THREAD_ROWS};

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
    /// That of what was there: negative if the row saw nothing before.
    pub keep: f32,
    /// That of the new sum.
    pub add: f32,
    /// Whether the row is stored: it is one, and changes.
    stored: bool,
}

impl Share {
    /// Whether what is there counts.
    #[inline(always)]
    fn counts(&self) -> bool {
        self.keep.to_bits() != UNSEEN.to_bits()
    }

    /// Whether an element becomes the sum of two products, of which a step that begins knows the first to be 0.
    #[inline(always)]
    pub fn is_plain(&self, begins: bool) -> bool {
        (begins || self.counts()) && self.add != 0.0
    }
}

/// In the place of a factor: what is there counts for nothing, NaN too. A flag of its own would take a register more, which spills.
const UNSEEN: f32 = -1.0;

/// The log-sum-exps of rows that saw nothing.
pub const NO_LOGS: Rows = [f32::NEG_INFINITY; THREAD_ROWS];

/// Pairs of columns at most that are loaded before the first of them is stored: a load takes its time.
const BATCH: usize = 8;

/// The same of pairs without questions: all of results of up to 128 columns; more spill.
const PLAIN: usize = 32;

const fn batch_of(columns: usize) -> usize {
    if columns <= 128 { PLAIN } else { PLAIN / 2 }
}

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

    /// Brings what is there of a warpgroup's rows from `row` on into the L2 cache, for [`merge`](Self::merge) after the walk over keys.
    #[inline(always)]
    #[track_caller]
    pub fn fetch_rows(&self, place: Place, row: u32) {
        let (lane, first) = (thread::lane(), row + thread::warp() % 4 * 16);
        if lane < 16 && first + lane < place.rows && !self.begins {
            pipeline::prefetch(&self.sums, place.start + u64::from(first + lane) * self.row_stride, self.size);
            if lane == 0 {
                pipeline::prefetch(&self.log_sum_exp, place.statistics + u64::from(first), (place.rows - first).min(16));
            }
        }
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
        let plain = shares.iter().all(|share| share.stored && share.counts() && share.add != 0.0) && self.size == V as u32;
        if STEPS && warp::all(plain) {
            self.merge_plain(sum, shares.map(|Share { keep, add, .. }| [keep, add]), place, row);
        } else {
            self.merge_columns(sum, shares, place, row, 0);
        }
    }

    /// The other half where every row of the warp has seen keys before and now: no question is asked of an element.
    #[inline(always)]
    #[track_caller]
    fn merge_plain<const V: usize>(&self, sum: &RegisterTile<V>, shares: [[f32; 2]; THREAD_ROWS], place: Place, row: u32)
    where
        Columns<V>: MatrixColumns,
    {
        let starts = [0, 1].map(|half| {
            let row = u64::from(row + register_tile::row(half));
            place.start + row * self.row_stride + u64::from(register_tile::column(0))
        });
        let at = |pair: usize| (pair / RegisterTile::<V>::PAIRS, pair % RegisterTile::<V>::PAIRS);
        let mut batch = 0;
        while batch < THREAD_ROWS * RegisterTile::<V>::PAIRS {
            let place = |i: usize| {
                let (half, pair) = at(batch + i);
                (half, pair, starts[half] + 8 * pair as u64)
            };
            let is_one = |i: usize| i < batch_of(V) && batch + i < THREAD_ROWS * RegisterTile::<V>::PAIRS;
            let mut values: [[f32; 2]; PLAIN] =
                core::array::from_fn(|i| if is_one(i) { self.sums.load_pair(place(i).2).map(f32::from_bits) } else { [0.0; 2] });
            let mut i = 0;
            while is_one(i) {
                let (half, pair, _) = place(i);
                let ([keep, add], new) = (shares[half], sum.pair(half, pair));
                values[i] = [0, 1].map(|j| values[i][j] * keep + new[j] * add);
                i += 1;
            }
            i = 0;
            if let Some(rounded) = self.rounded {
                while is_one(i) {
                    rounded.store_word(place(i).2, T::pack(values[i]));
                    i += 1;
                }
            } else {
                while is_one(i) {
                    self.sums.store_pair(place(i).2, values[i].map(f32::to_bits));
                    i += 1;
                }
            }
            batch += batch_of(V);
        }
    }

    /// The first half of [`merge`](Self::merge): of `log_sum_exp`.
    #[inline(always)]
    #[track_caller]
    pub fn merge_logs(&self, finished: &Finished, place: Place, row: u32) -> [Share; THREAD_ROWS] {
        [0, 1].map(|half| {
            let row = row + register_tile::row(half as u32);
            self.merge_log(finished, half, place, row, None)
        })
    }

    /// The same with the [old ones](Self::logs), loaded before.
    #[inline(always)]
    #[track_caller]
    pub fn merge_loaded_logs(&self, finished: &Finished, place: Place, row: u32, logs: Rows) -> [Share; THREAD_ROWS] {
        [0, 1].map(|half| self.merge_log(finished, half, place, row + register_tile::row(half as u32), Some(logs[half])))
    }

    /// The old log-sum-exps of a thread's rows, to base 2.
    #[inline(always)]
    #[track_caller]
    pub fn logs(&self, place: Place, row: u32) -> Rows {
        [0, 1].map(|half| {
            let row = row + register_tile::row(half);
            let counts = row < place.rows && !self.begins;
            if counts { self.log_sum_exp.load(place.statistics + u64::from(row)) * LOG2_E } else { f32::NEG_INFINITY }
        })
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
            let (reads, adds) = (stored && shares[half].counts(), !STEPS || add != 0.0);
            let start = place.start + u64::from(row + register_tile::row(half as u32)) * self.row_stride;
            let column = first + register_tile::column(0);
            let at = |pair: usize| column + 8 * pair as u32;
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

    /// Whether this is the first of the four lanes that share a row.
    #[inline(always)]
    #[track_caller]
    fn is_first_of_row() -> bool {
        // A step has no register to hold this over the walk along keys.
        let lane = if STEPS { opaque(thread::lane()) } else { thread::lane() };
        lane.is_multiple_of(4)
    }

    /// Merges a row's log-sum-exp.
    #[inline(always)]
    #[track_caller]
    fn merge_log(&self, finished: &Finished, half: usize, place: Place, row: u32, loaded: Option<f32>) -> Share {
        let (inside, at) = (row < place.rows, place.statistics + u64::from(row));
        let begins = STEPS && self.begins;
        let old = if let Some(old) = loaded {
            old
        } else if inside && !begins {
            self.log_sum_exp.load(at) * LOG2_E
        } else {
            f32::NEG_INFINITY
        };
        let new = finished.log_sum[half];
        // All lanes of a row have read before one writes.
        warp::sync();
        if new == f32::NEG_INFINITY {
            // Nothing is seen: what was there stays, but the first step makes it zeros, and the last one rounds it.
            if begins && inside && Self::is_first_of_row() {
                self.log_sum_exp.store(at, new);
            }
            let keep = if old == f32::NEG_INFINITY { UNSEEN } else { 1.0 };
            return Share { keep, add: 0.0, stored: inside && STEPS && (begins || self.rounded.is_some()) };
        }
        // The largest leaves out one that is NaN, which its own factor brings back.
        let largest = max(old, new);
        let (keep, add) = (exp2(old - largest), exp2(new - largest));
        let total = keep + add;
        if inside && Self::is_first_of_row() {
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
