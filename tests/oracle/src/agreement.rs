//! The format oracles against the golden vectors, and `oxtile_tile::num` against the oracles.

use oxtile_tile::num::{self, Float, Fp8, bf16, e2m1, e4m3, e5m2, f16, ue8m0};

use super::formats::{BF16, E2M1, E4M3, E5M2, F16, Format, e8m0};
use super::mxfp8;
use crate::golden;
use crate::inputs::{Dtype, Scenario};

const SMALL: [&Format; 3] = [&E4M3, &E5M2, &E2M1];

fn value(pattern: u32) -> f64 {
    f64::from(f32::from_bits(pattern))
}

/// f32 patterns: every 2^16th and its neighbours (so all of bf16), those around each boundary, a stride besides.
fn patterns<'a>(runs: &'a [(u32, u8)]) -> impl Iterator<Item = u32> + 'a {
    let coarse = (0..=0xffff_u32).flat_map(|upper| [0, 1, 0x8000, 0xffff].map(|lower| upper << 16 | lower));
    coarse.chain(golden::boundaries(runs)).chain((0..u32::MAX).step_by(65_521))
}

#[test]
fn decoding_is_golden() {
    let golden = golden::formats();
    for format in SMALL {
        for (code, bits) in golden.decode[format.name].iter().enumerate() {
            let ours = format.decode(code as u32);
            match bits {
                Some(bits) => assert_eq!(ours.to_bits(), value(*bits).to_bits(), "{} {code:#x}", format.name),
                None => assert!(ours.is_nan(), "{} {code:#x}", format.name),
            }
        }
    }
    for (code, bits) in golden.decode["ue8m0"].iter().enumerate() {
        match bits {
            Some(bits) => assert_eq!(e8m0::decode(code as u8), value(*bits)),
            None => assert!(e8m0::decode(code as u8).is_nan()),
        }
    }
    let halves = (0..=0xffff).flat_map(|code| {
        let x = F16.decode(code) as f32;
        let bits = if x.is_nan() { 0x7fff_7fff } else { x.to_bits() };
        [bits as u16, (bits >> 16) as u16]
    });
    assert_eq!(golden::hash(halves), golden.hash["f16 to f32"]);
}

#[test]
fn encoding_is_golden() {
    let golden = golden::formats();
    for format in SMALL {
        let runs = &golden.f32[format.name];
        for pattern in patterns(runs) {
            let expected = golden::look_up(runs, pattern);
            assert_eq!(format.encode(value(pattern)), u32::from(expected), "{} of {pattern:#x}", format.name);
        }
        for (half, runs) in [(&BF16, &golden.bf16), (&F16, &golden.f16)] {
            for code in 0..=0xffff {
                let expected = golden::look_up(&runs[format.name], code);
                let ours = format.encode(half.decode(code));
                assert_eq!(ours, u32::from(expected), "{} of {} {code:#x}", format.name, half.name);
            }
        }
    }
}

#[test]
fn scales_are_golden() {
    let golden = golden::formats();
    let runs = &golden.f32["ue8m0"];
    for pattern in golden::boundaries(runs).chain((0..u32::MAX).step_by(65_521)) {
        assert_eq!(e8m0::round_up(value(pattern)), golden::look_up(runs, pattern), "{pattern:#x}");
    }
}

#[test]
fn halves_are_golden() {
    let golden = golden::formats();
    let convert =
        |from: &'static Format, to: &'static Format| golden::hash((0..=0xffff).map(move |code| to.encode(from.decode(code)) as u16));
    assert_eq!(convert(&BF16, &F16), golden.hash["bf16 to f16"]);
    assert_eq!(convert(&F16, &BF16), golden.hash["f16 to bf16"]);
    for (to, name) in [(&BF16, "f32 to bf16"), (&F16, "f32 to f16")] {
        let codes = (0..=u32::MAX).step_by(65_521).map(|pattern| to.encode(value(pattern)) as u16);
        assert_eq!(golden::hash(codes), golden.hash[name]);
    }
    for (pattern, bf16, f16) in golden::sample() {
        assert_eq!(BF16.encode(value(pattern)), u32::from(bf16), "{pattern:#x}");
        assert_eq!(F16.encode(value(pattern)), u32::from(f16), "{pattern:#x}");
    }
}

/// A type's conversions against an oracle's, on every code and on the f32 patterns around it.
fn agrees<T: Float>(format: &Format, to_code: fn(T) -> u32, of_code: fn(u32) -> T) {
    for code in 0..format.codes() {
        let (ours, theirs) = (of_code(code).to_f32(), format.decode(code));
        assert!(f64::from(ours) == theirs || ours.is_nan() && theirs.is_nan(), "value of {} {code:#x}", T::NAME);
        if theirs.is_nan() {
            continue;
        }
        assert_eq!(f64::from(ours).to_bits(), theirs.to_bits(), "sign of {} {code:#x}", T::NAME);
        // The code itself and the midpoints with its neighbours, 2 ulp to either side.
        let next = format.decode((code + 1) % format.codes());
        for centre in [theirs, (theirs + next) / 2.0] {
            for ulps in -2..=2 {
                let x = f32::from_bits((centre as f32).to_bits().wrapping_add_signed(ulps));
                let (ours, theirs) = (to_code(T::from_f32(x)), format.encode(f64::from(x)));
                assert_eq!(ours, theirs, "{} of {x:e} ({:#x})", T::NAME, x.to_bits());
            }
        }
    }
    for pattern in (0..=u32::MAX).step_by(8_191) {
        let (ours, theirs) = (to_code(T::from_f32(f32::from_bits(pattern))), format.encode(value(pattern)));
        assert_eq!(ours, theirs, "{} of {pattern:#x}", T::NAME);
    }
}

#[test]
fn num_agrees_with_the_oracles() {
    agrees::<bf16>(&BF16, |x| x.to_bits().into(), |code| bf16::from_bits(code as u16));
    agrees::<f16>(&F16, |x| x.to_bits().into(), |code| f16::from_bits(code as u16));
    agrees::<e4m3>(&E4M3, |x| x.to_bits().into(), |code| e4m3::from_bits(code as u8));
    agrees::<e5m2>(&E5M2, |x| x.to_bits().into(), |code| e5m2::from_bits(code as u8));
    agrees::<e2m1>(&E2M1, |x| x.to_bits().into(), |code| e2m1::from_bits(code as u8));
}

#[test]
fn num_scales_agree_with_the_oracle() {
    for code in 0..=0xfe {
        assert_eq!(f64::from(ue8m0::from_bits(code).to_f32()), e8m0::decode(code));
        assert_eq!(f64::from(ue8m0::from_bits(code).reciprocal()), e8m0::multiplier(code));
    }
    assert!(ue8m0::NAN.to_f32().is_nan() && ue8m0::NAN.reciprocal().is_nan());
    for pattern in (0..=u32::MAX).step_by(65_537) {
        assert_eq!(ue8m0::from_f32(f32::from_bits(pattern)).to_bits(), e8m0::round_up(value(pattern)), "{pattern:#x}");
    }
}

/// MXFP8 as a kernel writes it with `num`, against the oracle, on every scenario and with a ragged last block.
fn casts<T: Fp8>(format: &Format, to_code: fn(T) -> u8) {
    let (rows, columns) = (5, 83);
    for dtype in Dtype::ALL {
        for scenario in Scenario::ALL {
            let x = scenario.generate(dtype, rows * columns, 3);
            let theirs = mxfp8::quantize(&x, rows, columns, format);
            let blocks: Vec<&[f32]> = x.chunks(columns).flat_map(|row| row.chunks(mxfp8::BLOCK)).collect();
            let amax = |block: &[f32]| block.iter().fold(0.0, |largest, value| num::max(largest, value.abs()));
            let scales: Vec<ue8m0> = blocks.iter().map(|block| ue8m0::from_f32(amax(block) * T::LARGEST_RECIPROCAL)).collect();
            let encode = |(block, scale): (&&[f32], &ue8m0)| -> Vec<u8> {
                block.iter().map(|value| to_code(T::from_f32(value * scale.reciprocal()))).collect()
            };
            let data: Vec<u8> = blocks.iter().zip(&scales).flat_map(encode).collect();
            let title = format!("{scenario:?} {} in {}", dtype.name(), T::NAME);
            assert_eq!(scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>(), theirs.scales, "scales of {title}");
            assert_eq!(data, theirs.data, "data of {title}");
        }
    }
}

#[test]
fn num_casts_as_the_oracle() {
    casts::<e4m3>(&E4M3, e4m3::to_bits);
    casts::<e5m2>(&E5M2, e5m2::to_bits);
}
