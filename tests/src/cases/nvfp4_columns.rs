//! The columnwise NVFP4 cast, the cast in both directions, with and without Hadamard transform and chance, the rowwise one
//! with chance, and the columnwise inverse: against the oracle, bit for bit.

use std::marker::PhantomData;

use oxtile::quantize::nvfp4::Nvfp4Number;
use oxtile::quantize::{Direction, Nvfp4StochasticRows, Nvfp4Tensor, RandomState};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::formats::E2M1;
use oxtile_tests::oracle::nvfp4::{Quantized, dequantize, hadamard, quantize_by, quantize_shared, squares, transpose};
use oxtile_tests::oracle::nvfp4_stochastic::{Generator, round};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, f16};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::nvfp4::{shapes_of_transformer_engine, shuffled_codes};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns: one block, ends of tiles in both dimensions, whole tiles, several tiles, and nothing.
const SHAPES: [(usize, usize); 9] = [(16, 16), (16, 48), (144, 32), (32, 400), (128, 128), (160, 304), (304, 64), (0, 64), (16, 0)];
const LARGE: (usize, usize) = (272, 544);
/// The same, of more tiles.
const MANY_TILES: (usize, usize) = (1040, 1056);
const AMAXES: [f32; 6] = [0.0, 1e-3, 1e6, 1e-38, f32::INFINITY, 1e-45];
const SEED: u64 = 0x1234_5678_9abc_def0;
const OFFSET: u64 = 0xfedc_ba98_7654_3210;

/// The bits of an element's draw.
trait TestRounding: Rounding + 'static {
    const NAME: &str;
    const BITS: u32;

    /// The code of an element's scaled value.
    fn code(columns: bool, element: usize, x: f32) -> u8 {
        match Self::BITS {
            0 => E2M1.encode(f64::from(x)) as u8,
            bits => round(x, Generator { seed: SEED, offset: OFFSET, bits, columns }.number(element)),
        }
    }
}

macro_rules! roundings {
    ($($rounding:ident: $bits:literal;)*) => { $(
        impl TestRounding for $rounding {
            const NAME: &str = stringify!($rounding);
            const BITS: u32 = $bits;
        }
    )* };
}
roundings! { Nearest: 0; Stochastic8: 8; Stochastic16: 16; }

pub fn cases() -> Vec<Case> {
    macro_rules! tiles {
        ($($t:ty, $r:ty, $h:literal;)*) => { [$(of_tile::<$t, $r, $h>()),*] };
    }
    let tiles = tiles! {
        bf16, Nearest, false; f16, Nearest, false; f32, Nearest, false; bf16, Stochastic8, false; bf16, Stochastic16, false;
        bf16, Nearest, true; bf16, Stochastic8, true; bf16, Stochastic16, true;
    };
    let rows =
        [of_rows::<bf16, Stochastic8>(), of_rows::<bf16, Stochastic16>(), of_rows::<f32, Stochastic8>(), of_rows::<f32, Stochastic16>()];
    let squares = [squares_of::<bf16>(), squares_of::<f16>(), squares_of::<f32>()];
    let back = [back_of::<bf16>(), back_of::<f16>(), back_of::<f32>()];
    tiles.into_iter().chain(rows).chain(squares).chain(back).flatten().chain(hadamard_amaxes()).collect()
}

/// A tensor and its amax, or another.
#[derive(Clone, Copy)]
struct Input {
    scenario: Scenario,
    rows: usize,
    columns: usize,
    amax: Option<f32>,
}

impl Input {
    /// Its values as kernels take them.
    fn matrix<T: TestElement>(self, values: &Buffer<T>) -> MatrixArgument<'_, T> {
        MatrixArgument::new(values.view(), [self.rows as u64, self.columns as u64])
    }
}

/// The cases of a kernel; the first of its kind also has the shapes of TransformerEngine.
fn inputs(is_first: bool) -> Vec<(String, Size, Input)> {
    let small = |scenario, amax| Input { scenario, rows: 48, columns: 80, amax };
    let scenarios = Scenario::ALL.map(|scenario| (format!("{scenario:?}"), Size::Small, small(scenario, None)));
    let amaxes = AMAXES.map(|amax| (format!("amax {amax:e}"), Size::Small, small(Scenario::Exponents, Some(amax))));
    let shape =
        |(rows, columns), size| (format!("{rows}x{columns}"), size, Input { scenario: Scenario::Normal, rows, columns, amax: None });
    let shapes = SHAPES.map(|s| shape(s, Size::Small));
    let listed = shapes_of_transformer_engine().filter(|_| is_first).map(|s| shape(s, Size::Large));
    scenarios
        .into_iter()
        .chain(amaxes)
        .chain(shapes)
        .chain([shape(LARGE, Size::Large), shape(MANY_TILES, Size::Twin)])
        .chain(listed)
        .collect()
}

fn of_tile<T: TestElement, R: TestRounding, const HADAMARD: bool>() -> Vec<Case>
where
    Nvfp4CastColumns<T, R, HADAMARD>: Kernel,
    Nvfp4CastBoth<T, R, HADAMARD>: Kernel,
{
    let kind = format!("{}::{}{}", T::DTYPE.name(), R::NAME, if HADAMARD { "::hadamard" } else { "" });
    let case = |kernel: &str, name: &str, size, input, run: fn(&Runtime, Input) -> Outcome| {
        Case::new(format!("nvfp4::{kernel}::{kind}::{name}"), size, move |r| run(r, input))
    };
    let both = |(name, size, input): (String, Size, Input)| {
        let columns = case("cast_columns", &name, size, input, cast_columns::<T, R, HADAMARD>);
        [columns, case("cast_both", &name, size, input, cast_both::<T, R, HADAMARD>)]
    };
    inputs(T::DTYPE == Dtype::Bf16 && R::BITS == 0).into_iter().flat_map(both).collect()
}

fn of_rows<T: TestElement + Nvfp4Number, R: TestRounding>() -> Vec<Case>
where
    Nvfp4CastRowsStochastic<T, R>: Kernel,
{
    let case = |(name, size, input): (String, Size, Input)| {
        Case::new(format!("nvfp4::cast_rows::{}::{}::{name}", T::DTYPE.name(), R::NAME), size, move |r| cast_rows::<T, R>(r, input))
    };
    inputs(false).into_iter().map(case).collect()
}

/// What a cast writes, poisoned, so that an element that is not written shows.
pub(super) struct Output {
    pub data: Buffer<e2m1x2>,
    pub scales: Buffer<e4m3>,
}

impl Output {
    pub fn of(stream: &Stream, elements: usize) -> Result<Self, String> {
        let data = text(Buffer::from_slice(stream, &vec![e2m1x2::from_bits(0xa5); elements / 2]))?;
        Ok(Self { data, scales: text(Buffer::from_slice(stream, &vec![e4m3::from_bits(0xa5); elements / 16]))? })
    }

    fn codes(&mut self) -> CodesArgument<'_, e2m1x2, e4m3> {
        CodesArgument { data: self.data.view_mut(), scales: self.scales.view_mut() }
    }

    pub fn equals(&self, stream: &Stream, direction: &str, expected: &Quantized) -> Outcome {
        let scales: Vec<u8> = text(self.scales.to_vec(stream))?.into_iter().map(e4m3::to_bits).collect();
        let data: Vec<u8> = text(self.data.to_vec(stream))?.into_iter().map(e2m1x2::to_bits).collect();
        equal(&format!("{direction} scales"), &scales, &expected.scales)?;
        equal(&format!("{direction} data"), &data, &expected.data)
    }
}

/// A tensor on the device, its casts by the oracle and what the kernels take beside it.
struct Trial<T> {
    input: Buffer<T>,
    by_rows: Quantized,
    by_columns: Quantized,
    row_amax: Buffer<f32>,
    column_amax: Buffer<f32>,
    offset: Buffer<u64>,
}

impl<T: TestElement> Trial<T> {
    fn new<R: TestRounding>(stream: &Stream, input: Input, transforms: bool) -> Result<Self, String> {
        let values = input.scenario.generate(T::DTYPE, input.rows * input.columns, 3);
        let turned = transpose(&values, input.columns);
        let turned = if transforms { hadamard(&turned) } else { turned };
        let (row_amax, column_amax) = (input.amax.unwrap_or(amax(&values)), input.amax.unwrap_or(amax(&turned)));
        Ok(Self {
            input: T::upload(stream, &values)?,
            by_rows: quantize_by(&values, row_amax, |i, x| R::code(false, i, x)),
            by_columns: quantize_by(&turned, column_amax, |i, x| R::code(true, i, x)),
            row_amax: text(Buffer::from_slice(stream, &[row_amax]))?,
            column_amax: text(Buffer::from_slice(stream, &[column_amax]))?,
            offset: text(Buffer::from_slice(stream, &vec![OFFSET; R::DRAWS as usize]))?,
        })
    }
}

fn cast_columns<T: TestElement, R: TestRounding, const HADAMARD: bool>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastColumns<T, R, HADAMARD>: Kernel,
{
    let stream = stream(r)?;
    let trial = Trial::<T>::new::<R>(&stream, input, HADAMARD)?;
    let mut output = Output::of(&stream, input.rows * input.columns)?;
    let args = Nvfp4CastColumnsArgs {
        input: input.matrix(&trial.input),
        amax: trial.column_amax.view(),
        data: output.data.view_mut(),
        scales: output.scales.view_mut(),
        random: RandomArgument { seed: SEED, offset: Some(trial.offset.view()) },
        marker: PhantomData,
    };
    text(text(r.load::<Nvfp4CastColumns<T, R, HADAMARD>>())?.launch(&stream, args))?;
    output.equals(&stream, "column", &trial.by_columns)
}

fn cast_both<T: TestElement, R: TestRounding, const HADAMARD: bool>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastBoth<T, R, HADAMARD>: Kernel,
{
    let stream = stream(r)?;
    let trial = Trial::<T>::new::<R>(&stream, input, HADAMARD)?;
    let elements = input.rows * input.columns;
    let (mut rows, mut columns) = (Output::of(&stream, elements)?, Output::of(&stream, elements)?);
    let args = Nvfp4CastBothArgs {
        input: input.matrix(&trial.input),
        row_amax: trial.row_amax.view(),
        column_amax: trial.column_amax.view(),
        rows: rows.codes(),
        columns: columns.codes(),
        random: RandomArgument { seed: SEED, offset: Some(trial.offset.view()) },
        marker: PhantomData,
    };
    text(text(r.load::<Nvfp4CastBoth<T, R, HADAMARD>>())?.launch(&stream, args))?;
    rows.equals(&stream, "row", &trial.by_rows)?;
    columns.equals(&stream, "column", &trial.by_columns)
}

fn cast_rows<T: TestElement + Nvfp4Number, R: TestRounding>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastRowsStochastic<T, R>: Kernel,
{
    let stream = stream(r)?;
    let trial = Trial::<T>::new::<R>(&stream, input, false)?;
    let Output { data, scales } = Output::of(&stream, input.rows * input.columns)?;
    let (shape, direction) = ([input.rows as u64, input.columns as u64], Direction::Rows);
    let mut tensor: Nvfp4Tensor = Nvfp4Tensor { data, scales, amax: trial.row_amax, shape, direction };
    let random = RandomState { seed: SEED, offset: trial.offset };
    text(text(Nvfp4StochasticRows::<T, R>::new(r))?.cast(&stream, trial.input.view(), &random, &mut tensor))?;
    Output { data: tensor.data, scales: tensor.scales }.equals(&stream, "row", &trial.by_rows)
}

fn squares_of<T: TestElement>() -> Vec<Case>
where
    Nvfp4CastSquares<T>: Kernel,
{
    let case = |(name, size, input): (String, Size, Input)| {
        Case::new(format!("nvfp4::cast_squares::{}::{name}", T::DTYPE.name()), size, move |r| cast_squares::<T>(r, input))
    };
    inputs(T::DTYPE == Dtype::Bf16).into_iter().map(case).collect()
}

/// The columnwise cast is the transpose of the rowwise one but for its packing: both by the oracle.
fn cast_squares<T: TestElement>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastSquares<T>: Kernel,
{
    let stream = stream(r)?;
    let values = input.scenario.generate(T::DTYPE, input.rows * input.columns, 3);
    let of_squares = squares(&values, input.columns);
    let given = input.amax.unwrap_or(amax(&values));
    let code = |_, x| Nearest::code(false, 0, x);
    let by_rows = quantize_shared(&values, &of_squares, given, code);
    let turned = [&values, &of_squares].map(|x| transpose(x, input.columns));
    let by_columns = quantize_shared(&turned[0], &turned[1], given, code);
    let (wide, given) = (T::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[given]))?);
    let (mut rows, mut columns) = (Output::of(&stream, values.len())?, Output::of(&stream, values.len())?);
    let args = Nvfp4CastSquaresArgs { input: input.matrix(&wide), amax: given.view(), rows: rows.codes(), columns: columns.codes() };
    text(text(r.load::<Nvfp4CastSquares<T>>())?.launch(&stream, args))?;
    rows.equals(&stream, "row", &by_rows)?;
    columns.equals(&stream, "column", &by_columns)
}

fn hadamard_amaxes() -> Vec<Case> {
    let case = |(name, size, input): (String, Size, Input)| {
        Case::new(format!("nvfp4::hadamard_amax::{name}"), size, move |r| {
            let stream = stream(r)?;
            let trial = Trial::<bf16>::new::<Nearest>(&stream, input, true)?;
            let (mut before, mut after) = (text(Buffer::zeros(&stream, 1))?, text(Buffer::zeros(&stream, 1))?);
            let args =
                Nvfp4HadamardAmaxArgs { input: input.matrix(&trial.input), amax: before.view_mut(), transformed_amax: after.view_mut() };
            text(text(r.load::<Nvfp4HadamardAmax>())?.launch(&stream, args))?;
            for (name, found, expected) in [("amax", &before, &trial.row_amax), ("transformed amax", &after, &trial.column_amax)] {
                let bits = |buffer: &Buffer<f32>| Ok::<_, String>(text(buffer.to_vec(&stream))?[0].to_bits());
                equal(name, &[bits(found)?], &[bits(expected)?])?;
            }
            Ok(())
        })
    };
    inputs(false).into_iter().filter(|(_, _, input)| input.amax.is_none()).map(case).collect()
}

fn back_of<T: TestElement>() -> Vec<Case>
where
    Nvfp4DequantizeColumns<T>: Kernel,
{
    let case = |name: String, size, rows, columns, given| {
        Case::new(format!("nvfp4::dequantize_columns::{}::{name}", T::DTYPE.name()), size, move |r| back::<T>(r, rows, columns, given))
    };
    let shapes = SHAPES.map(|shape| (shape, Size::Small)).into_iter().chain([(LARGE, Size::Large), (MANY_TILES, Size::Twin)]);
    let shapes = shapes.map(|((rows, columns), size)| case(format!("{rows}x{columns}"), size, rows, columns, 3.7));
    shapes.chain(AMAXES.map(|amax| case(format!("amax {amax:e}"), Size::Small, 16, 256, amax))).collect()
}

fn back<T: TestElement>(r: &Runtime, rows: usize, columns: usize, amax: f32) -> Outcome
where
    Nvfp4DequantizeColumns<T>: Kernel,
{
    let stream = stream(r)?;
    let mut random = Random::new(5);
    let blocks = rows * columns / 16;
    let quantized = Quantized {
        data: (0..blocks).flat_map(|_| shuffled_codes(&mut random)).collect(),
        scales: (0..blocks).map(|block| block as u8).collect(),
        amax,
    };
    let expected: Vec<u32> = transpose(&dequantize(&quantized), rows).into_iter().map(rounded_bits::<T>).collect();
    let data: Vec<e2m1x2> = quantized.data.iter().map(|&pair| e2m1x2::from_bits(pair)).collect();
    let scales: Vec<e4m3> = quantized.scales.iter().map(|&scale| e4m3::from_bits(scale)).collect();
    let (data, scales) = (text(Buffer::from_slice(&stream, &data))?, text(Buffer::from_slice(&stream, &scales))?);
    let amax = text(Buffer::from_slice(&stream, &[amax]))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; rows * columns])))?;
    let args = Nvfp4DequantizeColumnsArgs {
        data: data.view(),
        scales: scales.view(),
        amax: amax.view(),
        output: output.view_mut(),
        rows: rows as u64,
        columns: columns as u64,
    };
    text(text(r.load::<Nvfp4DequantizeColumns<T>>())?.launch(&stream, args))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)
}
