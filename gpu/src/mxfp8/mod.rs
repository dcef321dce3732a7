//! MXFP8: 8-bit elements with one power-of-two scale for every 32 consecutive elements of a row.
//!
//! Formats and rules: OCP Microscaling Formats 1.0; TransformerEngine `common/cast/mxfp8`. A tensor is
//! `[rows, columns]`; the scales are compact, `[rows, ceil(columns / 32)]`, unpadded.
//!
//! With `amax` the block's largest magnitude and `max` the largest element code (448 or 57344),
//! `scale = 2^e`, `e = ceil(log2(amax * fp32(1 / max)))` saturated to [-127, 127], and
//! `code = rn_satfinite(x * 2^-e)`, all in `f32`, nothing contracted or flushed. A NaN element does not
//! reach its block's amax and becomes a NaN code; an Inf gives the scale 2^127 and the largest code.

mod cast_rows;
mod dequantize_rows;
mod ragged_rows;

pub use cast_rows::{MXFP8_CAST_ROWS, Mxfp8CastRows, Mxfp8CastRowsArgs};
pub use dequantize_rows::{MXFP8_DEQUANTIZE_ROWS, Mxfp8DequantizeRows, Mxfp8DequantizeRowsArgs};
pub use ragged_rows::{MXFP8_CAST_RAGGED_ROWS, Mxfp8CastRaggedRows, Mxfp8CastRaggedRowsArgs};
pub use ragged_rows::{MXFP8_DEQUANTIZE_RAGGED_ROWS, Mxfp8DequantizeRaggedRows, Mxfp8DequantizeRaggedRowsArgs};

use oxtile_tile::num::{Float, Fp8, Half, HalfPair, Pod, bf16, f16, ue8m0};
use oxtile_tile::prelude::{Vector, thread, warp};

/// Elements that share a scale.
pub const BLOCK: u64 = 32;

/// Warps of a CUDA block; they share nothing.
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

/// A wide number that 8-bit codes decode to.
pub trait Wide: Float + Pod {
    /// One vector of these values, rounded to nearest even: eight of a 16-bit type, else the first four.
    fn vector(low: [f32; 4], high: [f32; 4]) -> Vector<Self>;
}

impl Wide for f32 {
    #[inline(always)]
    fn vector(low: [f32; 4], _: [f32; 4]) -> Vector<Self> {
        Vector::from_words(low.map(f32::to_bits))
    }
}

macro_rules! wide_half {
    ($($half:ident)*) => { $(
        impl Wide for $half {
            #[inline(always)]
            fn vector([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4]) -> Vector<Self> {
                let pair = |x: [f32; 2]| <<$half as Half>::X2 as HalfPair<$half>>::from_f32(x).to_bits();
                Vector::from_words([pair([a, b]), pair([c, d]), pair([e, f]), pair([g, h])])
            }
        }
    )* };
}

wide_half!(bf16 f16);
