//! The 8-bit scale of block formats: a power of two.

use super::element::{debug_as_value, number, packed};
use super::{Float, bf16, bf16x2};
use crate::arch::{Convert, Target};

number! {
    /// A power of two: code `e` is 2^(e - 127), 0xFF is NaN. There is no zero and no sign.
    ///
    /// Encoding takes the magnitude and rounds it up, towards +Inf, saturating at 2^127 (0xFE), where Inf goes too.
    /// Values up to 2^-127, and zero, give 0. This is `cvt.rp.satfinite.ue8m0x2.f32`; PTX does not say what a
    /// negative input gives, CUDA's `__nv_cvt_float_to_e8m0` takes its magnitude, and so does this. The table of
    /// TransformerEngine's `e8m0_round_up` (`common/util/ptx_arch_spec.cuh`) is the same on every non-negative input.
    ue8m0(u8), 8 bits
}
packed! {
    /// Two [`ue8m0`].
    ue8m0x2(u16): [ue8m0; 2], u8
}
debug_as_value!(ue8m0);

impl ue8m0 {
    /// The one NaN.
    pub const NAN: Self = Self::from_bits(0xff);

    /// The multiplier that encodes a block of this scale, `1 / self` with two corners that follow TransformerEngine's
    /// `exp2f_rcp` (`common/util/ptx.cuh`): code 0xFF gives the NaN 0x7FFFFFFF, and 0xFE the subnormal 2^-127.
    #[inline(always)]
    pub const fn reciprocal(self) -> f32 {
        // Selects, not a `match`: a kernel would branch on the code of every block.
        let e = self.to_bits() as u32;
        let bits = 254u32.wrapping_sub(e) << 23;
        let bits = if e == 0xfe { 0x0040_0000 } else { bits };
        f32::from_bits(if e == 0xff { 0x7fff_ffff } else { bits })
    }

    /// The scale of a magnitude that is known not to be NaN: [`from_f32`](Float::from_f32) without its branch.
    #[inline(always)]
    pub const fn from_magnitude(x: f32) -> Self {
        let bits = x.to_bits();
        // Rounds up at the power of two below; below 2^-126 that is 2^-127, half an exponent step.
        let up = if bits < 0x0080_0000 { 0x003f_ffff } else { 0x007f_ffff };
        let e = (bits + up) >> 23;
        Self::from_bits(if e < 0xfe { e as u8 } else { 0xfe })
    }

    /// [`reciprocal`](Self::reciprocal) as bf16, where it is exact too.
    #[inline(always)]
    pub const fn reciprocal_bf16(self) -> bf16 {
        bf16::from_bits(match self.to_bits() {
            0xff => 0x7fff,
            0xfe => 0x0040,
            e => (254 - e as u16) << 7,
        })
    }

    /// The value, exactly; NaN is 0x7FFF (`cvt.rn.bf16x2.ue8m0x2`).
    #[inline(always)]
    pub fn to_bf16(self) -> bf16 {
        bf16::from_bits(Target::bf16x2_from_ue8m0x2(self.to_bits() as u16) as u16)
    }
}

impl Float for ue8m0 {
    /// 2^127.
    const MAX: Self = Self::from_bits(0xfe);

    /// 2^(e - 127): 2^-127, an f32 subnormal, for code 0, and the NaN 0x7FFFFFFF for 0xFF
    /// (TransformerEngine `exp2f`).
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // Selects, as in `reciprocal`.
        let e = u32::from(self.to_bits());
        let bits = if e == 0 { 0x0040_0000 } else { e << 23 };
        f32::from_bits(if e == 0xff { 0x7fff_ffff } else { bits })
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_bits(Target::ue8m0x2_from_f32([x, 0.0]) as u8)
    }

    #[inline(always)]
    fn abs(self) -> Self {
        self
    }

    #[inline(always)]
    fn abs_bits(self) -> u32 {
        self.to_bits() as u32
    }
}

impl ue8m0x2 {
    /// The magnitudes rounded up to powers of two.
    #[inline(always)]
    pub fn from_f32(x: [f32; 2]) -> Self {
        Self::from_bits(Target::ue8m0x2_from_f32(x))
    }

    /// Exact values in bf16; NaN is 0x7FFF.
    #[inline(always)]
    pub fn to_bf16x2(self) -> bf16x2 {
        bf16x2::from_bits(Target::bf16x2_from_ue8m0x2(self.to_bits()))
    }
}
