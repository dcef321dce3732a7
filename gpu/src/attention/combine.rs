//! Results of [`attention_forward_split`](fn@super::attention_forward_split) on parts of the keys become one.
//!
//! Floor: the parts are read once, the result is written. A warp has a row: its lanes weigh a part each, then all of them add up the
//! parts in order, two columns a lane.

use core::f32::consts::LN_2;

use oxtile_tile::num::{Pod, exp2, fma, log2, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;

use super::parts::{Parts, PartsArgument};
use super::shape::{Checked, MOST_BLOCKS};
use super::softmax::warp_max;

const THREADS: u32 = 128;
const ROWS: u32 = THREADS / warp::LANES;

/// The result of all keys: row `r` of `[batches, heads, rows]` of `out` begins at element `batch * batch_stride + head * head_stride + row *
/// row_stride`; strides are multiples of 2.
#[derive(Clone, Copy, Parameter)]
pub struct Combined<T: Pod> {
    /// The result.
    pub out: GlobalMut<T>,
    /// The natural logarithm of each row's sum of exponentials, `[batches, heads, rows]`.
    pub log_sum_exp: GlobalMut<f32>,
    /// Heads of a batch.
    pub heads: u32,
    /// Rows of a head.
    pub rows: u32,
    /// Elements from one batch to the next.
    pub batch_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u64,
    /// Elements from one row to the next.
    pub row_stride: u64,
}

/// The result becomes that of all parts, which are as [`attention_forward_split`](fn@super::attention_forward_split) leaves them.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16, f16])]
pub fn attention_combine<T: RegisterElement>(parts: Parts, result: Combined<T>) {
    let (Parts { sums, logs, count: parts, size }, Combined { out, log_sum_exp, heads, rows, .. }) = (parts, result);
    let (index, lane) = (block::index()[0] * ROWS + thread::warp(), thread::lane());
    let (all_rows, at) = (log_sum_exp.len(), u64::from(index));
    if at >= all_rows {
        return;
    }
    let log = if lane < parts { logs.load(u64::from(lane) * all_rows + at) } else { f32::NEG_INFINITY };
    let largest = warp_max(log, 1);
    // By its own logarithm: the largest of the lanes leaves out one that is NaN, which must reach the result.
    let weight = if log == f32::NEG_INFINITY { 0.0 } else { exp2(log - largest) };
    let total = warp::sum_f32(weight);
    let share = if total == 0.0 { 0.0 } else { weight * reciprocal(total) };
    if lane == 0 {
        log_sum_exp.store(at, if total == 0.0 { f32::NEG_INFINITY } else { (largest + log2(total)) * LN_2 });
    }
    // No divisor is zero, as there is a row; `max(1)` saves its check.
    let (head, row) = (index / rows.max(1), index % rows.max(1));
    let (batch, head) = (head / heads.max(1), head % heads.max(1));
    let Combined { batch_stride, head_stride, row_stride, .. } = result;
    let start = u64::from(batch) * batch_stride + u64::from(head) * head_stride + u64::from(row) * row_stride;
    let mut first = 0;
    while first < size {
        let column = first + 2 * lane;
        let mut sum = [0.0; 2];
        let mut part = 0;
        while part < parts {
            let share = warp::shuffle(share, part);
            if column < size {
                let values = sums.load_pair((u64::from(part) * all_rows + at) * u64::from(size) + u64::from(column)).map(f32::from_bits);
                sum = [0, 1].map(|i| fma(share, values[i], sum[i]));
            }
            part += 1;
        }
        if column < size {
            out.store_word(start + u64::from(column), T::pack(sum));
        }
        first += 2 * warp::LANES;
    }
}

fn grid<T: RegisterElement>(args: &AttentionCombineArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let AttentionCombineArgs { parts, result } = args;
    let all_rows = result.log_sum_exp.len();
    LaunchError::check_limit("result.log_sum_exp", all_rows, MOST_BLOCKS)?;
    parts.check(all_rows)?;
    result.check(parts)?;
    Ok(Grid::x(all_rows.div_ceil(ROWS.into()) as u32))
}

impl<T: Pod> CombinedArgument<'_, T> {
    /// Rows of these parts.
    fn check(&self, parts: &PartsArgument<'_>) -> Checked {
        let (all_rows, size) = (self.log_sum_exp.len(), u64::from(parts.size));
        let (heads, rows) = (u64::from(self.heads), u64::from(self.rows));
        LaunchError::check_multiple("result.log_sum_exp", heads * rows, all_rows)?;
        LaunchError::check_alignment("result.out", 4, self.out.address())?;
        if all_rows == 0 {
            return Ok(());
        }
        LaunchError::check_limit("parts.size", size, self.out.len())?;
        // The last row of the last head of the last batch ends in `out`.
        let mut room = self.out.len() - size;
        let batches = all_rows / (heads * rows);
        let strides = [
            ("result.row_stride", self.row_stride, rows),
            ("result.head_stride", self.head_stride, heads),
            ("result.batch_stride", self.batch_stride, batches),
        ];
        for (name, stride, count) in strides.into_iter().filter(|(.., count)| *count > 1) {
            LaunchError::check_multiple(name, 2, stride)?;
            LaunchError::check_limit(name, stride, room / (count - 1))?;
            room -= stride * (count - 1);
        }
        Ok(())
    }
}
