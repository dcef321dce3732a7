//! MXFP8: 8-bit elements with one power-of-two scale for every 32 consecutive elements of a row or of a column.
//!
//! Formats and rules: OCP Microscaling Formats 1.0; TransformerEngine `common/cast/mxfp8`. A tensor is
//! `[rows, columns]` and so are its codes, in either direction; the scales are compact and unpadded,
//! `[rows, ceil(columns / 32)]` rowwise and `[ceil(rows / 32), columns]` columnwise.
//!
//! With `amax` the block's largest magnitude and `max` the largest element code (448 or 57344),
//! `scale = 2^e`, `e = ceil(log2(amax * fp32(1 / max)))` saturated to [-127, 127], and
//! `code = rn_satfinite(x * 2^-e)`, all in `f32`, nothing contracted or flushed. A NaN element does not
//! reach its block's amax and becomes a NaN code; an Inf gives the scale 2^127 and the largest code.
//!
//! | file | what it holds |
//! |---|---|
//! | `cast_rows`, `cast_columns`, `cast_both` | the casts by rows, by columns, and in both directions in one pass |
//! | `ragged_rows`, `ragged_columns` | cast and back of rows that end within a block, or lie at any address |
//! | `cast_rows_interleaved` | the cast by rows that writes interleaved scales |
//! | `cast_fused`, `cast_fused_rows`, `cast_fused_columns` | the casts fused with an activation, sums of columns and the amax: in both directions, by rows, by columns |
//! | `fused_operands` | what the fused casts read, and its checks |
//! | `dequantize_rows`, `dequantize_columns`, `dequantize_interleaved` | back to wide numbers |
//! | `cast_grouped`, `dequantize_grouped` | the same for a group of matrices by one launch |
//! | `column_tile`, `fused_tile`, `computed` | the tile of the casts along columns, what the fused ones add to it, and the first half of their work |
//! | `row_scales` | where the row scales of a CUDA block meet |

mod cast_both;
mod cast_columns;
mod cast_fused;
mod cast_fused_columns;
mod cast_fused_rows;
mod cast_grouped;
mod cast_rows;
mod cast_rows_interleaved;
mod column_tile;
mod computed;
mod dequantize_columns;
mod dequantize_grouped;
mod dequantize_interleaved;
mod dequantize_rows;
mod fused_operands;
mod fused_tile;
mod ragged_columns;
mod ragged_rows;
mod row_scales;

pub use cast_both::{MXFP8_CAST_BOTH, Mxfp8CastBoth, Mxfp8CastBothArgs};
pub use cast_columns::{MXFP8_CAST_COLUMNS, Mxfp8CastColumns, Mxfp8CastColumnsArgs};
pub use cast_fused::{
    COPIED_OPERANDS, INTERLEAVED_SCALES, MXFP8_CAST_FUSED, Mxfp8CastFused, Mxfp8CastFusedArgs, SQUARE_BLOCKS, copied_where_many,
};
pub use cast_fused_columns::{MXFP8_CAST_FUSED_COLUMNS, Mxfp8CastFusedColumns, Mxfp8CastFusedColumnsArgs};
pub use cast_fused_rows::{MXFP8_CAST_FUSED_ROWS, Mxfp8CastFusedRows, Mxfp8CastFusedRowsArgs};
pub use cast_grouped::*;
pub use cast_rows::{MXFP8_CAST_ROWS, Mxfp8CastRows, Mxfp8CastRowsArgs};
pub use cast_rows_interleaved::{MXFP8_CAST_ROWS_INTERLEAVED, Mxfp8CastRowsInterleaved, Mxfp8CastRowsInterleavedArgs};
pub use dequantize_columns::{MXFP8_DEQUANTIZE_COLUMNS, Mxfp8DequantizeColumns, Mxfp8DequantizeColumnsArgs};
pub use dequantize_grouped::*;
pub use dequantize_interleaved::*;
pub use dequantize_rows::{MXFP8_DEQUANTIZE_ROWS, Mxfp8DequantizeRows, Mxfp8DequantizeRowsArgs};
pub use fused_operands::{FusedOperands, FusedOperandsArgument};
pub use ragged_columns::{MXFP8_CAST_RAGGED_COLUMNS, Mxfp8CastRaggedColumns, Mxfp8CastRaggedColumnsArgs};
pub use ragged_columns::{MXFP8_DEQUANTIZE_RAGGED_COLUMNS, Mxfp8DequantizeRaggedColumns, Mxfp8DequantizeRaggedColumnsArgs};
pub use ragged_rows::{MXFP8_CAST_RAGGED_ROWS, Mxfp8CastRaggedRows, Mxfp8CastRaggedRowsArgs};
pub use ragged_rows::{MXFP8_DEQUANTIZE_RAGGED_ROWS, Mxfp8DequantizeRaggedRows, Mxfp8DequantizeRaggedRowsArgs};

use oxtile_tile::num::{Fp8, ue8m0};
use oxtile_tile::prelude::{Global, GlobalMut, Vector, thread, warp};

use crate::magnitude::{Magnitude, of_vector};
pub use crate::wide::Wide;

/// Elements that share a scale.
pub const BLOCK: u64 = 32;

/// Warps of a CUDA block.
const WARPS: u32 = 8;
const THREADS: u32 = WARPS * warp::LANES;

/// CUDA blocks a multiprocessor: 1536 threads of 40 registers; at 8 the cast spills.
const RESIDENT: u32 = 6;

/// Elements of `T` that a warp handles in some steps: a vector of 16 bytes a lane and step.
const fn warp_tile<T>(steps: usize) -> u64 {
    steps as u64 * warp::LANES as u64 * 16 / size_of::<T>() as u64
}

/// Lanes whose vectors of `T` make up one block of elements.
const fn lanes_a_block<T>() -> u32 {
    BLOCK as u32 * size_of::<T>() as u32 / 16
}

/// The first element of this lane's vector in a step over the tile that starts at `tile`.
#[inline(always)]
fn lane_element<T>(tile: u64, step: usize) -> u64 {
    let vector = step as u32 * warp::LANES + thread::lane();
    tile + u64::from(vector * 16 / size_of::<T>() as u32)
}

/// The block of the tile that this lane is part of in a step.
#[inline(always)]
fn block_in_tile<T>(step: u32) -> u32 {
    (step * warp::LANES + thread::lane()) / lanes_a_block::<T>()
}

/// The scale of a block whose largest magnitude is `amax`, NaN dropped.
#[inline(always)]
fn scale_of<Q: Fp8>(amax: f32) -> ue8m0 {
    ue8m0::from_magnitude(amax * Q::LARGEST_RECIPROCAL)
}

/// A block's scale beside its multiplier: eight codes alone would be packed into words before they are used.
#[derive(Clone, Copy)]
struct BlockScale {
    code: ue8m0,
    multiplier: f32,
}

/// The scale of the block that this lane's vector is part of, from its running maximum, agreed among the block's lanes.
#[inline(always)]
fn block_scale<T: Magnitude, Q: Fp8>(mut running: u32) -> ue8m0 {
    let mut flip = 1;
    while flip < lanes_a_block::<T>() {
        running = T::join(running, warp::shuffle_xor(running, flip));
        flip *= 2;
    }
    scale_of::<Q>(T::finish(running))
}

/// `data[first..] = vector * multipliers`, rounded; the four elements of an `f32` vector take the first four.
#[inline(always)]
fn store_codes<T: Magnitude, Q: Fp8>(data: &GlobalMut<Q>, first: u64, vector: Vector<T>, multipliers: [f32; 8]) {
    let four = |from: usize| Q::encode4(core::array::from_fn(|i| vector.lane(from + i).to_f32() * multipliers[from + i]));
    if Vector::<T>::LANES == 8 { data.store_pair(first, [four(0), four(4)]) } else { data.store_word(first, four(0)) }
}

/// The codes of one vector of `T`: 8, or 4 and nothing. They stay in the cache: decoding writes more than it reads.
#[inline(always)]
fn load_codes<Q: Fp8, T: Wide>(data: &Global<Q>, first: u64) -> [u32; 2] {
    if Vector::<T>::LANES == 8 { data.lasting().load_pair(first) } else { [data.lasting().load_word(first), 0] }
}

/// The values of these codes times their scales, rounded to `T`.
#[inline(always)]
fn decode<Q: Fp8, T: Wide>([low, high]: [u32; 2], scales: [f32; 8]) -> Vector<T> {
    let four = |codes, from: usize| {
        let values = Q::decode4(codes);
        core::array::from_fn(|i| values[i] * scales[from + i])
    };
    T::vector(four(low, 0), four(high, 4))
}
