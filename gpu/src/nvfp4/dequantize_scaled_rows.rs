//! NVFP4 with an amax for each row, or with another largest scale than 448, back to wide numbers.
//!
//! Floor: 1/2 + 1/16 + 2 (bf16) bytes an element. A warp takes a row; a lane takes half a block a step, so that a warp writes whole lines.

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::dequantize_rows::{load_part, store_part};
use super::*;
use crate::wide::Wide;

const THREADS: u32 = 256;
/// Elements of a lane and step: the codes of one register.
const PART: u64 = 8;
/// Parts of a lane that are loaded before the first is stored.
const STEPS: usize = 4;
/// Rows of a CUDA block: one a warp.
const ROWS: u32 = THREADS / warp::LANES;

/// `output[row][i] = data[row][i] * (scale * amaxes[row] * factor)`, rounded to nearest even, for rows of `columns` elements, a multiple
/// of 16. `factor` is 1 / (6 L) rounded to `f32`; an amax alone stands for all rows.
#[kernel(threads = THREADS, grid = grid, min_blocks = 4)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_scaled_rows<T: Wide>(
    data: Global<e2m1x2>,
    scales: Global<e4m3>,
    amaxes: Global<f32>,
    output: GlobalMut<T>,
    factor: f32,
    rows: u64,
    columns: u64,
) {
    let row = u64::from(block::index()[0]) * u64::from(ROWS) + u64::from(thread::warp());
    if row < rows {
        let amax = amaxes.load(row.min(amaxes.len() - 1));
        let (first, end) = (row * (columns / PART) + u64::from(thread::lane()), (row + 1) * (columns / PART));
        let mut part = first;
        while part < end {
            // Parts beyond the row are its last once more, and not stored.
            let place = |step: usize| part + step as u64 * u64::from(warp::LANES);
            let loaded: [_; STEPS] = core::array::from_fn(|step| load_part(&data, |block| scales.load(block), place(step).min(end - 1)));
            for (step, &(codes, scale)) in loaded.iter().enumerate() {
                if place(step) < end {
                    store_part(&output, place(step), codes, scale.to_f32() * amax * factor);
                }
            }
            part += STEPS as u64 * u64::from(warp::LANES);
        }
    }
}

fn grid<T: Wide>(args: &Nvfp4DequantizeScaledRowsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.output.len();
    LaunchError::check_multiple("columns", BLOCK, args.columns)?;
    LaunchError::check_length("output", args.rows.saturating_mul(args.columns), elements)?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    LaunchError::check_length("data", elements / 2, args.data.len())?;
    LaunchError::check_alignment("data", 4, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    if args.amaxes.len() != 1 {
        LaunchError::check_length("amaxes", args.rows, args.amaxes.len())?;
    }
    Grid::cover("rows", args.rows, ROWS)
}
