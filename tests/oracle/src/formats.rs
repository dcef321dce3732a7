//! Number formats by definition: a code's value is computed from its fields in f64, and a value's code is searched
//! among all values.
//!
//! Rounding is to nearest, a tie goes to the even code. What lies beyond the largest finite value, and NaN, follow
//! the PTX `cvt` instruction of each format (PTX ISA 9.7.9.21).

use std::sync::LazyLock;

/// What the top of a format's code range means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Top {
    /// The highest exponent field holds Inf and NaN (IEEE 754).
    Ieee,
    /// The highest magnitude code is NaN; there is no Inf.
    OneNan,
    /// All codes are numbers.
    Finite,
}

/// A signed binary floating-point format.
#[derive(Debug)]
pub struct Format {
    /// Its name: `bf16`, `f16`, `e4m3`, `e5m2`, `e2m1`.
    pub name: &'static str,
    exponent_bits: u32,
    mantissa_bits: u32,
    top: Top,
    /// Whether a conversion into it saturates instead of giving Inf.
    saturates: bool,
    /// The code that a conversion gives for any NaN.
    nan: u32,
    /// Values of the non-negative codes in order, up to the largest finite one and, for a format that does not
    /// saturate, 2^(emax + 1) in the place of Inf.
    magnitudes: LazyLock<Vec<f64>, fn() -> Vec<f64>>,
}

macro_rules! format {
    ($(#[$doc:meta])* $name:ident, $text:literal, $exponent:literal, $mantissa:literal, $top:expr, saturates $saturates:literal, NaN $nan:literal) => {
        $(#[$doc])*
        pub static $name: Format = Format {
            name: $text,
            exponent_bits: $exponent,
            mantissa_bits: $mantissa,
            top: $top,
            saturates: $saturates,
            nan: $nan,
            magnitudes: LazyLock::new(|| $name.list_magnitudes()),
        };
    };
}

format! {
    /// bfloat16; `cvt.rn.bf16.f32`.
    BF16, "bf16", 8, 7, Top::Ieee, saturates false, NaN 0x7fff
}
format! {
    /// IEEE binary16; `cvt.rn.f16.f32`.
    F16, "f16", 5, 10, Top::Ieee, saturates false, NaN 0x7fff
}
format! {
    /// FP8 E4M3 (OCP); `cvt.rn.satfinite.e4m3x2.f32`.
    E4M3, "e4m3", 4, 3, Top::OneNan, saturates true, NaN 0x7f
}
format! {
    /// FP8 E5M2 (OCP); `cvt.rn.satfinite.e5m2x2.f32`.
    E5M2, "e5m2", 5, 2, Top::Ieee, saturates true, NaN 0x7f
}
format! {
    /// FP4 E2M1 (OCP MX); `cvt.rn.satfinite.e2m1x2.f32`.
    E2M1, "e2m1", 2, 1, Top::Finite, saturates true, NaN 7
}

impl Format {
    /// The number of codes.
    pub fn codes(&self) -> u32 {
        1 << (1 + self.exponent_bits + self.mantissa_bits)
    }

    /// The value of a code.
    pub fn decode(&self, code: u32) -> f64 {
        assert!(code < self.codes(), "{} has no code {code:#x}", self.name);
        let sign = if code >= self.codes() / 2 { -1.0 } else { 1.0 };
        let magnitude = code % (self.codes() / 2);
        let (exponent, mantissa) = (magnitude >> self.mantissa_bits, magnitude % (1 << self.mantissa_bits));
        match self.top {
            Top::Ieee if exponent == (1 << self.exponent_bits) - 1 => match mantissa {
                0 => sign * f64::INFINITY,
                _ => f64::NAN,
            },
            Top::OneNan if magnitude == self.codes() / 2 - 1 => f64::NAN,
            _ => sign * self.magnitudes[magnitude as usize],
        }
    }

    /// The code of the value nearest to `x`.
    pub fn encode(&self, x: f64) -> u32 {
        if x.is_nan() {
            return self.nan;
        }
        let magnitudes = &*self.magnitudes;
        let a = x.abs();
        let near = self.binade(a);
        let above = near.start + magnitudes[near].partition_point(|&m| m < a);
        let code = if above == magnitudes.len() {
            above - 1
        } else if above == 0 {
            0
        } else {
            let (down, up) = (a - magnitudes[above - 1], magnitudes[above] - a);
            let even = if above.is_multiple_of(2) { above } else { above - 1 };
            if down < up {
                above - 1
            } else if up < down {
                above
            } else {
                even
            }
        };
        code as u32 + if x.is_sign_negative() { self.codes() / 2 } else { 0 }
    }

    /// The codes of `a`'s exponent, which are neighbours: the smallest whose value is not below `a` is one of them, or the next.
    fn binade(&self, a: f64) -> std::ops::Range<usize> {
        let (bias, fields) = ((1 << (self.exponent_bits - 1)) - 1, 1 << self.exponent_bits);
        let exponent = (a.to_bits() >> 52) as i32 - 1023;
        let start = ((exponent + bias).clamp(0, fields - 1) as usize) << self.mantissa_bits;
        start..(start + (1 << self.mantissa_bits)).min(self.magnitudes.len())
    }

    /// `x` rounded to the format.
    pub fn round(&self, x: f64) -> f64 {
        self.decode(self.encode(x))
    }

    /// The largest finite value.
    pub fn largest(&self) -> f64 {
        let magnitudes = &*self.magnitudes;
        magnitudes[magnitudes.len() - if self.saturates { 1 } else { 2 }]
    }

    /// A magnitude code's value as if all codes were numbers.
    fn magnitude(&self, code: u32) -> f64 {
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        let (exponent, mantissa) = (code >> self.mantissa_bits, code % (1 << self.mantissa_bits));
        let fraction = f64::from(mantissa) / f64::from(1u32 << self.mantissa_bits);
        match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent as i32 - bias),
        }
    }

    fn list_magnitudes(&self) -> Vec<f64> {
        let finite = match self.top {
            Top::Ieee => ((1 << self.exponent_bits) - 1) << self.mantissa_bits,
            Top::OneNan => self.codes() / 2 - 1,
            Top::Finite => self.codes() / 2,
        };
        let mut values: Vec<f64> = (0..finite).map(|code| self.magnitude(code)).collect();
        if !self.saturates {
            values.push(self.magnitude(values.len() as u32));
        }
        values
    }
}

/// The E8M0 scale (OCP MX): code `e` is 2^(e - 127), 0xFF is NaN.
pub mod e8m0 {
    /// The value of a code.
    pub fn decode(code: u8) -> f64 {
        if code == 0xff { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
    }

    /// The smallest power of two that is not below the magnitude of `x`, 0xFE beyond 2^127, 0xFF for NaN:
    /// `cvt.rp.satfinite.ue8m0x2.f32`, and `e8m0_round_up` of TransformerEngine on non-negative input.
    pub fn round_up(x: f64) -> u8 {
        if x.is_nan() {
            return 0xff;
        }
        (0..0xfe).find(|&code| decode(code) >= x.abs()).unwrap_or(0xfe)
    }

    /// The factor of a block of this scale before its elements are rounded: the inverse of the scale.
    pub fn multiplier(code: u8) -> f64 {
        1.0 / decode(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(E4M3.largest(), 448.0);
        assert_eq!(E5M2.largest(), 57344.0);
        assert_eq!(E2M1.largest(), 6.0);
        assert_eq!(F16.largest(), 65504.0);
        assert_eq!(BF16.largest(), f64::from(f32::from_bits(0x7f7f_0000)));
        assert_eq!(F16.decode(1), 2f64.powi(-24));
        assert_eq!(F16.encode(65519.0), 0x7bff);
        assert_eq!(F16.encode(65520.0), 0x7c00);
        assert_eq!(E5M2.encode(f64::NEG_INFINITY), 0xfb);
        assert_eq!(E2M1.encode(-2.5), 0xc);
    }

    #[test]
    fn every_code_returns() {
        for format in [&BF16, &F16, &E4M3, &E5M2, &E2M1] {
            for code in 0..format.codes() {
                let value = format.decode(code);
                let infinite_and_saturating = value.is_infinite() && format.saturates;
                if !value.is_nan() && !infinite_and_saturating {
                    assert_eq!(format.encode(value), code, "{} {code:#x}", format.name);
                }
            }
        }
        for code in 0..=0xfe {
            assert_eq!(e8m0::round_up(e8m0::decode(code)), code);
        }
    }
}
