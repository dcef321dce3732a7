//! How often which magnitudes occur.

/// Smallest exponent of a positive f64, subnormal ones included.
const LOWEST: i32 = -1074;

/// Counts of numbers by octave: those from 2^n up to 2^(n+1) together. Signs do not matter.
#[derive(Clone, Debug, PartialEq)]
pub struct Magnitudes {
    /// By exponent, from [`LOWEST`] on.
    octaves: Vec<u64>,
    /// Numbers that are zero.
    pub zeros: u64,
    /// Numbers that are NaN.
    pub nan: u64,
    /// Infinite numbers.
    pub infinite: u64,
    /// All of them.
    pub total: u64,
}

impl Default for Magnitudes {
    fn default() -> Self {
        Self { octaves: vec![0; (1024 - LOWEST) as usize], zeros: 0, nan: 0, infinite: 0, total: 0 }
    }
}

impl Magnitudes {
    /// Counts a number.
    pub fn add(&mut self, number: f64) {
        self.total += 1;
        let exponent = (number.to_bits() >> 52 & 0x7ff) as i32;
        match exponent {
            0x7ff if number.is_nan() => self.nan += 1,
            0x7ff => self.infinite += 1,
            0 if number == 0.0 => self.zeros += 1,
            0 => self.octaves[(number.abs().log2().floor() as i32 - LOWEST) as usize] += 1,
            _ => self.octaves[(exponent - 1023 - LOWEST) as usize] += 1,
        }
    }

    /// How many numbers lie from 2^`octave` up to twice that.
    pub fn count(&self, octave: i32) -> u64 {
        self.octaves.get((octave - LOWEST) as usize).copied().unwrap_or(0)
    }

    /// How many lie below 2^`octave`, zeros apart.
    pub fn below(&self, octave: i32) -> u64 {
        self.octaves.iter().take((octave - LOWEST).max(0) as usize).sum()
    }

    /// The first and the last octave that has numbers.
    pub fn range(&self) -> Option<[i32; 2]> {
        let first = self.octaves.iter().position(|&count| count > 0)?;
        let last = self.octaves.iter().rposition(|&count| count > 0)?;
        Some([first, last].map(|index| index as i32 + LOWEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fall_into_their_octaves() {
        let mut magnitudes = Magnitudes::default();
        [1.0, -1.5, 1.999, 2.0, 0.25, 0.0, -0.0, f64::NAN, f64::NEG_INFINITY, 5e-324, f64::MAX].into_iter().for_each(|x| magnitudes.add(x));
        assert_eq!([0, 1, -2, -1, -1074, 1023].map(|octave| magnitudes.count(octave)), [3, 1, 1, 0, 1, 1]);
        assert_eq!((magnitudes.zeros, magnitudes.nan, magnitudes.infinite, magnitudes.total), (2, 1, 1, 11));
        assert_eq!(magnitudes.range(), Some([-1074, 1023]));
        assert_eq!((magnitudes.below(0), magnitudes.below(1)), (2, 5));
        assert_eq!(Magnitudes::default().range(), None);
    }
}
