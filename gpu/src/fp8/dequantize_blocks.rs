//! FP8 with scales of blocks or squares back to wide numbers.
//!
//! Floor: 1 + 2 (bf16) bytes an element, and 4 a scale. On the [tile](super::tile) of the casts: a lane loads its codes and
//! their scales first.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::tile::{LINES, SIDE, Tile};
use super::*;
use crate::matrix::{Matrix, MatrixArgument};
use crate::wide::Wide;

/// CUDA blocks a multiprocessor.
const RESIDENT: u32 = 3;

/// The inverses of the scales of a matrix: that of element `i, j` is `inverses[i / 2^row_shift * row_stride + j / 128 * block_stride]`.
#[derive(Clone, Copy, Parameter)]
pub struct BlockScales {
    /// The inverses.
    pub inverses: Global<f32>,
    /// The binary logarithm of the rows that share one.
    pub row_shift: u32,
    /// From those of some rows to those of the next.
    pub row_stride: u64,
    /// From that of a block of 128 columns to that of the next.
    pub block_stride: u64,
}

/// `output[i, j] = input[i, j] * inverse[i, j]`, rounded to nearest even, of a matrix `[rows, columns]` of whole vectors a row. A transpose is
/// such a matrix too.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn fp8_dequantize_blocks<Q: Fp8, T: Wide>(input: Matrix<Q>, scales: BlockScales, output: GlobalMut<T>) {
    let BlockScales { inverses, row_shift, row_stride, block_stride } = scales;
    let tile = Tile::<T>::of_block(input.rows, input.columns);
    let first = tile.first_column / SIDE * block_stride;
    let codes = tile.gather([0; 2], |step, line| load_codes::<Q, T>(&input.values, tile.element(step, line)));
    let factors = tile.gather(0.0, |step, line| inverses.load(first + (tile.row(step, line) >> row_shift) * row_stride));
    Tile::<T>::for_each_step(|step| {
        for line in 0..LINES {
            if tile.is_inside(step, line) {
                output.store_vector(tile.element(step, line), decode::<Q, T>(codes[step][line], factors[step][line]));
            }
        }
    });
}

fn grid<Q: Fp8, T: Wide>(args: &Fp8DequantizeBlocksArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    let BlockScalesArgument { inverses, row_shift, row_stride, block_stride } = args.scales;
    LaunchError::check_length("output", values.len(), args.output.len())?;
    LaunchError::check_limit("scales.row_shift", row_shift.into(), 63)?;
    if !values.is_empty() {
        args.input.check()?;
        let [down, across] = [(rows - 1) >> row_shift, (columns - 1) / SIDE];
        let last = down.saturating_mul(row_stride).saturating_add(across.saturating_mul(block_stride));
        // There may be more than the strides reach.
        LaunchError::check_length("scales.inverses", inverses.len().max(last.saturating_add(1)), inverses.len())?;
    }
    Tile::<T>::check_vectors(columns, ("output", args.output.address()), ("input.values", values.address()))?;
    Tile::<T>::grid(&args.input)
}
