//! Fused casts by the host types: the gradient of a bias beside a backward cast, interleaved scales, graphs, refusals.

use oxtile::quantize::{BiasGradient, Direction, FusedInput, FusedMxfp8, FusedOutput, Interleaved, Mxfp8Tensor};
use oxtile::{Buffer, Error, Graph, Runtime};
use oxtile_kernels::activation::{Backward, Identity, Relu};
use oxtile_tests::inputs::{Dtype, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::formats::E4M3;
use oxtile_tests::oracle::interleave::interleave;
use oxtile_tests::oracle::mxfp8::{quantize, quantize_columns};
use oxtile_tile::num::{Float, bf16, e4m3, ue8m0};

use super::element::TestElement;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns: fewer rows than a warp's, more partial sums than warps, nothing.
const SHAPES: [([usize; 2], Size); 4] =
    [([3, 64], Size::Small), ([70, 136], Size::Small), ([0, 64], Size::Small), ([2100, 264], Size::Large)];

pub fn cases() -> Vec<Case> {
    let case = |([rows, columns], size): ([usize; 2], Size)| {
        Case::new(format!("mxfp8::bias_gradient::{rows}x{columns}"), size, move |runtime| run(runtime, [rows, columns]))
    };
    let mut cases: Vec<_> = SHAPES.map(case).into();
    cases.push(Case::new("mxfp8::fused::refusals", Size::Small, refusals));
    cases.push(Case::new("mxfp8::fused::captured", Size::Small, captured));
    // Whole blocks, which a kernel of their own takes, and others.
    for columns in [160, 72] {
        cases.push(Case::new(format!("mxfp8::fused::interleaved_rows::{columns}"), Size::Small, move |r| interleaved_rows(r, columns)));
    }
    cases
}

/// With ReLU, whose results are exact.
fn run(runtime: &Runtime, [rows, columns]: [usize; 2]) -> Outcome {
    let stream = stream(runtime)?;
    let x = Scenario::Normal.generate(Dtype::Bf16, rows * columns, 3);
    let g = Scenario::Normal.generate(Dtype::Bf16, rows * columns, 4);
    let (input, gradient) = (bf16::upload(&stream, &x)?, bf16::upload(&stream, &g)?);
    let values: Vec<f32> = x.iter().zip(&g).map(|(x, g)| g * if *x > 0.0 { 1.0 } else { 0.0 }).collect();
    let shape = [rows as u64, columns as u64];

    let mut tensor = text(Mxfp8Tensor::<e4m3, Interleaved>::uninitialised(&stream, shape, Direction::Columns))?;
    let mut bias = text(BiasGradient::<bf16>::uninitialised(&stream, shape))?;
    text(bias.sums.copy_from_slice(&stream, &bf16::encode(&vec![7.0; columns])))?;
    let mut largest = text(Buffer::<f32>::from_slice(&stream, &[7.0_f32]))?;
    let fused = text(FusedMxfp8::<Backward<Relu>>::new(runtime))?;
    let from = FusedInput { input: input.view(), gradient: Some(gradient.view()), shape, square_blocks: false, skip: None };
    let to = FusedOutput { columns: Some(&mut tensor), bias_gradient: Some(&mut bias), amax: Some(&mut largest), rows: None };
    text(fused.run(&stream, from, to))?;

    let (expected, blocks) = (quantize_columns(&values, rows, columns, &E4M3), rows.div_ceil(32));
    let scales = interleave(columns, blocks, |column, block| expected.scales[block * columns + column]);
    let found: Vec<ue8m0> = text(tensor.scales.to_vec(&stream))?;
    equal("scales", &found.into_iter().map(ue8m0::to_bits).collect::<Vec<_>>(), &scales)?;
    let found: Vec<e4m3> = text(tensor.data.to_vec(&stream))?;
    equal("data", &found.into_iter().map(e4m3::to_bits).collect::<Vec<_>>(), &expected.data)?;
    equal("amax", &text(largest.to_vec(&stream))?, &[amax(&values)])?;
    let found: Vec<bf16> = text(bias.sums.to_vec(&stream))?;
    for (column, found) in found.into_iter().enumerate() {
        let of_column = || (0..rows).map(|row| f64::from(values[row * columns + column]));
        let (sum, size) = (of_column().sum::<f64>(), of_column().map(f64::abs).sum::<f64>());
        let tolerance = sum.abs() * 2f64.powi(-8) + size * 2f64.powi(-20);
        if (f64::from(found.to_f32()) - sum).abs() > tolerance {
            return Err(format!("the sum of column {column} is {found:?}, expected {sum} within {tolerance}"));
        }
    }
    Ok(())
}

/// The plain cast along rows with interleaved scales, and the same with an amax.
fn interleaved_rows(runtime: &Runtime, columns: usize) -> Outcome {
    let (stream, rows) = (stream(runtime)?, 37);
    let x = Scenario::Outlier.generate(Dtype::Bf16, rows * columns, 3);
    let (expected, blocks) = (quantize(&x, rows, columns, &E4M3), columns.div_ceil(32));
    let scales = interleave(rows, blocks, |row, block| expected.scales[row * blocks + block]);
    let (input, fused) = (bf16::upload(&stream, &x)?, text(FusedMxfp8::<Identity>::new(runtime))?);
    let shape = [rows as u64, columns as u64];
    let from = FusedInput { input: input.view(), gradient: None, shape, square_blocks: false, skip: None };
    let mut largest = text(Buffer::<f32>::from_slice(&stream, &[7.0_f32]))?;
    for amax in [None, Some(&mut largest)] {
        let mut tensor = text(Mxfp8Tensor::<e4m3, Interleaved>::uninitialised(&stream, shape, Direction::Rows))?;
        text(fused.run(&stream, from, FusedOutput { rows: Some(&mut tensor), amax, ..Default::default() }))?;
        let found: Vec<ue8m0> = text(tensor.scales.to_vec(&stream))?;
        equal("scales", &found.into_iter().map(ue8m0::to_bits).collect::<Vec<_>>(), &scales)?;
        let found: Vec<e4m3> = text(tensor.data.to_vec(&stream))?;
        equal("data", &found.into_iter().map(e4m3::to_bits).collect::<Vec<_>>(), &expected.data)?;
    }
    equal("amax", &text(largest.to_vec(&stream))?, &[amax(&x)])
}

/// What cannot be done is an error before the launch.
fn refusals(runtime: &Runtime) -> Outcome {
    let (stream, shape) = (stream(runtime)?, [32, 64]);
    let input = bf16::upload(&stream, &[1.0; 32 * 64])?;
    let skip = text(Buffer::<f32>::from_slice(&stream, &[1.0_f32]))?;
    let fused = text(FusedMxfp8::<Identity>::new(runtime))?;
    let from = FusedInput { input: input.view(), gradient: None, shape, square_blocks: false, skip: None };
    let mut sums = text(BiasGradient::<bf16>::uninitialised(&stream, shape))?;
    let mut tensor = text(Mxfp8Tensor::<e4m3>::uninitialised(&stream, shape, Direction::Rows))?;

    let skipping = FusedInput { skip: Some(skip.view()), ..from };
    let refused =
        fused.run(&stream, skipping, FusedOutput { bias_gradient: Some(&mut sums), rows: Some(&mut tensor), ..Default::default() });
    expect(refused, "a bias gradient cannot be skipped")?;
    let refused = fused.run(&stream, from, FusedOutput { columns: Some(&mut tensor), ..Default::default() });
    expect(refused, "a tensor of [32, 64] along Rows where one of [32, 64] along Columns goes")?;
    let mut of_other = text(BiasGradient::<bf16>::uninitialised(&stream, [64, 64]))?;
    let refused =
        fused.run(&stream, from, FusedOutput { bias_gradient: Some(&mut of_other), rows: Some(&mut tensor), ..Default::default() });
    expect(refused, "a bias gradient of [64, 64] where one of [32, 64] goes")?;

    // What is refused leaves the amax as it was.
    let mut largest = text(Buffer::<f32>::from_slice(&stream, &[7.0_f32]))?;
    let refused = fused.run(&stream, from, FusedOutput { columns: Some(&mut tensor), amax: Some(&mut largest), ..Default::default() });
    expect(refused, "along Rows where one of [32, 64] along Columns goes")?;
    let without_gradient = text(FusedMxfp8::<Backward<Relu>>::new(runtime))?;
    let output = FusedOutput { rows: Some(&mut tensor), amax: Some(&mut largest), ..Default::default() };
    expect(without_gradient.run(&stream, from, output), "`operands.gradient` has 0 elements; the other arguments ask for 2048")?;
    equal("amax", &text(largest.to_vec(&stream))?, &[7.0])
}

/// A graph holds the cast with all that it can write: each replay is of the input as it then is.
fn captured(runtime: &Runtime) -> Outcome {
    let (stream, [rows, columns]) = (stream(runtime)?, [40, 64]);
    let shape = [rows as u64, columns as u64];
    let mut input = bf16::upload(&stream, &vec![0.0; rows * columns])?;
    let [mut by_rows, mut by_columns] = [
        text(Mxfp8Tensor::<e4m3>::uninitialised(&stream, shape, Direction::Rows))?,
        text(Mxfp8Tensor::<e4m3>::uninitialised(&stream, shape, Direction::Columns))?,
    ];
    let mut bias = text(BiasGradient::<bf16>::uninitialised(&stream, shape))?;
    let (fused, mut largest) = (text(FusedMxfp8::<Identity>::new(runtime))?, text(Buffer::<f32>::uninitialised(&stream, 1))?);
    let graph = Graph::capture(&[&stream], || {
        let from = FusedInput { input: input.view(), gradient: None, shape, square_blocks: false, skip: None };
        let (rows, columns) = (Some(&mut by_rows), Some(&mut by_columns));
        fused.run(&stream, from, FusedOutput { rows, columns, bias_gradient: Some(&mut bias), amax: Some(&mut largest) })
    });
    let graph = text(graph)?;
    // The second is smaller: its amax shows that the first's is cleared.
    for scale in [4.0, 1.0] {
        let values: Vec<f32> = (0..rows * columns).map(|i| scale * ((i % 15) as f32 - 7.0)).collect();
        text(input.copy_from_slice(&stream, &bf16::encode(&values)))?;
        text(graph.replay(&stream))?;
        equal("amax", &text(largest.to_vec(&stream))?, &[amax(&values)])?;
        let codes =
            |tensor: &Mxfp8Tensor<e4m3>| Ok::<_, String>(text(tensor.data.to_vec(&stream))?.into_iter().map(e4m3::to_bits).collect());
        let (found_rows, found_columns): (Vec<u8>, Vec<u8>) = (codes(&by_rows)?, codes(&by_columns)?);
        equal("rows", &found_rows, &quantize(&values, rows, columns, &E4M3).data)?;
        equal("columns", &found_columns, &quantize_columns(&values, rows, columns, &E4M3).data)?;
        // Small integers: their sums are exact but for the last rounding.
        let sums = (0..columns).map(|column| (0..rows).map(|row| values[row * columns + column]).sum::<f32>());
        let found: Vec<f32> = text(bias.sums.to_vec(&stream))?.into_iter().map(bf16::to_f32).collect();
        equal("sums", &found, &sums.map(|sum| bf16::from_f32(sum).to_f32()).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn expect(refused: Result<(), Error>, words: &str) -> Outcome {
    match refused {
        Err(error) if error.to_string().contains(words) => Ok(()),
        other => Err(format!("expected an error with {words:?}, got {other:?}")),
    }
}
