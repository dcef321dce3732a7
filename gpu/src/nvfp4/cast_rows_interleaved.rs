//! Rowwise cast to NVFP4 that writes its scales as block-scaled matrix multiplication reads them.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element. The scales lie [interleaved](crate::interleave), in tiles of 128 rows by 4 blocks. A
//! warp takes those 8 rows by 4 blocks whose scales are 32 bytes in a row: rows `r` and `r + 1` of each of the tile's four groups
//! of 32. So it reads whole lines, 64 elements of each row, and writes whole sectors of codes and of scales.
//!
//! | barrier | between |
//! |---|---|
//! | block | the table is written, and read |

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_rows::{RowBlock, block_codes};
use super::multipliers::Multipliers;
use super::rounding::Nearest;
use super::*;
use crate::interleave::{TILE_BLOCKS, TILE_BYTES, TILE_OUTER, interleaved_len};
use crate::magnitude::Magnitude;
use crate::matrix::{Matrix, MatrixArgument};

const THREADS: u32 = 256;
/// CUDA blocks that make a tile.
const A_TILE: u64 = TILE_OUTER * TILE_BLOCKS / THREADS as u64;
const GRID_LIMIT: u64 = 65_535;

#[derive(SharedStorage)]
struct Shared {
    multipliers: Multipliers,
}

/// Casts the rows of a matrix `[rows, columns]`, `columns` a multiple of 16, whose largest magnitude is `amax[0]`: pairs of codes to `data`, the
/// scales to `scales`, interleaved, 0 where they are padding.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = if size_of::<T>() == 4 { 5 } else { 8 })]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_rows_interleaved<T: Magnitude>(input: Matrix<T>, amax: Global<f32>, data: GlobalMut<e2m1x2>, scales: GlobalMut<e4m3>) {
    let Matrix { values: input, rows, columns } = input;
    let [x, y, _] = block::index();
    let (blocks, lane) = (columns / BLOCK, thread::lane());
    let pair = y % A_TILE as u32 * (THREADS / warp::LANES) + thread::warp();
    let row = u64::from(y) / A_TILE * TILE_OUTER + u64::from(lane / 4 % 4 * 32 + pair * 2 + lane / 16);
    let column = u64::from(x) * TILE_BLOCKS + u64::from(lane % 4);
    // Threads in the padding load another block: no branch parts the loads from the table.
    let index = row.min(rows - 1) * blocks + column.min(blocks - 1);
    let block = RowBlock::load(&input, index);
    let multipliers = Shared::claim().multipliers;
    multipliers.fill::<Nearest>(encode_scale(amax.load(0)));
    block::sync();
    let is_inside = row < rows && column < blocks;
    let scale = if is_inside {
        let (scale, codes) = block_codes(&input, &block, index, multipliers, Nearest);
        data.store_pair(index * BLOCK_BYTES, codes);
        scale
    } else {
        e4m3::from_bits(0)
    };
    // The warp's scales lie in the order of its lanes.
    let tile = u64::from(y) / A_TILE * u64::from(block::count()[0]) + u64::from(x);
    scales.store(tile * TILE_BYTES + u64::from(pair * warp::LANES + lane), scale);
}

fn grid<T: Magnitude>(args: &Nvfp4CastRowsInterleavedArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    let (elements, blocks) = (values.len(), columns / BLOCK);
    LaunchError::check_multiple("input.columns", BLOCK, columns)?;
    args.input.check()?;
    LaunchError::check_alignment("input.values", 16, values.address())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    LaunchError::check_length("data", elements / 2, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", interleaved_len(rows, blocks), args.scales.len())?;
    let down = rows.div_ceil(TILE_OUTER) * A_TILE;
    LaunchError::check_limit("input.rows", rows, GRID_LIMIT / A_TILE * TILE_OUTER)?;
    let across = Grid::cover("input.columns", blocks, TILE_BLOCKS as u32)?;
    Ok(if down == 0 { Grid::x(0) } else { Grid::xy(across.x, down as u32) })
}
