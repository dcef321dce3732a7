//! FP8 with one scale for a tensor, the casts and their inverse against the oracle, bit for bit.

use oxtile::quantize::fp8::Fp8Number;
use oxtile::{Buffer, Runtime};
use oxtile_kernels::fp8::*;
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::fp8::{Rule, decode, encode, scale};
use oxtile_tile::num::{bf16, e4m3, e5m2, f16};

use super::super::element::{TestElement, comparable_bits, rounded_bits};
use super::super::mxfp8::{TestFp8, large_of};
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Lengths and starts: around vectors and the runs of CUDA blocks, off the 16-byte boundary, TransformerEngine's list, and nothing.
const LENGTHS: [(usize, usize); 8] = [(0, 0), (1, 0), (7, 1), (16, 0), (65 * 96, 0), (8192, 0), (8192 + 4100, 0), (9000, 3)];
const LARGE: (usize, usize) = (993 * 512 + 5, 0);

/// Amaxes that are not the tensor's own, and specials.
const AMAXES: [f32; 8] = [0.0, 1e-3, 1e6, 1e-38, f32::MAX, f32::INFINITY, f32::NAN, 1e-45];

const PLAIN: Rule = Rule { epsilon: 0.0, power_of_two: false, largest: f32::MAX };
const POWERS: Rule = Rule { epsilon: 1e-4, power_of_two: true, largest: f32::MAX };

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; }.into_iter().flatten().collect()
}

fn of_types<T: TestElement + Fp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let name = format!("{}::{}", T::DTYPE.name(), Q::NAME);
    let mut cases = Vec::new();
    for scenario in Scenario::ALL {
        let values = move || scenario.generate(T::DTYPE, 2077, 3);
        cases.push(Case::new(format!("fp8::cast::{name}::{scenario:?}"), Size::Small, move |r| {
            let values = values();
            cast::<T, Q>(r, &values, 0, amax(&values), PLAIN)?;
            cast::<T, Q>(r, &values, 0, amax(&values), POWERS)
        }));
        cases.push(Case::new(format!("fp8::cast_delayed::{name}::{scenario:?}"), Size::Small, move |r| {
            cast_delayed::<T, Q>(r, &values(), 0)
        }));
    }
    for given in AMAXES {
        cases.push(Case::new(format!("fp8::cast::{name}::amax {given:e}"), Size::Small, move |r| {
            cast::<T, Q>(r, &Scenario::Exponents.generate(T::DTYPE, 960, 4), 0, given, PLAIN)
        }));
        cases.push(Case::new(format!("fp8::dequantize::{name}::scale {given:e}"), Size::Small, move |r| back::<T, Q>(r, 256, 0, given)));
    }
    for ((length, start), size) in LENGTHS.map(|l| (l, Size::Small)).into_iter().chain([(LARGE, large_of::<T, Q>())]) {
        let values = move || Scenario::Normal.generate(T::DTYPE, start + length, 3);
        let title = format!("{name}::length_{length}_from_{start}");
        cases.push(Case::new(format!("fp8::cast::{title}"), size, move |r| {
            let values = values();
            cast::<T, Q>(r, &values, start, amax(&values[start..]), PLAIN)
        }));
        cases.push(Case::new(format!("fp8::cast_delayed::{title}"), size, move |r| cast_delayed::<T, Q>(r, &values(), start)));
        cases.push(Case::new(format!("fp8::dequantize::{title}"), size, move |r| back::<T, Q>(r, length, start, 3.7)));
    }
    cases
}

/// Casts what follows the first `start` values.
fn cast<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, values: &[f32], start: usize, given: f32, rule: Rule) -> Outcome {
    let stream = stream(r)?;
    let factor = scale(given, Q::FORMAT, rule);
    let expected = encode(&values[start..], factor, Q::FORMAT);
    let (input, amax) = (T::upload(&stream, values)?, text(Buffer::from_slice(&stream, &[given]))?);
    // Poisoned, so that an element that is not written shows.
    let mut data = text(Buffer::from_slice(&stream, &vec![Q::of_code(0xa5); expected.len()]))?;
    let mut inverse = text(Buffer::from_slice(&stream, &[7.0_f32]))?;
    let args = Fp8CastArgs {
        input: input.view().slice(start as u64, values.len() as u64),
        amax: amax.view(),
        data: data.view_mut(),
        scale_inverse: inverse.view_mut(),
        options: ScaleOptions { epsilon: rule.epsilon, power_of_two: rule.power_of_two },
    };
    text(text(r.load::<T::Cast>())?.launch(&stream, args))?;
    let data: Vec<u8> = text(data.to_vec(&stream))?.into_iter().map(Q::code).collect();
    equal("inverse of the scale", &[text(inverse.to_vec(&stream))?[0].to_bits()], &[(1.0 / factor).to_bits()])?;
    equal("data", &data, &expected)
}

/// Casts by a scale that is not the tensor's own; the amax is raised from a smaller and a larger one.
fn cast_delayed<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, values: &[f32], start: usize) -> Outcome {
    let stream = stream(r)?;
    let factor = 19.3_f32;
    let expected = encode(&values[start..], factor, Q::FORMAT);
    let (input, scale) = (T::upload(&stream, values)?, text(Buffer::from_slice(&stream, &[factor]))?);
    for before in [0.0, 1e3_f32] {
        let mut data = text(Buffer::from_slice(&stream, &vec![Q::of_code(0xa5); expected.len()]))?;
        let mut raised = text(Buffer::from_slice(&stream, &[before]))?;
        let mut inverse = text(Buffer::from_slice(&stream, &[7.0_f32]))?;
        let args = Fp8CastDelayedArgs {
            input: input.view().slice(start as u64, values.len() as u64),
            scale: scale.view(),
            data: data.view_mut(),
            scale_inverse: inverse.view_mut(),
            amax: raised.view_mut(),
        };
        text(text(r.load::<T::CastDelayed>())?.launch(&stream, args))?;
        let data: Vec<u8> = text(data.to_vec(&stream))?.into_iter().map(Q::code).collect();
        equal("data", &data, &expected)?;
        equal("inverse of the scale", &text(inverse.to_vec(&stream))?, &[1.0 / factor])?;
        equal("amax", &text(raised.to_vec(&stream))?, &[before.max(amax(&values[start..]))])?;
    }
    Ok(())
}

/// Every code, NaN and Inf among them.
fn back<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, length: usize, start: usize, inverse: f32) -> Outcome {
    let stream = stream(r)?;
    let mut random = Random::new(5);
    let codes: Vec<u8> = (0..start + length).map(|i| (i as u64 ^ random.below(2)) as u8).collect();
    let expected: Vec<u32> = decode(&codes[start..], inverse, Q::FORMAT).into_iter().map(rounded_bits::<T>).collect();
    let data = text(Buffer::from_slice(&stream, &codes.iter().map(|&code| Q::of_code(code)).collect::<Vec<_>>()))?;
    let scale_inverse = text(Buffer::from_slice(&stream, &[inverse]))?;
    let mut output = text(Buffer::from_slice(&stream, &T::encode(&vec![7.0; length])))?;
    let args = Fp8DequantizeArgs {
        data: data.view().slice(start as u64, (start + length) as u64),
        scale_inverse: scale_inverse.view(),
        output: output.view_mut(),
    };
    text(text(r.load::<T::Dequantize>())?.launch(&stream, args))?;
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)
}
