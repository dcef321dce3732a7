//! The 16-bit formats: bfloat16 and IEEE binary16, alone and in pairs.

use super::element::{debug_as_value, number, packed};
use super::{Float, Pod};
use crate::arch::{Convert, Target};

number! {
    /// bfloat16: the upper half of an f32.
    bf16(u16), 16 bits
}
number! {
    /// IEEE 754 binary16.
    f16(u16), 16 bits
}
packed! {
    /// Two [`bf16`] in one 32-bit register.
    bf16x2(u32): [bf16; 2], u16
}
packed! {
    /// Two [`f16`](struct@f16) in one 32-bit register.
    f16x2(u32): [f16; 2], u16
}
debug_as_value!(bf16 f16);

/// A 16-bit floating-point element, which the hardware handles in pairs.
pub trait Half: Float + Pod {
    /// Two elements in one register.
    type X2: HalfPair<Self>;
}

/// Two 16-bit floating-point elements in one register.
pub trait HalfPair<T>: Pod {
    /// The pair with these codes, the first element in the low half.
    fn from_bits(bits: u32) -> Self;
    /// The codes.
    fn to_bits(self) -> u32;
    /// The pair of these elements.
    fn new(elements: [T; 2]) -> Self;
    /// The elements.
    fn elements(self) -> [T; 2];
    /// Rounds to nearest even: `cvt.rn.bf16x2.f32`, `cvt.rn.f16x2.f32`.
    fn from_f32(x: [f32; 2]) -> Self;
    /// Exact values.
    fn to_f32(self) -> [f32; 2];
    /// Magnitudes: `abs.bf16x2`, `abs.f16x2`. A NaN stays a NaN, with a payload that is not specified.
    fn abs(self) -> Self;
    /// Element maxima; a NaN loses to a number, two NaN give 0x7FFF, and +0 is above -0: `max.bf16x2`, `max.f16x2`.
    fn max(self, other: Self) -> Self;
    /// Element maxima; a NaN on either side gives 0x7FFF: `max.NaN.bf16x2`, `max.NaN.f16x2`.
    fn max_nan(self, other: Self) -> Self;
    /// Element minima; a NaN loses to a number, two NaN give 0x7FFF, and -0 is below +0: `min.bf16x2`, `min.f16x2`.
    fn min(self, other: Self) -> Self;
}

macro_rules! half {
    ($t:ident, $pair:ident, $inf:literal, $encode:ident, $encode2:ident, $decode:ident,
     $abs:ident, $max:ident, $max_nan:ident, $min:ident) => {
        impl $t {
            /// +Inf.
            pub const INFINITY: Self = Self::from_bits($inf);
            /// The NaN that conversions give.
            pub const NAN: Self = Self::from_bits(0x7fff);

            /// Whether the value is a NaN.
            #[inline(always)]
            pub const fn is_nan(self) -> bool {
                self.to_bits() & 0x7fff > $inf
            }
        }

        impl Float for $t {
            const MAX: Self = Self::from_bits($inf - 1);

            #[inline(always)]
            fn to_f32(self) -> f32 {
                Target::$decode(self.to_bits())
            }

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                Self::from_bits(Target::$encode(x))
            }

            #[inline(always)]
            fn abs(self) -> Self {
                Self::from_bits(self.to_bits() & 0x7fff)
            }

            #[inline(always)]
            fn abs_bits(self) -> u32 {
                (self.to_bits() & 0x7fff) as u32
            }
        }

        impl Half for $t {
            type X2 = $pair;
        }

        impl HalfPair<$t> for $pair {
            #[inline(always)]
            fn from_bits(bits: u32) -> Self {
                Self::from_bits(bits)
            }

            #[inline(always)]
            fn to_bits(self) -> u32 {
                self.to_bits()
            }

            #[inline(always)]
            fn new(elements: [$t; 2]) -> Self {
                Self::new(elements)
            }

            #[inline(always)]
            fn elements(self) -> [$t; 2] {
                self.elements()
            }

            #[inline(always)]
            fn from_f32(x: [f32; 2]) -> Self {
                Self::from_bits(Target::$encode2(x))
            }

            #[inline(always)]
            fn to_f32(self) -> [f32; 2] {
                [Target::$decode(self.to_bits() as u16), Target::$decode((self.to_bits() >> 16) as u16)]
            }

            #[inline(always)]
            fn abs(self) -> Self {
                Self::from_bits(Target::$abs(self.to_bits()))
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Self::from_bits(Target::$max(self.to_bits(), other.to_bits()))
            }

            #[inline(always)]
            fn max_nan(self, other: Self) -> Self {
                Self::from_bits(Target::$max_nan(self.to_bits(), other.to_bits()))
            }

            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Self::from_bits(Target::$min(self.to_bits(), other.to_bits()))
            }
        }
    };
}

half!(bf16, bf16x2, 0x7f80, bf16_from_f32, bf16x2_from_f32, f32_from_bf16, bf16x2_abs, bf16x2_max, bf16x2_max_nan, bf16x2_min);
half!(f16, f16x2, 0x7c00, f16_from_f32, f16x2_from_f32, f32_from_f16, f16x2_abs, f16x2_max, f16x2_max_nan, f16x2_min);

impl f16x2 {
    /// Rounds towards zero (`cvt.rz.f16x2.f32`); what is too large is the largest finite number, Inf is Inf.
    #[inline(always)]
    pub fn from_f32_toward_zero(x: [f32; 2]) -> Self {
        Self::from_bits(Target::f16x2_from_f32_toward_zero(x))
    }
}
