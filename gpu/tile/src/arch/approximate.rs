//! Functions that hardware approximates: the last bits differ between the targets.

/// Fast functions of f32. PTX ISA 9.7.3; subnormal inputs and results are flushed to zero.
pub trait Approximate {
    /// `ex2.approx.ftz.f32`: 2 to the `x`, within 2 ulp.
    fn exp2(x: f32) -> f32;
    /// `lg2.approx.ftz.f32`: absolute error at most 2^-22 between 0.5 and 2, relative elsewhere.
    fn log2(x: f32) -> f32;
    /// `rcp.approx.ftz.f32`: within 1 ulp.
    fn reciprocal(x: f32) -> f32;
    /// `rsqrt.approx.ftz.f32`: relative error at most 2^-22.9.
    fn rsqrt(x: f32) -> f32;
    /// `sqrt.approx.ftz.f32`: relative error at most 2^-23.
    fn sqrt(x: f32) -> f32;
}
