//! The MXFP8 cast fused with the operations around it: each output against the oracle, bit for bit; sums within their rounding.

use std::marker::PhantomData;

use oxtile::{Buffer, HostElement, Runtime, Stream};
use oxtile_kernels::activation::{Identity, Operation};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::mxfp8::*;
use oxtile_tests::inputs::Scenario;
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::interleave::interleave;
use oxtile_tests::oracle::mxfp8::{quantize, quantize_columns, quantize_squares};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Pod, bf16, e4m3, e5m2, f16, ue8m0};

use super::attention_limits::refuses;
use super::element::TestElement;
use super::mxfp8::{TestFp8, large_of};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns: ends of tiles and of squares in both dimensions, more than a CUDA block, nothing.
const SHAPES: [(usize, usize); 10] = [(1, 16), (16, 48), (65, 80), (1, 32), (33, 72), (130, 8), (64, 520), (17, 160), (0, 64), (5, 0)];
/// Ends of tiles, and whole tiles after many.
const LARGE: [(usize, usize); 2] = [(127, 400), (97, 1056)];
/// The same, of more tiles.
const MANY_TILES: [(usize, usize); 2] = [(993, 512), (256, 4128)];
const OPTIONS: [(&str, u32); 4] = [
    ("plain", 0),
    ("square", SQUARE_BLOCKS),
    ("interleaved", INTERLEAVED_SCALES),
    ("square_interleaved", SQUARE_BLOCKS | INTERLEAVED_SCALES),
];

/// What to ask the kernel for.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub shape: [usize; 2],
    pub options: u32,
    pub rows: bool,
    pub columns: bool,
    /// Sums and the amax.
    pub extras: bool,
    pub skip: Option<f32>,
}

impl Wanted {
    fn all(shape: [usize; 2], options: u32) -> Self {
        Self { shape, options, rows: true, columns: true, extras: true, skip: None }
    }
}

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    let mut cases =
        instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; }.into_iter().flatten().collect::<Vec<_>>();
    cases.push(Case::new("mxfp8::cast_fused::refused", Size::Small, refused));
    cases
}

/// What the kernel for columns alone is not launched with.
fn refused(runtime: &Runtime) -> Outcome {
    type Cast = Mxfp8CastFusedColumns<Identity, bf16, e4m3>;
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<Cast>())?;
    let input = text(Buffer::<bf16>::zeros(&stream, 32 * 64 + 8))?;
    let mut data = text(Buffer::<e4m3>::uninitialised(&stream, 32 * 64))?;
    let mut scales = text(Buffer::<ue8m0>::uninitialised(&stream, 64))?;
    let (mut sums, mut amax) = (text(Buffer::<f32>::zeros(&stream, 66))?, text(Buffer::<f32>::zeros(&stream, 2))?);
    let (mut sums, mut amax, skip) = (sums.view_mut(), amax.view_mut(), text(Buffer::<f32>::zeros(&stream, 2))?);
    let mut launch = |input_from: u64, [from, to]: [u64; 2], amaxes: u64, skips: u64| {
        let input = input.view().slice(input_from, input_from + 32 * 64);
        let args = Mxfp8CastFusedColumnsArgs {
            operands: FusedOperandsArgument { input, gradient: None, rows: 32, columns: 64 },
            data: data.view_mut(),
            scales: scales.view_mut(),
            partial_sums: sums.slice_mut(from, to),
            amax: (amaxes > 0).then(|| amax.slice_mut(0, amaxes)),
            skip: (skips > 0).then(|| skip.view().slice(0, skips)),
            options: 0,
            marker: PhantomData,
        };
        kernel.launch(&stream, args)
    };
    text(launch(0, [0, 64], 1, 1))?;
    text(launch(0, [0, 0], 0, 0))?;
    refuses("partial_sums", launch(0, [0, 63], 1, 1))?;
    refuses("partial_sums", launch(0, [1, 65], 1, 1))?;
    refuses("amax", launch(0, [0, 64], 2, 1))?;
    refuses("skip", launch(0, [0, 64], 1, 2))?;
    refuses("operands.input", launch(1, [0, 64], 1, 1))
}

fn of_types<T: TestElement, Q: TestFp8>() -> Vec<Case>
where
    Mxfp8CastFused<Identity, T, Q>: Kernel,
    Mxfp8CastFusedRows<Identity, T, Q>: Kernel,
    Mxfp8CastFusedColumns<Identity, T, Q>: Kernel,
{
    let name = format!("mxfp8::cast_fused::{}::{}", T::DTYPE.name(), Q::NAME);
    let case = |what: String, size, scenario, wanted: Wanted| {
        Case::new(format!("{name}::{what}"), size, move |runtime| {
            let [rows, columns] = wanted.shape;
            let values = Scenario::generate(scenario, T::DTYPE, rows * columns, 3);
            let input = T::upload(&stream(runtime)?, &values)?;
            check::<Identity, T, Q>(runtime, &input, &empty(runtime)?, &values, wanted)
        })
    };
    // All options once for each width of the input.
    let is_first = large_of::<T, Q>() == Size::Large;
    let mut cases = Vec::new();
    for scenario in Scenario::ALL {
        cases.push(case(format!("{scenario:?}"), Size::Small, scenario, Wanted::all([45, 72], 0)));
        if is_first {
            cases.push(case(format!("square::{scenario:?}"), Size::Small, scenario, Wanted::all([45, 72], SQUARE_BLOCKS)));
        }
    }
    let large = LARGE.map(|s| (s, large_of::<T, Q>())).into_iter().chain(MANY_TILES.map(|s| (s, Size::Twin)));
    for ((rows, columns), size) in SHAPES.map(|s| (s, Size::Small)).into_iter().chain(large) {
        let options = if is_first { &OPTIONS[..] } else { &OPTIONS[3..] };
        for &(what, options) in options {
            cases.push(case(format!("{what}::{rows}x{columns}"), size, Scenario::Normal, Wanted::all([rows, columns], options)));
        }
    }
    let some = Wanted { extras: false, ..Wanted::all([70, 136], INTERLEAVED_SCALES) };
    cases.push(case("rows_alone".into(), Size::Small, Scenario::Normal, Wanted { columns: false, ..some }));
    cases.push(case("columns_alone".into(), Size::Small, Scenario::Normal, Wanted { rows: false, ..some }));
    cases.push(case("not_skipped".into(), Size::Small, Scenario::Normal, Wanted { skip: Some(0.0), ..some }));
    cases.push(case("skipped".into(), Size::Small, Scenario::Normal, Wanted { skip: Some(1.0), ..Wanted::all([70, 136], 0) }));
    cases
}

/// Runs the kernel, where it computes with operands loaded and copied, and those for one direction alone; `values` are those that are cast.
pub fn check<O: Operation, T: TestElement, Q: TestFp8>(
    runtime: &Runtime,
    input: &Buffer<T>,
    gradient: &Buffer<T>,
    values: &[f32],
    wanted: Wanted,
) -> Outcome
where
    Mxfp8CastFused<O, T, Q>: Kernel,
    Mxfp8CastFusedRows<O, T, Q>: Kernel,
    Mxfp8CastFusedColumns<O, T, Q>: Kernel,
{
    let expected = Expected::of::<Q>(values, wanted);
    let given = Given { runtime, input, gradient, wanted, expected };
    let mut sums = Vec::new();
    for operands in if O::COMPUTES { &[0, COPIED_OPERANDS][..] } else { &[0] } {
        sums = cast::<O, T, Q>(&given, wanted.options | operands)?;
    }
    if wanted.columns {
        columns_alone::<O, T, Q>(&given, &sums)?;
    }
    let is_square = wanted.options & SQUARE_BLOCKS != 0;
    if wanted.rows && !is_square { rows_alone::<O, T, Q>(&given) } else { Ok(()) }
}

/// What all three kernels are given, and must write.
struct Given<'a, T> {
    runtime: &'a Runtime,
    input: &'a Buffer<T>,
    gradient: &'a Buffer<T>,
    wanted: Wanted,
    expected: Expected,
}

impl<T: Pod> Given<'_, T> {
    fn operands(&self) -> FusedOperandsArgument<'_, T> {
        let [rows, columns] = self.wanted.shape.map(|side| side as u64);
        let gradient = Some(self.gradient.view()).filter(|gradient| !gradient.is_empty());
        FusedOperandsArgument { input: self.input.view(), gradient, rows, columns }
    }
}

/// Gives the sums.
fn cast<O: Operation, T: TestElement, Q: TestFp8>(given: &Given<'_, T>, options: u32) -> Result<Vec<f32>, String>
where
    Mxfp8CastFused<O, T, Q>: Kernel,
{
    let Given { runtime, wanted, expected, .. } = given;
    let stream = stream(runtime)?;
    let (mut rows, mut columns) = (Coded::<Q>::like(&stream, &expected.rows)?, Coded::<Q>::like(&stream, &expected.columns)?);
    let mut sums = poisoned(&stream, expected.sums.len(), 7.0f32)?;
    let mut amax = poisoned(&stream, usize::from(wanted.extras), 0.0f32)?;
    let skip = text(Buffer::<f32>::from_slice(&stream, wanted.skip.as_slice()))?;
    let args = Mxfp8CastFusedArgs {
        operands: given.operands(),
        rows: rows.codes(),
        columns: columns.codes(),
        partial_sums: sums.view_mut(),
        amax: wanted.extras.then(|| amax.view_mut()),
        skip: wanted.skip.map(|_| skip.view()),
        options,
        marker: PhantomData,
    };
    text(text(runtime.load::<Mxfp8CastFused<O, T, Q>>())?.launch(&stream, args))?;
    rows.equals(&stream, "rows", &expected.rows)?;
    columns.equals(&stream, "columns", &expected.columns)?;
    equal("amax", &text(amax.to_vec(&stream))?, &expected.amax)?;
    let sums = text(sums.to_vec(&stream))?;
    near("sums", &sums, &expected.sums)?;
    Ok(sums)
}

/// The kernel for columns alone writes the same, sums to the bit.
fn columns_alone<O: Operation, T: TestElement, Q: TestFp8>(given: &Given<'_, T>, same_sums: &[f32]) -> Outcome
where
    Mxfp8CastFusedColumns<O, T, Q>: Kernel,
{
    let Given { runtime, wanted, expected, .. } = given;
    let stream = stream(runtime)?;
    let mut columns = Coded::<Q>::like(&stream, &expected.columns)?;
    let mut sums = poisoned(&stream, expected.sums.len(), 7.0f32)?;
    let mut amax = poisoned(&stream, usize::from(wanted.extras), 0.0f32)?;
    let skip = text(Buffer::<f32>::from_slice(&stream, wanted.skip.as_slice()))?;
    let args = Mxfp8CastFusedColumnsArgs {
        operands: given.operands(),
        data: columns.data.view_mut(),
        scales: columns.scales.view_mut(),
        partial_sums: sums.view_mut(),
        amax: wanted.extras.then(|| amax.view_mut()),
        skip: wanted.skip.map(|_| skip.view()),
        options: wanted.options,
        marker: PhantomData,
    };
    text(text(runtime.load::<Mxfp8CastFusedColumns<O, T, Q>>())?.launch(&stream, args))?;
    columns.equals(&stream, "columns alone", &expected.columns)?;
    equal("amax of columns alone", &text(amax.to_vec(&stream))?, &expected.amax)?;
    // Sums near the end of f32 may be NaN, of any sign.
    let bits = |sums: &[f32]| sums.iter().map(|sum| if sum.is_nan() { f32::NAN } else { *sum }.to_bits()).collect::<Vec<_>>();
    equal("bits of the sums of columns alone", &bits(&text(sums.to_vec(&stream))?), &bits(same_sums))
}

/// The kernel for rows alone writes the same.
fn rows_alone<O: Operation, T: TestElement, Q: TestFp8>(given: &Given<'_, T>) -> Outcome
where
    Mxfp8CastFusedRows<O, T, Q>: Kernel,
{
    let Given { runtime, wanted, expected, .. } = given;
    let stream = stream(runtime)?;
    let mut rows = Coded::<Q>::like(&stream, &expected.rows)?;
    let mut amax = poisoned(&stream, usize::from(wanted.extras), 0.0f32)?;
    let skip = text(Buffer::<f32>::from_slice(&stream, wanted.skip.as_slice()))?;
    let args = Mxfp8CastFusedRowsArgs {
        operands: given.operands(),
        data: rows.data.view_mut(),
        scales: rows.scales.view_mut(),
        amax: wanted.extras.then(|| amax.view_mut()),
        skip: wanted.skip.map(|_| skip.view()),
        options: wanted.options,
        marker: PhantomData,
    };
    text(text(runtime.load::<Mxfp8CastFusedRows<O, T, Q>>())?.launch(&stream, args))?;
    rows.equals(&stream, "rows alone", &expected.rows)?;
    equal("amax of rows alone", &text(amax.to_vec(&stream))?, &expected.amax)
}

/// Data and scales of one direction, poisoned before the launch.
struct Coded<Q> {
    data: Buffer<Q>,
    scales: Buffer<ue8m0>,
}

impl<Q: TestFp8> Coded<Q> {
    fn like(stream: &Stream, [data, scales]: &[Vec<u8>; 2]) -> Result<Self, String> {
        let data = poisoned(stream, data.len(), Q::of_code(0xa5))?;
        Ok(Self { data, scales: poisoned(stream, scales.len(), ue8m0::from_bits(0xa5))? })
    }

    fn codes(&mut self) -> CodesArgument<'_, Q, ue8m0> {
        CodesArgument { data: self.data.view_mut(), scales: self.scales.view_mut() }
    }

    fn equals(&self, stream: &Stream, what: &str, [data, scales]: &[Vec<u8>; 2]) -> Outcome {
        equal(&format!("scales of {what}"), &codes(&self.scales, stream, ue8m0::to_bits)?, scales)?;
        equal(&format!("data of {what}"), &codes(&self.data, stream, Q::code)?, data)
    }
}

/// What the kernel must write: data and scales of each direction, nothing for a direction that is left out.
struct Expected {
    rows: [Vec<u8>; 2],
    columns: [Vec<u8>; 2],
    /// Each with how far off it may be.
    sums: Vec<(f64, f64)>,
    amax: Vec<f32>,
}

impl Expected {
    fn of<Q: TestFp8>(x: &[f32], wanted: Wanted) -> Self {
        let [rows, columns] = wanted.shape;
        let (row_blocks, column_blocks) = (rows.div_ceil(32), columns.div_ceil(32));
        let [mut by_rows, mut by_columns] = if wanted.options & SQUARE_BLOCKS != 0 {
            quantize_squares(x, rows, columns, Q::FORMAT)
        } else {
            [quantize(x, rows, columns, Q::FORMAT), quantize_columns(x, rows, columns, Q::FORMAT)]
        };
        if wanted.options & INTERLEAVED_SCALES != 0 {
            by_rows.scales = interleave(rows, column_blocks, |i, j| by_rows.scales[i * column_blocks + j]);
            by_columns.scales = interleave(columns, row_blocks, |i, j| by_columns.scales[j * columns + i]);
        }
        let sum = |at: usize| {
            let (block, column) = (at / columns, at % columns);
            let of_rows = (block * 32..rows.min(block * 32 + 32)).map(|row| f64::from(x[row * columns + column]));
            of_rows.fold((0.0, 0.0), |(sum, size), value| (sum + value, size + value.abs() * 2f64.powi(-20)))
        };
        let extras = if wanted.extras { row_blocks * columns } else { 0 };
        // A launch without elements does not raise the amax, and neither does one that is skipped.
        let largest = if wanted.extras { vec![amax(x)] } else { Vec::new() };
        let expected = Self {
            rows: if wanted.rows { [by_rows.data, by_rows.scales] } else { Default::default() },
            columns: if wanted.columns { [by_columns.data, by_columns.scales] } else { Default::default() },
            sums: (0..extras).map(sum).collect(),
            amax: largest,
        };
        if wanted.skip == Some(1.0) { expected.poisoned() } else { expected }
    }

    /// What was there before the launch.
    fn poisoned(self) -> Self {
        let poison = |codes: Vec<u8>| vec![0xa5; codes.len()];
        Self {
            rows: self.rows.map(poison),
            columns: self.columns.map(poison),
            sums: vec![(7.0, 0.0); self.sums.len()],
            amax: vec![0.0; self.amax.len()],
        }
    }
}

fn near(what: &str, found: &[f32], expected: &[(f64, f64)]) -> Outcome {
    equal(&format!("how many {what}"), &[found.len()], &[expected.len()])?;
    for (i, (&found, &(sum, tolerance))) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found);
        // Near the end of f32 a sum may be Inf or NaN, by its order.
        let is_wild = !sum.is_finite() || tolerance > 1e31;
        if is_wild || (found - sum).abs() <= tolerance {
            continue;
        }
        return Err(format!("{what}[{i}] is {found}, expected {sum} within {tolerance}"));
    }
    Ok(())
}

pub fn empty<T: Pod>(runtime: &Runtime) -> Result<Buffer<T>, String> {
    text(Buffer::uninitialised(&stream(runtime)?, 0))
}

fn poisoned<T: Pod + HostElement<Device = T>>(stream: &Stream, length: usize, value: T) -> Result<Buffer<T>, String> {
    text(Buffer::from_slice(stream, &vec![value; length]))
}

fn codes<T: Pod + HostElement<Device = T>>(buffer: &Buffer<T>, stream: &Stream, code: fn(T) -> u8) -> Result<Vec<u8>, String> {
    Ok(text(buffer.to_vec(stream))?.into_iter().map(code).collect())
}
