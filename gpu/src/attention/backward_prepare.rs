//! What the backward pass of attention needs before it starts: two statistics a query.
//!
//! Floor: `O` and `dO` are read once. Lanes that hold 16 bytes each share a row; a block has 64 rows of one head.

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::backward_statistics::row_delta;
use super::backward_tensors::BlockStatistics;
use super::shape::MOST_BLOCKS;

const THREADS: u32 = 256;
/// Rows of a block.
const ROWS: u32 = 64;

/// The statistics of each block of queries of `[batches, heads]`.
///
/// `out` and `grad_out` are `[batches, rows, heads, D]`, of rows of `row_heads` heads from the first of these on; `log_sum_exp` is `[batches, heads, rows]`.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16, f16], D = [64, 128])]
pub fn attention_backward_prepare<T: Float + Pod, const D: usize>(
    out: Global<T>,
    grad_out: Global<T>,
    log_sum_exp: Global<f32>,
    statistics: BlockStatistics,
    heads: u32,
    row_heads: u32,
    rows: u32,
) {
    let BlockStatistics { offsets, deltas, rows: padded, .. } = statistics;
    let lanes = const { (D / Vector::<T>::LANES) as u32 };
    let block = block::index()[0];
    // No divisor is zero, as there is a block; `max(1)` saves its check.
    let row_blocks = padded.div_ceil(ROWS).max(1);
    let (head, start) = (block / row_blocks, block % row_blocks * ROWS);
    let (batch, head_of_batch) = (head / heads.max(1), head % heads.max(1));
    let (first, lane) = (start + thread::index() / lanes, thread::index() % lanes);
    let mut pass = 0;
    while pass < const { ROWS * (D / Vector::<T>::LANES) as u32 / THREADS } {
        let row = first + pass * (THREADS / lanes);
        let at = ((u64::from(batch) * u64::from(rows) + u64::from(row)) * u64::from(row_heads) + u64::from(head_of_batch)) * D as u64
            + u64::from(lane) * Vector::<T>::LANES as u64;
        let delta = row_delta(&out, &grad_out, at, row < rows, lanes);
        if lane == 0 && row < padded {
            let lse = if row < rows { log_sum_exp.load(u64::from(head) * u64::from(rows) + u64::from(row)) } else { f32::NEG_INFINITY };
            let offset = if lse == f32::NEG_INFINITY { lse } else { -core::f32::consts::LOG2_E * lse };
            let at = u64::from(head) * u64::from(padded) + u64::from(row);
            offsets.store(at, offset);
            deltas.store(at, delta);
        }
        pass += 1;
    }
}

fn grid<T: Float + Pod, const D: usize>(args: &AttentionBackwardPrepareArgs<'_, T, D>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let rows = args.log_sum_exp.len();
    let heads = if args.rows == 0 { 0 } else { rows / u64::from(args.rows) };
    LaunchError::check_length("log_sum_exp", heads * u64::from(args.rows), rows)?;
    LaunchError::check_multiple("log_sum_exp", u64::from(args.heads) * u64::from(args.rows), rows)?;
    LaunchError::check_at_least("row_heads", args.heads.into(), args.row_heads.into())?;
    // Rows but the last have what follows the heads, too.
    let all_rows = rows / u64::from(args.heads).max(1);
    let elements = if all_rows == 0 { 0 } else { ((all_rows - 1) * u64::from(args.row_heads) + u64::from(args.heads)) * D as u64 };
    LaunchError::check_length("out", elements, args.out.len())?;
    LaunchError::check_length("grad_out", elements, args.grad_out.len())?;
    LaunchError::check_alignment("out", 16, args.out.address())?;
    LaunchError::check_alignment("grad_out", 16, args.grad_out.address())?;
    args.statistics.check(heads)?;
    let padded = u64::from(args.statistics.rows);
    LaunchError::check_limit("rows", u64::from(args.rows), padded)?;
    let blocks = padded.div_ceil(ROWS.into()) * heads;
    LaunchError::check_limit("statistics.blocks", blocks, MOST_BLOCKS)?;
    Ok(Grid::x(blocks as u32))
}
