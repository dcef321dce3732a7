//! FP8 with scales of blocks or squares back to wide numbers.
//!
//! Floor: 1 + 2 (bf16) bytes an element, and 4 a scale. On the [tile](super::tile) of the casts: a lane loads its codes and
//! their scales first.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::tile::{LINES, SIDE, Tile};
use super::*;
use crate::mxfp8::Wide;

/// CUDA blocks a multiprocessor.
const RESIDENT: u32 = 3;

/// `output[i, j] = data[i, j] * scale_inverses[i / 2^row_shift * row_stride + j / 128 * block_stride]`, rounded to nearest even, of a matrix
/// `[rows, columns]` of whole vectors a row. A transpose is such a matrix too.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
#[allow(clippy::too_many_arguments)]
pub fn fp8_dequantize_blocks<Q: Fp8, T: Wide>(
    data: Global<Q>,
    scale_inverses: Global<f32>,
    output: GlobalMut<T>,
    rows: u64,
    columns: u64,
    row_shift: u32,
    row_stride: u64,
    block_stride: u64,
) {
    let tile = Tile::<T>::of_block(rows, columns);
    let first = tile.first_column / SIDE * block_stride;
    let codes = tile.gather([0; 2], |step, line| load_codes::<Q, T>(&data, tile.element(step, line)));
    let factors = tile.gather(0.0, |step, line| scale_inverses.load(first + (tile.row(step, line) >> row_shift) * row_stride));
    Tile::<T>::for_each_step(|step| {
        for line in 0..LINES {
            if tile.is_inside(step, line) {
                output.store_vector(tile.element(step, line), decode::<Q, T>(codes[step][line], factors[step][line]));
            }
        }
    });
}

fn grid<Q: Fp8, T: Wide>(args: &Fp8DequantizeBlocksArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, rows, columns) = (args.data.len(), args.rows, args.columns);
    LaunchError::check_length("output", elements, args.output.len())?;
    LaunchError::check_limit("row_shift", args.row_shift.into(), 63)?;
    if elements > 0 {
        LaunchError::check_length("data", rows.saturating_mul(columns), elements)?;
        let [down, across] = [(rows - 1) >> args.row_shift, (columns - 1) / SIDE];
        let last = down.saturating_mul(args.row_stride).saturating_add(across.saturating_mul(args.block_stride));
        // There may be more than the strides reach.
        let found = args.scale_inverses.len();
        LaunchError::check_length("scale_inverses", found.max(last.saturating_add(1)), found)?;
    }
    Tile::<T>::check_vectors(columns, ("output", args.output.address()), ("data", args.data.address()))?;
    Tile::<T>::grid("data", elements, rows, columns)
}
