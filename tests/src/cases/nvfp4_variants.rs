//! NVFP4 by other rules, four over six and an amax for each row, against the oracle, bit for bit; and the host's types.

use std::marker::PhantomData;

use oxtile::quantize::nvfp4_mapped::{Nvfp4FourOverSix, Nvfp4ScaledRows};
use oxtile::quantize::{Direction, Nvfp4, Nvfp4Columns, Nvfp4Squares};
use oxtile::{Buffer, Runtime};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::nvfp4::transpose;
use oxtile_tests::oracle::nvfp4_variants::{Rule, dequantize_rows};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, f16};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::nvfp4::shuffled_codes;
use super::nvfp4_columns::Output;
use crate::case::{Case, Outcome, Size, equal, stream, text};

const SHAPES: [(usize, usize); 6] = [(16, 16), (16, 48), (144, 32), (32, 528), (0, 64), (16, 0)];
const LARGE: (usize, usize) = (272, 544);
/// The same, of more tiles.
const MANY_TILES: (usize, usize) = (1040, 1056);
/// Amaxes that are not the tensor's own: what is beyond the fast way's range, and at its ends.
const AMAXES: [f32; 8] = [0.0, 1e-3, 1e6, 1e-38, 8e-28, 1.5e33, f32::INFINITY, 1e-45];

trait TestMapping: Mapping {
    const NAME: &str;
    const RULE: Rule;
}

macro_rules! mappings {
    ($($mapping:ident: $rule:expr;)*) => { $(
        impl TestMapping for $mapping {
            const NAME: &str = stringify!($mapping);
            const RULE: Rule = $rule;
        }
    )* };
}
mappings! {
    ToSix: Rule::ToSix;
    FourOverSix: Rule::FourOverSix { squared: false, largest_scale: 448.0 };
    FourOverSixSquared: Rule::FourOverSix { squared: true, largest_scale: 448.0 };
    FourOverSix256: Rule::FourOverSix { squared: false, largest_scale: 256.0 };
    FourOverSixSquared256: Rule::FourOverSix { squared: true, largest_scale: 256.0 };
}

#[derive(Clone, Copy)]
struct Input {
    scenario: Scenario,
    rows: usize,
    columns: usize,
    amax: Option<f32>,
}

/// The cases: all with bf16 and the plain form of a rule; for other types and rules those in which they differ.
fn inputs<T: TestElement, M: TestMapping>() -> Vec<(String, Size, Input)> {
    let small = |scenario, amax| Input { scenario, rows: 32, columns: 80, amax };
    let scenarios = Scenario::ALL.map(|scenario| (format!("{scenario:?}"), Size::Small, small(scenario, None)));
    let amaxes = AMAXES.map(|amax| (format!("amax {amax:e}"), Size::Small, small(Scenario::Exponents, Some(amax))));
    let shape =
        |(rows, columns), size| (format!("{rows}x{columns}"), size, Input { scenario: Scenario::Normal, rows, columns, amax: None });
    let shapes = SHAPES.map(|s| shape(s, Size::Small));
    if T::DTYPE == Dtype::Bf16 && matches!(M::RULE, Rule::ToSix | Rule::FourOverSix { squared: false, largest_scale: 448.0 }) {
        return scenarios
            .into_iter()
            .chain(amaxes)
            .chain(shapes)
            .chain([shape(LARGE, Size::Large), shape(MANY_TILES, Size::Twin)])
            .collect();
    }
    let differing = [Scenario::Normal, Scenario::Nans, Scenario::Outlier, Scenario::MaxFinite, Scenario::Exponents];
    scenarios
        .into_iter()
        .filter(|(_, _, input)| differing.contains(&input.scenario))
        .chain([shape(LARGE, Size::Large), shape(MANY_TILES, Size::Twin)])
        .collect()
}

pub fn cases() -> Vec<Case> {
    macro_rules! each {
        ($function:ident: $($t:ty, $m:ty;)*) => { [$($function::<$t, $m>()),*].concat_cases() };
    }
    let mut cases = each! { four_over_six:
        bf16, FourOverSix; f16, FourOverSix; f32, FourOverSix; bf16, FourOverSixSquared; bf16, FourOverSix256; bf16, FourOverSixSquared256;
    };
    cases.extend(each! { scaled_rows:
        bf16, ToSix; f16, ToSix; f32, ToSix; bf16, FourOverSix; bf16, FourOverSixSquared; bf16, FourOverSix256; bf16, FourOverSixSquared256;
    });
    cases.extend([back_of::<bf16>(), back_of::<f16>(), back_of::<f32>()].concat_cases());
    cases.extend([host_of::<bf16>(), host_of::<f16>(), host_of::<f32>()]);
    cases
}

/// Lists of cases as one.
trait ConcatCases {
    fn concat_cases(self) -> Vec<Case>;
}

impl<const N: usize> ConcatCases for [Vec<Case>; N] {
    fn concat_cases(self) -> Vec<Case> {
        self.into_iter().flatten().collect()
    }
}

fn four_over_six<T: TestElement, M: TestMapping>() -> Vec<Case>
where
    Nvfp4CastRows4over6<T, M>: Kernel,
    Nvfp4CastColumns4over6<T, M>: Kernel,
{
    let both = |(name, size, input): (String, Size, Input)| {
        let kind = format!("{}::{}::{name}", T::DTYPE.name(), M::NAME);
        [
            Case::new(format!("nvfp4::cast_rows_4over6::{kind}"), size, move |r| cast_rows::<T, M>(r, input)),
            Case::new(format!("nvfp4::cast_columns_4over6::{kind}"), size, move |r| cast_columns::<T, M>(r, input)),
        ]
    };
    inputs::<T, M>().into_iter().flat_map(both).collect()
}

fn cast_rows<T: TestElement, M: TestMapping>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastRows4over6<T, M>: Kernel,
{
    let stream = stream(r)?;
    let values = input.scenario.generate(T::DTYPE, input.rows * input.columns, 3);
    let given = input.amax.unwrap_or(amax(&values));
    let (wide, amax) = (T::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[given]))?);
    let mut output = Output::of(&stream, values.len())?;
    let (data, scales) = (output.data.view_mut(), output.scales.view_mut());
    let args = Nvfp4CastRows4over6Args { input: wide.view(), amax: amax.view(), data, scales, marker: PhantomData };
    text(text(r.load::<Nvfp4CastRows4over6<T, M>>())?.launch(&stream, args))?;
    output.equals(&stream, "row", &M::RULE.quantize(&values, given))
}

fn cast_columns<T: TestElement, M: TestMapping>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastColumns4over6<T, M>: Kernel,
{
    let stream = stream(r)?;
    let values = input.scenario.generate(T::DTYPE, input.rows * input.columns, 3);
    let given = input.amax.unwrap_or(amax(&values));
    let (wide, amax) = (T::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[given]))?);
    let mut output = Output::of(&stream, values.len())?;
    let args = Nvfp4CastColumns4over6Args {
        input: MatrixArgument::new(wide.view(), [input.rows as u64, input.columns as u64]),
        amax: amax.view(),
        data: output.data.view_mut(),
        scales: output.scales.view_mut(),
        marker: PhantomData,
    };
    text(text(r.load::<Nvfp4CastColumns4over6<T, M>>())?.launch(&stream, args))?;
    output.equals(&stream, "column", &M::RULE.quantize(&transpose(&values, input.columns), given))
}

fn scaled_rows<T: TestElement, M: TestMapping>() -> Vec<Case>
where
    Nvfp4CastScaledRows<T, M>: Kernel,
{
    let case = |(name, size, input): (String, Size, Input)| {
        let name = format!("nvfp4::cast_scaled_rows::{}::{}::{name}", T::DTYPE.name(), M::NAME);
        Case::new(name, size, move |r| cast_scaled_rows::<T, M>(r, input))
    };
    inputs::<T, M>().into_iter().filter(|(_, _, input)| input.amax.is_none()).map(case).collect()
}

fn cast_scaled_rows<T: TestElement, M: TestMapping>(r: &Runtime, input: Input) -> Outcome
where
    Nvfp4CastScaledRows<T, M>: Kernel,
{
    let stream = stream(r)?;
    let values = input.scenario.generate(T::DTYPE, input.rows * input.columns, 3);
    let (expected, mut amaxes) = M::RULE.quantize_rows(&values, input.columns);
    amaxes.resize(input.rows, 0.0);
    let wide = T::upload(&stream, &values)?;
    let mut output = Output::of(&stream, values.len())?;
    let mut found = text(Buffer::from_slice(&stream, &vec![7.0_f32; input.rows]))?;
    let args = Nvfp4CastScaledRowsArgs {
        input: wide.view(),
        amaxes: found.view_mut(),
        data: output.data.view_mut(),
        scales: output.scales.view_mut(),
        columns: input.columns as u64,
        marker: PhantomData,
    };
    text(text(r.load::<Nvfp4CastScaledRows<T, M>>())?.launch(&stream, args))?;
    equal("amaxes", &text(found.to_vec(&stream))?, &amaxes)?;
    output.equals(&stream, "row", &expected)
}

fn back_of<T: TestElement>() -> Vec<Case>
where
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    let case = |name: String, size, shape, per_row, largest| {
        let name = format!("nvfp4::dequantize_scaled_rows::{}::{name}", T::DTYPE.name());
        Case::new(name, size, move |r| back::<T>(r, shape, per_row, largest))
    };
    let shapes = SHAPES.map(|shape| (shape, Size::Small)).into_iter().chain([(LARGE, Size::Large), (MANY_TILES, Size::Twin)]);
    let shapes = shapes.map(|((rows, columns), size)| case(format!("{rows}x{columns}"), size, (rows, columns), true, 448.0));
    shapes.chain([case("one amax".to_owned(), Size::Small, (9, 256), false, 256.0)]).collect()
}

fn back<T: TestElement>(r: &Runtime, (rows, columns): (usize, usize), per_row: bool, largest: f32) -> Outcome
where
    Nvfp4DequantizeScaledRows<T>: Kernel,
{
    let stream = stream(r)?;
    let mut random = Random::new(5);
    let blocks = rows * columns / 16;
    let data: Vec<u8> = (0..blocks).flat_map(|_| shuffled_codes(&mut random)).collect();
    let scales: Vec<u8> = (0..blocks).map(|block| block as u8).collect();
    let amaxes: Vec<f32> = (0..if per_row { rows } else { 1 }).map(|row| [3.7, 1e-30, 1e30, 0.0][row % 4]).collect();
    let expected = dequantize_rows(&data, &scales, &amaxes, columns / 16, largest);
    let expected: Vec<u32> = expected.into_iter().map(rounded_bits::<T>).collect();
    let data: Vec<e2m1x2> = data.into_iter().map(e2m1x2::from_bits).collect();
    let scales: Vec<e4m3> = scales.into_iter().map(e4m3::from_bits).collect();
    let (data, scales) = (text(Buffer::from_slice(&stream, &data))?, text(Buffer::from_slice(&stream, &scales))?);
    let amaxes = text(Buffer::from_slice(&stream, &amaxes))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; rows * columns])))?;
    let args = Nvfp4DequantizeScaledRowsArgs {
        data: data.view(),
        scales: scales.view(),
        amaxes: amaxes.view(),
        output: output.view_mut(),
        factor: 1.0 / (6.0 * largest),
        rows: rows as u64,
        columns: columns as u64,
    };
    text(text(r.load::<Nvfp4DequantizeScaledRows<T>>())?.launch(&stream, args))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)
}

/// The host's types together: each decodes what another writes, or refuses it.
fn host_of<T: TestElement + oxtile::quantize::nvfp4::Nvfp4Number>() -> Case
where
    Nvfp4CastRows4over6<T, FourOverSix>: Kernel,
    Nvfp4CastColumns4over6<T, FourOverSix>: Kernel,
    Nvfp4CastScaledRows<T, ToSix>: Kernel,
    Nvfp4DequantizeScaledRows<T>: Kernel,
    Nvfp4CastSquares<T>: Kernel,
    Nvfp4CastColumns<T, Nearest, false>: Kernel,
    Nvfp4CastBoth<T, Nearest, false>: Kernel,
    Nvfp4DequantizeColumns<T>: Kernel,
{
    Case::new(format!("nvfp4::host::{}", T::DTYPE.name()), Size::Small, |r| {
        let (stream, shape) = (stream(r)?, [32_u64, 48]);
        let values = Scenario::Normal.generate(T::DTYPE, 32 * 48, 3);
        let wide = T::upload(&stream, &values)?;
        let mut restored = text(Buffer::<T>::uninitialised(&stream, wide.len()))?;
        let mut bits = |run: &mut dyn FnMut(&mut Buffer<T>) -> oxtile::Result<()>| -> Result<Vec<u32>, String> {
            text(run(&mut restored))?;
            Ok(text(restored.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect())
        };
        let (plain, by_columns) = (text(Nvfp4::<T>::new(r))?, text(Nvfp4Columns::<T>::new(r))?);

        let pair = text(text(Nvfp4Squares::<T>::new(r))?.quantize(&stream, wide.view(), shape))?;
        let rows = bits(&mut |out| plain.dequantize(&stream, &pair.rows, out.view_mut()))?;
        equal("squares", &bits(&mut |out| by_columns.dequantize_columns(&stream, &pair.columns, out.view_mut()))?, &rows)?;

        let casts = text(Nvfp4FourOverSix::<T>::new(r))?;
        for direction in [Direction::Rows, Direction::Columns] {
            let tensor = text(casts.quantize(&stream, wide.view(), shape, direction))?;
            let mapped = bits(&mut |out| casts.dequantize(&stream, &tensor, out.view_mut()))?;
            let tensor = text(tensor.into_plain())?;
            let (expected, found) = match direction {
                Direction::Rows => (mapped, bits(&mut |out| plain.dequantize(&stream, &tensor, out.view_mut()))?),
                Direction::Columns => {
                    (transpose(&mapped, 32), bits(&mut |out| by_columns.dequantize_columns(&stream, &tensor, out.view_mut()))?)
                }
            };
            equal("four over six", &found, &expected)?;
        }

        let casts = text(Nvfp4ScaledRows::<T>::new(r))?;
        let tensor = text(casts.quantize(&stream, wide.view(), shape))?;
        let (cast, amaxes) = Rule::ToSix.quantize_rows(&values, 48);
        let expected = dequantize_rows(&cast.data, &cast.scales, &amaxes, 3, 448.0);
        let expected: Vec<u32> = expected.into_iter().map(rounded_bits::<T>).collect();
        equal("scaled rows", &bits(&mut |out| casts.dequantize(&stream, &tensor, out.view_mut()))?, &expected)?;
        match tensor.into_plain() {
            Err(error) if error.to_string().contains("use `Nvfp4ScaledRows::dequantize`") => Ok(()),
            other => Err(format!("an amax for each row became {other:?}")),
        }
    })
}
