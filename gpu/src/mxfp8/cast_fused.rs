//! The cast to MXFP8 fused with its neighbours in a model: an activation or its derivative before, sums of columns and
//! the largest magnitude beside, scales interleaved or shared by both directions.
//!
//! Floor: the operands once, and 1 + 1/32 bytes an element and direction. The [tile](super::column_tile) of the columnwise
//! cast. A lane's 8 vectors of each result lie in shared memory that no other lane reads: registers for 16 warps a multiprocessor
//! become room for 24 and more. Operands are copied there, all at once, computed with and rounded to the input type in place, and cast.
//! From the rounding on scales, codes, sums and amax are those of the rounded values. Which outputs are wanted and other
//! such choices are the same for the whole grid. Rows and columns beyond the tensor are read as the last ones inside, which
//! changes no maximum, so all tiles are computed alike; what is computed of a whole tile is cast in both directions by one loop
//! without a branch.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the row scales of all warps, before they are stored side by side |
//! | in `block::max_u32` | the warps' amaxes, in memory of their own |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::column_tile::{ColumnTile, ROWS_A_LANE, scales_of_columns};
use super::computed::{Computed, Vectors};
use super::fused_operands::{FusedOperands, check_elements};
use super::fused_tile::{Shape, Source, Tile, add, square_maximum};
use super::row_scales::{RowScales, put_scale};
use super::*;
use crate::activation::*;
use crate::codes::{Codes, CodesArgument};

/// Option: 32 by 32 elements share a scale, so that both directions have the same codes.
pub const SQUARE_BLOCKS: u32 = 1;
/// Option: scales are [interleaved](crate::interleave) in both directions, the padding 0.
pub const INTERLEAVED_SCALES: u32 = 2;
/// Option: operands are copied, all at once, where they are loaded otherwise while results of others are computed; the same results, sooner
/// where there are [many tiles](copied_where_many). The input itself is always copied.
pub const COPIED_OPERANDS: u32 = 4;

/// [`COPIED_OPERANDS`] where the results of `O`, side by side `[rows, columns]`, have tiles for more than four waves of CUDA blocks
/// on an H200, or nothing: with fewer, a CUDA block that waits has none beside it that computes.
pub const fn copied_where_many<O: Operation, T>(rows: u64, columns: u64) -> u32 {
    const MULTIPROCESSORS: u64 = 132;
    let tiles = rows.div_ceil(BLOCK).saturating_mul(ColumnTile::<T>::groups(columns / O::RESULTS as u64));
    if tiles > 4 * MULTIPROCESSORS * resident::<O>() as u64 { COPIED_OPERANDS } else { 0 }
}

/// CUDA blocks a multiprocessor: two results take more registers.
pub(super) const fn resident<O: Operation>() -> u32 {
    if O::RESULTS == 1 { 4 } else { 2 }
}

#[derive(SharedStorage)]
struct Shared<O: Operation> {
    vectors: O::Each<Vectors>,
    row_scales: O::Each<RowScales>,
    reduce: ReduceStorage,
}

/// Casts the results of `O`, side by side `[rows, columns]`.
///
/// - `rows` and `columns`: as in the cast in both directions without an operation; a direction that is not wanted is empty.
/// - `partial_sums`: `[ceil(rows / 32), columns]`, the sums of each column over 32 rows, or empty.
///
///   None of the three is an `Option`: whether it is there would be asked of its address, not of its length, which costs up to 1.5 % more
///   instructions, here and in [the cast along columns](super::cast_fused_columns::mxfp8_cast_fused_columns).
/// - `amax`: raised to the largest magnitude, NaN dropped. The host zeroes it first.
/// - `skip`: where its one element is 1, nothing is written.
/// - `options`: [`SQUARE_BLOCKS`], [`INTERLEAVED_SCALES`], [`COPIED_OPERANDS`].
#[kernel(threads = THREADS, grid = grid, shared = Shared<O>, min_blocks = resident::<O>())]
#[instances(O = [Identity], T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16], Q = [e4m3])]
#[expect(clippy::needless_range_loop, reason = "the indices are constants once loops are unrolled")]
pub fn mxfp8_cast_fused<O: Operation, T: Magnitude + Wide, Q: Fp8>(
    operands: FusedOperands<T>,
    rows: Codes<Q, ue8m0>,
    columns: Codes<Q, ue8m0>,
    partial_sums: GlobalMut<f32>,
    amax: Option<GlobalMut<f32>>,
    skip: Option<Global<f32>>,
    options: u32,
) {
    if skip.is_some_and(|skip| skip.load(0) == 1.0) {
        return;
    }
    let shared = Shared::<O>::claim();
    let (vectors, staged) = (shared.vectors.as_ref(), shared.row_scales.as_ref());
    let interleaved = options & INTERLEAVED_SCALES != 0;
    let tile = Tile::of_lane::<O>(operands.rows, operands.columns);
    let source = Source::of::<O>(operands, &tile);
    let [squares, by_rows, by_columns] = [options & SQUARE_BLOCKS != 0, !rows.data.is_empty(), !columns.data.is_empty()];
    let Computed { running, row_codes } = if O::COMPUTES && options & COPIED_OPERANDS == 0 {
        Computed::of_loaded::<O, T, Q>(vectors, &source, true)
    } else {
        Computed::of_copied::<O, T, Q>(vectors, &source, by_rows)
    };

    let together = O::COMPUTES && by_rows && by_columns && warp::all(tile.is_whole());
    for result in 0..O::RESULTS {
        let (vectors, staged, running) = (vectors[result], staged[result], running[result]);
        let tile = tile.of_result(result);
        // Nothing is larger than the maximum of its square, and everything at least 0.
        let of_square = if squares { square_maximum::<T>(running) } else { 0 };
        let of_square_eight_times = u64::from(scale_of::<Q>(T::finish(of_square)).to_bits()) * 0x0101_0101_0101_0101;
        let row_codes = if squares { of_square_eight_times } else { row_codes[result] };
        let row_code = |step: usize| ue8m0::from_bits((row_codes >> (8 * step)) as u8);
        let scales = scales_of_columns::<T, Q>(running.map(|word| T::join(word, of_square)));
        let multipliers = scales.map(|scale| scale.multiplier);
        if by_columns && tile.place.row == 0 {
            tile.store_column_scales(&columns.scales, &scales, interleaved);
        }
        let mut sums = [0.0; 8];
        if together {
            for step in 0..ROWS_A_LANE {
                put_scale(staged, tile.place, step as u32, row_code(step));
            }
            let cast = |step: usize| {
                let vector = vectors.load::<T>(step);
                store_codes(&rows.data, tile.element(step), vector, [row_code(step).reciprocal(); 8]);
                store_codes(&columns.data, tile.element(step), vector, multipliers);
                vector
            };
            if partial_sums.is_empty() {
                (0..ROWS_A_LANE).for_each(|step| _ = cast(step));
            } else {
                (0..ROWS_A_LANE).for_each(|step| add(&mut sums, cast(step)));
            }
        } else {
            if by_rows {
                for step in 0..ROWS_A_LANE {
                    let vector = vectors.load::<T>(step);
                    let code = if O::COMPUTES { row_code(step) } else { block_scale::<T, Q>(T::join(of_vector(vector), of_square)) };
                    put_scale(staged, tile.place, step as u32, code);
                    if tile.is_inside(step) {
                        store_codes(&rows.data, tile.element(step), vector, [code.reciprocal(); 8]);
                    }
                }
            }
            for step in (0..ROWS_A_LANE).filter(|step| by_columns && tile.is_inside(*step)) {
                store_codes(&columns.data, tile.element(step), vectors.load::<T>(step), multipliers);
            }
            for step in (0..ROWS_A_LANE).filter(|step| !partial_sums.is_empty() && tile.is_inside(*step)) {
                add(&mut sums, vectors.load::<T>(step));
            }
        }
        if !partial_sums.is_empty() {
            tile.store_sums(&partial_sums, sums);
        }
    }
    if let Some(amax) = &amax {
        let largest = running.into_iter().flatten().fold(0, T::join);
        let largest = block::max_u32(T::finish(largest).to_bits(), shared.reduce);
        if thread::index() == 0 {
            atomic::max_non_negative(amax, 0, f32::from_bits(largest));
        }
    }
    if by_rows {
        block::sync();
        for result in 0..O::RESULTS {
            tile.of_result(result).store_row_scales(&rows.scales, staged[result], interleaved);
        }
    }
}

fn grid<O: Operation, T: Magnitude + Wide, Q: Fp8>(args: &Mxfp8CastFusedArgs<'_, O, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let shape = Shape::of::<O, T>(&args.operands, args.options)?;
    shape.check_sums(&args.partial_sums)?;
    check_elements(args.amax.as_ref(), args.skip.as_ref())?;
    let CodesArgument { data, scales } = &args.rows;
    if !data.is_empty() {
        shape.check_codes(("rows.data", data), ("rows.scales", scales), [shape.rows, shape.columns.div_ceil(BLOCK)])?;
    }
    let CodesArgument { data, scales } = &args.columns;
    if !data.is_empty() {
        shape.check_codes(("columns.data", data), ("columns.scales", scales), [shape.columns, shape.rows.div_ceil(BLOCK)])?;
    }
    shape.grid::<O, T>()
}
