//! The 4-bit element format E2M1, in pairs and in eights.

use super::element::packed;
use super::{Element, Float, e5m2x4, fma, max, permute_bytes};
use crate::arch::{Convert, Target};

/// FP4 with 2 exponent and 1 mantissa bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
///
/// Encoding rounds to nearest, ties to the even code, saturates at +-6, and gives +6 for any NaN.
/// It is stored in pairs ([`e2m1x2`]); alone, its code is in the low four bits of a byte. Equality compares codes.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct e2m1(u8);

impl e2m1 {
    /// The value with the code in the low four bits; the others are ignored.
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xf)
    }

    /// The code, 0 to 15.
    #[inline(always)]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// `2^-14 * RN(t / 256)` on the magnitude grid of E2M1, for `0 <= t < 7 * 256`: four instructions, exact for
    /// every such f32.
    ///
    /// The caller multiplies by its scale and by 256 at once, which rounds as the scale alone does. Encoded as E5M2
    /// the result is exact and its byte is the code times two ([`e2m1x8::from_scaled`]). Why it is right: `T` has
    /// 22 bits more than `t`, so that `T - t * 2^-22` is rounded at two significant bits of `t`, and never below
    /// the step of the lowest binade since `T >= 384`; `T` is an even multiple of its unit at every tie. At
    /// `t = 7 * 256` and above the result leaves the grid.
    #[inline(always)]
    pub fn round_scaled(t: f32) -> f32 {
        const SHIFT: f32 = -1.0 / 4_194_304.0;
        let anchor = max(t, 384.0);
        anchor - fma(t, SHIFT, anchor)
    }
}

impl core::fmt::Debug for e2m1 {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "e2m1({:?})", self.to_f32())
    }
}

impl Element for e2m1 {
    const NAME: &'static str = "e2m1";
    const BITS: u32 = 4;
}

impl Float for e2m1 {
    /// 6.
    const MAX: Self = Self(7);

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Target::f32_from_f16(Target::f16x2_from_e2m1x2(self.0) as u16)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_bits(Target::e2m1x2_from_f32([x, 0.0]))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0 & 7)
    }

    #[inline(always)]
    fn abs_bits(self) -> u32 {
        (self.0 & 7) as u32
    }
}

packed! {
    /// Two [`e2m1`] in one byte.
    e2m1x2(u8): [e2m1; 2], u8
}
packed! {
    /// Eight [`e2m1`] in one 32-bit register.
    e2m1x8(u32): [e2m1; 8], u8
}

impl e2m1x2 {
    /// Rounds to nearest, ties to the even code, saturating at +-6; NaN gives +6.
    #[inline(always)]
    pub fn from_f32(x: [f32; 2]) -> Self {
        Self::from_bits(Target::e2m1x2_from_f32(x))
    }

    /// Exact values.
    #[inline(always)]
    pub fn to_f32(self) -> [f32; 2] {
        let pair = Target::f16x2_from_e2m1x2(self.to_bits());
        [Target::f32_from_f16(pair as u16), Target::f32_from_f16((pair >> 16) as u16)]
    }
}

impl e2m1x8 {
    /// Rounds to nearest, ties to the even code, saturating at +-6; NaN gives +6.
    #[inline(always)]
    pub fn from_f32(x: [f32; 8]) -> Self {
        let mut bits = 0;
        let mut i = 0;
        while i < 4 {
            bits |= (Target::e2m1x2_from_f32([x[2 * i], x[2 * i + 1]]) as u32) << (8 * i);
            i += 1;
        }
        Self::from_bits(bits)
    }

    /// Exact values.
    #[inline(always)]
    pub fn to_f32(self) -> [f32; 8] {
        let mut values = [0.0; 8];
        let mut i = 0;
        while i < 4 {
            let [low, high] = e2m1x2::from_bits((self.to_bits() >> (8 * i)) as u8).to_f32();
            values[2 * i] = low;
            values[2 * i + 1] = high;
            i += 1;
        }
        values
    }

    /// The codes of eight magnitudes times 256 with `signs` ([`signs_of_halves`](Self::signs_of_halves)), by
    /// [`e2m1::round_scaled`]: the fast way where the target has no E2M1 instruction. `None` where that does not serve: if
    /// one is a NaN or as large as `7 * 256`.
    #[inline(always)]
    pub fn from_scaled(t: [f32; 8], signs: u32) -> Option<Self> {
        let round = |i: usize| e2m1::round_scaled(t[i]);
        let even = e5m2x4::from_f32([round(0), round(2), round(4), round(6)]).to_bits();
        let odd = e5m2x4::from_f32([round(1), round(3), round(5), round(7)]).to_bits();
        // Each byte is a code times two, at most 14. What is too large, or a NaN, is 16 or more.
        let fits = (even | odd) & 0xf0f0_f0f0 == 0;
        fits.then_some(Self::from_bits((odd << 4 | even) >> 1 | signs))
    }

    /// The signs of eight 16-bit floats, each at the high bit of its code's place, from the four words that hold them.
    #[inline(always)]
    pub fn signs_of_halves([a, b, c, d]: [u32; 4]) -> u32 {
        // The high bytes, those of the words' low halves before those of the high ones.
        let (first, second) = (permute_bytes(a, b, 0x7351), permute_bytes(c, d, 0x7351));
        Self::place_signs(permute_bytes(first, second, 0xdc98), permute_bytes(first, second, 0xfeba))
    }

    /// As [`signs_of_halves`](Self::signs_of_halves) of eight `f32` by their bits.
    #[inline(always)]
    pub fn signs_of_singles(x: [u32; 8]) -> u32 {
        let bytes = |i: usize| {
            let (low, high) = (permute_bytes(x[i], x[i + 2], 0x73), permute_bytes(x[i + 4], x[i + 6], 0x73));
            permute_bytes(low, high, 0xdc98)
        };
        Self::place_signs(bytes(0), bytes(1))
    }

    /// From bytes of eight times the sign, of the elements with even and with odd places.
    #[inline(always)]
    fn place_signs(even: u32, odd: u32) -> u32 {
        even & 0x0808_0808 | odd & 0x8080_8080
    }
}
