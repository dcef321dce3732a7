//! Approximated functions: rounded once, and flushed as the GPU does.

use super::Emulated;
use crate::arch::Approximate;

/// Zero of the same sign for a subnormal.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

impl Approximate for Emulated {
    #[inline(always)]
    fn exp2(x: f32) -> f32 {
        flushed(flushed(x).exp2())
    }

    #[inline(always)]
    fn log2(x: f32) -> f32 {
        flushed(flushed(x).log2())
    }

    #[inline(always)]
    fn reciprocal(x: f32) -> f32 {
        flushed(1.0 / flushed(x))
    }

    #[inline(always)]
    fn rsqrt(x: f32) -> f32 {
        (1.0 / f64::from(flushed(x)).sqrt()) as f32
    }

    #[inline(always)]
    fn sqrt(x: f32) -> f32 {
        flushed(x).sqrt()
    }
}
