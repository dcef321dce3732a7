//! Groups in FP8 through the library: every member's codes, scale and values are those of the oracle, bit for bit.

use oxtile::comm::SingleRank;
use oxtile::quantize::fp8::Fp8Number;
use oxtile::quantize::grouped::GroupedFp8;
use oxtile::quantize::{MultiAmax, ScaleOptions};
use oxtile::{Error, Graph, Runtime};
use oxtile_tests::inputs::Dtype;
use oxtile_tests::oracle::amax::amax;
use oxtile_tests::oracle::fp8::{Rule, decode, encode, scale};
use oxtile_tile::num::{Element, bf16, e4m3, e5m2, f16};

use super::element::TestElement;
use super::grouped::{Input, groups, on_gpu_unless, values};
use super::mxfp8::TestFp8;
use crate::case::{Case, Outcome, Size, equal, stream, text};

/// Single elements, whole vectors and ragged ends, a run of a CUDA block and more than its two, and members without elements, first and last.
const MIXED: [[usize; 2]; 9] = [[0, 8], [33, 64], [1, 1], [5, 33], [0, 32], [40, 520], [7, 0], [2, 4096], [0, 0]];
/// Members without elements have scales all the same.
const EMPTY: [[usize; 2]; 2] = [[0, 32], [16, 0]];

pub fn cases() -> Vec<Case> {
    macro_rules! instances {
        ($($t:ty, $q:ty;)*) => { [$(of_types::<$t, $q>()),*] };
    }
    let casts = instances! { bf16, e4m3; bf16, e5m2; f16, e4m3; f16, e5m2; f32, e4m3; f32, e5m2; };
    casts.into_iter().flatten().chain([Case::new("grouped::fp8::captured", Size::Small, captured)]).collect()
}

fn of_types<T: TestElement + Fp8Number<Q>, Q: TestFp8>() -> Vec<Case> {
    let shapes = groups(&MIXED, 8).into_iter().chain([("empty", Size::Small, EMPTY.to_vec())]);
    let case = |(name, size, shapes): (&str, Size, Vec<[usize; 2]>)| {
        let size = on_gpu_unless(T::DTYPE == Dtype::Bf16 && Q::NAME == e4m3::NAME, size);
        let name = format!("grouped::fp8::{}::{}::{name}", T::DTYPE.name(), Q::NAME);
        Case::new(name, size, move |r| fp8::<T, Q>(r, &shapes))
    };
    shapes.map(case).collect()
}

fn fp8<T: TestElement + Fp8Number<Q>, Q: TestFp8>(r: &Runtime, shapes: &[[usize; 2]]) -> Outcome {
    let (stream, alone) = (stream(r)?, SingleRank::new(&text(r.device(0))?));
    let input = Input::<T>::new(&stream, shapes, true)?;
    let group = input.group(&stream)?;
    // Plain scales for one of the formats, powers of two for the other.
    let options = ScaleOptions { epsilon: if Q::NAME == e5m2::NAME { 1e-4 } else { 0.0 }, power_of_two: Q::NAME == e5m2::NAME };
    let rule = Rule { epsilon: options.epsilon, power_of_two: options.power_of_two, largest: f32::MAX };
    let casts = text(GroupedFp8::<T, Q>::new(r, options))?;
    let of_all = text(text(text(MultiAmax::new(r))?.local_amax(&stream, &group))?.reduce(&alone, &stream))?;
    let quantized = text(casts.quantize(&stream, &group, &of_all))?;
    let restored = text(casts.dequantize(&stream, &quantized))?;
    let inverses = text(quantized.all_scales().to_vec(&stream))?;
    equal("scales", &[inverses.len()], &[shapes.len()])?;
    for (i, member) in input.values.iter().enumerate() {
        let factor = scale(amax(member), Q::FORMAT, rule);
        equal(&format!("member {i}: inverse of the scale"), &[inverses[i].to_bits()], &[(1.0 / factor).to_bits()])?;
        let expected = encode(member, factor, Q::FORMAT);
        let found: Vec<u8> = text(quantized.to_vecs(&stream, i))?.0.into_iter().map(Q::code).collect();
        equal(&format!("member {i}: data"), &found, &expected)?;
        values(&stream, &restored, i, &decode(&expected, 1.0 / factor, Q::FORMAT))?;
    }
    Ok(())
}

/// A graph holds both ways once the tables are there; another number of amaxes is refused.
fn captured(r: &Runtime) -> Outcome {
    let (stream, alone, shapes) = (stream(r)?, SingleRank::new(&text(r.device(0))?), [[3, 40], [0, 8], [16, 16]]);
    let input = Input::<bf16>::new(&stream, &shapes, true)?;
    let group = input.group(&stream)?;
    let casts = text(GroupedFp8::<bf16, e4m3>::new(r, ScaleOptions::default()))?;
    let of_all = text(text(text(MultiAmax::new(r))?.local_amax(&stream, &group))?.reduce(&alone, &stream))?;
    let mut quantized = text(casts.quantize(&stream, &group, &of_all))?;
    let mut restored = text(casts.dequantize(&stream, &quantized))?;
    let before = text(restored.to_vec(&stream, 2))?;
    let graph = Graph::capture(&[&stream], || {
        casts.quantize_into(&stream, &group, &of_all, &mut quantized)?;
        casts.dequantize_into(&stream, &quantized, &mut restored)
    });
    text(text(graph)?.replay(&stream))?;
    equal("values", &text(restored.to_vec(&stream, 2))?, &before)?;

    let fewer = Input::<bf16>::new(&stream, &shapes[..2], true)?;
    let of_fewer = text(text(text(MultiAmax::new(r))?.local_amax(&stream, &fewer.group(&stream)?))?.reduce(&alone, &stream))?;
    match casts.quantize_into(&stream, &group, &of_fewer, &mut quantized) {
        Err(Error::Length { expected: 3, found: 2, .. }) => Ok(()),
        other => Err(format!("expected a refusal of 2 amaxes for 3 members, got {other:?}")),
    }
}
