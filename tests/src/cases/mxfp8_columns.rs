//! The columnwise MXFP8 cast, the one in both directions and the columnwise inverse against the oracle, bit for bit.

use oxtile::quantize::mxfp8::Mxfp8Number;
use oxtile::{Buffer, Runtime, Stream};
use oxtile_kernels::codes::CodesArgument;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::mxfp8::*;
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle::mxfp8::{Quantized, dequantize_columns, quantize, quantize_columns};
use oxtile_tile::num::{bf16, e4m3, e5m2, f16, ue8m0};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::mxfp8::{TestFp8, sized};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns: one row, one column, ends of tiles in both dimensions, whole tiles, more than a CUDA block, no whole
/// vectors, and nothing. TransformerEngine's list among them.
const SHAPES: [(usize, usize); 15] = [
    (1, 1024),
    (128, 128),
    (1, 32),
    (32, 64),
    (33, 72),
    (17, 32),
    (64, 520),
    (65, 80),
    (31, 8),
    (1, 16),
    (16, 48),
    (40, 1),
    (33, 65),
    (0, 64),
    (4, 0),
];
const LARGE: [(usize, usize); 3] = [(993, 512), (127, 400), (127, 4001)];

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; }.into_iter().flatten().collect()
}

fn of_types<T: TestElement + Mxfp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let name = format!("{}::{}", T::DTYPE.name(), Q::NAME);
    let mut cases = Vec::new();
    for scenario in Scenario::ALL {
        let case = |kernel, run: fn(&Runtime, Scenario, usize, usize) -> Outcome| {
            let name = format!("mxfp8::{kernel}::{name}::{scenario:?}");
            Case::new(name, Size::Small, move |r| run(r, scenario, 45, 72))
        };
        cases.extend([case("cast_columns", cast_columns::<T, Q>), case("cast_both", cast_both::<T, Q>)]);
    }
    for ((rows, columns), size) in sized::<T, Q>(&SHAPES, &LARGE) {
        let case = |kernel, run: fn(&Runtime, Scenario, usize, usize) -> Outcome| {
            let name = format!("mxfp8::{kernel}::{name}::{rows}x{columns}");
            Case::new(name, size, move |r| run(r, Scenario::Normal, rows, columns))
        };
        cases.push(case("cast_columns", cast_columns::<T, Q>));
        // Its kernel takes whole vectors; others are cast in two passes.
        if columns.is_multiple_of(vector::<T>()) {
            cases.push(case("cast_both", cast_both::<T, Q>));
        }
        let name = format!("mxfp8::dequantize_columns::{name}::{rows}x{columns}");
        cases.push(Case::new(name, size, move |r| back::<T, Q>(r, rows, columns)));
    }
    cases
}

/// Elements of a vector.
const fn vector<T>() -> usize {
    16 / size_of::<T>()
}

/// What a cast writes, poisoned, so that an element that is not written shows.
struct Output<Q> {
    data: Buffer<Q>,
    scales: Buffer<ue8m0>,
}

impl<Q: TestFp8> Output<Q> {
    fn like(stream: &Stream, expected: &Quantized) -> Result<Self, String> {
        let data = text(Buffer::from_slice(stream, &vec![Q::of_code(0xa5); expected.data.len()]))?;
        Ok(Self { data, scales: text(Buffer::from_slice(stream, &vec![ue8m0::from_bits(0xa5); expected.scales.len()]))? })
    }

    fn codes(&mut self) -> CodesArgument<'_, Q, ue8m0> {
        CodesArgument { data: self.data.view_mut(), scales: self.scales.view_mut() }
    }

    fn equals(&self, stream: &Stream, direction: &str, expected: &Quantized) -> Outcome {
        let scales: Vec<u8> = text(self.scales.to_vec(stream))?.into_iter().map(ue8m0::to_bits).collect();
        let data: Vec<u8> = text(self.data.to_vec(stream))?.into_iter().map(Q::code).collect();
        equal(&format!("{direction} scales"), &scales, &expected.scales)?;
        equal(&format!("{direction} data"), &data, &expected.data)
    }
}

fn cast_columns<T: TestElement + Mxfp8Number<Q>, Q: TestFp8>(r: &Runtime, scenario: Scenario, rows: usize, columns: usize) -> Outcome {
    let stream = stream(r)?;
    let values = scenario.generate(T::DTYPE, rows * columns, 3);
    let expected = quantize_columns(&values, rows, columns, Q::FORMAT);
    let input = T::upload(&stream, &values)?;
    let run = |fast: bool| {
        let mut output = Output::<Q>::like(&stream, &expected)?;
        let (input, data, scales, columns) = (input.view(), output.data.view_mut(), output.scales.view_mut(), columns as u64);
        if fast {
            text(text(r.load::<T::CastColumns>())?.launch(&stream, Mxfp8CastColumnsArgs { input, data, scales, columns }))?;
        } else {
            text(text(r.load::<T::CastRaggedColumns>())?.launch(&stream, Mxfp8CastRaggedColumnsArgs { input, data, scales, columns }))?;
        }
        output.equals(&stream, if fast { "fast" } else { "ragged" }, &expected)
    };
    // The ragged kernel takes every shape.
    run(false)?;
    if columns.is_multiple_of(vector::<T>()) { run(true) } else { Ok(()) }
}

/// Each direction is that of its cast alone, by the oracle.
fn cast_both<T: TestElement + Mxfp8Number<Q>, Q: TestFp8>(r: &Runtime, scenario: Scenario, rows: usize, columns: usize) -> Outcome {
    let stream = stream(r)?;
    let values = scenario.generate(T::DTYPE, rows * columns, 3);
    let by_rows = quantize(&values, rows, columns, Q::FORMAT);
    let by_columns = quantize_columns(&values, rows, columns, Q::FORMAT);
    let input = T::upload(&stream, &values)?;
    let (mut row, mut column) = (Output::<Q>::like(&stream, &by_rows)?, Output::<Q>::like(&stream, &by_columns)?);
    let args = Mxfp8CastBothArgs {
        input: MatrixArgument::new(input.view(), [rows as u64, columns as u64]),
        rows: row.codes(),
        columns: column.codes(),
    };
    text(text(r.load::<T::CastBoth>())?.launch(&stream, args))?;
    row.equals(&stream, "row", &by_rows)?;
    column.equals(&stream, "column", &by_columns)
}

fn back<T: TestElement + Mxfp8Number<Q>, Q: TestFp8>(r: &Runtime, rows: usize, columns: usize) -> Outcome {
    let stream = stream(r)?;
    let mut random = Random::new(5);
    // Every code and every scale, NaN among both.
    let quantized = Quantized {
        data: (0..rows * columns).map(|i| (i as u64 ^ random.below(256)) as u8).collect(),
        scales: (0..rows.div_ceil(32) * columns).map(|_| random.below(256) as u8).collect(),
    };
    let expected: Vec<u32> = dequantize_columns(&quantized, rows, columns, Q::FORMAT).into_iter().map(rounded_bits::<T>).collect();
    let data = text(Buffer::from_slice(&stream, &quantized.data.iter().map(|&c| Q::of_code(c)).collect::<Vec<_>>()))?;
    let scales = text(Buffer::from_slice(&stream, &quantized.scales.iter().map(|&c| ue8m0::from_bits(c)).collect::<Vec<_>>()))?;
    let run = |fast: bool| {
        let mut buffer = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; rows * columns])))?;
        let (data, scales, output, columns) = (data.view(), scales.view(), buffer.view_mut(), columns as u64);
        if fast {
            let args = Mxfp8DequantizeColumnsArgs { data, scales, output, columns };
            text(text(r.load::<T::DequantizeColumns>())?.launch(&stream, args))?;
        } else {
            let args = Mxfp8DequantizeRaggedColumnsArgs { data, scales, output, columns };
            text(text(r.load::<T::DequantizeRaggedColumns>())?.launch(&stream, args))?;
        }
        let found: Vec<u32> = text(buffer.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
        equal(if fast { "fast output" } else { "ragged output" }, &found, &expected)
    };
    run(false)?;
    if columns.is_multiple_of(vector::<T>()) { run(true) } else { Ok(()) }
}
