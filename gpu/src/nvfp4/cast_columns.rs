//! Columnwise cast to NVFP4: 16 rows of a column share a scale, and the codes are those of the transpose.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element. A CUDA block casts one [tile](super::cast_tile).
//!
//! | barrier | between |
//! |---|---|
//! | block | the tile and the table are written, and read |
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
    multipliers: Multipliers,
}

/// Casts the columns of a matrix `[rows, columns]`, both multiples of 16: `data` is `[columns, rows / 2]`, `scales` `[columns, rows / 16]`.
///
/// `amax[0]` is the largest magnitude of the tensor, or, for `HADAMARD`, of the
/// [transformed](super::hadamard_amax) one.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<R>())]
#[instances(T = [bf16, f16, f32], R = [Nearest], HADAMARD = [false])]
#[instances(T = [bf16], R = [Stochastic8, Stochastic16], HADAMARD = [false])]
#[instances(T = [bf16], R = [Nearest, Stochastic8, Stochastic16], HADAMARD = [true])]
pub fn nvfp4_cast_columns<T: Magnitude, R: Rounding, const HADAMARD: bool>(
    input: Matrix<T>,
    amax: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
    random: Random,
) {
    let tile = CastTile::<T>::of_block(Shared::claim().tile, input.rows, input.columns);
    cast_columns::<T, R, HADAMARD>(&input.values, &amax, Codes { data, scales }, R::new(random), &tile, false);
}

/// A CUDA block's work on a tile, in [`Shared`]; `amax` has one element. `before` tells whether it cast another tile with the same amax before.
#[inline(always)]
pub(super) fn cast_columns<T: Magnitude, R: Rounding, const HADAMARD: bool>(
    input: &Global<T>,
    amax: &Global<f32>,
    codes: Codes<e2m1x2, e4m3>,
    rounding: R,
    tile: &CastTile<T>,
    before: bool,
) {
    let multipliers = Shared::claim().multipliers;
    let chunks = tile.load(input);
    if before {
        block::sync();
    } else {
        multipliers.fill::<R>(encode_scale(amax.load(0)));
    }
    tile.store(chunks);
    block::sync();
    let cast = BlockCast { codes, multipliers, rounding };
    if HADAMARD {
        cast.transformed_columns(tile);
    } else {
        cast.columns(tile, |_, amax| multipliers.of_block(amax));
    }
}

fn grid<T: Magnitude, R: Rounding, const HADAMARD: bool>(
    args: &Nvfp4CastColumnsArgs<'_, T, R, HADAMARD>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError> {
    args.random.check::<R>()?;
    check_output(args.input.values.len(), ("amax", &args.amax), ("data", &args.data), ("scales", &args.scales))?;
    cast_tile::grid(&args.input)
}
