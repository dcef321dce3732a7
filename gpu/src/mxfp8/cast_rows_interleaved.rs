//! Rowwise cast to MXFP8, rows of whole blocks, whose scales are [interleaved](crate::interleave) as they are written.
//!
//! Floor: 2 (bf16) + 1 + 1/32 bytes an element. Each warp casts a tile of one row as the [rowwise cast](super::cast_rows) does. What a
//! CUDA block writes of the scales should be whole sectors: 32 bytes are four blocks of eight rows, `r` and `r + 1` of each quarter of the 128
//! rows of an interleaved tile. Those are the rows of its eight warps, whose scales meet in shared memory.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the scales of all warps, before they are stored side by side |

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::cast_rows::{STEPS, cast_step, cast_tile};
use super::*;
use crate::interleave::{TILE_BLOCKS, TILE_OUTER, interleaved_len, offset};

/// Neighbouring rows of a CUDA block.
const NEIGHBOURS: u32 = 2;
/// The rows of a quarter of an interleaved tile.
const QUARTER: u32 = 32;
/// CUDA blocks below each other that make up the rows of an interleaved tile.
const GROUPS: u64 = TILE_OUTER / WARPS as u64;
/// Bytes of a row in an interleaved tile: four blocks of it and of three others.
const ROW_BYTES: u32 = 16;

/// Blocks of a row that a warp casts.
const fn blocks_a_warp<T>() -> u32 {
    (warp_tile::<T>(STEPS) / BLOCK) as u32
}

/// The scales of a CUDA block in the order in which they are stored: of each four blocks, the two neighbours, and of each its four quarters.
#[derive(SharedStorage)]
struct Shared {
    scales: SharedArray<ue8m0, { (WARPS * blocks_a_warp::<bf16>()) as usize }>,
}

/// Casts rows of `columns` elements, whole blocks; `scales` are those of `[rows, columns / 32]`, interleaved, the padding 0.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_rows_interleaved<T: Magnitude, Q: Fp8>(
    input: Global<T>,
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
    rows: u64,
    columns: u64,
) {
    let [chunk, y, z] = block::index();
    let group = u64::from(z) * u64::from(block::count()[1]) + u64::from(y);
    let first_row = group / GROUPS * TILE_OUTER + group % GROUPS * u64::from(NEIGHBOURS);
    let (neighbour, quarter) = (thread::warp() % NEIGHBOURS, thread::warp() / NEIGHBOURS);
    let row = first_row + u64::from(neighbour + quarter * QUARTER);
    let staged = Shared::claim().scales;
    let put_scale = |block: u32, code| {
        let place = (block / TILE_BLOCKS as u32 * NEIGHBOURS + neighbour) * ROW_BYTES + quarter * TILE_BLOCKS as u32;
        staged.store(place + block % TILE_BLOCKS as u32, code);
    };
    let first = u64::from(chunk) * warp_tile::<T>(STEPS);
    let start = row * columns + first;
    if warp::all(row < rows && first + warp_tile::<T>(STEPS) <= columns) {
        cast_tile::<T, Q>(&input, &data, start, put_scale);
    } else {
        for step in 0..STEPS {
            let within = lane_element::<T>(0, step);
            let code = cast_step::<T, Q>(&input, &data, start + within, row < rows && first + within < columns);
            if thread::lane().is_multiple_of(lanes_a_block::<T>()) {
                put_scale(block_in_tile::<T>(step as u32), code);
            }
        }
    }
    block::sync();
    let (tile, neighbour) = (thread::index() / NEIGHBOURS, thread::index() % NEIGHBOURS);
    let (j, blocks) = (first / BLOCK + u64::from(tile) * TILE_BLOCKS, columns / BLOCK);
    // A grid in three dimensions may have more blocks than there are groups of rows.
    let is_group = group < rows.div_ceil(TILE_OUTER) * GROUPS;
    if is_group && tile < blocks_a_warp::<T>() / TILE_BLOCKS as u32 && j < blocks {
        let of_row = staged.load_vector(thread::index() * ROW_BYTES);
        scales.store_vector(offset(first_row + u64::from(neighbour), j, blocks), of_row);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastRowsInterleavedArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (rows, columns, elements) = (args.rows, args.columns, args.rows.saturating_mul(args.columns));
    LaunchError::check_multiple("columns", BLOCK, columns)?;
    LaunchError::check_length("input", elements, args.input.len())?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("data", elements, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", interleaved_len(rows, columns / BLOCK), args.scales.len())?;
    LaunchError::check_alignment("scales", 16, args.scales.address())?;
    if elements == 0 {
        return Ok(Grid::x(0));
    }
    let chunks = Grid::cover("columns", columns, warp_tile::<T>(STEPS) as u32)?;
    Grid::down(chunks.x, "rows", rows.next_multiple_of(TILE_OUTER), TILE_OUTER / GROUPS)
}
