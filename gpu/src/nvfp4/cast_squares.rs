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
use crate::codes::Codes;
use crate::magnitude::Magnitude;
use crate::matrix::Matrix;

#[derive(SharedStorage)]
struct Shared {
    tile: TileWords,
    multipliers: Multipliers,
    squares: SharedArray<e4m3, SQUARES>,
}

/// Casts a matrix `[rows, columns]`, both multiples of 16, whose largest magnitude is `amax[0]`; each scale stands for all 16 rows, or
/// columns, of its square.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<Nearest>())]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_squares<T: Magnitude>(input: Matrix<T>, amax: Global<f32>, rows: Codes<e2m1x2, e4m3>, columns: Codes<e2m1x2, e4m3>) {
    let Shared { tile: words, multipliers, squares } = Shared::claim();
    let tile = CastTile::<T>::of_block(words, input.rows, input.columns);
    let chunks = tile.load(&input.values);
    multipliers.fill::<Nearest>(encode_scale(amax.load(0)));
    tile.store(chunks);
    block::sync();
    let (square, amax) = tile.square_amax();
    // The threads of a square agree; one of them writes.
    if let Some(square) = square {
        squares.store(square, multipliers.of_block(amax).code);
    }
    block::sync();
    let by_rows = BlockCast { codes: rows, multipliers, rounding: Nearest };
    by_rows.rows(&tile, |block, amax| multipliers.of_scale(squares.load(tile.square_of(block)), amax));
    let by_columns = BlockCast { codes: columns, ..by_rows };
    by_columns.columns(&tile, |block, amax| multipliers.of_scale(squares.load(tile.square_of(block)), amax));
}

fn grid<T: Magnitude>(args: &Nvfp4CastSquaresArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.input.values.len();
    check_output(elements, ("amax", &args.amax), ("rows.data", &args.rows.data), ("rows.scales", &args.rows.scales))?;
    check_output(elements, ("amax", &args.amax), ("columns.data", &args.columns.data), ("columns.scales", &args.columns.scales))?;
    cast_tile::grid(&args.input)
}
