//! The activations: functions of one number, with their derivatives.

use oxtile_tile::num::{exp2, fma, max, min, reciprocal};

/// A function of one number, with its derivative.
pub trait Activation: 'static {
    /// The function.
    fn value(x: f32) -> f32;
    /// Its derivative.
    fn slope(x: f32) -> f32;
}

/// `x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`. Its derivative is NaN at either infinity; that of the others is
/// the limit.
#[derive(Debug)]
pub struct Gelu;
/// `x / (1 + exp(-x))`.
#[derive(Debug)]
pub struct Silu;
/// `x / (1 + exp(-1.702 x))`.
#[derive(Debug)]
pub struct QuickGelu;
/// `max(x, 0)`.
#[derive(Debug)]
pub struct Relu;
/// `max(x, 0)^2`.
#[derive(Debug)]
pub struct SquaredRelu;

impl Activation for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid_of(gelu_exponent(x))
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        // d/dx of the sigmoid's argument: 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2), finite where `x` is.
        let inner = fma(0.214_064_45, min(x * x, 1e30), 1.595_769);
        let s = sigmoid_of(gelu_exponent(x));
        // As `product_slope` without its test: both factors are finite where `x` is, and one is 0 where the sigmoid is 0 or 1.
        fma(x * s, inner * (1.0 - s), s)
    }
}

impl Activation for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        product_slope(x, sigmoid(x))
    }
}

impl Activation for QuickGelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(1.702 * x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        product_slope(1.702 * x, sigmoid(1.702 * x))
    }
}

impl Activation for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        max(x, 0.0)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        if x > 0.0 { 1.0 } else { 0.0 }
    }
}

impl Activation for SquaredRelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        max(x, 0.0) * max(x, 0.0)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        2.0 * max(x, 0.0)
    }
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    sigmoid_of(-core::f32::consts::LOG2_E * x)
}

/// `1 / (1 + 2^exponent)`.
#[inline(always)]
fn sigmoid_of(exponent: f32) -> f32 {
    reciprocal(1.0 + exp2(exponent))
}

/// `-log2(e) 2 sqrt(2 / pi) (x + 0.044715 x^3)`.
#[inline(always)]
fn gelu_exponent(x: f32) -> f32 {
    x * fma(-0.102_943_24, x * x, -2.302_208_2)
}

/// The derivative of `x s(u)`, given `x du/dx` and the sigmoid `s`: `s + x du/dx s (1 - s)`, whose last term is 0 where `s` is 0
/// or 1, however large the first factor.
#[inline(always)]
fn product_slope(factor: f32, s: f32) -> f32 {
    let curve = fma(-s, s, s);
    if curve == 0.0 { s } else { fma(factor, curve, s) }
}
