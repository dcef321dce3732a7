//! `num` against the golden vectors that ml_dtypes made: every code, every 16-bit input, f32 around each boundary.

#[path = "../../../tests/golden/golden.rs"]
mod golden;

use golden::{boundaries, look_up};
use oxtile_tile::num::{
    Float, HalfPair, bf16, bf16x2, e2m1, e2m1x2, e2m1x8, e4m3, e4m3x2, e4m3x4, e5m2, e5m2x2, e5m2x4, f16, f16x2, ue8m0, ue8m0x2,
};

/// Whether to try all of what is sampled otherwise: `OXTILE_LONG=1`.
fn long() -> bool {
    std::env::var("OXTILE_LONG").is_ok_and(|value| value == "1")
}

/// A format with its conversions on codes.
struct Format {
    name: &'static str,
    decode: fn(u8) -> f32,
    encode: fn(f32) -> u8,
}

const FORMATS: [Format; 4] = [
    Format { name: "e4m3", decode: |code| e4m3::from_bits(code).to_f32(), encode: |x| e4m3::from_f32(x).to_bits() },
    Format { name: "e5m2", decode: |code| e5m2::from_bits(code).to_f32(), encode: |x| e5m2::from_f32(x).to_bits() },
    Format { name: "e2m1", decode: |code| e2m1::from_bits(code).to_f32(), encode: |x| e2m1::from_f32(x).to_bits() },
    Format { name: "ue8m0", decode: |code| ue8m0::from_bits(code).to_f32(), encode: |x| ue8m0::from_f32(x).to_bits() },
];

#[test]
fn every_code_decodes() {
    let golden = golden::formats();
    for format in FORMATS {
        for (code, bits) in golden.decode[format.name].iter().enumerate() {
            let value = (format.decode)(code as u8);
            match bits {
                Some(bits) => assert_eq!(value.to_bits(), *bits, "{} {code:#x}", format.name),
                None => assert!(value.is_nan(), "{} {code:#x}", format.name),
            }
        }
    }
    let halves = (0..=0xffff).flat_map(|code| {
        let x = f16::from_bits(code).to_f32();
        let bits = if x.is_nan() { 0x7fff_7fff } else { x.to_bits() };
        [bits as u16, (bits >> 16) as u16]
    });
    assert_eq!(golden::hash(halves), golden.hash["f16 to f32"]);
}

#[test]
fn every_half_encodes() {
    let golden = golden::formats();
    for format in FORMATS {
        for code in 0..=0xffff {
            let (bf16, f16) = (bf16::from_bits(code).to_f32(), f16::from_bits(code).to_f32());
            let pattern = u32::from(code);
            assert_eq!((format.encode)(bf16), look_up(&golden.bf16[format.name], pattern), "{} of {bf16:e}", format.name);
            assert_eq!((format.encode)(f16), look_up(&golden.f16[format.name], pattern), "{} of {f16:e}", format.name);
        }
    }
    let to_f16 = (0..=0xffff).map(|code| f16::from_f32(bf16::from_bits(code).to_f32()).to_bits());
    assert_eq!(golden::hash(to_f16), golden.hash["bf16 to f16"]);
    let to_bf16 = (0..=0xffff).map(|code| bf16::from_f32(f16::from_bits(code).to_f32()).to_bits());
    assert_eq!(golden::hash(to_bf16), golden.hash["f16 to bf16"]);
}

#[test]
fn f32_encodes() {
    let golden = golden::formats();
    let stride = if long() { 1 } else { 61 };
    for format in FORMATS {
        let runs = &golden.f32[format.name];
        for pattern in boundaries(runs) {
            let x = f32::from_bits(pattern);
            assert_eq!((format.encode)(x), look_up(runs, pattern), "{} of {x:e} ({pattern:#x})", format.name);
        }
        // Run by run: the expected code is constant within one.
        for (i, &(first, code)) in runs.iter().enumerate() {
            let last = runs.get(i + 1).map_or(u32::MAX, |&(next, _)| next - 1);
            for pattern in (first..=last).step_by(stride) {
                assert_eq!((format.encode)(f32::from_bits(pattern)), code, "{} of {pattern:#x}", format.name);
            }
        }
    }
}

#[test]
fn f32_encodes_as_halves() {
    let golden = golden::formats();
    let sweep = || (0..=u32::MAX).step_by(65_521).map(f32::from_bits);
    assert_eq!(golden::hash(sweep().map(|x| bf16::from_f32(x).to_bits())), golden.hash["f32 to bf16"]);
    assert_eq!(golden::hash(sweep().map(|x| f16::from_f32(x).to_bits())), golden.hash["f32 to f16"]);
    for (pattern, bf16_code, f16_code) in golden::sample() {
        let x = f32::from_bits(pattern);
        assert_eq!(bf16::from_f32(x).to_bits(), bf16_code, "bf16 of {x:e} ({pattern:#x})");
        assert_eq!(f16::from_f32(x).to_bits(), f16_code, "f16 of {x:e} ({pattern:#x})");
    }
}

#[test]
fn packed_types_are_their_elements() {
    for (i, (pattern, ..)) in golden::sample().into_iter().enumerate() {
        // Eight values of mixed size: neighbours must not disturb each other.
        let x: [f32; 8] = std::array::from_fn(|lane| f32::from_bits(pattern.rotate_left(4 * lane as u32) ^ i as u32));
        let (pair, four) = ([x[0], x[1]], [x[0], x[1], x[2], x[3]]);
        assert_eq!(bf16x2::from_f32(pair).elements(), pair.map(bf16::from_f32));
        assert_eq!(f16x2::from_f32(pair).elements(), pair.map(f16::from_f32));
        assert_eq!(e4m3x2::from_f32(pair).elements(), pair.map(e4m3::from_f32));
        assert_eq!(e5m2x2::from_f32(pair).elements(), pair.map(e5m2::from_f32));
        assert_eq!(e4m3x4::from_f32(four).elements(), four.map(e4m3::from_f32));
        assert_eq!(e5m2x4::from_f32(four).elements(), four.map(e5m2::from_f32));
        assert_eq!(e2m1x2::from_f32(pair).elements(), pair.map(e2m1::from_f32));
        assert_eq!(e2m1x8::from_f32(x).elements(), x.map(e2m1::from_f32));
        assert_eq!(ue8m0x2::from_f32(pair).elements(), pair.map(ue8m0::from_f32));

        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let e4m3 = e4m3x4::from_bits(pattern);
        assert_eq!(bits(&e4m3.to_f32()), bits(&e4m3.elements().map(Float::to_f32)));
        let e5m2 = e5m2x4::from_bits(pattern);
        assert_eq!(bits(&e5m2.to_f32()), bits(&e5m2.elements().map(Float::to_f32)));
        let e2m1 = e2m1x8::from_bits(pattern);
        assert_eq!(bits(&e2m1.to_f32()), bits(&e2m1.elements().map(Float::to_f32)));
        assert_eq!(e2m1x8::new(e2m1.elements()), e2m1);
        assert_eq!(e4m3x4::new(e4m3.elements()), e4m3);
    }
    assert_eq!(e4m3x2::new([e4m3::from_bits(0x12), e4m3::from_bits(0x34)]).to_bits(), 0x3412);
    assert_eq!(e2m1x2::new([e2m1::from_bits(0x1), e2m1::from_bits(0xe)]).to_bits(), 0xe1);
}

#[test]
fn widening_pairs_is_exact() {
    for code in 0..=0xff_u8 {
        let pair = u16::from_le_bytes([code, 0x38]);
        let same = |wide: f32, narrow: f32| wide.to_bits() == narrow.to_bits() || wide.is_nan() && narrow.is_nan();
        let [low, high] = e4m3x2::from_bits(pair).to_f16x2().to_f32();
        assert!(same(low, e4m3::from_bits(code).to_f32()) && high == 1.0, "e4m3 {code:#x}");
        let [low, high] = e5m2x2::from_bits(pair).to_f16x2().to_f32();
        assert!(same(low, e5m2::from_bits(code).to_f32()) && high == 0.5, "e5m2 {code:#x}");
        let [low, high] = ue8m0x2::from_bits(pair).to_bf16x2().to_f32();
        assert!(same(low, ue8m0::from_bits(code).to_f32()) && high == 2f32.powi(0x38 - 127), "ue8m0 {code:#x}");
        assert!(same(ue8m0::from_bits(code).to_bf16().to_f32(), low), "ue8m0 {code:#x}");
        let (f32, bf16) = (ue8m0::from_bits(code).reciprocal(), ue8m0::from_bits(code).reciprocal_bf16());
        assert!(same(f32, bf16.to_f32()), "1 / ue8m0 {code:#x}");
    }
}
