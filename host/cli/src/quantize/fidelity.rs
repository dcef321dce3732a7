//! What a quantization cost, measured on the host by decoding the device's own output.

use std::sync::LazyLock;

use super::{BLOCK, Elements};

/// Sums over a quantized tensor. Elements that are infinite or NaN count as such and enter no other sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fidelity {
    /// Elements seen.
    pub elements: u64,
    /// Elements whose code is zero.
    pub zeros: u64,
    /// Elements clipped to the largest code: infinite ones, and those beyond 448 times their scale.
    pub saturated: u64,
    /// Infinite and NaN elements of the input.
    pub non_finite: u64,
    /// Sum of squares of the input.
    pub signal: f64,
    /// Sum of squares of decoded output minus input.
    pub noise: f64,
}

impl Fidelity {
    /// Signal-to-noise ratio in dB, `10 log10(signal / noise)`; infinite if nothing was lost, `None` without a signal.
    pub fn snr_db(&self) -> Option<f64> {
        (self.signal > 0.0).then(|| 10.0 * (self.signal / self.noise).log10())
    }

    /// Adds one piece: its input, its E4M3 codes and its E8M0 scales.
    ///
    /// # Panics
    /// If the numbers of elements, codes and scales do not belong together.
    pub fn add_piece(&mut self, input: Elements<'_>, codes: &[u8], scales: &[u8]) {
        match input {
            Elements::F32(input) => self.add_blocks(input, codes, scales, |x| f64::from(*x)),
            Elements::F16(input) => self.add_blocks(input, codes, scales, |x| f64::from(x.to_f32())),
            Elements::Bf16(input) => self.add_blocks(input, codes, scales, |x| f64::from(x.to_f32())),
        }
    }

    /// Adds the sums of another part.
    pub fn merge(&mut self, other: &Self) {
        self.elements += other.elements;
        self.zeros += other.zeros;
        self.saturated += other.saturated;
        self.non_finite += other.non_finite;
        self.signal += other.signal;
        self.noise += other.noise;
    }

    fn add_blocks<T>(&mut self, input: &[T], codes: &[u8], scales: &[u8], value: impl Fn(&T) -> f64) {
        assert_eq!(input.len(), codes.len(), "a code an element");
        assert_eq!(input.len(), scales.len() * BLOCK as usize, "a scale a block");
        let decoded = &*E4M3;
        let blocks = input.chunks_exact(BLOCK as usize).zip(codes.chunks_exact(BLOCK as usize));
        for ((input, codes), &scale) in blocks.zip(scales) {
            // The biased exponent of binary64 is the scale's plus the difference of the biases: exact for all 255 scales.
            let scale = f64::from_bits((u64::from(scale) + 1023 - 127) << 52);
            let mut block = Self { elements: BLOCK, ..Self::default() };
            for (x, &code) in input.iter().zip(codes) {
                let x = value(x);
                block.zeros += u64::from(code & 0x7f == 0);
                block.saturated += u64::from(x.abs() > E4M3_MAX * scale);
                if x.is_finite() {
                    block.signal += x * x;
                    block.noise += (decoded[usize::from(code)] * scale - x).powi(2);
                } else {
                    block.non_finite += 1;
                }
            }
            self.merge(&block);
        }
    }
}

/// The largest finite E4M3 number.
const E4M3_MAX: f64 = 448.0;

/// The value of each E4M3 code (OCP FP8, table 2): bias 7, no infinity, NaN at 0x7f and 0xff.
pub(crate) static E4M3: LazyLock<[f64; 256]> = LazyLock::new(|| {
    std::array::from_fn(|code| {
        let (exponent, mantissa) = ((code >> 3 & 0xf) as i32, (code & 7) as f64);
        let magnitude = match (exponent, code & 7) {
            (0xf, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    })
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_decode_to_the_numbers_of_the_standard() {
        assert_eq!(E4M3[0x7e], E4M3_MAX);
        assert_eq!(E4M3[0xfe], -E4M3_MAX);
        assert_eq!(E4M3[0x38], 1.0);
        assert_eq!(E4M3[0x01], 2f64.powi(-9));
        assert_eq!(E4M3[0x08], 2f64.powi(-6));
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
    }

    #[test]
    fn sums_follow_their_definitions() {
        let mut input = [0f32; 32];
        input[..5].copy_from_slice(&[1.0, -3.0, 500.0, f32::INFINITY, f32::NAN]);
        let mut codes = [0u8; 32];
        // 1 exactly; -3 as -2.75; 500 and infinity clipped to 448; NaN.
        codes[..5].copy_from_slice(&[0x38, 0xc3, 0x7e, 0x7e, 0x7f]);
        let mut fidelity = Fidelity::default();
        fidelity.add_piece(Elements::F32(&input), &codes, &[127]);
        assert_eq!(fidelity.zeros, 27);
        assert_eq!(fidelity.saturated, 2);
        assert_eq!(fidelity.non_finite, 2);
        assert_eq!(fidelity.signal, 1.0 + 9.0 + 250_000.0);
        assert_eq!(fidelity.noise, 0.25f64.powi(2) + 52f64.powi(2));
    }

    #[test]
    fn extreme_scales_are_exact() {
        let mut fidelity = Fidelity::default();
        let tiny = [2f32.powi(-127); 32];
        fidelity.add_piece(Elements::F32(&tiny), &[0x38; 32], &[0]);
        assert_eq!(fidelity.noise, 0.0);
        let huge = [2f32.powi(127); 32];
        fidelity.add_piece(Elements::F32(&huge), &[0x38; 32], &[254]);
        assert_eq!((fidelity.noise, fidelity.saturated), (0.0, 0));
        assert_eq!(fidelity.snr_db(), Some(f64::INFINITY));
        assert_eq!(Fidelity::default().snr_db(), None);
    }
}
