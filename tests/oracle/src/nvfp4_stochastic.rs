//! Stochastic rounding to E2M1 and the random numbers it takes.
//!
//! Formulas: TransformerEngine `common/util/ptx.cuh` (rounding, 8 bits); Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011 (Philox 4x32-10).

use super::formats::E2M1;

/// What an element's random number is made of.
#[derive(Debug, Clone, Copy)]
pub struct Generator {
    /// The generator's key.
    pub seed: u64,
    /// The call's number.
    pub offset: u64,
    /// Bits of an element, 8 or 16.
    pub bits: u32,
    /// Whether the elements are those of the transpose.
    pub columns: bool,
}

impl Generator {
    /// The random number of an element, in [0, 1).
    pub fn number(self, element: usize) -> f32 {
        let a_call = 128 / self.bits as usize;
        let sequence = (element / a_call) as u64 + if self.columns { 1 << 63 } else { 0 };
        let words = philox([self.offset, sequence], self.seed);
        let all = words.iter().rev().fold(0u128, |all, &word| all << 32 | u128::from(word));
        let draw = (all >> (element % a_call * self.bits as usize)) as u32 % (1 << self.bits);
        let middle = if self.bits == 8 { 0.0 } else { 0.5 };
        (draw as f32 + middle) / (1u32 << self.bits) as f32
    }
}

/// The code of a value for the random number `u`.
pub fn round(x: f32, u: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let a = x.abs();
    let step = if a < 2.0 {
        0.5
    } else if a < 4.0 {
        1.0
    } else {
        2.0
    };
    let moved = u.mul_add(step, a);
    let below = (0..8).rev().find(|&code| E2M1.decode(code) as f32 <= moved).expect("0 is below");
    below as u8 | if x.is_sign_negative() { 8 } else { 0 }
}

fn philox([low, high]: [u64; 2], key: u64) -> [u32; 4] {
    let mut c = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    for _ in 0..10 {
        let product = |multiplier: u64, c: u32| (multiplier * u64::from(c)).to_be_bytes();
        let half = |bytes: [u8; 8], at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let (first, second) = (product(0xD251_1F53, c[0]), product(0xCD9E_8D57, c[2]));
        c = [half(second, 0) ^ c[1] ^ k0, half(second, 4), half(first, 0) ^ c[3] ^ k1, half(first, 4)];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123 1.14, `kat_vectors`.
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 2], 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u64::MAX; 2], u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox([0x85a3_08d3_243f_6a88, 0x0370_7344_1319_8a2e], 0x299f_31d0_a409_3822);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    /// Every draw gives one of the two neighbours, and on average the value, but for what `u` lacks.
    #[test]
    fn neighbours_and_mean() {
        let mut bias = [0.0f64; 2];
        for i in 0..=600 {
            let x = i as f32 / 100.0;
            for (kind, bits) in [8u32, 16].into_iter().enumerate() {
                let draws = 1u32 << bits;
                let middle = if bits == 8 { 0.0 } else { 0.5 };
                // Every draw of 8 bits, the middle one of each 16 of 16 bits.
                let (first, apart) = if bits == 8 { (0, 1) } else { (8, 16) };
                let values: Vec<f64> =
                    (first..draws).step_by(apart).map(|draw| E2M1.decode(round(x, (draw as f32 + middle) / draws as f32).into())).collect();
                let below = (0..8).rev().map(|c| E2M1.decode(c)).find(|&v| v <= f64::from(x)).unwrap();
                let above = (0..8).map(|c| E2M1.decode(c)).find(|&v| v >= f64::from(x)).unwrap();
                assert!(values.iter().all(|&v| v == below || v == above), "{x}");
                let mean = values.iter().sum::<f64>() / values.len() as f64;
                let error = mean - f64::from(x);
                // Enumerated: at most 0.0075 for 8 bits.
                assert!(error.abs() <= if bits == 8 { 0.0078 } else { 0.0006 }, "{x}: {error}");
                bias[kind] += error / 601.0;
            }
        }
        assert!((-0.0026..-0.0018).contains(&bias[0]) && bias[1].abs() < 1e-4, "{bias:?}");
    }
}
