//! Statistics of a tensor's values, streamed.

use half::{bf16, f16};

use crate::{quantize::fidelity::E4M3, safetensors::Dtype};

/// What a tensor's elements are like. NaN elements count as such and enter neither minimum, maximum nor amax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// Smallest element; infinite while there is none.
    pub min: f64,
    /// Largest element; negative infinite while there is none.
    pub max: f64,
    /// Number of NaN elements.
    pub nan: u64,
    /// Number of infinite elements.
    pub infinite: u64,
    /// Number of elements equal to zero.
    pub zeros: u64,
}

impl Default for Statistics {
    fn default() -> Self {
        Self { min: f64::INFINITY, max: f64::NEG_INFINITY, nan: 0, infinite: 0, zeros: 0 }
    }
}

impl Statistics {
    /// Largest magnitude, or `None` if every element is NaN or there is none.
    pub fn amax(&self) -> Option<f64> {
        (self.min <= self.max).then(|| self.min.abs().max(self.max.abs()))
    }

    /// Whether elements of this type are single numbers at byte (or half-byte) places.
    ///
    /// F6 elements straddle bytes in an order the format leaves open, and C64 elements have no order.
    pub fn covers(dtype: Dtype) -> bool {
        !matches!(dtype, Dtype::F6E2M3 | Dtype::F6E3M2 | Dtype::C64)
    }

    /// Adds whole elements of a covered type; nothing for the others.
    pub fn add(&mut self, dtype: Dtype, bytes: &[u8]) {
        if dtype.bits() > 8 {
            return Self::visit(dtype, bytes, |value| self.add_value(value, 1));
        }
        // One-byte elements by counting the codes first.
        let mut counts = [0_u64; 256];
        for &byte in bytes {
            counts[usize::from(byte)] += 1;
        }
        for (code, &count) in (0_u8..=255).zip(&counts).filter(|(_, count)| **count > 0) {
            Self::visit(dtype, &[code], |value| self.add_value(value, count));
        }
    }

    /// The values of whole elements of a covered type, in order; nothing for the others.
    pub fn visit(dtype: Dtype, bytes: &[u8], mut each: impl FnMut(f64)) {
        fn words<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64, each: impl FnMut(f64)) {
            bytes.as_chunks::<N>().0.iter().copied().map(value).for_each(each);
        }
        let codes = |value: &dyn Fn(u8) -> f64, each: &mut dyn FnMut(f64)| bytes.iter().for_each(|&byte| each(value(byte)));
        match dtype {
            Dtype::F6E2M3 | Dtype::F6E3M2 | Dtype::C64 => {}
            Dtype::Bool | Dtype::U8 => codes(&f64::from, &mut each),
            Dtype::I8 => codes(&|byte| f64::from(byte as i8), &mut each),
            Dtype::F8E4M3 => codes(&|code| E4M3[usize::from(code)], &mut each),
            Dtype::F8E5M2 => codes(&e5m2, &mut each),
            Dtype::F8E8M0 => codes(&e8m0, &mut each),
            Dtype::F8E4M3Fnuz => codes(&|code| fnuz(code, 3), &mut each),
            Dtype::F8E5M2Fnuz => codes(&|code| fnuz(code, 2), &mut each),
            Dtype::F4 => bytes.iter().flat_map(|&byte| [byte & 0xf, byte >> 4]).map(e2m1).for_each(each),
            Dtype::F16 => words(bytes, |word| f16::from_le_bytes(word).to_f64(), each),
            Dtype::Bf16 => words(bytes, |word| bf16::from_le_bytes(word).to_f64(), each),
            Dtype::F32 => words(bytes, |word| f32::from_le_bytes(word).into(), each),
            Dtype::F64 => words(bytes, f64::from_le_bytes, each),
            Dtype::I16 => words(bytes, |word| i16::from_le_bytes(word).into(), each),
            Dtype::U16 => words(bytes, |word| u16::from_le_bytes(word).into(), each),
            Dtype::I32 => words(bytes, |word| i32::from_le_bytes(word).into(), each),
            Dtype::U32 => words(bytes, |word| u32::from_le_bytes(word).into(), each),
            // To the nearest f64 beyond 2^53: a summary, not the data.
            Dtype::I64 => words(bytes, |word| i64::from_le_bytes(word) as f64, each),
            Dtype::U64 => words(bytes, |word| u64::from_le_bytes(word) as f64, each),
        }
    }

    /// Whether elements of this type are integers.
    pub fn is_integer(dtype: Dtype) -> bool {
        use Dtype::{Bool, I8, I16, I32, I64, U8, U16, U32, U64};
        matches!(dtype, Bool | U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
    }

    /// The values of whole elements of an integer type, in order, exactly; nothing for the others.
    pub fn visit_integers(dtype: Dtype, bytes: &[u8], mut each: impl FnMut(i128)) {
        match dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().for_each(|word| each(i64::from_le_bytes(*word).into())),
            Dtype::U64 => bytes.as_chunks().0.iter().for_each(|word| each(u64::from_le_bytes(*word).into())),
            // All others are exact as f64.
            _ if Self::is_integer(dtype) => Self::visit(dtype, bytes, |value| each(value as i128)),
            _ => {}
        }
    }

    #[inline]
    fn add_value(&mut self, value: f64, count: u64) {
        // Both comparisons are false for NaN.
        self.min = if value < self.min { value } else { self.min };
        self.max = if value > self.max { value } else { self.max };
        self.nan += count * u64::from(value.is_nan());
        self.infinite += count * u64::from(value.is_infinite());
        self.zeros += count * u64::from(value == 0.0);
    }
}

/// OCP FP8 E5M2 is binary16 without its last eight mantissa bits.
fn e5m2(code: u8) -> f64 {
    f16::from_bits(u16::from(code) << 8).to_f64()
}

/// OCP MX scale.
fn e8m0(code: u8) -> f64 {
    if code == 0xff { f64::NAN } else { 2f64.powi(i32::from(code) - 127) }
}

/// OCP MX E2M1.
fn e2m1(code: u8) -> f64 {
    const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The FNUZ types (arXiv 2206.02915): a bias one greater, no infinity, no negative zero, NaN at 0x80.
fn fnuz(code: u8, mantissa_bits: u32) -> f64 {
    if code == 0x80 {
        return f64::NAN;
    }
    let bias = 1 << (6 - mantissa_bits);
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let fraction = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(dtype: Dtype, bytes: &[u8]) -> Statistics {
        let mut statistics = Statistics::default();
        statistics.add(dtype, bytes);
        statistics
    }

    #[test]
    fn codes_decode_to_the_numbers_of_their_standards() {
        assert_eq!(e5m2(0x7b), 57344.0);
        assert!(e5m2(0x7c).is_infinite() && e5m2(0x7d).is_nan());
        assert_eq!((e8m0(127), e8m0(0), e8m0(254)), (1.0, 2f64.powi(-127), 2f64.powi(127)));
        assert!(e8m0(255).is_nan());
        assert_eq!((fnuz(0x7f, 3), fnuz(0x7f, 2)), (240.0, 57344.0));
        assert_eq!((fnuz(0x01, 3), fnuz(0x01, 2)), (2f64.powi(-10), 2f64.powi(-17)));
        assert_eq!((e2m1(0x7), e2m1(0x9)), (6.0, -0.5));
    }

    #[test]
    fn nan_and_infinity_are_counted_apart() {
        let words = [1.0f32, -3.0, f32::NAN, f32::INFINITY, 0.0, -0.0];
        let statistics = of(Dtype::F32, &words.map(f32::to_le_bytes).concat());
        assert_eq!(statistics, Statistics { min: -3.0, max: f64::INFINITY, nan: 1, infinite: 1, zeros: 2 });
        assert_eq!(of(Dtype::F32, &f32::NAN.to_le_bytes()).amax(), None);
        assert_eq!(of(Dtype::I8, &[0x80, 5]).amax(), Some(128.0));
        assert_eq!(of(Dtype::F4, &[0x7f]), Statistics { min: -6.0, max: 6.0, nan: 0, infinite: 0, zeros: 0 });
    }
}
