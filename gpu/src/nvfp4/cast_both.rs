//! Cast to NVFP4 by rows and by columns in one pass over the input.
//!
//! Floor: 2 (bf16) + 2 (1/2 + 1/16) bytes an element. A CUDA block casts one [tile](super::cast_tile), its rows, which
//! threads that do not draw keep in registers, and then its columns.
//!
//! | barrier | between |
//! |---|---|
//! | block | the tile and the tables are written, and read |
//! | block | a tile is read, and the next one of the same CUDA block, in a [group](super::grouped), is written |

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_block::BlockCast;
use super::cast_tile::{CastTile, THREADS, TileWords, check_output, resident};
use super::multipliers::Multipliers;
use super::rounding::{Nearest, Random, Rounding, Stochastic8, Stochastic16};
use super::*;
use crate::codes::Codes;
use crate::magnitude::Magnitude;
use crate::matrix::Matrix;

#[derive(SharedStorage)]
pub(super) struct Shared {
    pub tile: TileWords,
    row_multipliers: Multipliers,
    column_multipliers: Multipliers,
}

/// Casts a matrix `[rows, columns]`, both multiples of 16, as the rowwise and the columnwise kernel do.
///
/// `row_amax[0]` is the largest magnitude of the tensor, and so is `column_amax[0]`, or, for `HADAMARD`, of the
/// [transformed](super::hadamard_amax) one.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<R>())]
#[instances(T = [bf16, f16, f32], R = [Nearest], HADAMARD = [false])]
#[instances(T = [bf16], R = [Stochastic8, Stochastic16], HADAMARD = [false])]
#[instances(T = [bf16], R = [Nearest, Stochastic8, Stochastic16], HADAMARD = [true])]
pub fn nvfp4_cast_both<T: Magnitude, R: Rounding, const HADAMARD: bool>(
    input: Matrix<T>,
    row_amax: Global<f32>,
    column_amax: Global<f32>,
    rows: Codes<e2m1x2, e4m3>,
    columns: Codes<e2m1x2, e4m3>,
    random: Random,
) {
    let tile = CastTile::<T>::of_block(Shared::claim().tile, input.rows, input.columns);
    let amaxes = [&row_amax, &column_amax];
    cast_both::<T, R, HADAMARD>(&input.values, amaxes, [rows, columns], R::new(random), &tile, R::DRAWS == 0, false);
}

/// A CUDA block's work on a tile, in [`Shared`]; each amax has one element. A thread that `keeps` the rows that it loaded, in
/// registers, does not read them again. Whether the CUDA block did a tile `before`, with the same amaxes.
#[inline(always)]
pub(super) fn cast_both<T: Magnitude, R: Rounding, const HADAMARD: bool>(
    input: &Global<T>,
    [row_amax, column_amax]: [&Global<f32>; 2],
    [rows, columns]: [Codes<e2m1x2, e4m3>; 2],
    rounding: R,
    tile: &CastTile<T>,
    keeps: bool,
    before: bool,
) {
    let Shared { row_multipliers, column_multipliers, .. } = Shared::claim();
    let chunks = if keeps { tile.load_blocks(input) } else { tile.load(input) };
    if before {
        block::sync();
    } else {
        row_multipliers.fill::<R>(encode_scale(row_amax.load(0)));
        if HADAMARD {
            column_multipliers.fill::<R>(encode_scale(column_amax.load(0)));
        }
    }
    if keeps {
        tile.store_blocks(&chunks);
    } else {
        tile.store(chunks);
    }
    block::sync();
    let by_rows = BlockCast { codes: rows, multipliers: row_multipliers, rounding };
    if keeps {
        by_rows.loaded_rows(tile, &chunks, |_, amax| row_multipliers.of_block(amax));
    } else {
        by_rows.rows(tile, |_, amax| row_multipliers.of_block(amax));
    }
    if HADAMARD {
        BlockCast { codes: columns, multipliers: column_multipliers, rounding }.transformed_columns(tile);
    } else {
        let by_columns = BlockCast { codes: columns, ..by_rows };
        by_columns.columns(tile, |_, amax| row_multipliers.of_block(amax));
    }
}

fn grid<T: Magnitude, R: Rounding, const HADAMARD: bool>(
    args: &Nvfp4CastBothArgs<'_, T, R, HADAMARD>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    let elements = args.input.values.len();
    args.random.check::<R>()?;
    check_output(elements, ("row_amax", &args.row_amax), ("rows.data", &args.rows.data), ("rows.scales", &args.rows.scales))?;
    check_output(
        elements,
        ("column_amax", &args.column_amax),
        ("columns.data", &args.columns.data),
        ("columns.scales", &args.columns.scales),
    )?;
    cast_tile::grid(&args.input)
}
