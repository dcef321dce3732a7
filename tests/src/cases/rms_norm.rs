//! RMS norm and its gradients against f64, by every policy of rows.

use std::marker::PhantomData;

use oxtile::{Buffer, Runtime};
use oxtile_kernels::column_sums::{ColumnSums, ColumnSumsArgs};
use oxtile_kernels::rms_norm::*;
use oxtile_kernels::row::{ByBlock, ByElements, ByWarp, Split};
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::rms_norm::{backward, forward};
use oxtile_tile::launch::{DeviceView, Kernel};
use oxtile_tile::num::{Half, bf16, f16};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, agrees, stream, text};

const EPSILON: f32 = 1e-5;
/// The error of a sum of products in f32 over its terms' magnitudes, with that of the square root.
const SUM_ERROR: f64 = 4e-6;

/// Rows and columns, and elements by which all tensors begin after a multiple of 16 bytes.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    width: usize,
    shift: usize,
}

const fn shape(rows: usize, width: usize) -> Shape {
    Shape { rows, width, shift: 0 }
}

pub fn cases() -> Vec<Case> {
    let wide = [shape(1, 8), shape(5, 520), shape(3, 8192)];
    let any = [shape(1, 1), shape(3, 7), shape(2, 2049), shape(3, 4104), Shape { shift: 1, ..shape(3, 64) }];
    let refused = Case::new("rms_norm::refused", Size::Small, refused);
    [
        of_split::<bf16, ByWarp<2>>("by_warp", &[shape(1, 8), shape(13, 128), shape(70, 40), shape(9, 512), shape(0, 64)], 700),
        of_split::<f16, ByWarp<2>>("by_warp", &[shape(17, 136)], 700),
        of_split::<bf16, ByBlock<128, 2>>("by_block_128", &[shape(1, 8), shape(7, 1032), shape(37, 40), shape(3, 2048)], 120),
        of_split::<f16, ByBlock<128, 2>>("by_block_128", &[shape(7, 1024)], 120),
        of_split::<bf16, ByBlock<256, 2>>("by_block_256_of_2", &[shape(3, 4096), shape(5, 2056)], 60),
        of_split::<f16, ByBlock<256, 2>>("by_block_256_of_2", &[shape(2, 3080)], 60),
        of_split::<bf16, ByBlock<256, 4>>("by_block_256", &wide, 40),
        of_split::<f16, ByBlock<256, 4>>("by_block_256", &[shape(5, 2056)], 40),
        of_split::<bf16, ByBlock<512, 4>>("by_block_512", &[shape(2, 16384)], 6),
        of_split::<f16, ByBlock<512, 4>>("by_block_512", &[shape(2, 8200)], 6),
        of_split::<bf16, ByElements>("by_elements", &any, 10),
        of_split::<f16, ByElements>("by_elements", &any, 10),
        vec![refused],
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn of_split<T: TestElement + Half, S: Split>(name: &str, shapes: &[Shape], many: usize) -> Vec<Case>
where
    RmsNorm<T, S>: Kernel,
    RmsNormBackward<T, S>: Kernel,
    ColumnSums<T>: Kernel,
{
    let name = format!("rms_norm::{}::{name}", T::DTYPE.name());
    let case = |what: String, size, scenario, shape| {
        Case::new(format!("{name}::{what}"), size, move |runtime| run::<T, S>(runtime, scenario, shape))
    };
    let text = |Shape { rows, width, shift }: Shape| format!("{rows}x{width}{}", if shift > 0 { "_shifted" } else { "" });
    let mut cases: Vec<_> = shapes.iter().map(|&shape| case(text(shape), Size::Small, Scenario::Normal, shape)).collect();
    for scenario in [Scenario::Zeros, Scenario::Nans, Scenario::Infinities, Scenario::Subnormals] {
        cases.push(case(format!("{scenario:?}"), Size::Small, scenario, shape(5, 40)));
    }
    let widest = (S::WIDEST as usize).min(20_000);
    cases.push(case(text(shape(many, widest)), Size::Large, Scenario::Normal, shape(many, widest)));
    cases
}

fn run<T: TestElement + Half, S: Split>(runtime: &Runtime, scenario: Scenario, Shape { rows, width, shift }: Shape) -> Outcome
where
    RmsNorm<T, S>: Kernel,
    RmsNormBackward<T, S>: Kernel,
    ColumnSums<T>: Kernel,
{
    let stream = stream(runtime)?;
    let elements = rows * width;
    let mut random = Random::new(5);
    let mut normal = |count: usize| (0..count).map(|_| T::DTYPE.round(random.normal())).collect::<Vec<f32>>();
    let (x, w, g) = (scenario.generate(T::DTYPE, elements, 3), normal(width), normal(elements));
    // Each tensor begins `shift` elements into its buffer, which ends with it.
    let upload = |values: &[f32]| T::upload(&stream, &[&vec![7.0; shift], values].concat());
    let unwritten = || T::upload(&stream, &vec![f32::NAN; shift + elements]);
    let (input, weight, gradient) = (upload(&x)?, upload(&w)?, upload(&g)?);
    let (mut output, mut input_gradient) = (unwritten()?, unwritten()?);
    let mut inverse_rms = text(Buffer::<f32>::named(&stream, "inverse_rms", rows as u64))?;
    let of = |buffer| tail(buffer, shift);

    let kernel = text(runtime.load::<RmsNorm<T, S>>())?;
    for with_inverse in [false, true] {
        let args = RmsNormArgs {
            input: of(&input),
            weight: of(&weight),
            output: output.view_mut().split_at(shift as u64).1,
            inverse_rms: with_inverse.then(|| inverse_rms.view_mut()),
            width: width as u32,
            epsilon: EPSILON,
            marker: PhantomData,
        };
        text(kernel.launch(&stream, args))?;
    }
    let sum_rows = partial_rows::<S>(rows as u64, text(runtime.device(0))?.limits().multiprocessors);
    let mut partial_sums = text(Buffer::<f32>::named(&stream, "partial_sums", sum_rows * width as u64))?;
    let mut weight_gradient = text(Buffer::<T>::named(&stream, "weight_gradient", width as u64))?;
    let args = RmsNormBackwardArgs {
        gradient: of(&gradient),
        input: of(&input),
        weight: of(&weight),
        inverse_rms: inverse_rms.view(),
        input_gradient: input_gradient.view_mut().split_at(shift as u64).1,
        partial_sums: partial_sums.view_mut(),
        width: width as u32,
        marker: PhantomData,
    };
    text(text(runtime.load::<RmsNormBackward<T, S>>())?.launch(&stream, args))?;
    let args = ColumnSumsArgs { matrix: partial_sums.view(), output: weight_gradient.view_mut() };
    text(text(runtime.load::<ColumnSums<T>>())?.launch(&stream, args))?;

    let values = |buffer: &Buffer<T>, shift: usize| -> Result<Vec<f64>, String> {
        Ok(text(buffer.to_vec(&stream))?.into_iter().skip(shift).map(|value: T| f64::from(value.to_f32())).collect())
    };
    let (y, dx, dw) = (values(&output, shift)?, values(&input_gradient, shift)?, values(&weight_gradient, 0)?);
    let inverses = text(inverse_rms.to_vec(&stream))?;

    let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (x, w, g) = (wide(&x), wide(&w), wide(&g));
    let (mut sums, mut magnitudes) = (vec![0.0; width], vec![0.0; width]);
    for (row, &found) in inverses.iter().enumerate() {
        let of_row = row * width..(row + 1) * width;
        let (x, g) = (&x[of_row.clone()], &g[of_row.clone()]);
        let (expected, inverse) = forward(x, &w, EPSILON.into());
        let [of_input, of_weight] = backward(g, x, &w, EPSILON.into());
        if !agrees(found.into(), inverse, inverse * SUM_ERROR) {
            return Err(format!("1 / rms of row {row} is {found:e}, expected {inverse:e}"));
        }
        let mean = (0..width).map(|j| (g[j] * w[j] * x[j]).abs()).sum::<f64>() / width as f64;
        for j in 0..width {
            check::<T>("y", row, j, y[of_row.start + j], expected[j], expected[j].abs())?;
            let magnitude = (g[j] * w[j] * inverse).abs() + (x[j] * inverse.powi(3) * mean).abs();
            check::<T>("dx", row, j, dx[of_row.start + j], of_input[j], magnitude)?;
            sums[j] += of_weight[j];
            magnitudes[j] += of_weight[j].abs();
        }
    }
    (0..width).try_for_each(|j| check::<T>("dw", 0, j, dw[j], sums[j], magnitudes[j]))
}

/// The elements from `shift` on.
fn tail<T: TestElement>(buffer: &Buffer<T>, shift: usize) -> DeviceView<'_, T> {
    buffer.view().slice(shift as u64, buffer.len())
}

/// The value to within its rounding and the error of sums of such terms.
fn check<T: TestElement>(what: &str, row: usize, column: usize, found: f64, expected: f64, magnitude: f64) -> Outcome {
    let half_unit = if T::DTYPE == Dtype::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let bound = expected.abs() * half_unit + magnitude * SUM_ERROR + f64::from(T::DTYPE.smallest());
    if agrees(found, expected, bound) { Ok(()) } else { Err(format!("{what}[{row}, {column}] is {found:e}, expected {expected:e}")) }
}

/// What does not fit is named, with what would.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<RmsNorm<bf16, ByBlock<128, 2>>>())?;
    let buffer = || text(Buffer::<bf16>::zeros(&stream, 4096));
    let (input, weight, mut output) = (buffer()?, buffer()?, buffer()?);
    let mut refuses = |[start, end]: [u64; 2], weight: &DeviceView<'_, bf16>, width: u32, expected: &str| {
        let args = RmsNormArgs {
            input: input.view().slice(start, end),
            weight: *weight,
            output: output.view_mut().split_at(end - start).0,
            inverse_rms: None,
            width,
            epsilon: EPSILON,
            marker: PhantomData,
        };
        match kernel.launch(&stream, args) {
            Err(error) if error.to_string().contains(expected) => Ok(()),
            Err(error) => Err(format!("refused by `{error}`, expected `{expected}`")),
            Ok(()) => Err(format!("launched, expected `{expected}`")),
        }
    };
    let of_width = |width: u64| weight.view().slice(0, width);
    refuses([1, 129], &of_width(64), 64, "16-byte aligned: start the view at an aligned element")?;
    refuses([0, 130], &of_width(64), 64, "`input` counts 130, which is not a multiple of 64")?;
    refuses([0, 130], &of_width(65), 65, "`width` counts 65, which is not a multiple of 8")?;
    refuses([0, 128], &of_width(63), 64, "`weight` has 63 elements; the other arguments ask for 64")?;
    refuses([0, 4096], &of_width(4096), 4096, "`width` counts 4096; this kernel takes at most 2048")
}
