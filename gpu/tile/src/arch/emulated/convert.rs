//! Conversions on the emulator: all in software.

use super::Emulated;
use crate::arch::Convert;
use crate::num::software as soft;

const INF_BF16: u16 = 0x7f80;
const INF_F16: u16 = 0x7c00;

#[inline(always)]
fn pair8(low: u8, high: u8) -> u16 {
    u16::from_le_bytes([low, high])
}

#[inline(always)]
fn pair16(low: u16, high: u16) -> u32 {
    low as u32 | (high as u32) << 16
}

impl Convert for Emulated {
    #[inline(always)]
    fn bf16_from_f32(x: f32) -> u16 {
        soft::bf16_from_f32(x)
    }

    #[inline(always)]
    fn bf16x2_from_f32([a, b]: [f32; 2]) -> u32 {
        pair16(soft::bf16_from_f32(a), soft::bf16_from_f32(b))
    }

    #[inline(always)]
    fn f32_from_bf16(x: u16) -> f32 {
        soft::f32_from_bf16(x)
    }

    #[inline(always)]
    fn f16_from_f32(x: f32) -> u16 {
        soft::f16_from_f32(x)
    }

    #[inline(always)]
    fn f16x2_from_f32([a, b]: [f32; 2]) -> u32 {
        pair16(soft::f16_from_f32(a), soft::f16_from_f32(b))
    }

    #[inline(always)]
    fn f16x2_from_f32_toward_zero([a, b]: [f32; 2]) -> u32 {
        pair16(soft::f16_from_f32_toward_zero(a), soft::f16_from_f32_toward_zero(b))
    }

    #[inline(always)]
    fn f32_from_f16(x: u16) -> f32 {
        soft::f32_from_f16(x)
    }

    #[inline(always)]
    fn e4m3x2_from_f32([a, b]: [f32; 2]) -> u16 {
        pair8(soft::e4m3_from_f32(a), soft::e4m3_from_f32(b))
    }

    #[inline(always)]
    fn e5m2x2_from_f32([a, b]: [f32; 2]) -> u16 {
        pair8(soft::e5m2_from_f32(a), soft::e5m2_from_f32(b))
    }

    #[inline(always)]
    fn e2m1x2_from_f32([a, b]: [f32; 2]) -> u8 {
        soft::e2m1_from_f32(a) | soft::e2m1_from_f32(b) << 4
    }

    #[inline(always)]
    fn ue8m0x2_from_f32([a, b]: [f32; 2]) -> u16 {
        pair8(soft::ue8m0_from_f32(a), soft::ue8m0_from_f32(b))
    }

    #[inline(always)]
    fn f16x2_from_e4m3x2(x: u16) -> u32 {
        let [a, b] = x.to_le_bytes();
        pair16(soft::f16_from_e4m3(a), soft::f16_from_e4m3(b))
    }

    #[inline(always)]
    fn f16x2_from_e5m2x2(x: u16) -> u32 {
        let [a, b] = x.to_le_bytes();
        pair16(soft::f16_from_e5m2(a), soft::f16_from_e5m2(b))
    }

    #[inline(always)]
    fn f16x2_from_e2m1x2(x: u8) -> u32 {
        pair16(soft::f16_from_e2m1(x), soft::f16_from_e2m1(x >> 4))
    }

    #[inline(always)]
    fn bf16x2_from_ue8m0x2(x: u16) -> u32 {
        let [a, b] = x.to_le_bytes();
        pair16(soft::bf16_from_ue8m0(a), soft::bf16_from_ue8m0(b))
    }

    #[inline(always)]
    fn bf16x2_abs(x: u32) -> u32 {
        x & 0x7fff_7fff
    }

    #[inline(always)]
    fn bf16x2_max(a: u32, b: u32) -> u32 {
        soft::map_halves(a, b, soft::max16::<INF_BF16>)
    }

    #[inline(always)]
    fn bf16x2_max_nan(a: u32, b: u32) -> u32 {
        soft::map_halves(a, b, soft::max_nan16::<INF_BF16>)
    }

    #[inline(always)]
    fn bf16x2_min(a: u32, b: u32) -> u32 {
        soft::map_halves(a, b, soft::min16::<INF_BF16>)
    }

    #[inline(always)]
    fn f16x2_abs(x: u32) -> u32 {
        x & 0x7fff_7fff
    }

    #[inline(always)]
    fn f16x2_max(a: u32, b: u32) -> u32 {
        soft::map_halves(a, b, soft::max16::<INF_F16>)
    }

    #[inline(always)]
    fn f16x2_max_nan(a: u32, b: u32) -> u32 {
        soft::map_halves(a, b, soft::max_nan16::<INF_F16>)
    }

    #[inline(always)]
    fn f16x2_min(a: u32, b: u32) -> u32 {
        soft::map_halves(a, b, soft::min16::<INF_F16>)
    }

    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        soft::max32(a, b)
    }

    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        soft::min32(a, b)
    }

    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        f32::mul_add(a, b, c)
    }

    #[inline(always)]
    fn multiply_wide(a: u32, b: u32) -> u64 {
        u64::from(a) * u64::from(b)
    }

    #[inline(always)]
    fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
        soft::permute_bytes(a, b, selector)
    }
}
