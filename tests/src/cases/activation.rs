//! Activations against f64, and the casts fused with them: bit for bit the cast of the activation's own result.

use std::marker::PhantomData;

use oxtile::{Buffer, Runtime};
use oxtile_kernels::activation::*;
use oxtile_kernels::mxfp8::{Mxfp8CastFused, Mxfp8CastFusedColumns, Mxfp8CastFusedRows};
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::activation::Activation as Formula;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Float, bf16, e4m3};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::mxfp8_fused::{Wanted, check};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns of the result: halves of gated ones are whole blocks.
const SMALL: [[usize; 2]; 3] = [[33, 64], [3, 576], [0, 64]];
const LARGE: [usize; 2] = [97, 1088];
const MANY_TILES: [usize; 2] = [257, 4096];

/// Inputs of interest: steep and flat parts, cancellation, magnitudes far beyond.
const SCENARIOS: [Scenario; 4] = [Scenario::Normal, Scenario::Exponents, Scenario::Nans, Scenario::Zeros];

/// What a kernel computes, in f64.
trait Reference: Operation {
    /// From the formula, the input's value and, of gated ones, the gate's, and the gradient; `of_gate` says which half.
    fn exact(formula: Formula, x: f64, gate: f64, gradient: f64, of_gate: bool) -> f64;
    const IS_GATED: bool;
}

macro_rules! references {
    ($($operation:ident $is_gated:literal |$f:ident, $x:ident, $gate:ident, $gradient:ident, $of_gate:ident| $value:expr;)*) => { $(
        impl<A: Activation> Reference for $operation<A> {
            const IS_GATED: bool = $is_gated;

            #[allow(unused_variables)]
            fn exact($f: Formula, $x: f64, $gate: f64, $gradient: f64, $of_gate: bool) -> f64 {
                $value
            }
        }
    )* };
}

references! {
    Forward false |f, x, gate, gradient, of_gate| f.value(x);
    Backward false |f, x, gate, gradient, of_gate| gradient * f.slope(x);
    GatedForward true |f, x, gate, gradient, of_gate| f.value(x) * gate;
    GatedBackward true |f, x, gate, gradient, of_gate| gradient * if of_gate { f.value(x) } else { gate * f.slope(x) };
}

pub fn cases() -> Vec<Case> {
    macro_rules! operations {
        ($($activation:ident)*) => { [$(
            of_operation::<Forward<$activation>>("forward", Formula::$activation),
            of_operation::<Backward<$activation>>("backward", Formula::$activation),
            of_operation::<GatedForward<$activation>>("gated_forward", Formula::$activation),
            of_operation::<GatedBackward<$activation>>("gated_backward", Formula::$activation),
        )*] };
    }
    let slopes = Case::new("activation::slopes_at_infinity", Size::Small, slopes_at_infinity);
    operations!(Gelu Silu QuickGelu Relu SquaredRelu).into_iter().flatten().chain([slopes]).collect()
}

/// The derivatives at -Inf and at Inf: their limits, but for GELU's.
fn slopes_at_infinity(runtime: &Runtime) -> Outcome {
    slopes::<Gelu>(runtime, [f32::NAN; 2])?;
    slopes::<Silu>(runtime, [0.0, 1.0])?;
    slopes::<QuickGelu>(runtime, [0.0, 1.0])?;
    slopes::<Relu>(runtime, [0.0, 1.0])?;
    slopes::<SquaredRelu>(runtime, [0.0, f32::INFINITY])
}

fn slopes<A: Activation>(runtime: &Runtime, expected: [f32; 2]) -> Outcome
where
    Activate<Backward<A>, bf16>: Kernel,
{
    let stream = stream(runtime)?;
    let x = [f32::NEG_INFINITY, f32::INFINITY, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    let (input, gradient) = (bf16::upload(&stream, &x)?, bf16::upload(&stream, &[1.0; 8])?);
    let mut output = text(Buffer::from_slice(&stream, &bf16::encode(&[7.0; 8])))?;
    let (input, gradient, view) = (input.view(), gradient.view(), output.view_mut());
    let args = ActivateArgs { input, gradient: Some(gradient), output: view, columns: 8, marker: PhantomData };
    text(text(runtime.load::<Activate<Backward<A>, bf16>>())?.launch(&stream, args))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().take(2).map(comparable_bits::<bf16>).collect();
    equal(std::any::type_name::<A>(), &found, &expected.map(rounded_bits::<bf16>))
}

fn of_operation<O: Reference>(name: &str, formula: Formula) -> Vec<Case>
where
    Activate<O, bf16>: Kernel,
    Mxfp8CastFused<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedRows<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedColumns<O, bf16, e4m3>: Kernel,
{
    let case = |what: String, size, scenario, shape| {
        let name = format!("activation::{name}::{formula:?}::{what}");
        Case::new(name, size, move |runtime| run::<O>(runtime, formula, scenario, shape))
    };
    // A product of three numbers of any exponent may overflow on the way, by its order.
    let scenarios = SCENARIOS.into_iter().filter(|scenario| !O::IS_GATED || *scenario != Scenario::Exponents);
    let mut cases: Vec<_> = scenarios.map(|scenario| case(format!("{scenario:?}"), Size::Small, scenario, [8, 64])).collect();
    for shape in SMALL {
        cases.push(case(format!("{}x{}", shape[0], shape[1]), Size::Small, Scenario::Normal, shape));
    }
    for (shape, size) in [(LARGE, Size::Large), (MANY_TILES, Size::Twin)] {
        cases.push(case(format!("{}x{}", shape[0], shape[1]), size, Scenario::Normal, shape));
    }
    cases
}

fn run<O: Reference>(runtime: &Runtime, formula: Formula, scenario: Scenario, [rows, columns]: [usize; 2]) -> Outcome
where
    Activate<O, bf16>: Kernel,
    Mxfp8CastFused<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedRows<O, bf16, e4m3>: Kernel,
    Mxfp8CastFusedColumns<O, bf16, e4m3>: Kernel,
{
    let stream = stream(runtime)?;
    let input_columns = O::input_columns(columns as u64) as usize;
    let gradient_columns = O::gradient_columns(columns as u64) as usize;
    let x = scenario.generate(Dtype::Bf16, rows * input_columns, 3);
    // Of moderate size, so that products stay finite where the activation does.
    let mut random = Random::new(8);
    let g: Vec<f32> = (0..rows * gradient_columns).map(|_| Dtype::Bf16.round(random.normal())).collect();
    let (input, gradient) = (bf16::upload(&stream, &x)?, bf16::upload(&stream, &g)?);
    let mut output = text(Buffer::from_slice(&stream, &bf16::encode(&vec![7.0; rows * columns])))?;
    let args = ActivateArgs {
        input: input.view(),
        gradient: (gradient_columns > 0).then(|| gradient.view()),
        output: output.view_mut(),
        columns: columns as u64,
        marker: PhantomData,
    };
    text(text(runtime.load::<Activate<O, bf16>>())?.launch(&stream, args))?;
    let values: Vec<f32> = text(output.to_vec(&stream))?.into_iter().map(|value: bf16| value.to_f32()).collect();

    for (at, &found) in values.iter().enumerate() {
        let (row, column) = (at / columns, at % columns);
        // Where the gate and the gradient are, if there are any.
        let half = if gradient_columns == 0 { columns } else { gradient_columns };
        let (within, of_gate) = (column % half, column >= half);
        let value = |tensor: &[f32], at: usize| f64::from(*tensor.get(at).unwrap_or(&0.0));
        let place = row * input_columns + within;
        let gate = if O::IS_GATED { value(&x, place + half) } else { 0.0 };
        let exact = O::exact(formula, value(&x, place), gate, value(&g, row * half + within), of_gate);
        if !is_near(found, exact) {
            return Err(format!("[{row}, {column}] is {found:e}, expected {exact:e} of x = {:e}", value(&x, place)));
        }
    }
    let wanted = Wanted { shape: [rows, columns], options: 0, rows: true, columns: true, extras: true, skip: None };
    if O::IS_GATED && !columns.is_multiple_of(64) {
        return Ok(());
    }
    check::<O, bf16, e4m3>(runtime, &input, &gradient, &values, wanted)
}

/// Within one unit in the last place of bf16; what is tiny may be flushed, what overflows f32 on the way may be Inf or NaN.
fn is_near(found: f32, exact: f64) -> bool {
    const HUGE: f64 = 1e37;
    const TINY: f64 = 1e-35;
    if exact.is_nan() || exact.abs() > HUGE {
        return !found.is_finite() || f64::from(found).abs() > HUGE / 2.0;
    }
    // bf16 has 8 significant bits, so that a unit is at most 2^-7 of the value.
    let unit = 2f64.powi(exact.abs().max(TINY).log2().floor() as i32 - 7);
    (f64::from(found) - exact).abs() <= unit.max(TINY)
}
