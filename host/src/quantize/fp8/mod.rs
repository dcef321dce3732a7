//! FP8: E4M3 or E5M2 elements with f32 scales.
//!
//! The formats and their rounding are those of [`oxtile_kernels::fp8`] (as TransformerEngine computes them). A scale is kept as
//! what codes are multiplied by to get values, the inverse of what the input was multiplied by.
//!
//! | recipe | scales | from |
//! |---|---|---|
//! | [`CurrentScaling`] | one a tensor | the tensor's amax, by a pass over it before the cast; the transpose too |
//! | [`DelayedScaling`] | one a tensor | amaxes of earlier steps; the cast records the step's in its one pass |
//! | [`BlockScaling`] | one for 128 neighbours of a row, or for a 128x128 square | their amax, in one pass; the transpose too |
//! | [`ShardCasts`] | one for a 128x128 square | the amaxes of all ranks, each of which holds a shard |

mod block;
mod current;
mod delayed;
mod shard;

pub use block::BlockScaling;
pub use current::{CurrentScaling, Fp8Pair};
pub use delayed::{AmaxAlgorithm, DelayedScales, DelayedScaling};
pub use oxtile_kernels::fp8::ScaleOptions;
pub use shard::{Shard, ShardCasts};

use oxtile_kernels::fp8::*;
use oxtile_kernels::group::Grouped;
use oxtile_kernels::mxfp8::Wide;
use oxtile_tile::launch::{Kernel, Signature};
use oxtile_tile::num::{Fp8, bf16, e4m3, e5m2, f16};

use crate::quantize::amax::AmaxNumber;

/// A number type that is cast to and from FP8 elements `Q`: `bf16`, `f16` and `f32`, to `e4m3` and `e5m2`.
pub trait Fp8Number<Q: Fp8>: AmaxNumber + Wide {
    /// The cast with a scale made of an amax.
    type Cast: Kernel + for<'a> Signature<Args<'a> = Fp8CastArgs<'a, Self, Q>>;
    /// The cast with a given scale.
    type CastDelayed: Kernel + for<'a> Signature<Args<'a> = Fp8CastDelayedArgs<'a, Self, Q>>;
    /// The cast with a scale made of an amax, as it is and transposed, of rows of whole vectors.
    type CastTranspose: Kernel + for<'a> Signature<Args<'a> = Fp8CastTransposeArgs<'a, Self, Q>>;
    /// The cast with a given scale, as it is and transposed, of rows of whole vectors.
    type CastTransposeDelayed: Kernel + for<'a> Signature<Args<'a> = Fp8CastTransposeDelayedArgs<'a, Self, Q>>;
    /// The transpose of codes.
    type Transpose: Kernel + for<'a> Signature<Args<'a> = Fp8TransposeArgs<'a, Q>>;
    /// The cast with one scale for 128 neighbours of a row, of the matrix alone.
    type CastRowBlocksAlone: Kernel + for<'a> Signature<Args<'a> = Fp8CastRowBlocksAloneArgs<'a, Self, Q>>;
    /// The same of its transpose, or of both.
    type CastRowBlocks: Kernel + for<'a> Signature<Args<'a> = Fp8CastRowBlocksArgs<'a, Self, Q>>;
    /// The cast with one scale for a 128x128 square.
    type CastSquares: Kernel + for<'a> Signature<Args<'a> = Fp8CastSquaresArgs<'a, Self, Q>>;
    /// The inverse of both.
    type DequantizeBlocks: Kernel + for<'a> Signature<Args<'a> = Fp8DequantizeBlocksArgs<'a, Q, Self>>;
    /// The amaxes of squares in a shard.
    type PartialAmax: Kernel + for<'a> Signature<Args<'a> = Fp8PartialAmaxArgs<'a, Self>>;
    /// The cast of a shard.
    type PartialCast: Kernel + for<'a> Signature<Args<'a> = Fp8PartialCastArgs<'a, Self, Q>>;
    /// The inverse of the casts with one scale.
    type Dequantize: Kernel + for<'a> Signature<Args<'a> = Fp8DequantizeArgs<'a, Q, Self>>;
    /// The cast, for groups.
    type GroupCast: Grouped + Kernel + for<'a> Signature<Args<'a> = Fp8CastGroupedArgs<'a, Self, Q>>;
    /// Its inverse, for groups.
    type GroupDequantize: Grouped + Kernel + for<'a> Signature<Args<'a> = Fp8DequantizeGroupedArgs<'a, Q, Self>>;
}

macro_rules! numbers {
    ($($t:ty, $q:ty;)*) => { $(
        impl Fp8Number<$q> for $t {
            type Cast = Fp8Cast<$t, $q>;
            type CastDelayed = Fp8CastDelayed<$t, $q>;
            type CastTranspose = Fp8CastTranspose<$t, $q>;
            type CastTransposeDelayed = Fp8CastTransposeDelayed<$t, $q>;
            type Transpose = Fp8Transpose<$q>;
            type CastRowBlocksAlone = Fp8CastRowBlocksAlone<$t, $q>;
            type CastRowBlocks = Fp8CastRowBlocks<$t, $q>;
            type CastSquares = Fp8CastSquares<$t, $q>;
            type DequantizeBlocks = Fp8DequantizeBlocks<$q, $t>;
            type PartialAmax = Fp8PartialAmax<$t>;
            type PartialCast = Fp8PartialCast<$t, $q>;
            type Dequantize = Fp8Dequantize<$q, $t>;
            type GroupCast = Fp8CastGrouped<$t, $q>;
            type GroupDequantize = Fp8DequantizeGrouped<$q, $t>;
        }
    )* };
}
numbers! { bf16, e4m3; f16, e4m3; f32, e4m3; bf16, e5m2; f16, e5m2; f32, e5m2; }

/// What the kernels that cast and transpose need of a matrix of `T`.
fn has_whole_vectors<T>([_, columns]: [u64; 2], wide: u64, codes: u64) -> bool {
    let vector = 16 / size_of::<T>() as u64;
    columns.is_multiple_of(vector) && wide.is_multiple_of(16) && codes.is_multiple_of(vector)
}
