//! The sums of the columns of a matrix, always in the same order: the second half of a bias gradient.
//!
//! Floor: 4 bytes an element. A CUDA block takes 32 columns: each warp adds every 16th row, a lane one column, and then the
//! first warp adds the warps' sums.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the sums of all warps |

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

const WARPS: u32 = 16;
const THREADS: u32 = WARPS * warp::LANES;
/// Rows whose elements a thread has in flight.
const ROWS: usize = 8;

#[derive(SharedStorage)]
struct Shared {
    sums: SharedArray<f32, { THREADS as usize }>,
}

/// `output[j]` is the sum of column `j` of `matrix`, `[rows, columns]`, added in `f32` and rounded to nearest even.
#[kernel(threads = THREADS, grid = grid, shared = Shared)]
#[instances(T = [bf16, f16, f32])]
pub fn column_sums<T: Float + Pod>(matrix: Global<f32>, output: GlobalMut<T>) {
    let (columns, lane, this_warp) = (output.len(), thread::lane(), thread::warp());
    let column = u64::from(block::index()[0]) * u64::from(warp::LANES) + u64::from(lane);
    let sums = Shared::claim().sums;
    let mut sum = 0.0;
    if column < columns {
        let step = u64::from(WARPS) * columns;
        let mut element = u64::from(this_warp) * columns + column;
        while element < matrix.len() {
            // All loads first. A row beyond the last adds 0, which changes no sum: no sum is -0, since the first is +0.
            let rows: [f32; ROWS] = core::array::from_fn(|row| {
                let element = element + row as u64 * step;
                if element < matrix.len() { matrix.load(element) } else { 0.0 }
            });
            sum = rows.into_iter().fold(sum, |sum, x| sum + x);
            element += ROWS as u64 * step;
        }
    }
    sums.store(this_warp * warp::LANES + lane, sum);
    block::sync();
    if this_warp == 0 && column < columns {
        let mut total = 0.0;
        for other in 0..WARPS {
            total += sums.load(other * warp::LANES + lane);
        }
        output.store(column, T::from_f32(total));
    }
}

fn grid<T: Float + Pod>(args: &ColumnSumsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("matrix", args.output.len(), args.matrix.len())?;
    Grid::cover("output", args.output.len(), warp::LANES)
}
