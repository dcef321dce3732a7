//! Cast to NVFP4 with one scale for 16 by 16 elements, by rows and by columns in one pass: a weight and its transpose get the
//! same values.
//!
//! Floor: 2 (bf16) + 2 (1/2 + 1/16) bytes an element. A CUDA block casts one [tile](super::cast_tile): the scales of its squares,
//! then its rows, then its columns.
//!
//! | barrier | between |
//! |---|---|
//! | first | the tile and the table are written, and read |
//! | second | the scales of the squares are written, and read |

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_block::BlockCast;
use super::cast_tile::{CastTile, SQUARES, THREADS, TileWords, check_output, resident};
use super::multipliers::Multipliers;
use super::rounding::Nearest;
use super::*;
use crate::magnitude::Magnitude;

#[derive(SharedStorage)]
struct Shared {
    tile: TileWords,
    multipliers: Multipliers,
    squares: SharedArray<e4m3, SQUARES>,
}

/// Casts `[rows, columns]`, both multiples of 16, whose largest magnitude is `amax[0]`; each scale stands for all 16 rows, or
/// columns, of its square.
#[expect(clippy::too_many_arguments, reason = "two outputs of data and scales")]
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<Nearest>())]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_squares<T: Magnitude>(
    input: Global<T>,
    amax: Global<f32>,
    row_data: GlobalMut<e2m1x2>,
    row_scales: GlobalMut<e4m3>,
    column_data: GlobalMut<e2m1x2>,
    column_scales: GlobalMut<e4m3>,
    rows: u64,
    columns: u64,
) {
    let Shared { tile: words, multipliers, squares } = Shared::claim();
    let tile = CastTile::<T>::of_block(words, rows, columns);
    let chunks = tile.load(&input);
    multipliers.fill::<Nearest>(encode_scale(amax.load(0)));
    tile.store(chunks);
    block::sync();
    let (square, amax) = tile.square_amax();
    // The threads of a square agree; one of them writes.
    if let Some(square) = square {
        squares.store(square, multipliers.of_block(amax).code);
    }
    block::sync();
    let by_rows = BlockCast { data: row_data, scales: row_scales, multipliers, rounding: Nearest };
    by_rows.rows(&tile, |block, amax| multipliers.of_scale(squares.load(tile.square_of(block)), amax));
    let by_columns = BlockCast { data: column_data, scales: column_scales, ..by_rows };
    by_columns.columns(&tile, |block, amax| multipliers.of_scale(squares.load(tile.square_of(block)), amax));
}

fn grid<T: Magnitude>(args: &Nvfp4CastSquaresArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.input.len();
    check_output(elements, ("amax", &args.amax), ("row_data", &args.row_data), ("row_scales", &args.row_scales))?;
    check_output(elements, ("amax", &args.amax), ("column_data", &args.column_data), ("column_scales", &args.column_scales))?;
    cast_tile::grid(&args.input, args.rows, args.columns)
}
