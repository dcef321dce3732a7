//! Functions that hardware approximates: the last bits differ between the targets.

use crate::arch::{Approximate, Target};

/// 2 to the `x`, within 2 ulp, subnormals flushed (`ex2.approx.ftz.f32`).
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    Target::exp2(x)
}

/// The logarithm of `x` to base 2, subnormals flushed (`lg2.approx.ftz.f32`).
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    Target::log2(x)
}

/// `1 / x`, within 1 ulp, subnormals flushed (`rcp.approx.ftz.f32`).
#[inline(always)]
pub fn reciprocal(x: f32) -> f32 {
    Target::reciprocal(x)
}
