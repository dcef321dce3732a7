//! The NVFP4 cast and its inverse against the oracle, bit for bit.

use oxtile::{Buffer, Runtime};
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_kernels::nvfp4::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::interleave::interleave;
use oxtile_tests::oracle::nvfp4::{Quantized, dequantize, quantize};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, f16};

use super::element::{TestElement, comparable_bits, rounded_bits};
use crate::backend::long;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns; TransformerEngine's list among them.
const SHAPES: [(usize, usize); 8] = [(1, 16), (17, 32), (16, 48), (128, 128), (304, 304), (5, 1056), (0, 64), (4, 0)];
const LARGE: (usize, usize) = (993, 512);

/// The shapes of TransformerEngine's exact and C++ tests that are not among the others.
const OF_TRANSFORMER_ENGINE: [(usize, usize); 9] =
    [(16, 128), (32, 128), (32, 32), (128, 256), (256, 272), (320, 256), (256, 1024), (1024, 256), (2048, 160)];
/// Those of them that take minutes.
const LONG: [(usize, usize); 7] = [(2048, 2048), (1024, 2048), (2048, 1024), (8192, 128), (1024, 16384), (4096, 13312), (8192, 8192)];

/// Amaxes that are not the tensor's own: scales and elements saturate, or all but vanish; specials.
const AMAXES: [f32; 8] = [0.0, 1e-3, 1e6, 1e-38, f32::MAX, f32::INFINITY, f32::NAN, 1e-45];

pub fn cases() -> Vec<Case> {
    [of_type::<bf16>(), of_type::<f16>(), of_type::<f32>()].into_iter().flatten().collect()
}

fn of_type<T: TestElement>() -> Vec<Case>
where
    Nvfp4CastRows<T>: Kernel,
    Nvfp4CastRowsInterleaved<T>: Kernel,
    Nvfp4DequantizeRows<T>: Kernel,
{
    let name = T::DTYPE.name();
    let mut cases = Vec::new();
    for scenario in Scenario::ALL {
        cases.push(Case::new(format!("nvfp4::cast::{name}::{scenario:?}"), Size::Small, move |r| {
            let values = scenario.generate(T::DTYPE, 9 * 160, 3);
            cast::<T>(r, &values, amax(&values))
        }));
    }
    for given in AMAXES {
        cases.push(Case::new(format!("nvfp4::cast::{name}::amax {given:e}"), Size::Small, move |r| {
            cast::<T>(r, &Scenario::Exponents.generate(T::DTYPE, 3 * 320, 4), given)
        }));
    }
    for ((rows, columns), size) in SHAPES.map(|shape| (shape, Size::Small)).into_iter().chain([(LARGE, Size::Large)]) {
        cases.push(Case::new(format!("nvfp4::cast::{name}::{rows}x{columns}"), size, move |r| {
            let values = Scenario::Normal.generate(T::DTYPE, rows * columns, 3);
            cast::<T>(r, &values, amax(&values))
        }));
        cases.push(Case::new(format!("nvfp4::cast_interleaved::{name}::{rows}x{columns}"), size, move |r| {
            interleaved::<T>(r, rows, columns)
        }));
        cases.push(Case::new(format!("nvfp4::dequantize::{name}::{rows}x{columns}"), size, move |r| back::<T>(r, rows * columns, 3.7)));
    }
    if T::DTYPE != Dtype::F16 {
        cases.extend(shapes_of_transformer_engine().map(|(rows, columns)| {
            Case::new(format!("nvfp4::cast::{name}::{rows}x{columns}"), Size::Large, move |r| {
                let values = Scenario::Uniform.generate(T::DTYPE, rows * columns, 3);
                cast::<T>(r, &values, amax(&values))
            })
        }));
    }
    for given in AMAXES {
        let every = 256 * 16;
        cases.push(Case::new(format!("nvfp4::dequantize::{name}::amax {given:e}"), Size::Small, move |r| back::<T>(r, every, given)));
    }
    cases
}

/// All of them where long runs are asked for.
pub(super) fn shapes_of_transformer_engine() -> impl Iterator<Item = (usize, usize)> {
    OF_TRANSFORMER_ENGINE.into_iter().chain(LONG.into_iter().filter(|_| long()))
}

fn cast<T: TestElement>(runtime: &Runtime, values: &[f32], amax: f32) -> Outcome
where
    Nvfp4CastRows<T>: Kernel,
{
    let stream = stream(runtime)?;
    let expected = quantize(values, amax);
    let (input, amax) = (T::upload(&stream, values)?, text(Buffer::from_slice(&stream, &[amax]))?);
    // Poisoned, so that an element that is not written shows.
    let mut data = text(Buffer::from_slice(&stream, &vec![e2m1x2::from_bits(0xa5); expected.data.len()]))?;
    let mut scales = text(Buffer::from_slice(&stream, &vec![e4m3::from_bits(0xa5); expected.scales.len()]))?;
    let args = Nvfp4CastRowsArgs { input: input.view(), amax: amax.view(), data: data.view_mut(), scales: scales.view_mut() };
    text(text(runtime.load::<Nvfp4CastRows<T>>())?.launch(&stream, args))?;
    let scales: Vec<u8> = text(scales.to_vec(&stream))?.into_iter().map(e4m3::to_bits).collect();
    let data: Vec<u8> = text(data.to_vec(&stream))?.into_iter().map(e2m1x2::to_bits).collect();
    equal("scales", &scales, &expected.scales)?;
    equal("data", &data, &expected.data)
}

fn interleaved<T: TestElement>(runtime: &Runtime, rows: usize, columns: usize) -> Outcome
where
    Nvfp4CastRowsInterleaved<T>: Kernel,
{
    let stream = stream(runtime)?;
    let values = Scenario::Outlier.generate(T::DTYPE, rows * columns, 3);
    let expected = quantize(&values, amax(&values));
    let expected_scales = interleave(rows, columns / 16, |row, block| expected.scales[row * (columns / 16) + block]);
    let (input, amax) = (T::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[expected.amax]))?);
    let mut data = text(Buffer::from_slice(&stream, &vec![e2m1x2::from_bits(0xa5); expected.data.len()]))?;
    let mut scales = text(Buffer::from_slice(&stream, &vec![e4m3::from_bits(0xa5); expected_scales.len()]))?;
    let args = Nvfp4CastRowsInterleavedArgs {
        input: MatrixArgument::new(input.view(), [rows as u64, columns as u64]),
        amax: amax.view(),
        data: data.view_mut(),
        scales: scales.view_mut(),
    };
    text(text(runtime.load::<Nvfp4CastRowsInterleaved<T>>())?.launch(&stream, args))?;
    let scales: Vec<u8> = text(scales.to_vec(&stream))?.into_iter().map(e4m3::to_bits).collect();
    let data: Vec<u8> = text(data.to_vec(&stream))?.into_iter().map(e2m1x2::to_bits).collect();
    equal("scales", &scales, &expected_scales)?;
    equal("data", &data, &expected.data)
}

fn back<T: TestElement>(runtime: &Runtime, elements: usize, amax: f32) -> Outcome
where
    Nvfp4DequantizeRows<T>: Kernel,
{
    let stream = stream(runtime)?;
    let mut random = Random::new(5);
    let quantized = Quantized {
        // All 16 codes in each block, in random order and pairs: with 256 blocks, every code under every scale.
        data: (0..elements / 16).flat_map(|_| shuffled_codes(&mut random)).collect(),
        scales: (0..elements / 16).map(|block| block as u8).collect(),
        amax,
    };
    let expected: Vec<u32> = dequantize(&quantized).into_iter().map(rounded_bits::<T>).collect();
    let data: Vec<e2m1x2> = quantized.data.iter().map(|&pair| e2m1x2::from_bits(pair)).collect();
    let scales: Vec<e4m3> = quantized.scales.iter().map(|&scale| e4m3::from_bits(scale)).collect();
    let (data, scales) = (text(Buffer::from_slice(&stream, &data))?, text(Buffer::from_slice(&stream, &scales))?);
    let amax = text(Buffer::from_slice(&stream, &[amax]))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; elements])))?;
    let args = Nvfp4DequantizeRowsArgs { data: data.view(), scales: scales.view(), amax: amax.view(), output: output.view_mut() };
    text(text(runtime.load::<Nvfp4DequantizeRows<T>>())?.launch(&stream, args))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)
}

/// The 16 codes in random order, in pairs.
pub(super) fn shuffled_codes(random: &mut Random) -> [u8; 8] {
    let mut codes: [u8; 16] = std::array::from_fn(|code| code as u8);
    for last in (1..16).rev() {
        codes.swap(last, random.below(last as u64 + 1) as usize);
    }
    std::array::from_fn(|pair| codes[2 * pair] | codes[2 * pair + 1] << 4)
}
