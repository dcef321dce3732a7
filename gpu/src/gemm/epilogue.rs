//! What follows a product that is stored, in a launch of its own: GELU, or the gradient of GELU's input, and the sums of columns.
//!
//! A CUDA block takes 32 columns of 128 rows: a lane has a column, a warp every eighth row. Sums of columns are left as one row of partial sums for each 128 rows, which
//! `column_sums` adds: always in one order.
//!
//! Floor: the bytes of the input and of the result, once each; twice those of the result where it is multiplied in place.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the sums of all warps |

use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::fusion::gelu_of;
use crate::activation::{Activation, Gelu};

const WARPS: u32 = 8;
const THREADS: u32 = WARPS * warp::LANES;
/// Rows of a thread, whose loads are in flight together.
const EACH: usize = 16;
/// Rows that share a row of partial sums: those of a block.
pub const EPILOGUE_ROWS: u32 = WARPS * EACH as u32;

#[derive(SharedStorage)]
struct Shared {
    sums: SharedArray<f32, { THREADS as usize }>,
}

/// Writes GELU of `input` to `result`, a matrix of so many `columns`; or, if `derives`, multiplies `result` by the derivative of GELU at `input`, in place. Without an input the result stays as it is.
/// `sums[i]`, where there are any, are the sums of the columns of [`EPILOGUE_ROWS`] rows of the rounded result: `[rows / EPILOGUE_ROWS, columns]`, rounded up.
#[kernel(threads = THREADS, grid = grid, shared = Shared)]
#[instances(O = [bf16, f16, f32])]
pub fn gemm_epilogue<O: Float + Pod>(
    result: GlobalMut<O>,
    input: Option<Global<O>>,
    sums: Option<GlobalMut<f32>>,
    columns: u32,
    derives: bool,
) {
    let ([rows, group, _], this_warp) = (block::index(), thread::warp());
    let (width, column) = (u64::from(columns), group * warp::LANES + thread::lane());
    let first = u64::from(rows * EPILOGUE_ROWS + this_warp) * width + u64::from(column);
    let at = |row: usize| first + (row as u64 * u64::from(WARPS)) * width;
    let is_inside = |row: usize| column < columns && at(row) < result.len();
    // What is outside is 0, and so is what becomes of it: it adds nothing.
    let is_read = derives || input.is_none();
    let mut values: [f32; EACH] = core::array::from_fn(|row| if is_read && is_inside(row) { result.load(at(row)).to_f32() } else { 0.0 });
    if let Some(input) = input {
        let inputs: [f32; EACH] = core::array::from_fn(|row| if is_inside(row) { input.load(at(row)).to_f32() } else { 0.0 });
        values = core::array::from_fn(|row| {
            let rounded = O::from_f32(if derives { values[row] * Gelu::slope(inputs[row]) } else { gelu_of(inputs[row]) });
            if is_inside(row) {
                result.store(at(row), rounded);
            }
            rounded.to_f32()
        });
    }
    if let Some(sums) = sums {
        let of_warps = Shared::claim().sums;
        of_warps.store(thread::index(), values.into_iter().fold(0.0, |sum, x| sum + x));
        block::sync();
        if this_warp == 0 && column < columns {
            let mut total = 0.0;
            for other in 0..WARPS {
                total += of_warps.load(other * warp::LANES + thread::lane());
            }
            sums.store(u64::from(rows) * width + u64::from(column), total);
        }
    }
}

fn grid<O: Float + Pod>(args: &GemmEpilogueArgs<'_, O>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (columns, elements) = (u64::from(args.columns), args.result.len());
    LaunchError::check_multiple("result", columns, elements)?;
    if let Some(input) = args.input {
        LaunchError::check_length("input", elements, input.len())?;
    }
    LaunchError::check_limit("derives", u64::from(args.derives && args.input.is_none()), 0)?;
    let rows = elements.checked_div(columns).unwrap_or(0);
    LaunchError::check_limit("result", rows, u64::from(u32::MAX - EPILOGUE_ROWS))?;
    let blocks = rows.div_ceil(EPILOGUE_ROWS.into());
    if let Some(sums) = &args.sums {
        LaunchError::check_length("sums", blocks * columns, sums.len())?;
    }
    let groups = columns.div_ceil(warp::LANES.into());
    LaunchError::check_limit("columns", groups, u16::MAX.into())?;
    Ok(if elements == 0 { Grid::x(0) } else { Grid::xy(blocks as u32, groups as u32) })
}
