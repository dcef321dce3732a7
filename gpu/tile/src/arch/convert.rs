//! Conversions between number formats, and the float arithmetic whose bits formats depend on.

/// Conversions of the PTX `cvt` family on codes, and `max`, `min`, `abs` and `fma`.
///
/// In a pair the first element is in the low bits. Every function is pure and is called by one thread for itself.
/// Results are the same bits on every target. Source: PTX ISA 9.7.9.21 (`cvt`), 9.7.3 and 9.7.4 (`fma`, `min`,
/// `max`, `abs`).
pub trait Convert {
    /// `cvt.rn.bf16.f32`.
    fn bf16_from_f32(x: f32) -> u16;
    /// `cvt.rn.bf16x2.f32`.
    fn bf16x2_from_f32(x: [f32; 2]) -> u32;
    /// `cvt.f32.bf16`.
    fn f32_from_bf16(x: u16) -> f32;
    /// `cvt.rn.f16.f32`.
    fn f16_from_f32(x: f32) -> u16;
    /// `cvt.rn.f16x2.f32`.
    fn f16x2_from_f32(x: [f32; 2]) -> u32;
    /// `cvt.rz.f16x2.f32`.
    fn f16x2_from_f32_toward_zero(x: [f32; 2]) -> u32;
    /// `cvt.f32.f16`.
    fn f32_from_f16(x: u16) -> f32;
    /// `cvt.rn.satfinite.e4m3x2.f32`.
    fn e4m3x2_from_f32(x: [f32; 2]) -> u16;
    /// `cvt.rn.satfinite.e5m2x2.f32`.
    fn e5m2x2_from_f32(x: [f32; 2]) -> u16;
    /// Two of `cvt.rn.satfinite.e4m3x2.f32`, the first pair in the low half.
    #[inline(always)]
    fn e4m3x4_from_f32([a, b, c, d]: [f32; 4]) -> u32 {
        u32::from(Self::e4m3x2_from_f32([a, b])) | u32::from(Self::e4m3x2_from_f32([c, d])) << 16
    }
    /// Two of `cvt.rn.satfinite.e5m2x2.f32`, the first pair in the low half.
    #[inline(always)]
    fn e5m2x4_from_f32([a, b, c, d]: [f32; 4]) -> u32 {
        u32::from(Self::e5m2x2_from_f32([a, b])) | u32::from(Self::e5m2x2_from_f32([c, d])) << 16
    }
    /// `cvt.rn.satfinite.e2m1x2.f32`.
    fn e2m1x2_from_f32(x: [f32; 2]) -> u8;
    /// `cvt.rp.satfinite.ue8m0x2.f32`, of magnitudes.
    fn ue8m0x2_from_f32(x: [f32; 2]) -> u16;
    /// `cvt.rn.f16x2.e4m3x2`.
    fn f16x2_from_e4m3x2(x: u16) -> u32;
    /// `cvt.rn.f16x2.e5m2x2`.
    fn f16x2_from_e5m2x2(x: u16) -> u32;
    /// `cvt.rn.f16x2.e2m1x2`.
    fn f16x2_from_e2m1x2(x: u8) -> u32;
    /// `cvt.rn.bf16x2.ue8m0x2`.
    fn bf16x2_from_ue8m0x2(x: u16) -> u32;

    /// `abs.bf16x2`.
    fn bf16x2_abs(x: u32) -> u32;
    /// `max.bf16x2`: a NaN loses.
    fn bf16x2_max(a: u32, b: u32) -> u32;
    /// `max.NaN.bf16x2`: a NaN wins.
    fn bf16x2_max_nan(a: u32, b: u32) -> u32;
    /// `min.bf16x2`: a NaN loses.
    fn bf16x2_min(a: u32, b: u32) -> u32;
    /// `abs.f16x2`.
    fn f16x2_abs(x: u32) -> u32;
    /// `max.f16x2`: a NaN loses.
    fn f16x2_max(a: u32, b: u32) -> u32;
    /// `max.NaN.f16x2`: a NaN wins.
    fn f16x2_max_nan(a: u32, b: u32) -> u32;
    /// `min.f16x2`: a NaN loses.
    fn f16x2_min(a: u32, b: u32) -> u32;

    /// `max.f32`: a NaN loses.
    fn max(a: f32, b: f32) -> f32;
    /// `min.f32`: a NaN loses.
    fn min(a: f32, b: f32) -> f32;
    /// `fma.rn.f32`.
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// `mul.wide.u32` (PTX ISA 9.7.1.3).
    fn multiply_wide(a: u32, b: u32) -> u64;
    /// `prmt.b32`: byte `i` of the result is the byte of `b:a` that nibble `i` of the selector numbers, or its sign eight
    /// times where the nibble has its high bit (PTX ISA 9.7.9.7).
    fn permute_bytes(a: u32, b: u32, selector: u32) -> u32;
}
