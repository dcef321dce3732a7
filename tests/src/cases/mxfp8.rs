//! The MXFP8 casts and their inverses against the oracle, bit for bit.

use oxtile::{Buffer, HostElement, Runtime};
use oxtile_kernels::mxfp8::*;
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle::formats::{E4M3, E5M2, Format};
use oxtile_tests::oracle::mxfp8::{Quantized, dequantize, quantize};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Fp8, bf16, e4m3, e5m2, f16, ue8m0};

use super::element::{TestElement, comparable_bits, rounded_bits};
use crate::backend::long;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns. Whole blocks, then ragged ones; TransformerEngine's list among them.
const SHAPES: [(usize, usize); 14] = [
    (1, 1024),
    (1, 32),
    (3, 64),
    (17, 96),
    (128, 128),
    (4, 1056),
    (1, 16),
    (16, 48),
    (5, 1),
    (33, 65),
    (65, 80),
    (17, 400),
    (0, 64),
    (4, 0),
];
const LARGE: [(usize, usize); 3] = [(993, 512), (127, 400), (127, 4000)];
/// Large ones of TransformerEngine's, of whole tiles.
const WHOLE: [(usize, usize); 3] = [(256, 1024), (512, 512), (256, 8192)];
/// The one that takes minutes.
const LONG: (usize, usize) = (8192, 7168);

/// Small shapes, large ones, those of whole tiles, and where long runs are asked for the longest.
pub(super) fn sized<T: TestElement, Q: TestFp8>(
    small: &[(usize, usize)],
    large: &[(usize, usize)],
) -> impl Iterator<Item = ((usize, usize), Size)> {
    let of = |shapes: &[(usize, usize)], size| shapes.iter().map(|&shape| (shape, size)).collect::<Vec<_>>();
    let longest = of(long().then_some(LONG).as_slice(), Size::Large);
    [of(small, Size::Small), of(large, large_of::<T, Q>()), of(&WHOLE, Size::Twin), longest].into_iter().flatten()
}

/// The size of a large case of these types: the emulator runs those of one pair of types for each width of the input.
pub fn large_of<T: TestElement, Q: TestFp8>() -> Size {
    match (T::DTYPE.name(), Q::NAME) {
        ("bf16", "e4m3") | ("f32", "e5m2") => Size::Large,
        _ => Size::Twin,
    }
}

/// An 8-bit format with the oracle's description of it.
pub trait TestFp8: Fp8 + HostElement<Device = Self> {
    const FORMAT: &'static Format;
    fn code(self) -> u8;
    fn of_code(code: u8) -> Self;
}

macro_rules! test_fp8 {
    ($($t:ident $format:ident)*) => { $(
        impl TestFp8 for $t {
            const FORMAT: &'static Format = &$format;

            fn code(self) -> u8 {
                self.to_bits()
            }

            fn of_code(code: u8) -> Self {
                Self::from_bits(code)
            }
        }
    )* };
}

test_fp8!(e4m3 E4M3  e5m2 E5M2);

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; }.into_iter().flatten().collect()
}

fn of_types<T: TestElement, Q: TestFp8>() -> Vec<Case>
where
    Mxfp8CastRows<T, Q>: Kernel,
    Mxfp8CastRaggedRows<T, Q>: Kernel,
    Mxfp8DequantizeRows<Q, T>: Kernel,
    Mxfp8DequantizeRaggedRows<Q, T>: Kernel,
{
    let name = format!("{}::{}", T::DTYPE.name(), Q::NAME);
    let mut cases = Vec::new();
    for scenario in Scenario::ALL {
        cases.push(Case::new(format!("mxfp8::cast::{name}::{scenario:?}"), Size::Small, move |r| cast::<T, Q>(r, scenario, 9, 160)));
    }
    for ((rows, columns), size) in sized::<T, Q>(&SHAPES, &LARGE) {
        let shape = format!("{rows}x{columns}");
        cases.push(Case::new(format!("mxfp8::cast::{name}::{shape}"), size, move |r| cast::<T, Q>(r, Scenario::Normal, rows, columns)));
        cases.push(Case::new(format!("mxfp8::dequantize::{name}::{shape}"), size, move |r| back::<T, Q>(r, rows, columns)));
    }
    cases
}

fn cast<T: TestElement, Q: TestFp8>(runtime: &Runtime, scenario: Scenario, rows: usize, columns: usize) -> Outcome
where
    Mxfp8CastRows<T, Q>: Kernel,
    Mxfp8CastRaggedRows<T, Q>: Kernel,
{
    let stream = stream(runtime)?;
    let values = scenario.generate(T::DTYPE, rows * columns, 3);
    let expected = quantize(&values, rows, columns, Q::FORMAT);
    let input = T::upload(&stream, &values)?;
    // Poisoned, so that an element that is not written shows.
    let mut data = text(Buffer::from_slice(&stream, &vec![Q::of_code(0xa5); values.len()]))?;
    let mut scales = text(Buffer::from_slice(&stream, &vec![ue8m0::from_bits(0xa5); expected.scales.len()]))?;
    let (input, data_view, scales_view) = (input.view(), data.view_mut(), scales.view_mut());
    if columns.is_multiple_of(32) {
        let args = Mxfp8CastRowsArgs { input, data: data_view, scales: scales_view };
        text(text(runtime.load::<Mxfp8CastRows<T, Q>>())?.launch(&stream, args))?;
    } else {
        let args = Mxfp8CastRaggedRowsArgs { input, data: data_view, scales: scales_view, columns: columns as u64 };
        text(text(runtime.load::<Mxfp8CastRaggedRows<T, Q>>())?.launch(&stream, args))?;
    }
    let scales: Vec<u8> = text(scales.to_vec(&stream))?.into_iter().map(ue8m0::to_bits).collect();
    let data: Vec<u8> = text(data.to_vec(&stream))?.into_iter().map(Q::code).collect();
    equal("scales", &scales, &expected.scales)?;
    equal("data", &data, &expected.data)
}

fn back<T: TestElement, Q: TestFp8>(runtime: &Runtime, rows: usize, columns: usize) -> Outcome
where
    Mxfp8DequantizeRows<Q, T>: Kernel,
    Mxfp8DequantizeRaggedRows<Q, T>: Kernel,
{
    let stream = stream(runtime)?;
    let mut random = Random::new(5);
    // Every code and every scale, NaN among both.
    let quantized = Quantized {
        data: (0..rows * columns).map(|i| (i as u64 ^ random.below(256)) as u8).collect(),
        scales: (0..rows * columns.div_ceil(32)).map(|_| random.below(256) as u8).collect(),
    };
    let expected: Vec<u32> = dequantize(&quantized, rows, columns, Q::FORMAT).into_iter().map(rounded_bits::<T>).collect();
    let data = text(Buffer::from_slice(&stream, &quantized.data.iter().map(|&c| Q::of_code(c)).collect::<Vec<_>>()))?;
    let scales = text(Buffer::from_slice(&stream, &quantized.scales.iter().map(|&c| ue8m0::from_bits(c)).collect::<Vec<_>>()))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; rows * columns])))?;
    let (data, scales, view) = (data.view(), scales.view(), output.view_mut());
    if columns.is_multiple_of(32) {
        let args = Mxfp8DequantizeRowsArgs { data, scales, output: view };
        text(text(runtime.load::<Mxfp8DequantizeRows<Q, T>>())?.launch(&stream, args))?;
    } else {
        let args = Mxfp8DequantizeRaggedRowsArgs { data, scales, output: view, columns: columns as u64 };
        text(text(runtime.load::<Mxfp8DequantizeRaggedRows<Q, T>>())?.launch(&stream, args))?;
    }
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)
}
