//! Reductions over a block, of vectors of halves in turn; functions that hardware approximates.

use oxtile_tile::prelude::*;

use crate::THREADS;

/// Halves that [`row_reductions`](fn@row_reductions) takes: more than a vector a thread, and a last vector of another thread's turn.
pub const ROW: u32 = THREADS * 8 + 48;
/// Words a thread that it writes, after a copy of the row, doubled.
pub const ROW_WORDS: u32 = 3;
/// Functions that [`approximations`](fn@approximations) tries.
pub const FUNCTIONS: u32 = 8;

#[derive(SharedStorage)]
struct Shared {
    sum: ReduceStorage,
    maximum: ReduceStorage,
}

/// Sum and maximum of a row over the block, and the maximum over each warp: three words a thread. Before them the row, each value doubled.
#[kernel(threads = THREADS, grid = row_grid, shared = Shared)]
pub fn row_reductions(input: Global<bf16>, doubled: GlobalMut<bf16>, pairs: GlobalMut<f32>, output: GlobalMut<f32>) {
    let (mut sum, mut maximum) = (0.0, f32::NAN);
    for at in thread::stride(input.len(), 8) {
        let values = input.load_vector(at).to_f32();
        sum = values.into_iter().fold(sum, |sum, x| sum + x);
        maximum = values.into_iter().fold(maximum, num::max);
        doubled.store_vector(at, Vector::<bf16>::from_f32(values.map(|x| x + x)));
        let [a, b, c, d, ..] = values;
        pairs.store_vector(at / 2, Vector::<f32>::from_f32(Vector::<f32>::from_f32([a, b, c, d]).to_f32()));
    }
    let shared = Shared::claim();
    let results = [block::sum_f32(sum, shared.sum), block::max_f32(maximum, shared.maximum), warp::max_f32(maximum)];
    for (i, result) in results.into_iter().enumerate() {
        output.store(u64::from(thread::index() * ROW_WORDS) + i as u64, result);
    }
}

fn row_grid(args: &RowReductionsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("input", ROW.into(), args.input.len())?;
    LaunchError::check_length("doubled", ROW.into(), args.doubled.len())?;
    LaunchError::check_length("pairs", u64::from(ROW) / 2, args.pairs.len())?;
    LaunchError::check_length("output", u64::from(THREADS * ROW_WORDS), args.output.len())?;
    Grid::rows("input", args.input.len(), ROW.into())
}

/// Each value's `exp2`, `log2`, `reciprocal`, `rsqrt`, `sqrt`, `exp`, `ln` and `tanh`.
#[kernel(threads = THREADS, grid = approximations_grid)]
pub fn approximations(input: Global<f32>, output: GlobalMut<f32>) {
    let index = u64::from(block::index()[0] * THREADS + thread::index());
    if index < input.len() {
        let x = input.load(index);
        let results = [num::exp2(x), num::log2(x), num::reciprocal(x), num::rsqrt(x), num::sqrt(x), num::exp(x), num::ln(x), num::tanh(x)];
        for (i, result) in results.into_iter().enumerate() {
            output.store(index * u64::from(FUNCTIONS) + i as u64, result);
        }
    }
}

fn approximations_grid(args: &ApproximationsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.input.len() * u64::from(FUNCTIONS), args.output.len())?;
    Grid::cover("input", args.input.len(), THREADS)
}
