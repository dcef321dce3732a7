//! What a quantization cost, measured on the host by decoding the device's own output.

use std::sync::LazyLock;

use super::{Codes, Direction, Format, Side, matrix};

/// Sums over a quantized tensor. Elements that are infinite or NaN count as such and enter no other sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fidelity {
    /// Elements seen.
    pub elements: u64,
    /// Elements that decode to zero.
    pub zeros: u64,
    /// Elements clipped to the largest code: infinite ones, and those beyond 448 times their scale in MXFP8, 464 times in the FP8
    /// formats, 7 times in NVFP4.
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

    /// Adds one direction of a piece: its row-major input, what the device made of it, and the amax that it was cast with. Where the
    /// columns were transformed, the sums are those of the transformed ones, which are as long.
    ///
    /// # Panics
    /// If the numbers of elements, codes and scales do not belong together.
    pub fn add(&mut self, side: &Side, hadamard: bool, input: &[f32], codes: &Codes, amax: f32) {
        if !side.is_transposed() {
            return self.add_lines(side, input, codes, amax);
        }
        let mut lines = matrix::transpose(input, side.shape[1] as usize);
        if hadamard {
            matrix::transform(&mut lines);
        }
        self.add_lines(side, &lines, codes, amax);
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

    /// Adds input that lies as the codes do.
    fn add_lines(&mut self, side: &Side, input: &[f32], codes: &Codes, amax: f32) {
        let [_, length] = side.lines().map(|n| n as usize);
        let scales = Scales::new(side, &codes.scales, amax);
        let code_bytes = |elements: usize| elements / side.format.shapes().elements as usize;
        assert_eq!(codes.data.len(), code_bytes(input.len()), "a code an element");
        let lines = input.chunks(length).zip(codes.data.chunks(code_bytes(length)));
        for (line, (input, data)) in lines.enumerate() {
            let blocks = input.chunks(scales.block).zip(data.chunks(code_bytes(scales.block)));
            for (block, (input, data)) in blocks.enumerate() {
                let factor = scales.factor(line, block);
                let mut sums = Self { elements: input.len() as u64, ..Self::default() };
                let input = input.iter().map(|&x| f64::from(x));
                if side.format.is_nvfp4() {
                    let codes = data.iter().flat_map(|&pair| [pair & 0xf, pair >> 4]);
                    sums.add_pairs(input.zip(codes.map(|code| E2M1[usize::from(code)] * factor)), scales.limit(factor));
                } else {
                    let decoded = &*E4M3;
                    sums.add_pairs(input.zip(data.iter().map(|&code| decoded[usize::from(code)] * factor)), scales.limit(factor));
                }
                self.merge(&sums);
            }
        }
    }

    /// Adds pairs of an input and its decoded code; inputs beyond `limit` were clipped.
    fn add_pairs(&mut self, pairs: impl Iterator<Item = (f64, f64)>, limit: f64) {
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

/// The scales of a piece, to be looked up.
struct Scales<'a> {
    format: Format,
    codes: &'a [u8],
    amax: f32,
    /// Neighbours in a line that share a scale.
    block: usize,
    /// Lines that share their scales.
    lines: usize,
    /// Scales of a line.
    stride: usize,
}

impl<'a> Scales<'a> {
    fn new(side: &Side, codes: &'a [u8], amax: f32) -> Self {
        let [_, length] = side.lines().map(|n| n as usize);
        let [scale_lines, stride] = side.compact_scales().map(|n| n as usize);
        assert_eq!(codes.len(), scale_lines * stride * side.scale_bytes() as usize, "a scale a block");
        let block = side.format.shapes().block.map(|block| block as usize);
        let (lines, block) = match (side.format, side.direction) {
            (Format::Mxfp8, Direction::Columns) => (32, 1),
            (Format::Fp8, _) => (usize::MAX, length),
            _ => (1, block.unwrap_or(length)),
        };
        Self { format: side.format, codes, amax, block, lines, stride }
    }

    /// What the codes of a block are multiplied by.
    fn factor(&self, line: usize, block: usize) -> f64 {
        let index = line / self.lines * self.stride + block;
        match self.format {
            Format::Mxfp8 => e8m0(self.codes[index]),
            Format::Nvfp4 | Format::Nvfp4Squares => nvfp4_factor(self.codes[index], self.amax),
            Format::Fp8 | Format::Fp8Block => f64::from(f32::from_le_bytes(self.codes.as_chunks().0[index])),
        }
    }

    /// Beyond which magnitude an element was clipped. What is rounded to the largest code is not clipped yet; under a scale of 0 all is
    /// zero, and counted as such.
    fn limit(&self, factor: f64) -> f64 {
        let largest = match self.format {
            Format::Mxfp8 => 448.0,
            Format::Nvfp4 | Format::Nvfp4Squares => 7.0,
            Format::Fp8 | Format::Fp8Block => 464.0,
        };
        if factor == 0.0 { f64::INFINITY } else { largest * factor }
    }
}

/// The value of an E8M0 code: the biased exponent of binary64 is the code plus the difference of the biases, exact for all 255.
fn e8m0(code: u8) -> f64 {
    f64::from_bits((u64::from(code) + 1023 - 127) << 52)
}

/// What the E2M1 elements of a block are multiplied by, in f32 and in this order (TransformerEngine `dequantize_nvfp4.cuh`).
fn nvfp4_factor(scale: u8, amax: f32) -> f64 {
    f64::from(E4M3[usize::from(scale)] as f32 * amax * (1.0 / 2688.0))
}

/// The value of each E2M1 code (OCP MX, table 5).
const E2M1: [f64; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

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

    fn fidelity(format: Format, input: &[f32], data: &[u8], scales: &[u8], amax: f32) -> Fidelity {
        let side = Side { format, direction: Direction::Rows, interleave: false, shape: [1, input.len() as u64] };
        let mut fidelity = Fidelity::default();
        fidelity.add(&side, false, input, &Codes { data: data.into(), scales: scales.into() }, amax);
        fidelity
    }

    #[test]
    fn codes_decode_to_the_numbers_of_the_standard() {
        assert_eq!(E4M3[0x7e], 448.0);
        assert_eq!(E4M3[0xfe], -448.0);
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
        for (format, scales) in
            [(Format::Mxfp8, vec![127]), (Format::Fp8, 1f32.to_le_bytes().into()), (Format::Fp8Block, 1f32.to_le_bytes().into())]
        {
            let fidelity = fidelity(format, &input, &codes, &scales, 0.0);
            assert_eq!((fidelity.zeros, fidelity.saturated, fidelity.non_finite), (27, 2, 2));
            assert_eq!(fidelity.signal, 1.0 + 9.0 + 250_000.0);
            assert_eq!(fidelity.noise, 0.25f64.powi(2) + 52f64.powi(2));
        }
    }

    #[test]
    fn extreme_scales_are_exact() {
        assert_eq!(fidelity(Format::Mxfp8, &[2f32.powi(-127); 32], &[0x38; 32], &[0], 0.0).noise, 0.0);
        let huge = fidelity(Format::Mxfp8, &[2f32.powi(127); 32], &[0x38; 32], &[254], 0.0);
        assert_eq!((huge.noise, huge.saturated), (0.0, 0));
        assert_eq!(huge.snr_db(), Some(f64::INFINITY));
        assert_eq!(Fidelity::default().snr_db(), None);
    }

    #[test]
    fn nvfp4_sums_follow_their_definitions() {
        let mut input = [0f32; 32];
        input[..6].copy_from_slice(&[2688.0, -448.0, 300.0, f32::INFINITY, f32::NAN, 3200.0]);
        input[16] = 1e-9;
        let mut codes = [0u8; 16];
        // 2688 as 6, -448 as -1 times 448; 300 as half of it; NaN and 3200 as 6.
        codes[..3].copy_from_slice(&[0xa7, 0x71, 0x77]);
        // Under a scale of 0 whatever is not zero becomes 6, which decodes to 0.
        codes[8] = 7;
        let fidelity = fidelity(Format::Nvfp4, &input, &codes, &[0x7e, 0], 2688.0);
        assert_eq!((fidelity.elements, fidelity.zeros, fidelity.saturated, fidelity.non_finite), (32, 26, 2, 2));
        let signal = [2688.0, 448.0, 300.0, 3200.0].map(|x: f64| x * x).iter().sum::<f64>() + f64::from(1e-9f32).powi(2);
        assert_eq!(fidelity.signal, signal);
        let noise = (448f64 / 2.0 - 300.0).powi(2) + (3200f64 - 2688.0).powi(2);
        assert!((fidelity.noise - noise).abs() < 1e-3 * noise, "{} {noise}", fidelity.noise);
    }

    #[test]
    fn columns_take_their_own_scales() {
        // 64 rows of 2: ones under 2^0 and 2^1 in the first column, halves under 2^-1 and 2^0 in the second.
        let input: Vec<f32> = (0..64).flat_map(|_| [1.0, 0.5]).collect();
        let side = Side { format: Format::Mxfp8, direction: Direction::Columns, interleave: false, shape: [64, 2] };
        let data: Vec<u8> = (0..64).flat_map(|row| if row < 32 { [0x38, 0x38] } else { [0x30, 0x30] }).collect();
        let mut fidelity = Fidelity::default();
        fidelity.add(&side, false, &input, &Codes { data, scales: vec![127, 126, 128, 127] }, 0.0);
        assert_eq!((fidelity.noise, fidelity.elements), (0.0, 128));
        // The transpose of 2x4 by one scale: codes in the order of the transpose.
        let side = Side { format: Format::Fp8, direction: Direction::Columns, interleave: false, shape: [2, 4] };
        let codes = Codes { data: vec![0x38, 0xb8, 0x40, 0xc0, 0, 0, 0x38, 0x38], scales: 1f32.to_le_bytes().into() };
        let mut fidelity = Fidelity::default();
        fidelity.add(&side, false, &[1.0, 2.0, 0.0, 1.0, -1.0, -2.0, 0.0, 1.0], &codes, 2.0);
        assert_eq!((fidelity.noise, fidelity.zeros), (0.0, 2));
    }
}
