//! What a step of a ring adds to log-sum-exps, results and gradients: bit for bit where nothing is approximate, else against f64.

use oxtile::comm::WorldSize;
use oxtile::num::{bf16, f16};
use oxtile::thd::{
    AddedTo, Corrected, GradientCorrection, GradientElement, GradientHalves, Half, HeadRows, LogSumExps, OutCorrection, Part, Partition,
};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::sum_parts::Summed;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::thd::{Shared, StepRow};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::thd_rows::of_lengths;
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

const HEADS: usize = 3;
/// Ranks.
const WORLD: u32 = 2;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (layout, is_packed) in [("packed", true), ("padded", false)] {
        cases.push(Case::new(format!("thd::lse_read_half::{layout}"), Size::Small, move |runtime| lse_read_half(runtime, is_packed)));
        for (name, part) in [("whole", Part::Whole), ("early", Part::Early), ("late", Part::Late)] {
            cases.push(Case::new(format!("thd::lse_correct::{layout}::{name}"), Size::Small, move |runtime| {
                lse_correct(runtime, is_packed, part)
            }));
            cases.push(Case::new(format!("thd::out_correct::{layout}::{name}"), Size::Small, move |runtime| {
                out_correct::<f32, f32>(runtime, is_packed, part, 8)?;
                out_correct::<f32, bf16>(runtime, is_packed, part, 64)?;
                out_correct::<f32, f16>(runtime, is_packed, part, 96)?;
                out_correct::<bf16, bf16>(runtime, is_packed, part, 128)?;
                out_correct::<f16, f16>(runtime, is_packed, part, 16)
            }));
        }
    }
    cases.push(Case::new("thd::grad_correct::f32", Size::Small, grad_correct::<f32>));
    cases.push(Case::new("thd::grad_correct::bf16", Size::Small, grad_correct::<bf16>));
    cases.push(Case::new("thd::grad_correct::f16", Size::Small, grad_correct::<f16>));
    cases.push(Case::new("thd::correct::garbage", Size::Large, garbage));
    cases.push(Case::new("thd::correct::refused", Size::Small, refused));
    cases
}

fn world() -> WorldSize {
    WorldSize::new(WORLD).expect("a world has ranks")
}

fn of_part(part: Part) -> Option<bool> {
    match part {
        Part::Whole => None,
        Part::Early => Some(false),
        Part::Late => Some(true),
    }
}

/// Sequences, the rows of a step of them, and the sizes of numbers a row and head.
struct Problem {
    shared: Shared,
    step: Vec<StepRow>,
    rows: HeadRows,
    offsets: Buffer<u32>,
}

impl Problem {
    fn new(stream: &Stream, is_packed: bool, part: Part) -> Result<Self, String> {
        let shared = of_lengths(Partition::Zigzag, WORLD);
        let (all, step) = (shared.step_rows(None), shared.step_rows(of_part(part)));
        // One row more than there are, of which nothing is read.
        let of_longest = |rows: &[StepRow], within: fn(&StepRow) -> usize| rows.iter().map(within).max().unwrap_or(0) + 2;
        let [rows, step_rows] = if is_packed {
            [all.len() + 3, step.len() + 1]
        } else {
            [of_longest(&all, |row| row.within), of_longest(&step, |row| row.within_step)]
        };
        let rows = HeadRows { heads: HEADS as u32, rows: rows as u32, step_rows: step_rows as u32, is_packed };
        let offsets = text(Buffer::from_slice(stream, &shared.sums()[1]))?;
        Ok(Self { shared, step, rows, offsets })
    }

    /// Elements of the rank's numbers, and of the step's.
    fn elements(&self) -> [usize; 2] {
        let tensors = if self.rows.is_packed { 1 } else { self.shared.lengths.len() };
        [self.rows.rows, self.rows.step_rows].map(|rows| tensors * HEADS * rows as usize)
    }

    /// Where the number of a head is in both tensors, of each row of the step.
    fn places(&self, head: usize, (number, row): (usize, &StepRow)) -> [usize; 2] {
        let [rows, step_rows] = [self.rows.rows as usize, self.rows.step_rows as usize];
        if self.rows.is_packed {
            [head * rows + row.row, head * step_rows + number]
        } else {
            let first = row.sequence * HEADS + head;
            [first * rows + row.within, first * step_rows + row.within_step]
        }
    }
}

fn numbers(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| 3.0 * random.normal()).collect()
}

fn lse_read_half(runtime: &Runtime, is_packed: bool) -> Outcome {
    let (stream, mut random) = (stream(runtime)?, Random::new(1));
    let kernel = text(LogSumExps::new(runtime, world()))?;
    for (which, part) in [(Half::Early, Part::Early), (Half::Late, Part::Late)] {
        let problem = Problem::new(&stream, is_packed, part)?;
        let [elements, of_half] = problem.elements();
        let whole = numbers(&mut random, elements);
        let mut expected = vec![7.0; of_half];
        for head in 0..HEADS {
            for row in problem.step.iter().enumerate() {
                let [from, to] = problem.places(head, row);
                expected[to] = whole[from];
            }
        }
        let (whole, mut half) = (text(Buffer::from_slice(&stream, &whole))?, text(Buffer::from_slice(&stream, &vec![7.0_f32; of_half]))?);
        text(kernel.read_half(&stream, problem.offsets.view(), which, whole.view(), half.view_mut(), problem.rows))?;
        equal("half", &text(half.to_vec(&stream))?, &expected)?;
    }
    Ok(())
}

fn lse_correct(runtime: &Runtime, is_packed: bool, part: Part) -> Outcome {
    let (stream, mut random) = (stream(runtime)?, Random::new(2));
    let problem = Problem::new(&stream, is_packed, part)?;
    let [before, step] = problem.elements().map(|count| {
        let mut numbers = numbers(&mut random, count);
        // Rows that saw nothing, here or there or in both.
        numbers.iter_mut().filter(|_| random.below(4) == 0).for_each(|x| *x = f32::NEG_INFINITY);
        numbers
    });
    let mut expected: Vec<f64> = before.iter().map(|&x| x.into()).collect();
    for head in 0..HEADS {
        for row in problem.step.iter().enumerate() {
            let [to, from] = problem.places(head, row);
            expected[to] = (f64::from(before[to]).exp() + f64::from(step[from]).exp()).ln();
        }
    }
    let (mut whole, step) = (text(Buffer::from_slice(&stream, &before))?, text(Buffer::from_slice(&stream, &step))?);
    let kernel = text(LogSumExps::new(runtime, world()))?;
    text(kernel.correct(&stream, problem.offsets.view(), part, whole.view_mut(), step.view(), problem.rows))?;
    for (i, (found, expected)) in text(whole.to_vec(&stream))?.into_iter().zip(expected).enumerate() {
        if !agrees(found.into(), expected, 2e-6 * (1.0 + expected.abs())) {
            return Err(format!("whole[{i}] is {found:e}, expected {expected:e}"));
        }
    }
    Ok(())
}

fn out_correct<Out: TestElement + Summed, Step: TestElement + AddedTo<Out>>(
    runtime: &Runtime,
    is_packed: bool,
    part: Part,
    size: usize,
) -> Outcome {
    let (stream, mut random) = (stream(runtime)?, Random::new(3));
    let problem = Problem::new(&stream, is_packed, part)?;
    let [elements, step_elements] = problem.elements();
    let (mut lse, mut step_lse) = (numbers(&mut random, elements), numbers(&mut random, step_elements));
    let width = HEADS * size;
    let rows = (problem.shared.rows() + problem.shared.tail) / WORLD as usize;
    let before = Scenario::Normal.generate(Out::DTYPE, rows * width, 5);
    let mut step = Scenario::Normal.generate(Step::DTYPE, (problem.step.len() + 1) * width, 6);
    let mut expected: Vec<[f64; 2]> = before.iter().map(|&x| [x.into(), f64::from(x).abs()]).collect();
    for head in 0..HEADS {
        for row in problem.step.iter().enumerate() {
            let [at, of_step] = problem.places(head, row);
            // A row that saw no key so far, in any step: its weight is NaN, its result is 0.
            let saw_nothing = row.0 % 5 == head;
            if saw_nothing {
                [lse[at], step_lse[of_step]] = [f32::NEG_INFINITY; 2];
            }
            let weight = (f64::from(step_lse[of_step]) - f64::from(lse[at])).exp();
            for i in 0..size {
                let from = row.0 * width + head * size + i;
                if saw_nothing {
                    step[from] = 0.0;
                } else {
                    let (sum, added) = (&mut expected[row.1.row * width + head * size + i], f64::from(step[from]) * weight);
                    *sum = [sum[0] + added, sum[1] + added.abs()];
                }
            }
        }
    }
    let of = |numbers: &[f32]| text(Buffer::from_slice(&stream, numbers));
    let (lse, step_lse, step, mut out) = (of(&lse)?, of(&step_lse)?, Step::upload(&stream, &step)?, Out::upload(&stream, &before)?);
    let kernel = text(OutCorrection::<Out, Step>::new(runtime, world()))?;
    let tensors = Corrected { out: out.view_mut(), step: step.view(), lse: lse.view(), step_lse: step_lse.view() };
    text(kernel.run(&stream, problem.offsets.view(), part, tensors, problem.rows, size as u32))?;
    let rounding = match Out::DTYPE {
        Dtype::F32 => 0.0,
        Dtype::F16 => 2f64.powi(-11),
        Dtype::Bf16 => 2f64.powi(-8),
    };
    for (i, (found, [expected, magnitude])) in text(out.to_vec(&stream))?.into_iter().zip(expected).enumerate() {
        let found: f64 = found.to_f32().into();
        if !agrees(found, expected, expected.abs() * rounding + 6e-6 * magnitude) {
            return Err(format!("row {}, element {} is {found:e}, expected {expected:e}", i / width, i % width));
        }
    }
    Ok(())
}

fn grad_correct<T: TestElement + GradientElement>(runtime: &Runtime) -> Outcome {
    const GROUPS: usize = 2;
    const WIDTH: usize = 264;
    let stream = stream(runtime)?;
    let kernel = text(GradientCorrection::<T>::new(runtime, world()))?;
    let add = |before: f32, step: f32| before + step;
    let copy = |_: f32, step: f32| step;
    type Rule = fn(f32, f32) -> f32;
    // Of each the half that the step has, and what it does to the early and the late one.
    let rules: [(GradientHalves, Option<bool>, Rule, Rule); 6] = [
        (GradientHalves::AddEarly, Some(false), add, add),
        (GradientHalves::CopyEarly, Some(false), copy, copy),
        (GradientHalves::AddLate, Some(true), add, add),
        (GradientHalves::CopyLate, Some(true), copy, copy),
        (GradientHalves::AddEarlyCopyLate, None, add, copy),
        (GradientHalves::CopyEarlyAddLate, None, copy, add),
    ];
    for (halves, late, early_rule, late_rule) in rules {
        let shared = Shared { tail: 2 * WORLD as usize, ..of_lengths(Partition::Zigzag, WORLD) };
        let rows = (shared.rows() + shared.tail) / WORLD as usize;
        let step_rows = if late.is_some() { rows / 2 } else { rows };
        let before = Scenario::Normal.generate(T::DTYPE, GROUPS * rows * WIDTH, 7);
        let step = Scenario::Normal.generate(T::DTYPE, GROUPS * step_rows * WIDTH, 8);
        let mut expected = before.clone();
        for group in 0..GROUPS {
            for (number, row) in shared.step_rows(late).into_iter().enumerate() {
                let rule = if row.is_late { late_rule } else { early_rule };
                for i in 0..WIDTH {
                    let at = (group * rows + row.row) * WIDTH + i;
                    expected[at] = rule(before[at], step[(group * step_rows + number) * WIDTH + i]);
                }
            }
        }
        let offsets = text(Buffer::from_slice(&stream, &shared.sums()[1]))?;
        let (mut gradient, step) = (T::upload(&stream, &before)?, T::upload(&stream, &step)?);
        text(kernel.run(&stream, offsets.view(), halves, gradient.view_mut(), step.view(), [step_rows as u64, WIDTH as u64]))?;
        let found: Vec<u32> = text(gradient.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
        let expected: Vec<u32> = expected.into_iter().map(rounded_bits::<T>).collect();
        equal("gradient", &found, &expected).map_err(|why| format!("{halves:?}: {why}"))?;
    }
    Ok(())
}

/// Whatever `cu_seqlens_padded` hold, nothing outside the tensors is read or written. Rows may meet there, which checks would report as a race.
fn garbage(runtime: &Runtime) -> Outcome {
    const ROWS: u32 = 20;
    let (stream, mut random) = (stream(runtime)?, Random::new(4));
    for round in 0..6 {
        let offsets: Vec<u32> = (0..9).map(|_| random.below([40, 1 << 32, 1 << 30][round % 3]) as u32).collect();
        let offsets = text(Buffer::from_slice(&stream, &offsets))?;
        for (part, halves) in [(Part::Whole, GradientHalves::AddEarlyCopyLate), (Part::Late, GradientHalves::AddLate)] {
            let step_rows = if part == Part::Whole { ROWS } else { ROWS / 2 };
            for is_packed in [true, false] {
                let rows = HeadRows { heads: 2, rows: ROWS, step_rows, is_packed };
                let tensors = if is_packed { 1 } else { 8 };
                let [whole, of_step] = [ROWS, step_rows].map(|rows| vec![1.0_f32; (tensors * 2 * rows) as usize]);
                let (mut lse, step_lse) = (text(Buffer::from_slice(&stream, &whole))?, text(Buffer::from_slice(&stream, &of_step))?);
                let kernel = text(LogSumExps::new(runtime, world()))?;
                text(kernel.correct(&stream, offsets.view(), part, lse.view_mut(), step_lse.view(), rows))?;
                let mut out = text(Buffer::<f32>::zeros(&stream, u64::from(ROWS) * 2 * 16))?;
                let step = text(Buffer::<f32>::zeros(&stream, u64::from(step_rows) * 2 * 16))?;
                let tensors = Corrected { out: out.view_mut(), step: step.view(), lse: lse.view(), step_lse: step_lse.view() };
                text(text(OutCorrection::<f32, f32>::new(runtime, world()))?.run(&stream, offsets.view(), part, tensors, rows, 16))?;
                let kernel = text(GradientCorrection::<f32>::new(runtime, world()))?;
                text(kernel.run(&stream, offsets.view(), halves, out.view_mut(), step.view(), [step_rows.into(), 32]))?;
                text(stream.synchronize())?;
            }
        }
    }
    Ok(())
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let offsets = text(Buffer::from_slice(&stream, &[0_u32, 8]))?;
    let (step, mut gradient) = (text(Buffer::<bf16>::zeros(&stream, 64))?, text(Buffer::<bf16>::zeros(&stream, 128))?);
    let refused = |result: oxtile::Result<()>, expected: &str| match result {
        Err(error) if error.to_string().contains(expected) => Ok(()),
        Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
        Ok(()) => Err(format!("launched, expected `{expected}`")),
    };
    let kernel = text(GradientCorrection::<bf16>::new(runtime, world()))?;
    let mut run = |halves, extent, expected: &str| {
        refused(kernel.run(&stream, offsets.view(), halves, gradient.view_mut(), step.view(), extent), expected)
    };
    run(GradientHalves::AddLate, [16, 4], "`width` counts 4, which is not a multiple of 8")?;
    run(GradientHalves::AddEarlyCopyLate, [8, 8], "`gradient` has 128 elements; the other arguments ask for 64")?;
    run(GradientHalves::AddLate, [3, 16], "`step` has 64 elements; the other arguments ask for 48")?;
    let (whole, mut half) = (text(Buffer::<f32>::zeros(&stream, 16))?, text(Buffer::<f32>::zeros(&stream, 8))?);
    let kernel = text(LogSumExps::new(runtime, world()))?;
    let rows = HeadRows { heads: 4, rows: 4, step_rows: 3, is_packed: true };
    refused(
        kernel.read_half(&stream, offsets.view(), Half::Late, whole.view(), half.view_mut(), rows),
        "`part` has 8 elements; the other arguments ask for 12",
    )
}
