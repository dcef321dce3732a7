//! The corners of `num`: NaN, Inf, signed zeros, maxima, the scale's table, `fma`.

use oxtile_tile::num::{
    Element, Float, Fp8, HalfPair, bf16, bf16x2, e2m1, e4m3, e5m2, f16, f16x2, fma, max, min, permute_bytes, software, ue8m0,
};

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

#[test]
fn nan_has_one_code_whatever_its_sign() {
    for pattern in [0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0xff80_0001, 0xffc0_0000, 0xffff_ffff] {
        let x = f32::from_bits(pattern);
        assert_eq!(bf16::from_f32(x).to_bits(), 0x7fff);
        assert_eq!(f16::from_f32(x).to_bits(), 0x7fff);
        assert_eq!(e4m3::from_f32(x).to_bits(), 0x7f);
        assert_eq!(e5m2::from_f32(x).to_bits(), 0x7f);
        assert_eq!(e2m1::from_f32(x).to_bits(), 7);
        assert_eq!(ue8m0::from_f32(x).to_bits(), 0xff);
    }
}

#[test]
fn infinity_saturates_where_the_format_saturates() {
    assert_eq!(bf16::from_f32(INF), bf16::INFINITY);
    assert_eq!(f16::from_f32(-INF).to_bits(), 0xfc00);
    assert_eq!(e4m3::from_f32(INF), e4m3::MAX);
    assert_eq!(e4m3::from_f32(-INF).to_bits(), 0xfe);
    assert_eq!(e5m2::from_f32(-INF).to_bits(), 0xfb);
    assert_eq!(e2m1::from_f32(-INF).to_bits(), 0xf);
    assert_eq!(ue8m0::from_f32(INF), ue8m0::MAX);
    assert_eq!(e5m2::from_bits(0xfc).to_f32(), -INF);
    assert_eq!((e4m3::MAX.to_f32(), e5m2::MAX.to_f32(), e2m1::MAX.to_f32()), (448.0, 57344.0, 6.0));
    assert_eq!((e4m3::LARGEST, e5m2::LARGEST), (448.0, 57344.0));
    assert_eq!(e4m3::LARGEST_RECIPROCAL.to_bits(), 0x3b12_4925);
    assert_eq!(e5m2::LARGEST_RECIPROCAL.to_bits(), 0x3792_4925);
}

#[test]
fn signs_survive_zero() {
    assert_eq!(bf16::from_f32(-0.0).to_bits(), 0x8000);
    assert_eq!(f16::from_f32(-1e-30).to_bits(), 0x8000);
    assert_eq!(e4m3::from_f32(-0.0).to_bits(), 0x80);
    assert_eq!(e5m2::from_f32(-1e-30).to_bits(), 0x80);
    assert_eq!(e2m1::from_f32(-0.1).to_bits(), 8);
    assert_eq!(e4m3::from_bits(0x80).to_f32().to_bits(), 1 << 31);
    assert_eq!(e2m1::from_bits(8).to_f32().to_bits(), 1 << 31);
}

/// The rows of TransformerEngine's table for the scale (`e8m0_round_up`), and its two multipliers.
#[test]
fn scale_table() {
    let code = |pattern| ue8m0::from_f32(f32::from_bits(pattern)).to_bits();
    assert_eq!(code(0), 0);
    assert_eq!((code(1), code(0x40_0000), code(0x40_0001), code(0x7f_ffff)), (0, 0, 1, 1));
    assert_eq!((code(0x80_0000), code(0x80_0001)), (1, 2));
    assert_eq!((code(0x3f80_0000), code(0x3f80_0001)), (127, 128));
    assert_eq!((code(0x7f00_0000), code(0x7f00_0001), code(0x7f7f_ffff)), (0xfe, 0xfe, 0xfe));
    assert_eq!(code(0xbf80_0000), 127, "a negative value goes by its magnitude");

    let multiplier = |code| ue8m0::from_bits(code).reciprocal().to_bits();
    assert_eq!((multiplier(0), multiplier(127), multiplier(253)), (0x7f00_0000, 0x3f80_0000, 0x80_0000));
    assert_eq!((multiplier(0xfe), multiplier(0xff)), (0x40_0000, 0x7fff_ffff));
    let value = |code| ue8m0::from_bits(code).to_f32().to_bits();
    assert_eq!((value(0), value(1), value(0xfe), value(0xff)), (0x40_0000, 0x80_0000, 0x7f00_0000, 0x7fff_ffff));
}

/// Every pair of codes in one half, with a stride in the other: against f32 arithmetic.
fn pairs<T: Float, P: HalfPair<T>>(from_bits: fn(u16) -> T, to_bits: fn(T) -> u16) {
    let corners = [0, 1, 0x3c00, 0x3f80, 0x7bff, 0x7c00, 0x7c01, 0x7f7f, 0x7f80, 0x7f81, 0x7fff];
    let signed: Vec<u16> = corners.iter().flat_map(|&c| [c, c | 0x8000]).collect();
    let by_value = |a: u16, b: u16, larger: bool| {
        let (x, y) = (from_bits(a).to_f32(), from_bits(b).to_f32());
        match (x.is_nan(), y.is_nan()) {
            (true, true) => 0x7fff,
            (true, false) => b,
            (false, true) => a,
            // Equal values differ in the sign of zero at most.
            _ if x == y => {
                if larger {
                    a & b
                } else {
                    a | b
                }
            }
            _ if (x > y) == larger => a,
            _ => b,
        }
    };
    for a in 0..=0xffff_u16 {
        for &b in &signed {
            let first = P::new([from_bits(a), from_bits(b)]);
            let second = P::new([from_bits(b), from_bits(a)]);
            let codes = |pair: P| pair.elements().map(to_bits);
            let nan = from_bits(a).to_f32().is_nan() || from_bits(b).to_f32().is_nan();
            let (high, low) = (by_value(a, b, true), by_value(a, b, false));
            assert_eq!(codes(first.max(second)), [high; 2], "max of {a:#x} and {b:#x}");
            assert_eq!(codes(first.min(second)), [low; 2], "min of {a:#x} and {b:#x}");
            assert_eq!(codes(first.max_nan(second)), [if nan { 0x7fff } else { high }; 2], "max.NaN of {a:#x} and {b:#x}");
        }
        let pair = P::new([from_bits(a), from_bits(!a)]);
        assert_eq!(pair.abs().elements().map(to_bits), [a & 0x7fff, !a & 0x7fff]);
    }
}

#[test]
fn bf16_pairs() {
    pairs::<bf16, bf16x2>(bf16::from_bits, bf16::to_bits);
}

#[test]
fn f16_pairs() {
    pairs::<f16, f16x2>(f16::from_bits, f16::to_bits);
}

#[test]
fn max_and_min_drop_nan() {
    assert_eq!((max(NAN, 1.0), max(1.0, NAN), min(NAN, -1.0), min(-1.0, NAN)), (1.0, 1.0, -1.0, -1.0));
    assert_eq!((max(NAN, -NAN).to_bits(), min(NAN, NAN).to_bits()), (0x7fff_ffff, 0x7fff_ffff));
    assert_eq!((max(-0.0, 0.0).to_bits(), max(0.0, -0.0).to_bits()), (0, 0));
    assert_eq!((min(-0.0, 0.0).to_bits(), min(0.0, -0.0).to_bits()), (1 << 31, 1 << 31));
    assert_eq!((max(1.0, 2.0), min(1.0, 2.0), max(-INF, -3.0), min(INF, 3.0)), (2.0, 1.0, -3.0, 3.0));
}

#[test]
fn fma_rounds_once() {
    let x = 1.0 + f32::EPSILON;
    assert_eq!(fma(x, x, -1.0 - 2.0 * f32::EPSILON), f32::EPSILON * f32::EPSILON);
    assert_eq!(x * x - 1.0 - 2.0 * f32::EPSILON, 0.0, "and a plain product is not contracted");
}

#[test]
fn names_and_widths() {
    assert_eq!((bf16::NAME, f16::NAME, f32::NAME, e4m3::NAME), ("bf16", "f16", "f32", "e4m3"));
    assert_eq!((e5m2::NAME, e2m1::NAME, ue8m0::NAME, u64::NAME), ("e5m2", "e2m1", "ue8m0", "u64"));
    assert_eq!((bf16::BITS, e4m3::BITS, e2m1::BITS, <f64 as Element>::BITS), (16, 8, 4, 64));
    assert_eq!(format!("{:?} {:?}", bf16::from_f32(1.5), e2m1::MAX), "bf16(1.5) e2m1(6.0)");
    assert_eq!(format!("{:?}", bf16x2::from_f32([1.0, -2.0])), "[bf16(1.0), bf16(-2.0)]");
    assert_eq!((e4m3::from_f32(-3.0).abs().to_f32(), f16::from_f32(-3.0).abs_bits()), (3.0, 0x4200));
}

/// The four-instruction rounding of E2M1 against the conversion: all 1,088,421,888 inputs under `OXTILE_LONG=1`.
#[test]
fn scaled_rounding_of_e2m1() {
    let end = (7f32 * 256.0).to_bits();
    let stride = if std::env::var("OXTILE_LONG").is_ok_and(|v| v == "1") { 1 } else { 61 };
    let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1.0, 2.0, 4.0, 1.5, 6.0].map(|y: f32| (y * 256.0).to_bits());
    let near = ties.iter().flat_map(|&tie| tie - 64..tie + 64);
    for pattern in (0..end).step_by(stride).chain(near).chain(end - 64..end) {
        let t = f32::from_bits(pattern);
        // Doubling a code's value in E5M2's subnormals: exact, or the byte would not be the code times two.
        let byte = software::e5m2_from_f32(e2m1::round_scaled(t));
        assert_eq!(byte, software::e2m1_from_f32(t / 256.0) << 1, "{pattern:#x}");
    }
}

#[test]
fn eight_scaled_values_pack_in_order() {
    use oxtile_tile::num::e2m1x8;
    let codes = |x: [f32; 8]| {
        let signs = e2m1x8::signs_of_singles(x.map(f32::to_bits));
        let halves = core::array::from_fn(|i| bf16x2::from_f32([x[2 * i], x[2 * i + 1]]).to_bits());
        assert_eq!(e2m1x8::signs_of_halves(halves), signs);
        e2m1x8::from_scaled(x.map(|x| x.abs() * 256.0), signs).map(e2m1x8::to_bits)
    };
    let x = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    assert_eq!(codes(x), Some(0x7654_3210));
    assert_eq!(codes(x.map(|x| -x)), Some(0xfedc_ba98));
    let mut reversed = x;
    reversed.reverse();
    assert_eq!(codes(reversed), Some(0x0123_4567));
    for i in 0..8 {
        let with = |value: f32| core::array::from_fn(|j| if i == j { value } else { x[j] });
        assert_eq!(codes(with(-x[i])), Some(0x7654_3210 | 8 << (4 * i)));
        let below = 7f32.next_down();
        assert_eq!(codes(with(below)), Some(0x7654_3210 | 7 << (4 * i)));
        for too_large in [7.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!((codes(with(too_large)), codes(with(-too_large))), (None, None), "{too_large}");
        }
        assert_eq!(e2m1x8::from_scaled(with(f32::NAN).map(|x| x * 256.0), 0), None);
    }
}

#[test]
fn bytes_permute_as_prmt_does() {
    let (a, b) = (0x8312_7f01, 0xfe00_80ff);
    assert_eq!(permute_bytes(a, b, 0x3210), a);
    assert_eq!(permute_bytes(a, b, 0x7654), b);
    assert_eq!(permute_bytes(a, b, 0x0736), 0x01fe_8300);
    // Nibbles from the lowest: the signs of 0x7f, 0x83, 0x80 and 0x01.
    assert_eq!(permute_bytes(a, b, 0x8db9), 0x00ff_ff00);
}
