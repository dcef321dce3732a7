//! The FP8 casts that transpose too, and the transpose alone, against the oracle, bit for bit.

use oxtile::quantize::fp8::Fp8Number;
use oxtile::{Buffer, Runtime};
use oxtile_kernels::fp8::*;
use oxtile_kernels::matrix::MatrixArgument;
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::fp8::{Rule, encode, scale, transpose};
use oxtile_tile::num::{bf16, e4m3, e5m2, f16};

use super::super::element::TestElement;
use super::super::mxfp8::{TestFp8, large_of};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Rows and columns: a tile, parts of one, tiles at edges in both dimensions, and nothing. Rows of whole vectors, then others.
const SHAPES: [(usize, usize); 11] =
    [(1, 1024), (128, 128), (16, 48), (1, 16), (5, 8), (144, 160), (130, 136), (17, 32), (0, 64), (4, 0), (129, 264)];
const RAGGED: [(usize, usize); 5] = [(5, 1), (65, 80), (33, 65), (130, 131), (16, 129)];
const LARGE: (usize, usize) = (993, 512);
/// Large ones of whole tiles.
const WHOLE: [(usize, usize); 3] = [(256, 1024), (512, 512), (256, 2048)];

const PLAIN: Rule = Rule { epsilon: 0.0, power_of_two: false, largest: f32::MAX };
const POWERS: Rule = Rule { epsilon: 1e-4, power_of_two: true, largest: f32::MAX };

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    let casts = instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; };
    casts.into_iter().flatten().chain(transposes::<bf16, e4m3>()).chain(transposes::<bf16, e5m2>()).collect()
}

fn of_types<T: TestElement + Fp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let name = format!("{}::{}", T::DTYPE.name(), Q::NAME);
    let mut cases = Vec::new();
    for scenario in Scenario::ALL {
        cases.push(Case::new(format!("fp8::cast_transpose::{name}::{scenario:?}"), Size::Small, move |r| {
            cast::<T, Q>(r, scenario, [45, 72], PLAIN)?;
            cast::<T, Q>(r, scenario, [45, 72], POWERS)
        }));
        cases.push(Case::new(format!("fp8::cast_transpose_delayed::{name}::{scenario:?}"), Size::Small, move |r| {
            cast_delayed::<T, Q>(r, scenario, [45, 72])
        }));
    }
    let shapes = SHAPES.map(|s| (s, Size::Small)).into_iter().chain([(LARGE, large_of::<T, Q>())]);
    for ((rows, columns), size) in shapes.chain(WHOLE.map(|s| (s, Size::Twin))) {
        cases.push(Case::new(format!("fp8::cast_transpose::{name}::{rows}x{columns}"), size, move |r| {
            cast::<T, Q>(r, Scenario::Normal, [rows, columns], PLAIN)
        }));
        cases.push(Case::new(format!("fp8::cast_transpose_delayed::{name}::{rows}x{columns}"), size, move |r| {
            cast_delayed::<T, Q>(r, Scenario::Normal, [rows, columns])
        }));
    }
    cases
}

fn cast<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, scenario: Scenario, shape: [usize; 2], rule: Rule) -> Outcome {
    let stream = stream(r)?;
    let values = scenario.generate(T::DTYPE, shape[0] * shape[1], 3);
    let factor = scale(amax(&values), Q::FORMAT, rule);
    let (input, amax) = (T::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[amax(&values)]))?);
    // Poisoned, so that an element that is not written shows.
    let poison = vec![Q::of_code(0xa5); values.len()];
    let (mut data, mut turned) = (text(Buffer::from_slice(&stream, &poison))?, text(Buffer::from_slice(&stream, &poison))?);
    let mut inverse = text(Buffer::from_slice(&stream, &[7.0_f32]))?;
    let args = Fp8CastTransposeArgs {
        input: MatrixArgument::new(input.view(), shape.map(|side| side as u64)),
        amax: amax.view(),
        data: data.view_mut(),
        transposed: turned.view_mut(),
        scale_inverse: inverse.view_mut(),
        options: ScaleOptions { epsilon: rule.epsilon, power_of_two: rule.power_of_two },
    };
    text(text(r.load::<T::CastTranspose>())?.launch(&stream, args))?;
    equal("inverse of the scale", &[text(inverse.to_vec(&stream))?[0].to_bits()], &[(1.0 / factor).to_bits()])?;
    let expected = encode(&values, factor, Q::FORMAT);
    equal("data", &codes(text(data.to_vec(&stream))?), &expected)?;
    equal("transposed", &codes(text(turned.to_vec(&stream))?), &transpose(&expected, shape))
}

fn cast_delayed<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, scenario: Scenario, shape: [usize; 2]) -> Outcome {
    let stream = stream(r)?;
    let values = scenario.generate(T::DTYPE, shape[0] * shape[1], 3);
    let factor = 19.3_f32;
    let (input, scale) = (T::upload(&stream, &values)?, text(Buffer::from_slice(&stream, &[factor]))?);
    let poison = vec![Q::of_code(0xa5); values.len()];
    let (mut data, mut turned) = (text(Buffer::from_slice(&stream, &poison))?, text(Buffer::from_slice(&stream, &poison))?);
    let mut raised = text(Buffer::from_slice(&stream, &[0.5_f32]))?;
    let mut inverse = text(Buffer::from_slice(&stream, &[7.0_f32]))?;
    let args = Fp8CastTransposeDelayedArgs {
        input: MatrixArgument::new(input.view(), shape.map(|side| side as u64)),
        scale: scale.view(),
        data: data.view_mut(),
        transposed: turned.view_mut(),
        scale_inverse: inverse.view_mut(),
        amax: raised.view_mut(),
    };
    text(text(r.load::<T::CastTransposeDelayed>())?.launch(&stream, args))?;
    let expected = encode(&values, factor, Q::FORMAT);
    equal("inverse of the scale", &text(inverse.to_vec(&stream))?, &[1.0 / factor])?;
    equal("amax", &text(raised.to_vec(&stream))?, &[amax(&values).max(0.5)])?;
    equal("data", &codes(text(data.to_vec(&stream))?), &expected)?;
    equal("transposed", &codes(text(turned.to_vec(&stream))?), &transpose(&expected, shape))
}

/// `T` is any type: it names the kernel of `Q`.
fn transposes<T: TestElement + Fp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let shapes = SHAPES.iter().chain(&RAGGED).map(|s| (*s, Size::Small)).chain([(LARGE, large_of::<T, Q>())]);
    let case = |((rows, columns), size)| {
        Case::new(format!("fp8::transpose::{}::{rows}x{columns}", Q::NAME), size, move |r: &Runtime| {
            let stream = stream(r)?;
            let mut random = Random::new(5);
            // One byte more, so that the matrix starts off the boundary too.
            let bytes: Vec<u8> = (0..=rows * columns).map(|_| random.below(256) as u8).collect();
            let data = text(Buffer::from_slice(&stream, &bytes.iter().map(|&b| Q::of_code(b)).collect::<Vec<_>>()))?;
            for start in 0..2 {
                let mut turned = text(Buffer::from_slice(&stream, &vec![Q::of_code(0xa5); rows * columns]))?;
                let view = data.view().slice(start as u64, (start + rows * columns) as u64);
                let input = MatrixArgument::new(view, [rows as u64, columns as u64]);
                text(text(r.load::<T::Transpose>())?.launch(&stream, Fp8TransposeArgs { input, transposed: turned.view_mut() }))?;
                let expected = transpose(&bytes[start..start + rows * columns], [rows, columns]);
                equal("transposed", &codes(text(turned.to_vec(&stream))?), &expected)?;
            }
            Ok(())
        })
    };
    shapes.chain(WHOLE.map(|s| (s, Size::Twin))).map(case).collect()
}

fn codes<Q: TestFp8>(elements: Vec<Q>) -> Vec<u8> {
    elements.into_iter().map(Q::code).collect()
}
