//! FP8: E4M3 or E5M2 elements whose scales are f32, one for a tensor, for 128 neighbours of a row, or for a 128x128 square.
//!
//! Rules: TransformerEngine `common/recipe/recipe_common.cuh`, `common/recipe/current_scaling.cu`. With `amax` the largest magnitude
//! and `LARGEST` the largest element (448 or 57344), every step rounded to `f32`, nothing contracted or flushed:
//!
//! ```text
//! scale   = LARGEST / max(amax, epsilon)       1 where that maximum is 0, Inf or NaN; the input type's
//!                                              or f32's largest value where the quotient is Inf
//! scale   = 2^floor(log2(scale))               if powers of two are asked for
//! code    = rn_satfinite(x * scale)
//! inverse = 1 / scale
//! value   = code * inverse
//! ```
//!
//! A NaN element does not reach `amax` and becomes a NaN code; beside an Inf the scale is 1 and the Inf becomes the
//! largest code.
//!
//! | file | what it holds |
//! |---|---|
//! | `cast`, `cast_transpose` | one scale for the tensor, by current or delayed scaling: as it is, and with the transpose |
//! | `update_scales` | delayed scaling: new scales from histories of amaxes |
//! | `cast_row_blocks`, `cast_row_blocks_alone` | one scale for 128 neighbours of a row: of the transpose, or of both; of the matrix alone |
//! | `cast_squares` | one scale for a 128x128 square |
//! | `shard` | the same where a rank holds a part of the matrix: partial amax, partial cast |
//! | `dequantize`, `dequantize_blocks` | back to wide numbers |
//! | `transpose` | the transpose of codes |
//! | `grouped` | groups of tensors by one launch |
//! | `tile`, `staging` | the tile of 128x128 elements, and the buffer in which its transpose is built |
//! | `run` | the elements of a CUDA block of an elementwise kernel |

mod cast;
mod cast_row_blocks;
mod cast_row_blocks_alone;
mod cast_squares;
mod cast_transpose;
mod dequantize;
mod dequantize_blocks;
mod grouped;
mod run;
mod shard;
mod staging;
mod tile;
mod transpose;
mod update_scales;

pub use cast::{FP8_CAST, FP8_CAST_DELAYED, Fp8Cast, Fp8CastArgs, Fp8CastDelayed, Fp8CastDelayedArgs};
pub use cast_row_blocks::{FP8_CAST_ROW_BLOCKS, Fp8CastRowBlocks, Fp8CastRowBlocksArgs};
pub use cast_row_blocks_alone::{FP8_CAST_ROW_BLOCKS_ALONE, Fp8CastRowBlocksAlone, Fp8CastRowBlocksAloneArgs};
pub use cast_squares::{FP8_CAST_SQUARES, Fp8CastSquares, Fp8CastSquaresArgs};
pub use cast_transpose::{FP8_CAST_TRANSPOSE, Fp8CastTranspose, Fp8CastTransposeArgs};
pub use cast_transpose::{FP8_CAST_TRANSPOSE_DELAYED, Fp8CastTransposeDelayed, Fp8CastTransposeDelayedArgs};
pub use dequantize::{FP8_DEQUANTIZE, Fp8Dequantize, Fp8DequantizeArgs};
pub use dequantize_blocks::{BlockScales, BlockScalesArgument, FP8_DEQUANTIZE_BLOCKS, Fp8DequantizeBlocks, Fp8DequantizeBlocksArgs};
pub use grouped::{FP8_CAST_GROUPED, Fp8CastGrouped, Fp8CastGroupedArgs};
pub use grouped::{FP8_DEQUANTIZE_GROUPED, Fp8DequantizeGrouped, Fp8DequantizeGroupedArgs};
pub use shard::{FP8_PARTIAL_AMAX, Fp8PartialAmax, Fp8PartialAmaxArgs};
pub use shard::{FP8_PARTIAL_CAST, Fp8PartialCast, Fp8PartialCastArgs};
pub use shard::{Shard, ShardArgument};
pub use tile::SIDE;
pub use transpose::{FP8_TRANSPOSE, Fp8Transpose, Fp8TransposeArgs};
pub use update_scales::{FP8_UPDATE_SCALES, Fp8UpdateScales, Fp8UpdateScalesArgs};

use oxtile_tile::num::{Float, Fp8, Pod};
use oxtile_tile::prelude::{Global, Parameter, Vector, warp};

use crate::magnitude::{Magnitude, of_vector};
use crate::wide::Wide;

/// Threads of a CUDA block.
const THREADS: u32 = 256;

/// How a scale follows from an amax. The default is neither floor nor rounding.
#[derive(Debug, Clone, Copy, PartialEq, Default, Parameter)]
pub struct ScaleOptions {
    /// A smaller amax counts as this.
    pub epsilon: f32,
    /// Whether scales are powers of two: the factor for the input is rounded down to one.
    pub power_of_two: bool,
}

/// How a scale is made of an amax.
#[derive(Clone, Copy)]
struct ScaleRule {
    epsilon: f32,
    /// The bits of a scale that are kept: all, or those of a power of two.
    kept: u32,
    /// The scale where it would be Inf.
    largest: f32,
}

impl ScaleRule {
    #[inline(always)]
    fn new(ScaleOptions { epsilon, power_of_two }: ScaleOptions, largest: f32) -> Self {
        Self { epsilon, kept: if power_of_two { 0xff80_0000 } else { u32::MAX }, largest }
    }

    /// The factor that takes a tensor or block with this amax to the range of `Q`.
    #[inline(always)]
    fn scale<Q: Fp8>(self, amax: f32) -> f32 {
        // A NaN is not below epsilon.
        let amax = if amax < self.epsilon { self.epsilon } else { amax };
        let quotient = Q::LARGEST / amax;
        let scale = if quotient == f32::INFINITY { self.largest } else { quotient };
        let is_usable = amax != 0.0 && amax.abs() < f32::INFINITY;
        if is_usable { f32::from_bits(scale.to_bits() & self.kept) } else { 1.0 }
    }
}

/// Elements of a row of so many scales: rows start at multiples of 16 bytes.
#[inline(always)]
pub const fn row_of_scales(scales: u64) -> u64 {
    scales.next_multiple_of(4)
}

/// The running maximum of a block that so many neighbouring lanes hold a vector of each.
#[inline(always)]
fn maximum_of_block<T: Magnitude>(vector: Vector<T>, lanes: u32) -> u32 {
    let (mut running, mut flip) = (of_vector(vector), 1);
    while flip < lanes {
        running = T::join(running, warp::shuffle_xor(running, flip));
        flip *= 2;
    }
    running
}

/// The codes of one vector of `T` times `scale`: eight, or four and nothing.
#[inline(always)]
fn encode<T: Float + Pod, Q: Fp8>(vector: Vector<T>, scale: f32) -> [u32; 2] {
    encode_by::<T, Q>(vector, [scale; 8])
}

/// The codes of one vector of `T` times these scales, of which the four elements of `f32` take the first four.
#[inline(always)]
fn encode_by<T: Float + Pod, Q: Fp8>(vector: Vector<T>, scales: [f32; 8]) -> [u32; 2] {
    let four = |from: usize| Q::encode4(core::array::from_fn(|i| vector.lane(from + i).to_f32() * scales[from + i]));
    [four(0), if Vector::<T>::LANES == 8 { four(4) } else { 0 }]
}

/// The codes of one vector of `T`: eight, or four and nothing. They stay in the cache: decoding writes more than it reads.
#[inline(always)]
fn load_codes<Q: Fp8, T: Pod>(data: &Global<Q>, first: u64) -> [u32; 2] {
    if Vector::<T>::LANES == 8 { data.lasting().load_pair(first) } else { [data.lasting().load_word(first), 0] }
}

/// The values of these codes times `factor`, rounded to `T`.
#[inline(always)]
fn decode<Q: Fp8, T: Wide>([low, high]: [u32; 2], factor: f32) -> Vector<T> {
    let four = |codes| Q::decode4(codes).map(|value| value * factor);
    T::vector(four(low), four(high))
}
