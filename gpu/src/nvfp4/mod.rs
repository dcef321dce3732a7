//! NVFP4: 4-bit E2M1 elements with one E4M3 scale for every 16 consecutive elements of a row and one
//! f32 for the tensor.
//!
//! Formats and rules: TransformerEngine `common/cast/nvfp4/core_nvfp4.cuh`, `dequantize_nvfp4.cuh`. A tensor is
//! `[rows, columns]`, `columns` a multiple of 16; the codes lie in pairs, the even element in the low
//! nibble, `[rows, columns / 2]`; the scales are compact, `[rows, columns / 16]`, unpadded. Cast by columns, it is its
//! transpose that is cast: codes `[columns, rows / 2]`, scales `[columns, rows / 16]`.
//!
//! With `amax` the largest magnitude of the tensor, every step rounded to `f32` in this order, nothing
//! contracted or flushed:
//!
//! ```text
//! encode     = min(2688 / amax, MAX)           1 where that is 0 or amax is; 2688 = 6 * 448
//! scale      = e4m3(min(block_amax * (encode * fp32(1/6)), MAX))
//! multiplier = min(1 / (scale * (1 / encode)), MAX)
//! code       = e2m1(x * multiplier)            nearest, ties to even, saturating; NaN is +6
//! value      = code * (scale * amax * fp32(1/2688))
//! ```
//!
//! A NaN element reaches neither amax. A block whose scale rounds to 0 has the multiplier MAX: what is
//! not nearly zero becomes +-6, and all of it decodes to 0.
//!
//! | file | what it holds |
//! |---|---|
//! | `cast_rows`, `cast_columns`, `cast_both` | the casts by rows (to the nearest value, or by stochastic rounding), by columns, and in both directions in one pass |
//! | `cast_rows_interleaved` | the cast by rows that writes interleaved scales |
//! | `cast_rows_4over6`, `cast_columns_4over6`, `mapping` | four over six: the casts, and its rule |
//! | `cast_scaled_rows` | an amax for each row |
//! | `cast_squares` | one scale for 16 by 16 elements |
//! | `cast_tile`, `cast_block` | the tile of the casts along columns, and the cast of its blocks in either direction |
//! | `rounding`, `philox` | rounding to nearest and stochastic rounding, and its random bits |
//! | `multipliers` | a table of what elements are multiplied by |
//! | `hadamard`, `hadamard_amax` | the random Hadamard transform of columns, and the amax after it |
//! | `dequantize_rows`, `dequantize_columns`, `dequantize_interleaved`, `dequantize_scaled_rows` | back to wide numbers |
//! | `grouped` | groups of matrices by one launch |
//! | `gemm_factors` | the factors of products of matrices in this format |

mod cast_block;
mod cast_both;
mod cast_columns;
mod cast_columns_4over6;
mod cast_rows;
mod cast_rows_4over6;
mod cast_rows_interleaved;
mod cast_scaled_rows;
mod cast_squares;
mod cast_tile;
mod dequantize_columns;
mod dequantize_interleaved;
mod dequantize_rows;
mod dequantize_scaled_rows;
mod gemm_factors;
mod grouped;
mod hadamard;
mod hadamard_amax;
mod mapping;
mod multipliers;
mod philox;
mod rounding;

pub use cast_both::{NVFP4_CAST_BOTH, Nvfp4CastBoth, Nvfp4CastBothArgs};
pub use cast_columns::{NVFP4_CAST_COLUMNS, Nvfp4CastColumns, Nvfp4CastColumnsArgs};
pub use cast_columns_4over6::{NVFP4_CAST_COLUMNS_4OVER6, Nvfp4CastColumns4over6, Nvfp4CastColumns4over6Args};
pub use cast_rows::{NVFP4_CAST_ROWS, Nvfp4CastRows, Nvfp4CastRowsArgs};
pub use cast_rows::{NVFP4_CAST_ROWS_STOCHASTIC, Nvfp4CastRowsStochastic, Nvfp4CastRowsStochasticArgs};
pub use cast_rows_4over6::{NVFP4_CAST_ROWS_4OVER6, Nvfp4CastRows4over6, Nvfp4CastRows4over6Args};
pub use cast_rows_interleaved::{NVFP4_CAST_ROWS_INTERLEAVED, Nvfp4CastRowsInterleaved, Nvfp4CastRowsInterleavedArgs};
pub use cast_scaled_rows::{NVFP4_CAST_SCALED_ROWS, Nvfp4CastScaledRows, Nvfp4CastScaledRowsArgs};
pub use cast_squares::{NVFP4_CAST_SQUARES, Nvfp4CastSquares, Nvfp4CastSquaresArgs};
pub use dequantize_columns::{NVFP4_DEQUANTIZE_COLUMNS, Nvfp4DequantizeColumns, Nvfp4DequantizeColumnsArgs};
pub use dequantize_interleaved::*;
pub use dequantize_rows::{NVFP4_DEQUANTIZE_ROWS, Nvfp4DequantizeRows, Nvfp4DequantizeRowsArgs};
pub use dequantize_scaled_rows::{NVFP4_DEQUANTIZE_SCALED_ROWS, Nvfp4DequantizeScaledRows, Nvfp4DequantizeScaledRowsArgs};
pub use gemm_factors::{NVFP4_GEMM_FACTORS, Nvfp4GemmFactors, Nvfp4GemmFactorsArgs};
pub use grouped::*;
pub use hadamard_amax::{NVFP4_HADAMARD_AMAX, Nvfp4HadamardAmax, Nvfp4HadamardAmaxArgs};
pub use mapping::{FourOverSix, FourOverSix256, FourOverSixSquared, FourOverSixSquared256, Mapping, ToSix};
pub use rounding::{Nearest, Random, RandomArgument, Rounding, Stochastic8, Stochastic16};

use oxtile_tile::num::{Float, e4m3, min};

/// Elements that share a scale.
pub const BLOCK: u64 = 16;

/// Bytes that hold the codes of a block.
pub const BLOCK_BYTES: u64 = BLOCK / 2;

/// The largest element times the largest scale.
const LARGEST: f32 = 6.0 * 448.0;

/// The factor that takes a tensor whose largest magnitude is `amax` to the range of scales times codes.
#[inline(always)]
pub fn encode_scale(amax: f32) -> f32 {
    encode_scale_to(LARGEST / 6.0, amax)
}

/// The same where the largest scale is another.
#[inline(always)]
fn encode_scale_to(largest_scale: f32, amax: f32) -> f32 {
    let scale = min(6.0 * largest_scale / amax, f32::MAX);
    if amax == 0.0 || scale == 0.0 { 1.0 } else { scale }
}

/// The factor from the largest magnitude of a block to its scale.
#[inline(always)]
fn scale_factor(encode_scale: f32) -> f32 {
    const SIXTH: f32 = 1.0 / 6.0;
    encode_scale * SIXTH
}

/// The scale of a block whose largest magnitude is `amax`, NaN dropped.
#[inline(always)]
fn block_scale(amax: f32, scale_factor: f32) -> e4m3 {
    e4m3::from_f32(min(amax * scale_factor, f32::MAX))
}

/// The factor of the elements of a block before they are rounded.
#[inline(always)]
fn multiplier(scale: e4m3, encode_scale: f32) -> f32 {
    min(1.0 / (scale.to_f32() * (1.0 / encode_scale)), f32::MAX)
}

/// The factor of the values of a block's codes, for a tensor with this amax.
#[inline(always)]
fn decode_factor(scale: e4m3, amax: f32) -> f32 {
    const LARGEST_RECIPROCAL: f32 = 1.0 / LARGEST;
    scale.to_f32() * amax * LARGEST_RECIPROCAL
}
