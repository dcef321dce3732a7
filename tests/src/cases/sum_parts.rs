//! Sums of parts, bit for bit: one addition in `f32` after another, rounded once, or scaled and added to a target.

use std::marker::PhantomData;

use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::sum_parts::*;
use oxtile_tests::inputs::Scenario;
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::num::{bf16, f16};

use super::element::{TestElement, comparable_bits, rounded_bits};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// What is launched.
#[derive(Clone, Copy)]
struct Problem {
    scenario: Scenario,
    elements: usize,
    parts: usize,
    /// Elements between parts.
    gap: usize,
    /// Elements before the first part, and before the sum.
    starts: [usize; 2],
}

const fn problem(parts: usize, elements: usize) -> Problem {
    Problem { scenario: Scenario::Normal, elements, parts, gap: 0, starts: [0; 2] }
}

pub fn cases() -> Vec<Case> {
    [
        all::<f32, f32>(),
        all::<f32, bf16>(),
        all::<f32, f16>(),
        all::<bf16, f32>(),
        all::<bf16, bf16>(),
        all::<bf16, f16>(),
        all::<f16, f32>(),
        all::<f16, f16>(),
        all_added::<f32, Kept>(),
        all_added::<bf16, Kept>(),
        all_added::<f32, Zero>(),
        all_added::<bf16, Zero>(),
        problems().map(largest_case).collect(),
        vec![
            Case::new("sum_parts::f32::bf16::8x1000007", Size::Large, |runtime| run::<f32, bf16>(runtime, problem(8, 1_000_007))),
            Case::new("sum_parts::refused", Size::Small, refused),
            Case::new("add_parts::bf16::kept::8x1000007", Size::Large, |runtime| {
                run_added::<bf16, Kept>(runtime, added(problem(8, 1_000_007), 0.125))
            }),
            Case::new("add_parts::bf16::zero::apart_2x1000007", Size::Large, |runtime| {
                run_added::<bf16, Zero>(runtime, Added { apart: Some([1, 0]), ..added(problem(2, 1_000_007), 1.0) })
            }),
            Case::new("add_parts::refused", Size::Small, refused_target),
            Case::new("largest_part::refused", Size::Small, refused_largest),
        ],
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn all<In: TestElement + Summed, Out: TestElement + Summed>() -> Vec<Case>
where
    SumParts<In, Out>: Kernel,
{
    let case = |what: &str, problem| {
        let name = format!("sum_parts::{}::{}::{what}", In::DTYPE.name(), Out::DTYPE.name());
        Case::new(name, Size::Small, move |runtime| run::<In, Out>(runtime, problem))
    };
    problems().map(|(what, problem)| case(what, problem)).collect()
}

/// What is added to a target.
#[derive(Clone, Copy)]
struct Added {
    problem: Problem,
    scale: f32,
    rows: usize,
    /// The number of the part that lies apart, and the elements between its rows.
    apart: Option<[usize; 2]>,
}

const fn added(problem: Problem, scale: f32) -> Added {
    Added { problem, scale, rows: 1, apart: None }
}

/// What a sum is added to.
trait TestBefore: Before {
    const NAME: &'static str;
    /// What it is where the target holds a number.
    fn of_old(old: f32) -> f32;
}

impl TestBefore for Kept {
    const NAME: &'static str = "kept";

    fn of_old(old: f32) -> f32 {
        old
    }
}

impl TestBefore for Zero {
    const NAME: &'static str = "zero";

    fn of_old(_: f32) -> f32 {
        0.0
    }
}

fn all_added<In: TestElement + Summed, B: TestBefore>() -> Vec<Case>
where
    AddParts<In, B>: Kernel,
{
    // One that is exact, one that rounds, one that overflows, and 0.
    let scales = [0.25, 1.0 / 3.0, f32::MAX, 0.0].into_iter().cycle();
    let together = problems().zip(scales).map(|((what, problem), scale)| (what, added(problem, scale)));
    let apart = |parts, rows: usize, width: usize, apart| Added { rows, apart: Some(apart), ..added(problem(parts, rows * width), 0.25) };
    let off_boundary = Problem { starts: [1, 0], ..problem(2, 2080) };
    let of_apart = [
        ("first_apart", apart(4, 1, 2048, [0, 0])),
        ("middle_apart", apart(6, 1, 2059, [3, 0])),
        ("last_apart", apart(5, 1, 4104, [4, 0])),
        ("alone_apart", apart(1, 1, 2056, [0, 0])),
        ("apart_in_rows", apart(3, 4, 2056, [1, 24])),
        ("apart_in_odd_rows", apart(2, 5, 131, [1, 7])),
        ("apart_off_boundary", Added { apart: Some([0, 0]), ..added(off_boundary, 1.0) }),
        ("none_of_rows_apart", apart(2, 0, 16, [1, 8])),
    ];
    let case = |(what, of): (&str, Added)| {
        let name = format!("add_parts::{}::{}::{what}", In::DTYPE.name(), B::NAME);
        Case::new(name, Size::Small, move |runtime| run_added::<In, B>(runtime, of))
    };
    together.chain(of_apart).map(case).collect()
}

fn largest_case((what, problem): (&'static str, Problem)) -> Case {
    Case::new(format!("largest_part::{what}"), Size::Small, move |runtime| run_largest(runtime, problem))
}

fn problems() -> impl Iterator<Item = (&'static str, Problem)> {
    [
        ("none", problem(0, 19)),
        ("one", problem(1, 4104)),
        ("one_of_negative_zeros", Problem { scenario: Scenario::NegativeZeros, ..problem(1, 16) }),
        ("negative_zeros", Problem { scenario: Scenario::NegativeZeros, ..problem(3, 16) }),
        ("4x2048", problem(4, 2048)),
        ("5x2059", Problem { gap: 5, ..problem(5, 2059) }),
        ("odd_stride", Problem { gap: 1, ..problem(3, 2056) }),
        ("parts_off_boundary", Problem { starts: [1, 0], ..problem(2, 2080) }),
        ("sum_off_boundary", Problem { starts: [0, 1], ..problem(9, 100) }),
        ("empty", problem(3, 0)),
        ("exponents", Problem { scenario: Scenario::Exponents, ..problem(6, 515) }),
        ("infinities", Problem { scenario: Scenario::Infinities, ..problem(4, 264) }),
        ("nans", Problem { scenario: Scenario::Nans, ..problem(2, 80) }),
    ]
    .into_iter()
}

fn run<In: TestElement + Summed, Out: TestElement + Summed>(runtime: &Runtime, problem: Problem) -> Outcome
where
    SumParts<In, Out>: Kernel,
{
    let Problem { elements, parts: count, starts: [_, before_sum], .. } = problem;
    let stream = stream(runtime)?;
    let parts = Parts::<In>::new(&stream, problem)?;
    let mut sum = Out::upload(&stream, &vec![7.0; before_sum + elements + 1])?;
    let args = SumPartsArgs {
        parts: parts.view(),
        sum: sum.view_mut().split_at(before_sum as u64).1.split_at(elements as u64).0,
        count: count as u32,
        stride: parts.stride as u64,
    };
    text(text(runtime.load::<SumParts<In, Out>>())?.launch(&stream, args))?;
    let around = |n: usize| vec![rounded_bits::<Out>(7.0); n];
    let expected = [around(before_sum), (0..elements).map(|i| rounded_bits::<Out>(parts.total(i))).collect(), around(1)].concat();
    let found: Vec<u32> = text(sum.to_vec(&stream))?.into_iter().map(comparable_bits::<Out>).collect();
    equal("sum", &found, &expected)
}

fn run_added<In: TestElement + Summed, B: TestBefore>(runtime: &Runtime, of: Added) -> Outcome
where
    AddParts<In, B>: Kernel,
{
    let Added { problem: Problem { scenario, elements, parts: count, starts: [_, before], .. }, scale, rows, apart } = of;
    let stream = stream(runtime)?;
    let parts = Parts::<In>::new(&stream, of.problem)?;
    let width = elements.checked_div(rows).unwrap_or(16);
    // What is among the others in its place is not read.
    let (others, own) = match apart {
        Some([rank, gap]) => (Some(parts.without(&stream, rank)?), Some(parts.rows_of(&stream, rank, width, gap)?)),
        None => (None, None),
    };
    let old = scenario.generate(f32::DTYPE, before + elements + 1, 6);
    let mut target = f32::upload(&stream, &old)?;
    let view = target.view_mut().split_at(before as u64).1.split_at(elements as u64).0;
    let [rank, gap] = apart.unwrap_or([0; 2]);
    let places =
        Places { count: count as u32, rank: rank as u32, stride: parts.stride as u64, width: width as u64, pitch: (width + gap) as u64 };
    let all = others.as_ref().map_or_else(|| parts.view(), |others| others.view());
    let args = AddPartsArgs { parts: all, apart: own.as_ref().map(|own| own.view()), target: view, places, scale, marker: PhantomData };
    text(text(runtime.load::<AddParts<In, B>>())?.launch(&stream, args))?;
    let sum = |(at, old): (usize, &f32)| match at.checked_sub(before).filter(|i| *i < elements) {
        Some(i) => B::of_old(*old) + scale * parts.total(i),
        None => *old,
    };
    let expected: Vec<u32> = old.iter().enumerate().map(sum).map(rounded_bits::<f32>).collect();
    let found: Vec<u32> = text(target.to_vec(&stream))?.into_iter().map(comparable_bits::<f32>).collect();
    equal("target", &found, &expected)
}

/// The largest of parts, NaN left out; -0 is as large as 0.
fn run_largest(runtime: &Runtime, problem: Problem) -> Outcome {
    let Problem { elements, parts: count, starts: [before, before_largest], .. } = problem;
    let stream = stream(runtime)?;
    let parts = Parts::<f32>::new(&stream, problem)?;
    let mut largest = f32::upload(&stream, &vec![7.0; before_largest + elements + 1])?;
    let view = largest.view_mut().split_at(before_largest as u64).1.split_at(elements as u64).0;
    let args = LargestPartArgs { parts: parts.view(), largest: view, count: count as u32, stride: parts.stride as u64 };
    text(text(runtime.load::<LargestPart>())?.launch(&stream, args))?;
    let of = |i: usize| {
        let values = (0..count).map(|p| parts.values[before + p * parts.stride + i]);
        // NaN is larger than nothing.
        values.fold(f32::NEG_INFINITY, |largest, x| if x > largest { x } else { largest })
    };
    let expected = (0..elements).map(of);
    let expected: Vec<f32> = std::iter::repeat_n(7.0, before_largest).chain(expected).chain([7.0]).collect();
    let found = text(largest.to_vec(&stream))?;
    // By value: of 0 and -0 either.
    let bits = |values: &[f32]| values.iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<_>>();
    equal("largest", &bits(&found), &bits(&expected))
}

/// The parts of a problem, on the host and on the device.
struct Parts<In> {
    problem: Problem,
    stride: usize,
    values: Vec<f32>,
    device: Buffer<In>,
}

impl<In: TestElement> Parts<In> {
    fn new(stream: &Stream, problem: Problem) -> Result<Self, String> {
        let Problem { scenario, elements, parts: count, gap, starts: [before, _] } = problem;
        let stride = elements + gap;
        let mut values = scenario.generate(In::DTYPE, before + count * stride, 5);
        // What is not in a part is in no sum.
        values.iter_mut().enumerate().filter(|(i, _)| *i < before || (*i - before) % stride >= elements).for_each(|(_, x)| *x = f32::NAN);
        let device = In::upload(stream, &values)?;
        Ok(Self { problem, stride, values, device })
    }

    fn view(&self) -> DeviceView<'_, In> {
        let Problem { elements, parts: count, starts: [before, _], .. } = self.problem;
        let end = before + count.checked_sub(1).map_or(0, |others| others * self.stride + elements);
        self.device.view().slice(before as u64, end as u64)
    }

    /// The elements of a part.
    fn part(&self, number: usize) -> &[f32] {
        let start = self.problem.starts[0] + number * self.stride;
        &self.values[start..start + self.problem.elements]
    }

    /// All parts but one, at the same distance.
    fn without(&self, stream: &Stream, rank: usize) -> Result<Buffer<In>, String> {
        let others = (0..self.problem.parts).filter(|number| *number != rank);
        let padded = |number| [self.part(number), &vec![f32::NAN; self.problem.gap]].concat();
        In::upload(stream, &others.flat_map(padded).collect::<Vec<_>>())
    }

    /// Rows of a part, with others of NaN between them.
    fn rows_of(&self, stream: &Stream, rank: usize, width: usize, gap: usize) -> Result<Buffer<In>, String> {
        let rows = self.part(rank).chunks(width).map(|row| [row, &vec![f32::NAN; gap]].concat());
        In::upload(stream, &rows.collect::<Vec<_>>().concat())
    }

    /// The sum of element `i` of all parts, in their order.
    fn total(&self, i: usize) -> f32 {
        let of_part = |p: usize| self.values[self.problem.starts[0] + p * self.stride + i];
        (0..self.problem.parts).map(of_part).reduce(|sum, x| sum + x).unwrap_or(0.0)
    }
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let parts = f32::upload(&stream, &[1.0; 64])?;
    let mut sum = f32::upload(&stream, &[0.0; 16])?;
    let kernel = text(runtime.load::<SumParts<f32, f32>>())?;
    let mut refuses = |count: u32, stride: u64, expected: &str| {
        let args = SumPartsArgs { parts: parts.view(), sum: sum.view_mut(), count, stride };
        match kernel.launch(&stream, args) {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    refuses(2, 15, "`stride` counts 15; this kernel needs at least 16")?;
    refuses(4, 17, "`parts` counts 64; this kernel needs at least 67")?;
    refuses(u32::MAX, 16, "`count` counts 4294967295; this kernel takes at most 2147483647")?;
    refuses(3, u64::MAX, "`parts` counts 64; this kernel needs at least 18446744073709551615")
}

/// The same of what is added to a target.
fn refused_target(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let parts = bf16::upload(&stream, &[1.0; 64])?;
    let mut target = f32::upload(&stream, &[0.0; 16])?;
    let kernel = text(runtime.load::<AddParts<bf16, Kept>>())?;
    let mut refuses = |apart: Option<u64>, places: Places, expected: &str| {
        let apart = apart.map(|elements| parts.view().slice(0, elements));
        let args = AddPartsArgs { parts: parts.view(), apart, target: target.view_mut(), places, scale: 1.0, marker: PhantomData };
        match kernel.launch(&stream, args) {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    let places = Places { count: 2, rank: 0, stride: 16, width: 16, pitch: 0 };
    refuses(None, Places { stride: 15, ..places }, "`stride` counts 15; this kernel needs at least 16")?;
    refuses(None, Places { count: 4, stride: 17, ..places }, "`parts` counts 64; this kernel needs at least 67")?;
    refuses(Some(16), Places { count: 6, ..places }, "`parts` counts 64; this kernel needs at least 80")?;
    refuses(Some(16), Places { rank: 2, ..places }, "`rank` counts 3; this kernel takes at most 2")?;
    refuses(Some(15), places, "`apart` counts 15; this kernel needs at least 16")?;
    refuses(Some(19), Places { width: 8, pitch: 12, ..places }, "`apart` counts 19; this kernel needs at least 20")?;
    refuses(Some(16), Places { width: 3, ..places }, "`target`")
}

/// The same of the largest.
fn refused_largest(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let parts = f32::upload(&stream, &[1.0; 64])?;
    let mut largest = f32::upload(&stream, &[0.0; 16])?;
    let kernel = text(runtime.load::<LargestPart>())?;
    let mut refuses = |count: u32, stride: u64, expected: &str| match kernel
        .launch(&stream, LargestPartArgs { parts: parts.view(), largest: largest.view_mut(), count, stride })
    {
        Err(error) if error.to_string().contains(expected) => Ok(()),
        Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
        Ok(()) => Err(format!("launched, expected `{expected}`")),
    };
    refuses(2, 15, "`stride` counts 15; this kernel needs at least 16")?;
    refuses(4, 17, "`parts` counts 64; this kernel needs at least 67")
}
