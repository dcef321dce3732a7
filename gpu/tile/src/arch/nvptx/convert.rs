//! Conversions on the GPU: the instruction where the target has it, software where not.
//!
//! | instruction | from |
//! |---|---|
//! | bf16 and f16 `cvt`, `abs`, `max`, `min` on pairs | sm_80 |
//! | e4m3 and e5m2 `cvt` | sm_89 |
//! | e2m1 and ue8m0 `cvt` | sm_100a, sm_120a |

use core::arch::asm;

use super::Nvptx;
use crate::arch::Convert;
use crate::num::software as soft;

/// Whether the target has `cvt` to and from the 8-bit element formats.
const FP8: bool = cfg!(target_feature = "sm_89");

/// One pure instruction: `op!("text" => register class: type; inputs)`.
macro_rules! op {
    ($text:literal => $class:ident: $out:ty; $($in:ident $value:expr),*) => {{
        let out: $out;
        // SAFETY: the instruction reads and writes its operands only; it touches no memory and no flag.
        unsafe { asm!($text, out($class) out, $(in($in) $value),*, options(pure, nomem, nostack)) };
        out
    }};
}

#[inline(always)]
fn pair8(low: u8, high: u8) -> u16 {
    low as u16 | (high as u16) << 8
}

#[inline(always)]
fn pair16(low: u16, high: u16) -> u32 {
    low as u32 | (high as u32) << 16
}

impl Convert for Nvptx {
    #[inline(always)]
    fn bf16_from_f32(x: f32) -> u16 {
        op!("cvt.rn.bf16.f32 {0}, {1};" => reg16: u16; reg32 x)
    }

    #[inline(always)]
    fn bf16x2_from_f32([a, b]: [f32; 2]) -> u32 {
        op!("cvt.rn.bf16x2.f32 {0}, {2}, {1};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn f32_from_bf16(x: u16) -> f32 {
        soft::f32_from_bf16(x)
    }

    #[inline(always)]
    fn f16_from_f32(x: f32) -> u16 {
        op!("cvt.rn.f16.f32 {0}, {1};" => reg16: u16; reg32 x)
    }

    #[inline(always)]
    fn f16x2_from_f32([a, b]: [f32; 2]) -> u32 {
        op!("cvt.rn.f16x2.f32 {0}, {2}, {1};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn f16x2_from_f32_toward_zero([a, b]: [f32; 2]) -> u32 {
        op!("cvt.rz.f16x2.f32 {0}, {2}, {1};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn f32_from_f16(x: u16) -> f32 {
        op!("cvt.f32.f16 {0}, {1};" => reg32: f32; reg16 x)
    }

    #[inline(always)]
    fn e4m3x2_from_f32([a, b]: [f32; 2]) -> u16 {
        if !FP8 {
            return pair8(soft::e4m3_from_f32(a), soft::e4m3_from_f32(b));
        }
        op!("cvt.rn.satfinite.e4m3x2.f32 {0}, {2}, {1};" => reg16: u16; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn e5m2x2_from_f32([a, b]: [f32; 2]) -> u16 {
        if !FP8 {
            return pair8(soft::e5m2_from_f32(a), soft::e5m2_from_f32(b));
        }
        op!("cvt.rn.satfinite.e5m2x2.f32 {0}, {2}, {1};" => reg16: u16; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn e4m3x4_from_f32([a, b, c, d]: [f32; 4]) -> u32 {
        if !FP8 {
            return pair16(Self::e4m3x2_from_f32([a, b]), Self::e4m3x2_from_f32([c, d]));
        }
        op!("{{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {2}, {1}; cvt.rn.satfinite.e4m3x2.f32 high, {4}, {3}; \
             mov.b32 {0}, {{low, high}}; }}" => reg32: u32; reg32 a, reg32 b, reg32 c, reg32 d)
    }

    #[inline(always)]
    fn e5m2x4_from_f32([a, b, c, d]: [f32; 4]) -> u32 {
        if !FP8 {
            return pair16(Self::e5m2x2_from_f32([a, b]), Self::e5m2x2_from_f32([c, d]));
        }
        op!("{{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, {2}, {1}; cvt.rn.satfinite.e5m2x2.f32 high, {4}, {3}; \
             mov.b32 {0}, {{low, high}}; }}" => reg32: u32; reg32 a, reg32 b, reg32 c, reg32 d)
    }

    #[inline(always)]
    #[cfg(any(target_feature = "sm_100a", target_feature = "sm_120a"))]
    fn e2m1x2_from_f32([a, b]: [f32; 2]) -> u8 {
        op!("{{ .reg .b8 code; cvt.rn.satfinite.e2m1x2.f32 code, {2}, {1}; mov.b32 {0}, {{code, code, code, code}}; }}"
            => reg32: u32; reg32 a, reg32 b) as u8
    }

    #[inline(always)]
    #[cfg(not(any(target_feature = "sm_100a", target_feature = "sm_120a")))]
    fn e2m1x2_from_f32([a, b]: [f32; 2]) -> u8 {
        soft::e2m1_from_f32(a) | soft::e2m1_from_f32(b) << 4
    }

    #[inline(always)]
    #[cfg(any(target_feature = "sm_100a", target_feature = "sm_120a"))]
    fn ue8m0x2_from_f32([a, b]: [f32; 2]) -> u16 {
        // PTX leaves negative inputs open: magnitudes go in, on every target.
        let (a, b) = (f32::from_bits(a.to_bits() & 0x7fff_ffff), f32::from_bits(b.to_bits() & 0x7fff_ffff));
        op!("cvt.rp.satfinite.ue8m0x2.f32 {0}, {2}, {1};" => reg16: u16; reg32 a, reg32 b)
    }

    #[inline(always)]
    #[cfg(not(any(target_feature = "sm_100a", target_feature = "sm_120a")))]
    fn ue8m0x2_from_f32([a, b]: [f32; 2]) -> u16 {
        pair8(soft::ue8m0_from_f32(a), soft::ue8m0_from_f32(b))
    }

    #[inline(always)]
    fn f16x2_from_e4m3x2(x: u16) -> u32 {
        if !FP8 {
            return pair16(soft::f16_from_e4m3(x as u8), soft::f16_from_e4m3((x >> 8) as u8));
        }
        op!("cvt.rn.f16x2.e4m3x2 {0}, {1};" => reg32: u32; reg16 x)
    }

    #[inline(always)]
    fn f16x2_from_e5m2x2(x: u16) -> u32 {
        if !FP8 {
            return pair16(soft::f16_from_e5m2(x as u8), soft::f16_from_e5m2((x >> 8) as u8));
        }
        op!("cvt.rn.f16x2.e5m2x2 {0}, {1};" => reg32: u32; reg16 x)
    }

    #[inline(always)]
    #[cfg(any(target_feature = "sm_100a", target_feature = "sm_120a"))]
    fn f16x2_from_e2m1x2(x: u8) -> u32 {
        op!("{{ .reg .b8 code, a, b, c; mov.b32 {{code, a, b, c}}, {1}; cvt.rn.f16x2.e2m1x2 {0}, code; }}"
            => reg32: u32; reg32 x as u32)
    }

    #[inline(always)]
    #[cfg(not(any(target_feature = "sm_100a", target_feature = "sm_120a")))]
    fn f16x2_from_e2m1x2(x: u8) -> u32 {
        // The fields of a code in their places of an f16 are its value times 2^-14, the subnormal 0.5 too; the product
        // with 2^14 is exact.
        let codes = u32::from(x) | u32::from(x) << 12;
        let fields = codes << 12 & 0x8000_8000 | codes << 9 & 0x0e00_0e00;
        op!("mul.rn.f16x2 {0}, {1}, {2};" => reg32: u32; reg32 fields, reg32 0x7400_7400_u32)
    }

    #[inline(always)]
    fn bf16x2_from_ue8m0x2(x: u16) -> u32 {
        if cfg!(any(target_feature = "sm_100a", target_feature = "sm_120a")) {
            return op!("cvt.rn.bf16x2.ue8m0x2 {0}, {1};" => reg32: u32; reg16 x);
        }
        pair16(soft::bf16_from_ue8m0(x as u8), soft::bf16_from_ue8m0((x >> 8) as u8))
    }

    #[inline(always)]
    fn bf16x2_abs(x: u32) -> u32 {
        op!("abs.bf16x2 {0}, {1};" => reg32: u32; reg32 x)
    }

    #[inline(always)]
    fn bf16x2_max(a: u32, b: u32) -> u32 {
        op!("max.bf16x2 {0}, {1}, {2};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn bf16x2_max_nan(a: u32, b: u32) -> u32 {
        op!("max.NaN.bf16x2 {0}, {1}, {2};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn bf16x2_min(a: u32, b: u32) -> u32 {
        op!("min.bf16x2 {0}, {1}, {2};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn f16x2_abs(x: u32) -> u32 {
        op!("abs.f16x2 {0}, {1};" => reg32: u32; reg32 x)
    }

    #[inline(always)]
    fn f16x2_max(a: u32, b: u32) -> u32 {
        op!("max.f16x2 {0}, {1}, {2};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn f16x2_max_nan(a: u32, b: u32) -> u32 {
        op!("max.NaN.f16x2 {0}, {1}, {2};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn f16x2_min(a: u32, b: u32) -> u32 {
        op!("min.f16x2 {0}, {1}, {2};" => reg32: u32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        op!("max.f32 {0}, {1}, {2};" => reg32: f32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        op!("min.f32 {0}, {1}, {2};" => reg32: f32; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        op!("fma.rn.f32 {0}, {1}, {2}, {3};" => reg32: f32; reg32 a, reg32 b, reg32 c)
    }

    #[inline(always)]
    fn multiply_wide(a: u32, b: u32) -> u64 {
        op!("mul.wide.u32 {0}, {1}, {2};" => reg64: u64; reg32 a, reg32 b)
    }

    #[inline(always)]
    fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
        op!("prmt.b32 {0}, {1}, {2}, {3};" => reg32: u32; reg32 a, reg32 b, reg32 selector)
    }
}
