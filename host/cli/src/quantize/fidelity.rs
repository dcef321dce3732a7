//! What a quantization cost, measured on the host by decoding the device's own output.

use std::sync::LazyLock;

use super::{Elements, Format, QuantizedRows};

/// Sums over a quantized tensor. Elements that are infinite or NaN count as such and enter no other sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fidelity {
    /// Elements seen.
    pub elements: u64,
    /// Elements that decode to zero.
    pub zeros: u64,
    /// Elements clipped to the largest code: infinite ones, and those beyond 448 times their scale in MXFP8, 7 times in NVFP4.
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

    /// Adds one piece: its input and what the device made of it.
    ///
    /// # Panics
    /// If the numbers of elements, codes and scales do not belong together.
    pub fn add_piece(&mut self, format: Format, input: Elements<'_>, rows: &QuantizedRows) {
        match input {
            Elements::F32(input) => self.add_blocks(format, input, rows, |x| f64::from(*x)),
            Elements::F16(input) => self.add_blocks(format, input, rows, |x| f64::from(x.to_f32())),
            Elements::Bf16(input) => self.add_blocks(format, input, rows, |x| f64::from(x.to_f32())),
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

    fn add_blocks<T>(&mut self, format: Format, input: &[T], rows: &QuantizedRows, value: impl Fn(&T) -> f64) {
        let (block, code_bytes) = (format.block() as usize, format.data_bytes(format.block()) as usize);
        assert_eq!(input.len(), rows.scales.len() * block, "a scale a block");
        assert_eq!(rows.data.len(), rows.scales.len() * code_bytes, "a code an element");
        let blocks = input.chunks_exact(block).zip(rows.data.chunks_exact(code_bytes));
        for ((input, codes), &scale) in blocks.zip(&rows.scales) {
            let mut sums = Self { elements: block as u64, ..Self::default() };
            let input = input.iter().map(&value);
            match format {
                Format::Mxfp8 => {
                    let (decoded, scale) = (&*E4M3, e8m0(scale));
                    sums.add(input.zip(codes.iter().map(|&code| decoded[usize::from(code)] * scale)), E4M3_MAX * scale);
                }
                Format::Nvfp4 => {
                    let factor = nvfp4_factor(scale, rows.amax);
                    let codes = codes.iter().flat_map(|&pair| [pair & 0xf, pair >> 4]);
                    let decoded = codes.map(|code| f64::from(E2M1[usize::from(code)] * factor));
                    // What is rounded to 6 is not clipped yet; under a scale of 0 all is zero, and counted as such.
                    let limit = if factor == 0.0 { f64::INFINITY } else { 7.0 * f64::from(factor) };
                    sums.add(input.zip(decoded), limit);
                }
            }
            self.merge(&sums);
        }
    }

    /// Adds pairs of an input and its decoded code; inputs beyond `limit` were clipped.
    fn add(&mut self, pairs: impl Iterator<Item = (f64, f64)>, limit: f64) {
        for (x, decoded) in pairs {
            self.zeros += u64::from(decoded == 0.0);
            self.saturated += u64::from(x.is_infinite() || x.abs() > limit);
            if x.is_finite() {
                self.signal += x * x;
                self.noise += (decoded - x).powi(2);
            } else {
                self.non_finite += 1;
            }
        }
    }
}

/// The value of an E8M0 code: the biased exponent of binary64 is the code plus the difference of the biases, exact for all 255.
fn e8m0(code: u8) -> f64 {
    f64::from_bits((u64::from(code) + 1023 - 127) << 52)
}

/// What the E2M1 elements of a block are multiplied by, in f32 and in this order (TransformerEngine `dequantize_nvfp4.cuh`).
fn nvfp4_factor(scale: u8, amax: f32) -> f32 {
    E4M3[usize::from(scale)] as f32 * amax * (1.0 / 2688.0)
}

/// The value of each E2M1 code (OCP MX, table 5).
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

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

    fn mxfp8(data: &[u8], scales: &[u8]) -> QuantizedRows {
        QuantizedRows { data: data.into(), scales: scales.into(), amax: f32::NAN }
    }

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
        fidelity.add_piece(Format::Mxfp8, Elements::F32(&input), &mxfp8(&codes, &[127]));
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
        fidelity.add_piece(Format::Mxfp8, Elements::F32(&tiny), &mxfp8(&[0x38; 32], &[0]));
        assert_eq!(fidelity.noise, 0.0);
        let huge = [2f32.powi(127); 32];
        fidelity.add_piece(Format::Mxfp8, Elements::F32(&huge), &mxfp8(&[0x38; 32], &[254]));
        assert_eq!((fidelity.noise, fidelity.saturated), (0.0, 0));
        assert_eq!(fidelity.snr_db(), Some(f64::INFINITY));
        assert_eq!(Fidelity::default().snr_db(), None);
    }

    #[test]
    fn nvfp4_sums_follow_their_definitions() {
        let mut input = [0f32; 32];
        input[..6].copy_from_slice(&[2688.0, -448.0, 300.0, f32::INFINITY, f32::NAN, 3200.0]);
        input[16] = 1e-9;
        let mut codes = [0u8; 16];
        // 2688 as 6, -448 as -1 times 448; 300 as half of it; what is no number and 3200 as 6.
        codes[..3].copy_from_slice(&[0xa7, 0x71, 0x77]);
        // Under a scale of 0 whatever is not zero becomes 6, which decodes to 0.
        codes[8] = 7;
        let mut fidelity = Fidelity::default();
        let rows = QuantizedRows { data: codes.into(), scales: vec![0x7e, 0], amax: 2688.0 };
        fidelity.add_piece(Format::Nvfp4, Elements::F32(&input), &rows);
        assert_eq!((fidelity.elements, fidelity.zeros, fidelity.saturated, fidelity.non_finite), (32, 26, 2, 2));
        let signal = [2688.0, 448.0, 300.0, 3200.0].map(|x: f64| x * x).iter().sum::<f64>() + f64::from(1e-9f32).powi(2);
        assert_eq!(fidelity.signal, signal);
        let noise = (448f64 / 2.0 - 300.0).powi(2) + (3200f64 - 2688.0).powi(2);
        assert!((fidelity.noise - noise).abs() < 1e-3 * noise, "{} {noise}", fidelity.noise);
    }
}
