//! Rotary position embedding against f64: both pairings, tensors with strides, in place, forward and back.

use std::marker::PhantomData;

use oxtile::{Buffer, Runtime};
use oxtile_kernels::rotary::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::rotary::turn;
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Half, bf16, f16};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, agrees, stream, text};

/// What is launched.
#[derive(Clone, Copy)]
struct Problem {
    scenario: Scenario,
    /// Batches, rows, heads and the size of a head.
    shape: [u32; 4],
    /// Heads of others between those of a row, and elements between those of a head's rows.
    gap: u32,
    in_place: bool,
    turn: f32,
}

const fn problem(shape: [u32; 4]) -> Problem {
    Problem { scenario: Scenario::Normal, shape, gap: 0, in_place: false, turn: 1.0 }
}

pub fn cases() -> Vec<Case> {
    [of_pairing::<bf16, Halves>("halves"), of_pairing::<f16, Halves>("halves"), of_pairing::<bf16, Neighbours>("neighbours")]
        .into_iter()
        .flatten()
        .chain([of_pairing::<f16, Neighbours>("neighbours").swap_remove(0), Case::new("rotary::refused", Size::Small, refused)])
        .collect()
}

fn of_pairing<T: TestElement + Half, P: Pairing>(name: &str) -> Vec<Case>
where
    Rotary<T, P>: Kernel,
{
    let case = |what: &str, size, problem| {
        Case::new(format!("rotary::{}::{name}::{what}", T::DTYPE.name()), size, move |runtime| run::<T, P>(runtime, problem))
    };
    vec![
        case("2x5x3x64", Size::Small, problem([2, 5, 3, 64])),
        case("one_row", Size::Small, problem([1, 1, 1, 16])),
        case("1x7x2x80", Size::Small, problem([1, 7, 2, 80])),
        case("empty", Size::Small, problem([1, 0, 2, 64])),
        case("with_gaps", Size::Small, Problem { gap: 2, ..problem([2, 5, 3, 32]) }),
        case("in_place", Size::Small, Problem { in_place: true, gap: 1, ..problem([2, 3, 3, 48]) }),
        case("back", Size::Small, Problem { turn: -1.0, ..problem([1, 9, 2, 128]) }),
        case("nans", Size::Small, Problem { scenario: Scenario::Nans, ..problem([1, 3, 2, 64]) }),
        case("infinities", Size::Small, Problem { scenario: Scenario::Infinities, ..problem([1, 3, 2, 64]) }),
        case("2x100x8x128", Size::Large, problem([2, 100, 8, 128])),
    ]
}

fn run<T: TestElement + Half, P: Pairing>(runtime: &Runtime, problem: Problem) -> Outcome
where
    Rotary<T, P>: Kernel,
{
    let Problem { scenario, shape: [batches, rows, heads, size], gap, in_place, turn: way } = problem;
    let stream = stream(runtime)?;
    let row = u64::from((heads + gap) * size);
    let strides = |row: u64| Strides { batch: row * u64::from(rows), row, head: size.into() };
    let elements = (u64::from(batches * rows) * row) as usize;
    let x = scenario.generate(T::DTYPE, elements, 3);
    let mut random = Random::new(6);
    let half = size as usize / 2;
    let angles: Vec<(f32, f32)> =
        (0..rows as usize * half).map(|_| (6.0 * random.unit()).sin_cos()).map(|(sine, cosine)| (cosine, sine)).collect();
    let table = |of: fn(&(f32, f32)) -> f32| text(Buffer::from_slice(&stream, &angles.iter().map(of).collect::<Vec<f32>>()));
    let (cosines, sines) = (table(|angle| angle.0)?, table(|angle| angle.1)?);
    let input = T::upload(&stream, &x)?;
    // In place the output has the input, with its gaps; else none.
    let packed = u64::from(heads * size);
    let of_output = if in_place { row } else { packed };
    let mut output =
        if in_place { T::upload(&stream, &x)? } else { T::upload(&stream, &vec![7.0; (u64::from(batches * rows) * packed) as usize])? };
    let args = RotaryArgs {
        input: (!in_place).then(|| input.view()),
        input_strides: strides(row),
        output: output.view_mut(),
        strides: strides(of_output),
        angles: AnglesArgument { cosines: cosines.view(), sines: sines.view() },
        sizes: Sizes { batches, rows, heads, size },
        turn: way,
        marker: PhantomData,
    };
    text(text(runtime.load::<Rotary<T, P>>())?.launch(&stream, args))?;
    let found: Vec<f64> = text(output.to_vec(&stream))?.into_iter().map(|x: T| x.to_f32().into()).collect();
    let wide = |x: &f32| f64::from(*x);
    let is_halves = std::any::type_name::<P>().ends_with("Halves");
    let pair = |i: usize| if is_halves { [i, i + half] } else { [2 * i, 2 * i + 1] };
    for number in 0..(batches * rows) as usize {
        let of_row = number % rows as usize * half;
        let angles: Vec<(f64, f64)> = angles[of_row..of_row + half].iter().map(|(c, s)| (wide(c), wide(s) * f64::from(way))).collect();
        for head in 0..(heads + if in_place { gap } else { 0 }) as usize {
            let start = number * row as usize + head * size as usize;
            let x: Vec<f64> = x[start..start + size as usize].iter().map(wide).collect();
            // Heads of the gap stay as they were.
            let expected = if head < heads as usize { turn(&x, &angles, pair) } else { x.clone() };
            for (j, &expected) in expected.iter().enumerate() {
                let at = number * of_output as usize + head * size as usize + j;
                let half_unit = if T::DTYPE == Dtype::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
                let largest = x.iter().filter(|x| x.is_finite()).fold(0.0, |largest: f64, x| largest.max(x.abs()));
                let bound = expected.abs() * half_unit + 3e-7 * largest + f64::from(T::DTYPE.smallest());
                if !agrees(found[at], expected, bound) {
                    return Err(format!("row {number}, head {head}, element {j} is {:e}, expected {expected:e}", found[at]));
                }
            }
        }
    }
    Ok(())
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Rotary<bf16, Halves>>())?;
    let input = text(Buffer::<bf16>::zeros(&stream, 1024))?;
    let mut output = text(Buffer::<bf16>::zeros(&stream, 1024))?;
    let table = text(Buffer::<f32>::zeros(&stream, 1024))?;
    let mut refuses = |start: u64, size: u32, head: u64, angles: u64, expected: &str| {
        let args = RotaryArgs {
            input: Some(input.view().slice(start, 512 + start)),
            input_strides: Strides { batch: 0, row: 256, head },
            output: output.view_mut(),
            strides: Strides { batch: 0, row: 256, head: 64 },
            angles: AnglesArgument { cosines: table.view().slice(0, angles), sines: table.view().slice(0, angles) },
            sizes: Sizes { batches: 1, rows: 2, heads: 4, size },
            turn: 1.0,
            marker: PhantomData,
        };
        match kernel.launch(&stream, args) {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    refuses(1, 64, 64, 64, "`input` starts at")?;
    refuses(0, 72, 64, 72, "`sizes.size` counts 72, which is not a multiple of 16")?;
    refuses(0, 64, 68, 64, "`input_strides` counts 68, which is not a multiple of 8")?;
    refuses(0, 64, 72, 64, "`input` counts 512; this kernel needs at least 536")?;
    refuses(0, 64, 64, 63, "`angles.cosines` has 63 elements; the other arguments ask for 64")
}
