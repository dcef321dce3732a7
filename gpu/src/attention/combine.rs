//! Results of [`attention_forward_split`](fn@super::attention_forward_split) on parts of the keys become one.
//!
//! Floor: the parts are read once, the result is written. A warp has a row: its lanes weigh a part each, then all of them add up the
//! parts in order, two columns a lane.

use core::f32::consts::LN_2;

use oxtile_tile::num::{exp2, fma, log2, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;

use super::softmax::warp_max;

const THREADS: u32 = 128;
const ROWS: u32 = THREADS / warp::LANES;
/// Parts of a row at most: one a lane.
pub const MOST_PARTS: u32 = warp::LANES;

/// `out` and `log_sum_exp` become those of all keys: row `r` of `[batches, heads, rows]` of `out` begins at element `batch *
/// batch_stride + head * head_stride + row * row_stride` and has `size` elements, a multiple of 2; `log_sum_exp` is natural, `[batches, heads,
/// rows]`. `sums` and `logs` are as [`attention_forward_split`](fn@super::attention_forward_split) leaves them.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16, f16])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_combine<T: RegisterElement>(
    sums: Global<f32>,
    logs: Global<f32>,
    out: GlobalMut<T>,
    log_sum_exp: GlobalMut<f32>,
    heads: u32,
    rows: u32,
    parts: u32,
    size: u32,
    batch_stride: u64,
    head_stride: u64,
    row_stride: u64,
) {
    let (index, lane) = (block::index()[0] * ROWS + thread::warp(), thread::lane());
    let (all_rows, at) = (log_sum_exp.len(), u64::from(index));
    if at >= all_rows {
        return;
    }
    let log = if lane < parts { logs.load(u64::from(lane) * all_rows + at) } else { f32::NEG_INFINITY };
    let largest = warp_max(log, 1);
    // By its own logarithm: the largest of the lanes leaves out one that is not a number, which must reach the result.
    let weight = if log == f32::NEG_INFINITY { 0.0 } else { exp2(log - largest) };
    let total = warp::sum_f32(weight);
    let share = if total == 0.0 { 0.0 } else { weight * reciprocal(total) };
    if lane == 0 {
        log_sum_exp.store(at, if total == 0.0 { f32::NEG_INFINITY } else { (largest + log2(total)) * LN_2 });
    }
    // No divisor is zero, as there is a row; saying so keeps the check out.
    let (head, row) = (index / rows.max(1), index % rows.max(1));
    let (batch, head) = (head / heads.max(1), head % heads.max(1));
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
    let (all_rows, parts, size) = (args.log_sum_exp.len(), u64::from(args.parts), u64::from(args.size));
    let (heads, rows) = (u64::from(args.heads), u64::from(args.rows));
    LaunchError::check_limit("parts", parts, MOST_PARTS.into())?;
    LaunchError::check_multiple("size", 2, size)?;
    LaunchError::check_limit("log_sum_exp", all_rows, (1 << 31) - 1)?;
    LaunchError::check_multiple("log_sum_exp", heads * rows, all_rows)?;
    LaunchError::check_length("logs", all_rows * parts, args.logs.len())?;
    LaunchError::check_length("sums", (all_rows * parts).saturating_mul(size), args.sums.len())?;
    LaunchError::check_length("out", all_rows * size, args.out.len())?;
    LaunchError::check_alignment("sums", 8, args.sums.address())?;
    LaunchError::check_alignment("out", 4, args.out.address())?;
    if all_rows == 0 {
        return Ok(Grid::x(0));
    }
    // The last row of the last head of the last batch ends in `out`.
    let mut room = args.out.len() - size;
    let batches = all_rows / (heads * rows);
    let strides =
        [("row_stride", args.row_stride, rows), ("head_stride", args.head_stride, heads), ("batch_stride", args.batch_stride, batches)];
    for (name, stride, count) in strides.into_iter().filter(|(.., count)| *count > 1) {
        LaunchError::check_multiple(name, 2, stride)?;
        LaunchError::check_limit(name, stride, room / (count - 1))?;
        room -= stride * (count - 1);
    }
    Ok(Grid::x(all_rows.div_ceil(ROWS.into()) as u32))
}
