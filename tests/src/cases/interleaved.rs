//! The rowwise cast that interleaves its scales, and values from interleaved scales: against the oracles, bit for bit.

use oxtile::quantize::{Direction, Interleaved, InterleavedMxfp8, InterleavedNvfp4, InterleavedScales, Mxfp8Tensor, Nvfp4Tensor};
use oxtile::{Buffer, Runtime};
use oxtile_kernels::mxfp8::*;
use oxtile_kernels::nvfp4::*;
use oxtile_tests::inputs::{Dtype, Random, Scenario};
use oxtile_tests::oracle::interleave::{interleave, length};
use oxtile_tests::oracle::{mxfp8, nvfp4};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{bf16, e2m1x2, e4m3, e5m2, f16, ue8m0};

use super::element::{TestElement, comparable_bits, rounded_bits};
use super::grouped::on_gpu_unless;
use super::mxfp8::TestFp8;
use super::nvfp4::shuffled_codes;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Ends of tiles in both dimensions, whole ones, more than a warp's part of a row, one row, and nothing.
const SHAPES: [([usize; 2], Size); 7] = [
    ([128, 128], Size::Small),
    ([33, 160], Size::Small),
    ([130, 32], Size::Small),
    ([2, 1120], Size::Small),
    ([1, 64], Size::Small),
    ([0, 64], Size::Small),
    ([993, 2080], Size::Large),
];

pub fn cases() -> Vec<Case> {
    macro_rules! mxfp8 {
        ($($t:ty, $q:ty;)*) => { [$(of_mxfp8::<$t, $q>()),*] };
    }
    let mxfp8 = mxfp8! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; };
    mxfp8.into_iter().chain([of_nvfp4::<bf16>(), of_nvfp4::<f16>(), of_nvfp4::<f32>()]).flatten().collect()
}

fn of_mxfp8<T: TestElement, Q: TestFp8>() -> Vec<Case>
where
    Mxfp8CastRowsInterleaved<T, Q>: Kernel,
    Mxfp8DequantizeRowsInterleaved<Q, T>: Kernel,
    Mxfp8DequantizeColumnsInterleaved<Q, T>: Kernel,
{
    let name = format!("mxfp8::interleaved::{}::{}", T::DTYPE.name(), Q::NAME);
    let on_both = matches!((T::DTYPE, Q::NAME), (Dtype::Bf16, "e4m3") | (Dtype::F16, "e5m2") | (Dtype::F32, "e4m3"));
    let scenarios = Scenario::ALL.into_iter().filter(move |scenario| on_both || *scenario == Scenario::Outlier).map(|scenario| {
        Case::new(format!("{name}::{scenario:?}"), Size::Small, move |r| mxfp8::<T, Q>(r, [9, 160], scenario, Direction::Rows))
    });
    let few = move |shape: &([usize; 2], Size)| on_both || [[33, 160], [993, 2080]].contains(&shape.0);
    let shapes = SHAPES.into_iter().filter(few).flat_map(|([rows, columns], size)| {
        [Direction::Rows, Direction::Columns].map(|direction| {
            let name = format!("{name}::{direction:?}::{rows}x{columns}");
            let size = on_gpu_unless(on_both, size);
            Case::new(name, size, move |r| mxfp8::<T, Q>(r, [rows, columns], Scenario::Normal, direction))
        })
    });
    scenarios.chain(shapes).collect()
}

/// Rowwise: cast and back; columnwise: back.
fn mxfp8<T: TestElement, Q: TestFp8>(r: &Runtime, [rows, columns]: [usize; 2], scenario: Scenario, direction: Direction) -> Outcome
where
    Mxfp8CastRowsInterleaved<T, Q>: Kernel,
    Mxfp8DequantizeRowsInterleaved<Q, T>: Kernel,
    Mxfp8DequantizeColumnsInterleaved<Q, T>: Kernel,
{
    let (stream, casts) = (stream(r)?, text(InterleavedMxfp8::<T, Q>::new(r))?);
    let values = scenario.generate(T::DTYPE, rows * columns, 3);
    let shape = [rows as u64, columns as u64];
    let by_rows = direction == Direction::Rows;
    let cast = if by_rows { mxfp8::quantize } else { mxfp8::quantize_columns };
    let expected = cast(&values, rows, columns, Q::FORMAT);
    let [outer, blocks] = if by_rows { [rows, columns / 32] } else { [columns, rows.div_ceil(32)] };
    let interleaved = interleave(outer, blocks, |i, j| expected.scales[if by_rows { i * blocks + j } else { j * outer + i }]);
    let codes: Vec<Q> = expected.data.iter().map(|&code| Q::of_code(code)).collect();
    let scales: Vec<ue8m0> = interleaved.iter().map(|&code| ue8m0::from_bits(code)).collect();
    let (data, scales) = (text(Buffer::from_slice(&stream, &codes))?, text(InterleavedScales::from_slice(&stream, &scales))?);
    let tensor = Mxfp8Tensor::<Q, Interleaved> { data, scales, amax: (), shape, direction };
    if by_rows {
        let found = text(casts.quantize_rows(&stream, T::upload(&stream, &values)?.view(), shape))?;
        let found_scales: Vec<u8> = text(found.scales.to_vec(&stream))?.into_iter().map(ue8m0::to_bits).collect();
        equal("scales", &found_scales, &interleaved)?;
        equal("data", &text(found.data.to_vec(&stream))?.into_iter().map(Q::code).collect::<Vec<_>>(), &expected.data)?;
    }
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; values.len()])))?;
    text(casts.dequantize(&stream, &tensor, output.view_mut()))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    let back = if by_rows { mxfp8::dequantize } else { mxfp8::dequantize_columns };
    let decoded = back(&expected, rows, columns, Q::FORMAT);
    equal("values", &found, &decoded.into_iter().map(rounded_bits::<T>).collect::<Vec<_>>())
}

fn of_nvfp4<T: TestElement>() -> Vec<Case>
where
    Nvfp4DequantizeRowsInterleaved<T>: Kernel,
    Nvfp4DequantizeColumnsInterleaved<T>: Kernel,
{
    let shapes =
        [([16, 16], Size::Small), ([48, 80], Size::Small), ([144, 32], Size::Small), ([0, 32], Size::Small), ([992, 1040], Size::Large)];
    let case = |([rows, columns], size): ([usize; 2], Size), direction: Direction| {
        let name = format!("nvfp4::interleaved::{}::{direction:?}::{rows}x{columns}", T::DTYPE.name());
        let size = on_gpu_unless(T::DTYPE != Dtype::F16, size);
        Case::new(name, size, move |r| nvfp4::<T>(r, [rows, columns], direction))
    };
    shapes.into_iter().flat_map(|shape| [case(shape, Direction::Rows), case(shape, Direction::Columns)]).collect()
}

fn nvfp4<T: TestElement>(r: &Runtime, [rows, columns]: [usize; 2], direction: Direction) -> Outcome
where
    Nvfp4DequantizeRowsInterleaved<T>: Kernel,
    Nvfp4DequantizeColumnsInterleaved<T>: Kernel,
{
    let (stream, mut random, count, amax) = (stream(r)?, Random::new(5), rows * columns / 16, 3.7);
    let data = (0..count).flat_map(|_| shuffled_codes(&mut random)).collect();
    let quantized = nvfp4::Quantized { data, scales: (0..count).map(|block| block as u8).collect(), amax };
    let decoded = nvfp4::dequantize(&quantized);
    let by_rows = direction == Direction::Rows;
    let [outer, blocks] = if by_rows { [rows, columns / 16] } else { [columns, rows / 16] };
    let scales = interleave(outer, blocks, |i, j| quantized.scales[i * blocks + j]);
    equal("scales", &[scales.len()], &[length(outer, blocks)])?;
    let data: Vec<e2m1x2> = quantized.data.iter().map(|&pair| e2m1x2::from_bits(pair)).collect();
    let scales: Vec<e4m3> = scales.iter().map(|&code| e4m3::from_bits(code)).collect();
    let (data, scales) = (text(Buffer::from_slice(&stream, &data))?, text(InterleavedScales::from_slice(&stream, &scales))?);
    let amax = text(Buffer::from_slice(&stream, &[amax]))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; rows * columns])))?;
    let shape = [rows as u64, columns as u64];
    let tensor = Nvfp4Tensor::<Interleaved> { data, scales, amax, shape, direction };
    text(text(InterleavedNvfp4::<T>::new(r))?.dequantize(&stream, &tensor, output.view_mut()))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    let expected = if by_rows { decoded } else { nvfp4::transpose(&decoded, rows) };
    equal("values", &found, &expected.into_iter().map(rounded_bits::<T>).collect::<Vec<_>>())
}
