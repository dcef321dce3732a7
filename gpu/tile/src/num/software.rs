//! The conversions in plain arithmetic, bit for bit those of the instructions.
//!
//! The emulator runs them, and a GPU whose target lacks an instruction. All are functions of codes; a pair has its
//! first element in the low bits. f32 operations round to nearest even and keep subnormals, on every target.

/// The one NaN that conversions to f32 give.
const NAN_F32: u32 = 0x7fff_ffff;
const INF_F32: u32 = 0x7f80_0000;
const SIGN_F32: u32 = 0x8000_0000;

/// Rounds a magnitude to nearest even in a format with `MANTISSA` bits and smallest normal exponent
/// `MIN_EXPONENT`, as if its exponents had no upper end: codes grow with values, so that the caller saturates by a
/// minimum of codes. `magnitude` holds the bits of a non-negative f32 that is not a NaN.
#[inline(always)]
fn round<const MANTISSA: u32, const MIN_EXPONENT: i32>(magnitude: u32) -> u32 {
    let min_normal = ((127 + MIN_EXPONENT) as u32) << 23;
    if magnitude < min_normal {
        // The unit of the sum's last place is the format's subnormal step: the addition rounds.
        let anchor = ((127 + MIN_EXPONENT + 23) as u32 - MANTISSA) << 23;
        return (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits() - anchor;
    }
    let dropped = 23 - MANTISSA;
    let rebased = magnitude - (min_normal - (1 << 23));
    let odd = (rebased >> dropped) & 1;
    (rebased + ((1 << (dropped - 1)) - 1) + odd) >> dropped
}

/// The value of a finite magnitude code of the format, as f32 bits.
#[inline(always)]
fn expand<const MANTISSA: u32, const MIN_EXPONENT: i32>(code: u32) -> u32 {
    let rebase = f32::from_bits(((127 + 126 + MIN_EXPONENT) as u32) << 23);
    (f32::from_bits(code << (23 - MANTISSA)) * rebase).to_bits()
}

/// Splits f32 bits into sign (bit 31) and magnitude.
#[inline(always)]
fn split(x: f32) -> (u32, u32) {
    (x.to_bits() & SIGN_F32, x.to_bits() & !SIGN_F32)
}

/// `cvt.rn.bf16.f32`.
#[inline(always)]
pub fn bf16_from_f32(x: f32) -> u16 {
    let (sign, magnitude) = split(x);
    if magnitude > INF_F32 {
        return 0x7fff;
    }
    (sign >> 16 | round::<7, -126>(magnitude)) as u16
}

/// `cvt.f32.bf16`: the upper half of an f32, NaN payloads kept.
#[inline(always)]
pub const fn f32_from_bf16(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// `cvt.rn.f16.f32`.
#[inline(always)]
pub fn f16_from_f32(x: f32) -> u16 {
    let (sign, magnitude) = split(x);
    if magnitude > INF_F32 {
        return 0x7fff;
    }
    (sign >> 16 | round::<10, -14>(magnitude).min(0x7c00)) as u16
}

/// `cvt.rz.f16.f32`: what is too large is the largest finite number.
#[inline(always)]
pub fn f16_from_f32_toward_zero(x: f32) -> u16 {
    const MIN_NORMAL: u32 = (127 - 14) << 23;
    let (sign, magnitude) = split(x);
    let code = match magnitude {
        0..MIN_NORMAL => (f32::from_bits(magnitude) * 16_777_216.0) as u32,
        MIN_NORMAL..INF_F32 => ((magnitude - MIN_NORMAL + (1 << 23)) >> 13).min(0x7bff),
        INF_F32 => 0x7c00,
        _ => return 0x7fff,
    };
    (sign >> 16 | code) as u16
}

/// `cvt.f32.f16`: any NaN gives 0x7FFFFFFF.
#[inline(always)]
pub fn f32_from_f16(x: u16) -> f32 {
    let code = (x & 0x7fff) as u32;
    let magnitude = match code {
        0..0x7c00 => expand::<10, -14>(code),
        0x7c00 => INF_F32,
        _ => return f32::from_bits(NAN_F32),
    };
    f32::from_bits(((x & 0x8000) as u32) << 16 | magnitude)
}

/// One code of `cvt.rn.satfinite.e4m3x2.f32`.
#[inline(always)]
pub fn e4m3_from_f32(x: f32) -> u8 {
    let (sign, magnitude) = split(x);
    if magnitude > INF_F32 {
        return 0x7f;
    }
    (sign >> 24 | round::<3, -6>(magnitude).min(0x7e)) as u8
}

/// One code of `cvt.rn.satfinite.e5m2x2.f32`.
#[inline(always)]
pub fn e5m2_from_f32(x: f32) -> u8 {
    let (sign, magnitude) = split(x);
    if magnitude > INF_F32 {
        return 0x7f;
    }
    (sign >> 24 | round::<2, -14>(magnitude).min(0x7b)) as u8
}

/// One code, in the low four bits, of `cvt.rn.satfinite.e2m1x2.f32`.
#[inline(always)]
pub fn e2m1_from_f32(x: f32) -> u8 {
    let (sign, magnitude) = split(x);
    if magnitude > INF_F32 {
        return 7;
    }
    (sign >> 28 | round::<1, 0>(magnitude).min(7)) as u8
}

/// One code of `cvt.rp.satfinite.ue8m0x2.f32`, of the magnitude of `x`.
#[inline(always)]
pub fn ue8m0_from_f32(x: f32) -> u8 {
    let (_, magnitude) = split(x);
    if magnitude > INF_F32 {
        return 0xff;
    }
    // Code 0 is 2^-127, half of f32's smallest normal number: subnormals above it go to code 1.
    let (exponent, mantissa) = (magnitude >> 23, magnitude & 0x7f_ffff);
    let threshold = if exponent == 0 { 0x40_0000 } else { 0 };
    (exponent + (mantissa > threshold) as u32).min(0xfe) as u8
}

/// One value of `cvt.rn.f16x2.e4m3x2`, as an f16 code.
#[inline(always)]
pub fn f16_from_e4m3(x: u8) -> u16 {
    let code = (x & 0x7f) as u32;
    if code == 0x7f {
        return 0x7fff;
    }
    let magnitude = f16_from_f32(f32::from_bits(expand::<3, -6>(code)));
    ((x & 0x80) as u16) << 8 | magnitude
}

/// One value of `cvt.rn.f16x2.e5m2x2`, as an f16 code: the upper byte of an f16.
#[inline(always)]
pub const fn f16_from_e5m2(x: u8) -> u16 {
    if x & 0x7f > 0x7c { 0x7fff } else { (x as u16) << 8 }
}

/// One value of `cvt.rn.f16x2.e2m1x2`, as an f16 code; `x` is a code in the low four bits.
#[inline(always)]
pub const fn f16_from_e2m1(x: u8) -> u16 {
    let magnitude = match x & 7 {
        0 => 0,
        // 0.5, the one subnormal.
        1 => 0x3800,
        code => ((code as u16) << 9) + (14 << 10),
    };
    ((x & 8) as u16) << 12 | magnitude
}

/// One value of `cvt.rn.bf16x2.ue8m0x2`, as a bf16 code.
#[inline(always)]
pub const fn bf16_from_ue8m0(x: u8) -> u16 {
    match x {
        0xff => 0x7fff,
        0 => 0x0040,
        e => (e as u16) << 7,
    }
}

/// Applies `f` to the two halves of a pair of 16-bit codes.
#[inline(always)]
pub fn map_halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    f(a as u16, b as u16) as u32 | (f((a >> 16) as u16, (b >> 16) as u16) as u32) << 16
}

/// `prmt.b32` without a mode.
#[inline(always)]
pub const fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (b as u64) << 32 | a as u64;
    let (mut permuted, mut i) = (0, 0);
    while i < 4 {
        let nibble = selector >> (4 * i);
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        let byte = if nibble & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        permuted |= (byte as u32) << (8 * i);
        i += 1;
    }
    permuted
}

/// A key that orders the 16-bit codes of numbers as their values, -0 below +0.
#[inline(always)]
const fn order16(x: u16) -> u16 {
    if x & 0x8000 != 0 { !x } else { x | 0x8000 }
}

/// `max` of two 16-bit floats of which `INF` is the code of Inf: a NaN loses to a number.
#[inline(always)]
pub const fn max16<const INF: u16>(a: u16, b: u16) -> u16 {
    match (a & 0x7fff > INF, b & 0x7fff > INF) {
        (true, true) => 0x7fff,
        (true, false) => b,
        (false, true) => a,
        (false, false) if order16(a) >= order16(b) => a,
        (false, false) => b,
    }
}

/// `max.NaN` of two 16-bit floats of which `INF` is the code of Inf: a NaN wins.
#[inline(always)]
pub const fn max_nan16<const INF: u16>(a: u16, b: u16) -> u16 {
    if a & 0x7fff > INF || b & 0x7fff > INF { 0x7fff } else { max16::<INF>(a, b) }
}

/// `min` of two 16-bit floats of which `INF` is the code of Inf: a NaN loses to a number.
#[inline(always)]
pub const fn min16<const INF: u16>(a: u16, b: u16) -> u16 {
    match (a & 0x7fff > INF, b & 0x7fff > INF) {
        (true, true) => 0x7fff,
        (true, false) => b,
        (false, true) => a,
        (false, false) if order16(a) <= order16(b) => a,
        (false, false) => b,
    }
}

/// `max.f32`: a NaN loses to a number, and +0 is above -0.
#[inline(always)]
pub fn max32(a: f32, b: f32) -> f32 {
    if a.is_nan() && b.is_nan() {
        f32::from_bits(NAN_F32)
    } else if a > b || b.is_nan() || (a == b && a.is_sign_positive()) {
        a
    } else {
        b
    }
}

/// `min.f32`: a NaN loses to a number, and -0 is below +0.
#[inline(always)]
pub fn min32(a: f32, b: f32) -> f32 {
    if a.is_nan() && b.is_nan() {
        f32::from_bits(NAN_F32)
    } else if a < b || b.is_nan() || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}
