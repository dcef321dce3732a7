//! Functions that hardware approximates: the last bits differ between the targets.
//!
//! Errors are bounds for every argument, on every target; a NaN gives a NaN. Subnormal arguments count as 0 where it says flushed.

use super::{fma, max, min};
use crate::arch::{Approximate, Target};

/// 2 to the `x`, within 2 ulp, subnormals flushed (`ex2.approx.ftz.f32`).
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    Target::exp2(x)
}

/// The logarithm of `x` to base 2, subnormals flushed (`lg2.approx.ftz.f32`): absolute error at most 2^-22 where `x` is between 0.5 and 2,
/// relative error at most 2^-22 elsewhere.
#[inline(always)]
pub fn log2(x: f32) -> f32 {
    Target::log2(x)
}

/// `1 / x`, within 1 ulp, subnormals flushed (`rcp.approx.ftz.f32`).
#[inline(always)]
pub fn reciprocal(x: f32) -> f32 {
    Target::reciprocal(x)
}

/// `1 / sqrt(x)`, relative error at most 2^-22.9, subnormals flushed (`rsqrt.approx.ftz.f32`). Inf of the sign of a zero, NaN below it.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    Target::rsqrt(x)
}

/// The square root, relative error at most 2^-23, subnormals flushed (`sqrt.approx.ftz.f32`). A zero gives itself, what is below it NaN.
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    Target::sqrt(x)
}

/// e to the `x`, relative error at most 2^-21; results under 2^-126 are 0 or as near as that. `exp2`, after the whole part of the exponent has
/// been split off, so that the error does not grow with `x`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // What is added and taken away again rounds to a whole number, whose low bits are then those of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = min(max(x * core::f32::consts::LOG2_E, -127.0), 127.0) + ROUND;
    let whole = shifted - ROUND;
    let rest = fma(x, 1.925_963_3e-8, fma(x, core::f32::consts::LOG2_E, -whole));
    // 2 to the whole part, by its exponent; 0 of -127.
    exp2(rest) * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// The natural logarithm of `x`, subnormals flushed: absolute error at most 2^-22 where `x` is between 0.5 and 2, relative error at most 2^-21
/// elsewhere. `log2` times ln 2.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    log2(x) * core::f32::consts::LN_2
}

/// The hyperbolic tangent, relative error at most 2^-20; a subnormal gives itself. By `exp` from 0.45 on, by a polynomial below: the hardware's own
/// (`tanh.approx.f32`) has an error of 2^-11.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let (magnitude, square) = (x.abs(), x * x);
    let far = fma(-2.0, reciprocal(1.0 + exp(2.0 * magnitude)), 1.0).copysign(x);
    // An odd polynomial of degree 11: x + x^3 P(x^2).
    let tail = [-0.008_863_2, 0.021_869_5, -0.053_968_254, 0.133_333_33, -0.333_333_34];
    let near = fma(tail.into_iter().skip(1).fold(tail[0], |sum, factor| fma(sum, square, factor)) * square, x, x).copysign(x);
    if magnitude < 0.45 { near } else { far }
}
