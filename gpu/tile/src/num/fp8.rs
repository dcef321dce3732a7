//! The 8-bit element formats E4M3 and E5M2, alone, in pairs and in fours.

use super::element::{debug_as_value, number, packed};
use super::{Float, Pod, f16x2};
use crate::arch::{Convert, Target};

number! {
    /// FP8 with 4 exponent and 3 mantissa bits, bias 7: no Inf, NaN at 0x7F and 0xFF, largest 448.
    ///
    /// Encoding rounds to nearest even and saturates: Inf and everything beyond 448 become +-448.
    e4m3(u8), 8 bits
}
number! {
    /// FP8 with 5 exponent and 2 mantissa bits, bias 15: Inf at 0x7C, NaN above it, largest 57344.
    ///
    /// Encoding rounds to nearest even and saturates: Inf and everything beyond 57344 become +-57344.
    e5m2(u8), 8 bits
}
packed! {
    /// Two [`e4m3`].
    e4m3x2(u16): [e4m3; 2], u8
}
packed! {
    /// Four [`e4m3`] in one 32-bit register.
    e4m3x4(u32): [e4m3; 4], u8
}
packed! {
    /// Two [`e5m2`].
    e5m2x2(u16): [e5m2; 2], u8
}
packed! {
    /// Four [`e5m2`] in one 32-bit register.
    e5m2x4(u32): [e5m2; 4], u8
}
debug_as_value!(e4m3 e5m2);

/// An 8-bit floating-point element of block-scaled formats.
pub trait Fp8: Float + Pod {
    /// The largest finite value as f32: 448 or 57344.
    const LARGEST: f32;
    /// `1 / LARGEST` rounded to f32: what a block's amax is multiplied by to get its scale
    /// (TransformerEngine `common/utils.cuh`, `Quantized_Limits::max_norm_rcp`).
    const LARGEST_RECIPROCAL: f32 = 1.0 / Self::LARGEST;

    /// The value with this code.
    fn from_byte(code: u8) -> Self;

    /// The code of the value.
    fn to_byte(self) -> u8;

    /// Four codes from four values, the first in the low byte.
    fn encode4(x: [f32; 4]) -> u32;

    /// Four values from four codes, the first from the low byte.
    fn decode4(codes: u32) -> [f32; 4];
}

macro_rules! fp8 {
    ($t:ident, $x2:ident, $x4:ident, $largest:literal, $max:literal, $encode2:ident, $encode4:ident, $decode2:ident) => {
        impl $t {
            /// The NaN that conversions give.
            pub const NAN: Self = Self::from_bits(0x7f);
        }

        impl Float for $t {
            const MAX: Self = Self::from_bits($max);

            #[inline(always)]
            fn to_f32(self) -> f32 {
                Target::f32_from_f16(Target::$decode2(self.to_bits() as u16) as u16)
            }

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                Self::from_bits(Target::$encode2([x, 0.0]) as u8)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                Self::from_bits(self.to_bits() & 0x7f)
            }

            #[inline(always)]
            fn abs_bits(self) -> u32 {
                (self.to_bits() & 0x7f) as u32
            }
        }

        impl $x2 {
            /// Rounds to nearest even, saturating at the largest finite value; NaN gives 0x7F.
            #[inline(always)]
            pub fn from_f32(x: [f32; 2]) -> Self {
                Self::from_bits(Target::$encode2(x))
            }

            /// Exact values in f16: a NaN gives 0x7FFF (`cvt.rn.f16x2` of the pair).
            #[inline(always)]
            pub fn to_f16x2(self) -> f16x2 {
                f16x2::from_bits(Target::$decode2(self.to_bits()))
            }

            /// Exact values.
            #[inline(always)]
            pub fn to_f32(self) -> [f32; 2] {
                let pair = Target::$decode2(self.to_bits());
                [Target::f32_from_f16(pair as u16), Target::f32_from_f16((pair >> 16) as u16)]
            }
        }

        impl $x4 {
            /// Rounds to nearest even, saturating at the largest finite value; NaN gives 0x7F.
            #[inline(always)]
            pub fn from_f32(x: [f32; 4]) -> Self {
                Self::from_bits(Target::$encode4(x))
            }

            /// Exact values.
            #[inline(always)]
            pub fn to_f32(self) -> [f32; 4] {
                let [a, b] = $x2::from_bits(self.to_bits() as u16).to_f32();
                let [c, d] = $x2::from_bits((self.to_bits() >> 16) as u16).to_f32();
                [a, b, c, d]
            }
        }

        impl Fp8 for $t {
            const LARGEST: f32 = $largest;

            #[inline(always)]
            fn from_byte(code: u8) -> Self {
                Self::from_bits(code)
            }

            #[inline(always)]
            fn to_byte(self) -> u8 {
                self.to_bits()
            }

            #[inline(always)]
            fn encode4(x: [f32; 4]) -> u32 {
                $x4::from_f32(x).to_bits()
            }

            #[inline(always)]
            fn decode4(codes: u32) -> [f32; 4] {
                $x4::from_bits(codes).to_f32()
            }
        }
    };
}

fp8!(e4m3, e4m3x2, e4m3x4, 448.0, 0x7e, e4m3x2_from_f32, e4m3x4_from_f32, f16x2_from_e4m3x2);
fp8!(e5m2, e5m2x2, e5m2x4, 57344.0, 0x7b, e5m2x2_from_f32, e5m2x4_from_f32, f16x2_from_e5m2x2);
