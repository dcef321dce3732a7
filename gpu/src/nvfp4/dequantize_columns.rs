//! Columnwise NVFP4, whose codes are those of the transpose, back to wide numbers.
//!
//! Floor: 1/2 + 1/16 + 2 (bf16) bytes an element. A thread takes the blocks of a vector of columns: 8 bytes of codes and
//! one scale a column, and stores 16 rows of a vector. Sixteen threads side by side in a row write 256 bytes of it, sixteen
//! blocks below each other are 128 bytes of a row of codes. Nothing is exchanged.

use oxtile_tile::num::{Pod, e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::*;
use crate::wide::Wide;

pub(super) const THREADS: u32 = 256;
/// Vectors side by side in a CUDA block: half as many, or twice, and one of reading and writing goes in runs too short.
const VECTORS: u32 = 16;
/// Blocks below each other in a CUDA block.
const ROW_BLOCKS: u32 = THREADS / VECTORS;
const GRID_LIMIT: u64 = 65_535;
/// Rows of a CUDA block.
const TILE_ROWS: u64 = BLOCK * ROW_BLOCKS as u64;

/// `output[row][column] = data[column][row] * (scale * amax * fp32(1/2688))`, rounded to nearest even; `output` is
/// `[rows, columns]`, both multiples of 16, `data` `[columns, rows / 2]`, `scales` `[columns, rows / 16]`.
#[kernel(threads = THREADS, grid = grid, min_blocks = 3)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_columns<T: Wide>(
    data: Global<e2m1x2>,
    scales: Global<e4m3>,
    amax: Global<f32>,
    output: GlobalMut<T>,
    rows: u64,
    columns: u64,
) {
    let place = block::index();
    let place = [u64::from(place[0]), u64::from(place[1])];
    dequantize(&data, &amax, &output, [rows, columns], place, |(column, row_block)| scales.load(column * (rows / BLOCK) + row_block));
}

/// CUDA blocks side by side and below each other.
pub(super) const fn tiles<T: Pod>(rows: u64, columns: u64) -> [u64; 2] {
    [columns.div_ceil(VECTORS as u64 * Vector::<T>::LANES as u64), rows.div_ceil(TILE_ROWS)]
}

/// The work of the CUDA block at `[x, y]`; `scale` gives the scale of a column's block of rows. `amax` has one element.
#[inline(always)]
pub(super) fn dequantize<T: Wide>(
    data: &Global<e2m1x2>,
    amax: &Global<f32>,
    output: &GlobalMut<T>,
    [rows, columns]: [u64; 2],
    [x, y]: [u64; 2],
    scale: impl Fn((u64, u64)) -> e4m3,
) {
    let lanes = Vector::<T>::LANES as u64;
    let column = (x * u64::from(VECTORS) + u64::from(thread::index() % VECTORS)) * lanes;
    let row_block = y * u64::from(ROW_BLOCKS) + u64::from(thread::index() / VECTORS);
    if column < columns && row_block * BLOCK < rows {
        let amax = amax.load(0);
        let block = |i: usize| (column + i as u64 % lanes) * (rows / BLOCK) + row_block;
        let codes: [[u32; 2]; 8] = core::array::from_fn(|i| data.lasting().load_pair(block(i) * BLOCK_BYTES));
        let factors: [f32; 8] = core::array::from_fn(|i| decode_factor(scale((column + i as u64 % lanes, row_block)), amax));
        for pair in 0..BLOCK as usize / 2 {
            let values: [[f32; 2]; 8] = core::array::from_fn(|i| e2m1x2::from_bits((codes[i][pair / 4] >> (pair % 4 * 8)) as u8).to_f32());
            let store = |odd: usize| {
                let value = |i: usize| values[i][odd] * factors[i];
                let vector = T::vector(core::array::from_fn(value), core::array::from_fn(|i| value(4 + i)));
                output.store_vector((row_block * BLOCK + (2 * pair + odd) as u64) * columns + column, vector);
            };
            store(0);
            store(1);
        }
    }
}

fn grid<T: Wide>(args: &Nvfp4DequantizeColumnsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.output.len();
    LaunchError::check_multiple("rows", BLOCK, args.rows)?;
    LaunchError::check_multiple("columns", BLOCK, args.columns)?;
    LaunchError::check_length("output", args.rows.saturating_mul(args.columns), elements)?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    LaunchError::check_length("data", elements / 2, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    grid_of_tiles::<T>(args.rows, args.columns)
}

/// One CUDA block a tile.
pub(super) fn grid_of_tiles<T: Pod>(rows: u64, columns: u64) -> Result<Grid, LaunchError> {
    LaunchError::check_limit("rows", rows, GRID_LIMIT * TILE_ROWS)?;
    let across = Grid::cover("columns", columns, VECTORS * Vector::<T>::LANES as u32)?;
    Ok(if rows == 0 { Grid::x(0) } else { Grid::xy(across.x, rows.div_ceil(TILE_ROWS) as u32) })
}
