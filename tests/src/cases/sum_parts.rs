//! Sums of parts, bit for bit: one addition in `f32` after another, rounded once.

use oxtile::Runtime;
use oxtile_kernels::sum_parts::*;
use oxtile_tests::inputs::Scenario;
use oxtile_tile::launch::Kernel;
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
        vec![
            Case::new("sum_parts::f32::bf16::8x1000007", Size::Large, |runtime| run::<f32, bf16>(runtime, problem(8, 1_000_007))),
            Case::new("sum_parts::refused", Size::Small, refused),
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
    vec![
        case("none", problem(0, 19)),
        case("one", problem(1, 4104)),
        case("one_of_negative_zeros", Problem { scenario: Scenario::NegativeZeros, ..problem(1, 16) }),
        case("negative_zeros", Problem { scenario: Scenario::NegativeZeros, ..problem(3, 16) }),
        case("4x2048", problem(4, 2048)),
        case("5x2059", Problem { gap: 5, ..problem(5, 2059) }),
        case("odd_stride", Problem { gap: 1, ..problem(3, 2056) }),
        case("parts_off_boundary", Problem { starts: [1, 0], ..problem(2, 2080) }),
        case("sum_off_boundary", Problem { starts: [0, 1], ..problem(9, 100) }),
        case("empty", problem(3, 0)),
        case("exponents", Problem { scenario: Scenario::Exponents, ..problem(6, 515) }),
        case("infinities", Problem { scenario: Scenario::Infinities, ..problem(4, 264) }),
        case("nans", Problem { scenario: Scenario::Nans, ..problem(2, 80) }),
    ]
}

fn run<In: TestElement + Summed, Out: TestElement + Summed>(runtime: &Runtime, problem: Problem) -> Outcome
where
    SumParts<In, Out>: Kernel,
{
    let Problem { scenario, elements, parts: count, gap, starts: [before, before_sum] } = problem;
    let (stream, stride) = (stream(runtime)?, elements + gap);
    let mut values = scenario.generate(In::DTYPE, before + count * stride, 5);
    // What is not in a part is in no sum.
    values.iter_mut().enumerate().filter(|(i, _)| *i < before || (*i - before) % stride >= elements).for_each(|(_, x)| *x = f32::NAN);
    let parts = In::upload(&stream, &values)?;
    let mut sum = Out::upload(&stream, &vec![7.0; before_sum + elements + 1])?;
    let end = before + count.checked_sub(1).map_or(0, |others| others * stride + elements);
    let args = SumPartsArgs {
        parts: parts.view().slice(before as u64, end as u64),
        sum: sum.view_mut().split_at(before_sum as u64).1.split_at(elements as u64).0,
        count: count as u32,
        stride: stride as u64,
    };
    text(text(runtime.load::<SumParts<In, Out>>())?.launch(&stream, args))?;
    let part = |p: usize| &values[before + p * stride..][..elements];
    let total = |i: usize| (0..count).map(|p| part(p)[i]).reduce(|sum, x| sum + x).unwrap_or(0.0);
    let around = |n: usize| vec![rounded_bits::<Out>(7.0); n];
    let expected = [around(before_sum), (0..elements).map(|i| rounded_bits::<Out>(total(i))).collect(), around(1)].concat();
    let found: Vec<u32> = text(sum.to_vec(&stream))?.into_iter().map(comparable_bits::<Out>).collect();
    equal("sum", &found, &expected)
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
