//! Softmax cross entropy and its gradient against f64, by every way of reading rows.

use std::marker::PhantomData;

use oxtile::{Buffer, Runtime};
use oxtile_kernels::cross_entropy::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::cross_entropy::row;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Float, Half, bf16, f16};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, agrees, stream, text};

const IGNORED: i32 = -100;

/// What is launched.
#[derive(Clone, Copy)]
struct Problem {
    scenario: Scenario,
    rows: usize,
    width: usize,
    /// Elements by which tensors begin after a multiple of 16 bytes.
    shift: usize,
    smoothing: f32,
    in_place: bool,
}

const fn problem(rows: usize, width: usize) -> Problem {
    Problem { scenario: Scenario::Normal, rows, width, shift: 0, smoothing: 0.0, in_place: false }
}

pub fn cases() -> Vec<Case> {
    // Groups of vectors are of 16384 elements, groups of elements of 4096.
    let vectors = [problem(1, 8), problem(4, 1000), problem(3, 16_384), problem(2, 20_008)];
    let elements = [problem(1, 1), problem(5, 7), problem(2, 4096), problem(3, 4099), Problem { shift: 1, ..problem(3, 512) }];
    [
        of_reading::<bf16, Once>("once", &vectors, problem(4, 50_304)),
        of_reading::<f16, Once>("once", &vectors[1..2], problem(4, 50_304)),
        of_reading::<bf16, Twice>("twice", &vectors, problem(3, 128_256)),
        of_reading::<f16, Twice>("twice", &vectors[1..2], problem(3, 128_256)),
        of_reading::<bf16, Elements>("elements", &elements, problem(3, 50_257)),
        of_reading::<f16, Elements>("elements", &elements[3..], problem(3, 50_257)),
        vec![Case::new("cross_entropy::losses_alone", Size::Small, losses_alone)],
        vec![
            Case::new("cross_entropy::masked::once", Size::Small, |runtime| masked::<Once>(runtime, 8)),
            Case::new("cross_entropy::masked::twice", Size::Small, |runtime| masked::<Twice>(runtime, 8)),
            Case::new("cross_entropy::masked::elements", Size::Small, |runtime| masked::<Elements>(runtime, 4)),
        ],
        vec![Case::new("cross_entropy::refused", Size::Small, refused)],
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn of_reading<T: TestElement + Half, R: Reading>(name: &str, problems: &[Problem], large: Problem) -> Vec<Case>
where
    CrossEntropy<T, R>: Kernel,
{
    let case = |what: String, size, problem: Problem| {
        let name = format!("cross_entropy::{}::{name}::{what}", T::DTYPE.name());
        Case::new(name, size, move |runtime| run::<T, R>(runtime, problem))
    };
    let shape = |problem: &Problem| format!("{}x{}{}", problem.rows, problem.width, if problem.shift > 0 { "_shifted" } else { "" });
    let mut cases: Vec<_> = problems.iter().map(|problem| case(shape(problem), Size::Small, *problem)).collect();
    for scenario in [Scenario::Zeros, Scenario::Nans, Scenario::Infinities, Scenario::Outlier] {
        cases.push(case(format!("{scenario:?}"), Size::Small, Problem { scenario, ..problem(4, 520) }));
    }
    cases.push(case("smoothed".to_owned(), Size::Small, Problem { smoothing: 0.1, ..problem(4, 1000) }));
    cases.push(case("in_place".to_owned(), Size::Small, Problem { in_place: true, ..problem(4, 1000) }));
    cases.push(case(shape(&large), Size::Large, large));
    cases
}

fn run<T: TestElement + Half, R: Reading>(runtime: &Runtime, problem: Problem) -> Outcome
where
    CrossEntropy<T, R>: Kernel,
{
    let Problem { scenario, rows, width, shift, smoothing, in_place } = problem;
    let stream = stream(runtime)?;
    let mut random = Random::new(9);
    let scale = |x: f32| if scenario == Scenario::Normal { T::DTYPE.round(4.0 * x) } else { x };
    let x: Vec<f32> = scenario.generate(T::DTYPE, rows * width, 3).into_iter().map(scale).collect();
    // The last element is a target, one row is ignored, and one has a target that is not there.
    let target = |i: usize| match i {
        0 => width as i32 - 1,
        1 => IGNORED,
        2 => width as i32,
        _ => random.below(width as u64) as i32,
    };
    let targets: Vec<i32> = (0..rows).map(target).collect();
    let upload = |values: &[f32]| T::upload(&stream, &[&vec![7.0; shift], values].concat());
    let (logits, mut gradient) = (upload(&x)?, if in_place { upload(&x)? } else { upload(&vec![f32::NAN; x.len()])? });
    let of_targets = text(Buffer::from_slice(&stream, &targets))?;
    let mut losses = text(Buffer::<f32>::named(&stream, "losses", rows as u64))?;
    let args = CrossEntropyArgs {
        logits: (!in_place).then(|| logits.view().slice(shift as u64, logits.len())),
        gradient: Some(gradient.view_mut().split_at(shift as u64).1),
        targets: of_targets.view(),
        losses: losses.view_mut(),
        width: width as u32,
        rule: Rule { ignored: IGNORED, smoothing, scale: 0.5 },
        marker: PhantomData,
    };
    text(text(runtime.load::<CrossEntropy<T, R>>())?.launch(&stream, args))?;
    let losses = text(losses.to_vec(&stream))?;
    let found: Vec<f64> = text(gradient.to_vec(&stream))?.into_iter().skip(shift).map(|x: T| x.to_f32().into()).collect();
    for i in 0..rows {
        let logits: Vec<f64> = x[i * width..(i + 1) * width].iter().map(|&x| x.into()).collect();
        let (loss, mut expected) = row(&logits, targets[i].max(0) as usize, smoothing.into());
        let loss = match targets[i] {
            IGNORED => 0.0,
            target if target as usize >= width => f64::NAN,
            _ => loss,
        };
        if targets[i] == IGNORED {
            expected.fill(0.0);
        }
        if !agrees(losses[i].into(), loss, loss.abs() * 2e-6 + 4e-6) {
            return Err(format!("the loss of row {i} is {:e}, expected {loss:e}", losses[i]));
        }
        let half_unit = if T::DTYPE == Dtype::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
        for (j, expected) in expected.iter().map(|x| 0.5 * x).enumerate() {
            let found = found[i * width + j];
            // The smallest exponentials are 0 in f32.
            let bound =
                expected.abs() * (half_unit + 8e-6) + 2e-7 * f64::from(u8::from(j as i32 == targets[i])) + f64::from(T::DTYPE.smallest());
            if !agrees(found, expected, bound + 1e-37) {
                return Err(format!("the gradient [{i}, {j}] is {found:e}, expected {expected:e}"));
            }
        }
    }
    Ok(())
}

/// Where something is smoothed, masked logits have no gradient, unless one is the target's.
fn masked<R: Reading>(runtime: &Runtime, width: usize) -> Outcome
where
    CrossEntropy<bf16, R>: Kernel,
{
    let stream = stream(runtime)?;
    let logits: Vec<f32> = (0..2 * width).map(|i| [1.0, 2.0].get(i % width).copied().unwrap_or(f32::NEG_INFINITY)).collect();
    let (logits, targets) = (bf16::upload(&stream, &logits)?, text(Buffer::from_slice(&stream, &[0, 3]))?);
    let mut gradient = bf16::upload(&stream, &vec![f32::NAN; 2 * width])?;
    let mut losses = text(Buffer::<f32>::named(&stream, "losses", 2))?;
    let args = CrossEntropyArgs {
        logits: Some(logits.view()),
        gradient: Some(gradient.view_mut()),
        targets: targets.view(),
        losses: losses.view_mut(),
        width: width as u32,
        rule: Rule { ignored: IGNORED, smoothing: 0.1, scale: 1.0 },
        marker: PhantomData,
    };
    text(text(runtime.load::<CrossEntropy<bf16, R>>())?.launch(&stream, args))?;
    let found = text(gradient.to_vec(&stream))?;
    let (alike, weights) = (0.1 / width as f32, [1.0 / (1.0 + 1_f32.exp()), 1.0 / (1.0 + (-1_f32).exp())]);
    for (i, found) in found.into_iter().map(|x: bf16| x.to_f32()).enumerate() {
        let (target, j) = ([0, 3][i / width], i % width);
        let of_target = if j == target { 0.9 } else { 0.0 };
        let expected = match weights.get(j) {
            Some(weight) => weight - alike - of_target,
            None if j == target => -alike - of_target,
            None => 0.0,
        };
        if (found - expected).abs() > expected.abs() / 128.0 {
            return Err(format!("the gradient [{}, {j}] is {found}, expected {expected}", i / width));
        }
    }
    Ok(())
}

/// Without a gradient the losses are the same.
fn losses_alone(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    // The last row's target has no weight.
    let mut values = Scenario::Zeros.generate(Dtype::Bf16, 4 * 64, 1);
    values[4 * 64 - 1] = f32::NEG_INFINITY;
    let logits = bf16::upload(&stream, &values)?;
    let targets = text(Buffer::from_slice(&stream, &[0, 63, IGNORED, 63]))?;
    let mut losses = text(Buffer::<f32>::named(&stream, "losses", 4))?;
    let args = CrossEntropyArgs {
        logits: Some(logits.view()),
        gradient: None,
        targets: targets.view(),
        losses: losses.view_mut(),
        width: 64,
        rule: Rule { ignored: IGNORED, smoothing: 0.0, scale: 1.0 },
        marker: PhantomData,
    };
    text(text(runtime.load::<CrossEntropy<bf16, Once>>())?.launch(&stream, args))?;
    let losses = text(losses.to_vec(&stream))?;
    let near = |found: f32, expected: f32| (found - expected).abs() < 1e-5;
    let is_right = near(losses[0], 64f32.ln()) && near(losses[1], 64f32.ln()) && losses[2] == 0.0 && losses[3] == f32::INFINITY;
    if is_right { Ok(()) } else { Err(format!("{losses:?}, expected ln(64) twice, 0 and Inf")) }
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<CrossEntropy<bf16, Once>>())?;
    let logits = text(Buffer::<bf16>::zeros(&stream, 1024))?;
    let targets = text(Buffer::<i32>::zeros(&stream, 2))?;
    let mut losses = text(Buffer::<f32>::zeros(&stream, 2))?;
    let mut refuses = |part: Option<[u64; 2]>, width: u32, expected: &str| {
        let args = CrossEntropyArgs {
            logits: part.map(|[start, end]| logits.view().slice(start, end)),
            gradient: None,
            targets: targets.view(),
            losses: losses.view_mut(),
            width,
            rule: Rule { ignored: IGNORED, smoothing: 0.0, scale: 1.0 },
            marker: PhantomData,
        };
        match kernel.launch(&stream, args) {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    refuses(Some([1, 129]), 64, "16-byte aligned: start the view at an aligned element")?;
    refuses(Some([0, 130]), 65, "`width` counts 65, which is not a multiple of 8")?;
    refuses(Some([0, 64]), 64, "`logits` has 64 elements; the other arguments ask for 128")?;
    refuses(Some([0, 128]), 65_536, "`width` counts 65536; this kernel takes at most 57344")?;
    refuses(None, 64, "`logits` has 0 elements; the other arguments ask for 128")
}
