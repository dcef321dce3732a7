//! Steps of AdamW against f64.

use oxtile::{Buffer, Runtime};
use oxtile_kernels::adamw::{Adamw, AdamwArgs, Gradient, Step};
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle::adamw as oracle;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Half, bf16, f16};

use super::element::{TestElement, comparable_bits, rounded_bits};
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

pub fn cases() -> Vec<Case> {
    let lengths = [0, 1, 7, 8, 2048, 2055, 4100];
    let small = lengths.into_iter().flat_map(|length| {
        let case = |name: String, run: fn(&Runtime, Scenario, usize) -> Outcome| {
            Case::new(name, Size::Small, move |runtime| run(runtime, Scenario::Normal, length))
        };
        [
            case(format!("adamw::bf16::{length}"), run::<bf16, bf16>),
            case(format!("adamw::f16::{length}"), run::<f16, f16>),
            case(format!("adamw::bf16 by f32::{length}"), run::<bf16, f32>),
            case(format!("adamw::f16 by f32::{length}"), run::<f16, f32>),
        ]
    });
    let scenarios = [Scenario::Zeros, Scenario::Nans, Scenario::Infinities, Scenario::Subnormals];
    let of_scenario = scenarios.into_iter().map(|scenario| {
        Case::new(format!("adamw::bf16::{scenario:?}"), Size::Small, move |runtime| run::<bf16, bf16>(runtime, scenario, 100))
    });
    let large = Case::new("adamw::bf16::300001", Size::Large, |runtime| run::<bf16, bf16>(runtime, Scenario::Normal, 300_001));
    small.chain(of_scenario).chain([large, Case::new("adamw::refused", Size::Small, refused)]).collect()
}

/// The numbers of step `t`, for the kernel and for the oracle.
fn numbers(t: i32) -> (Step, oracle::Step) {
    let (beta1, beta2) = (0.9_f32, 0.95_f32);
    let exact = oracle::Step { rate: 3e-3, decay: 0.1, betas: [beta1.into(), beta2.into()], epsilon: 1e-8, number: t };
    let step = Step {
        rate: 3e-3,
        decay: 0.1,
        beta1,
        beta2,
        epsilon: 1e-8,
        correction1: (1.0 / (1.0 - f64::from(beta1).powi(t))) as f32,
        correction2: (1.0 / (1.0 - f64::from(beta2).powi(t)).sqrt()) as f32,
        gradient_scale: 0.5,
    };
    (step, exact)
}

/// Two steps, with another gradient each: the second has moments.
fn run<T: TestElement + Half, G: TestElement + Gradient>(runtime: &Runtime, scenario: Scenario, length: usize) -> Outcome
where
    Adamw<T, G>: Kernel,
{
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Adamw<T, G>>())?;
    let mut random = Random::new(2);
    let start: Vec<f32> = (0..length).map(|_| random.normal()).collect();
    let upload = |values: &[f32]| text(Buffer::from_slice(&stream, values));
    let (mut weights, mut first, mut second) = (upload(&start)?, upload(&vec![0.0; length])?, upload(&vec![0.0; length])?);
    let mut rounded = T::upload(&stream, &vec![f32::NAN; length])?;
    let mut before: Vec<[f64; 3]> = start.iter().map(|&weight| [weight.into(), 0.0, 0.0]).collect();
    for t in 1..=2 {
        let (step, exact) = numbers(t);
        let gradients = scenario.generate(G::DTYPE, length, t as u64);
        let gradient = G::upload(&stream, &gradients)?;
        let args = AdamwArgs {
            gradient: gradient.view(),
            weights: weights.view_mut(),
            first: first.view_mut(),
            second: second.view_mut(),
            rounded: (t == 2).then(|| rounded.view_mut()),
            step,
        };
        text(kernel.launch(&stream, args))?;
        let found = [text(weights.to_vec(&stream))?, text(first.to_vec(&stream))?, text(second.to_vec(&stream))?];
        for i in 0..length {
            let gradient = 0.5 * f64::from(gradients[i]);
            let expected = oracle::step(&exact, before[i], gradient);
            // What is subnormal, squared, is 0 in f32; then the second moment says nothing of the first.
            let is_tiny = gradient != 0.0 && gradient.abs() < 1e-15;
            let bounds = [
                2e-7 * before[i][0].abs() + 3e-3 * 1e-5 + if is_tiny { 1e-2 } else { 0.0 },
                3e-7 * (before[i][1].abs() + gradient.abs()) + 1e-44,
                3e-7 * (before[i][2].abs() + gradient * gradient) + 1e-37,
            ];
            for (part, name) in ["weight", "first moment", "second moment"].into_iter().enumerate() {
                let value = f64::from(found[part][i]);
                if !agrees(value, expected[part], bounds[part]) {
                    return Err(format!("step {t}: {name} {i} is {value:e}, expected {:e} of gradient {gradient:e}", expected[part]));
                }
                before[i][part] = value;
            }
        }
    }
    let expected: Vec<u32> = text(weights.to_vec(&stream))?.into_iter().map(rounded_bits::<T>).collect();
    let found: Vec<u32> = text(rounded.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("rounded", &found, &expected)
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Adamw<bf16, bf16>>())?;
    let gradient = text(Buffer::<bf16>::zeros(&stream, 64))?;
    let floats = || text(Buffer::<f32>::zeros(&stream, 64));
    let (mut weights, mut first, mut second) = (floats()?, floats()?, floats()?);
    let mut refuses = |[start, end]: [u64; 2], moments: u64, expected: &str| {
        let args = AdamwArgs::<bf16, bf16> {
            gradient: gradient.view().slice(start, end),
            weights: weights.view_mut().split_at(end - start).0,
            first: first.view_mut().split_at(moments).0,
            second: second.view_mut().split_at(end - start).0,
            rounded: None,
            step: numbers(1).0,
        };
        match kernel.launch(&stream, args) {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    refuses([1, 33], 32, "`gradient` starts at")?;
    refuses([0, 32], 31, "`first` has 31 elements; the other arguments ask for 32")
}
