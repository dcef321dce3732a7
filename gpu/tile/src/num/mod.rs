//! Number formats: exact decoding, and encoding by the rule of the PTX instruction of each format.
//!
//! | type | bits | exponent, mantissa | largest | from f32 | specials |
//! |---|---|---|---|---|---|
//! | [`bf16`] | 16 | 8, 7 | 2^127 * 1.9921875 | `cvt.rn.bf16.f32` | Inf; NaN is 0x7FFF |
//! | [`f16`](struct@f16) | 16 | 5, 10 | 65504 | `cvt.rn.f16.f32` | Inf; NaN is 0x7FFF |
//! | [`e4m3`] | 8 | 4, 3 | 448 | `cvt.rn.satfinite.e4m3x2.f32` | no Inf; NaN is 0x7F |
//! | [`e5m2`] | 8 | 5, 2 | 57344 | `cvt.rn.satfinite.e5m2x2.f32` | Inf decodes, never encodes; NaN is 0x7F |
//! | [`e2m1`] | 4 | 2, 1 | 6 | `cvt.rn.satfinite.e2m1x2.f32` | neither; NaN encodes as +6 |
//! | [`ue8m0`] | 8 | 8, 0 | 2^127 | `cvt.rp.satfinite.ue8m0x2.f32` | no zero, no sign; NaN is 0xFF |
//!
//! Source: PTX ISA 9.7.9.21 (`cvt`) and 5.2.3 (alternate floating-point formats); OCP Microscaling Formats 1.0
//! for the 8-bit scale and the 4-bit element. Conversions are the hardware's where the target has the instruction
//! and [`software`]'s, bit for bit the same, elsewhere and on the emulator.
//!
//! Packed types hold their first element in the low bits. Any thread may call anything here on its own; nothing
//! waits. Nothing is flushed to zero and nothing is contracted: a fused multiply-add is written [`fma`].
//!
//! | file | what it holds |
//! |---|---|
//! | `half` | bfloat16 and binary16, alone and in pairs |
//! | `fp8`, `fp4`, `scale` | E4M3 and E5M2; E2M1; UE8M0 |
//! | `software` | the conversions in plain arithmetic |
//! | `math`, `approximate` | operations whose bits are pinned, and functions that hardware approximates |
//! | `element` | element types of tensors, and what may lie in device memory |

mod approximate;
mod element;
mod fp4;
mod fp8;
mod half;
mod math;
mod scale;
pub mod software;

pub use approximate::{exp, exp2, ln, log2, reciprocal, rsqrt, sqrt, tanh};
pub use element::{Element, Float, Pod};
pub use fp4::{e2m1, e2m1x2, e2m1x8};
pub use fp8::{Fp8, e4m3, e4m3x2, e4m3x4, e5m2, e5m2x2, e5m2x4};
pub use half::{Half, HalfPair, bf16, bf16x2, f16, f16x2};
pub use math::{anew, fma, max, min, multiply_wide, opaque, permute_bytes};
pub use scale::{ue8m0, ue8m0x2};
