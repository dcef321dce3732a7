//! The functions that hardware approximates, of every kind of number: each within its stated error of `f64`. Their last bits differ between the
//! targets, so no bytes are compared.

use oxtile::{Buffer, Runtime};
use oxtile_conformance::reductions::{Approximations, ApproximationsArgs, FUNCTIONS};
use oxtile_tests::inputs::Random;

use crate::case::{Case, Outcome, Size, stream, text};

/// A function, in f64, and its error.
struct Function {
    name: &'static str,
    exact: fn(f64) -> f64,
    /// The largest relative error.
    relative: f64,
    /// The largest absolute error where the argument is between 0.5 and 2.
    near_one: f64,
    /// Whether a subnormal argument counts as 0.
    flushes: bool,
}

const fn function(name: &'static str, exact: fn(f64) -> f64, relative: f64) -> Function {
    Function { name, exact, relative, near_one: 0.0, flushes: true }
}

/// 2^-20; the bounds of `num::approximate` are multiples of its powers.
const UNIT: f64 = 1.0 / (1 << 20) as f64;

const TRIED: [Function; FUNCTIONS as usize] = [
    function("exp2", f64::exp2, UNIT / 4.0),
    Function { near_one: UNIT / 4.0, ..function("log2", f64::log2, UNIT / 4.0) },
    function("reciprocal", |x| 1.0 / x, UNIT / 8.0),
    function("rsqrt", |x| 1.0 / x.sqrt(), UNIT / 7.4),
    function("sqrt", f64::sqrt, UNIT / 8.0),
    function("exp", f64::exp, UNIT / 2.0),
    Function { near_one: UNIT / 4.0, ..function("ln", f64::ln, UNIT / 2.0) },
    Function { flushes: false, ..function("tanh", f64::tanh, UNIT) },
];

/// The smallest normal number.
const TINY: f64 = f32::MIN_POSITIVE as f64;

pub fn cases() -> Vec<Case> {
    let small = Case::new("approximate::functions", Size::Small, |runtime| functions(runtime, 4096));
    let large = Case::new("approximate::functions", Size::Large, |runtime| functions(runtime, 1 << 20));
    vec![small, large]
}

/// Every sign, exponent and kind; arguments whose results are in range; what is next to a bound of a case.
fn arguments(count: usize) -> Vec<f32> {
    let mut random = Random::new(11);
    let edges = [0.0, 1.0, 0.5, 2.0, 0.45, 0.4499999, 88.72, 88.73, 87.33, 87.34, 103.9, 104.0, 126.0, 127.0, 128.0, 149.0, 150.0];
    let special = [f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x7f_ffff)];
    let edges = edges.into_iter().chain(special).flat_map(|x| [x, -x]);
    let any = (0..count).map(|i| match i % 3 {
        0 => f32::from_bits(random.bits() as u32),
        1 => (random.unit() - 0.5) * 220.0,
        _ => (random.unit() - 0.5) * 5.0,
    });
    edges.chain(any).collect()
}

fn functions(runtime: &Runtime, count: usize) -> Outcome {
    let stream = stream(runtime)?;
    let arguments = arguments(count);
    let input = text(Buffer::from_slice(&stream, &arguments))?;
    let mut output = text(Buffer::<f32>::uninitialised(&stream, arguments.len() as u64 * u64::from(FUNCTIONS)))?;
    let args = ApproximationsArgs { input: input.view(), output: output.view_mut() };
    text(text(runtime.load::<Approximations>())?.launch(&stream, args))?;
    let found = text(output.to_vec(&stream))?;
    for (results, &x) in found.chunks_exact(FUNCTIONS as usize).zip(&arguments) {
        for (function, &result) in TRIED.iter().zip(results) {
            let argument = if function.flushes && x.is_subnormal() { 0.0_f32.copysign(x) } else { x };
            let exact = (function.exact)(f64::from(argument));
            if !is_near(function, argument, f64::from(result), exact) {
                let name = function.name;
                return Err(format!("{name}({x:e}) is {result:e}, expected {exact:e}: error {:e}", (f64::from(result) - exact) / exact));
            }
        }
    }
    Ok(())
}

fn is_near(function: &Function, x: f32, found: f64, exact: f64) -> bool {
    if exact.is_nan() || found.is_nan() {
        return exact.is_nan() && found.is_nan();
    }
    // What is too large for f32 is Inf, or the largest number within the error; what is subnormal may be 0.
    let limit = f64::from(f32::MAX) * (1.0 - function.relative);
    if exact.abs() > limit {
        return found.signum() == exact.signum() && found.abs() >= limit;
    }
    let is_near_one = (0.5..=2.0).contains(&x);
    let bound = (exact.abs() * function.relative).max(if is_near_one { function.near_one } else { 0.0 });
    (found - exact).abs() <= bound.max(if function.flushes { 2.0 * TINY } else { 0.0 })
}
