//! Test tensors: seeded, one scenario for each kind of difficult value.
//!
//! Values come as f32 and are exactly representable in the asked type: [`codes`] turns them into its 16-bit codes
//! without rounding.

use crate::formats::{BF16, F16, Format};

/// The element type of an input tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// The name used by kernels: `f32`, `f16`, `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    fn format(self) -> Option<&'static Format> {
        match self {
            Self::F32 => None,
            Self::F16 => Some(&F16),
            Self::Bf16 => Some(&BF16),
        }
    }

    /// `x` rounded to the type.
    pub fn round(self, x: f32) -> f32 {
        self.format().map_or(x, |format| format.round(f64::from(x)) as f32)
    }

    /// The largest finite value.
    pub fn largest(self) -> f32 {
        self.format().map_or(f32::MAX, |format| format.largest() as f32)
    }

    /// The smallest positive value, a subnormal.
    pub fn smallest(self) -> f32 {
        self.format().map_or(f32::from_bits(1), |format| format.decode(1) as f32)
    }

    /// The smallest positive normal value.
    fn smallest_normal(self) -> f32 {
        match self {
            Self::F32 | Self::Bf16 => f32::MIN_POSITIVE,
            Self::F16 => 2f32.powi(-14),
        }
    }

    /// The exponents of the type's values, subnormals included.
    fn exponents(self) -> std::ops::RangeInclusive<i32> {
        match self {
            Self::F32 => -149..=127,
            Self::Bf16 => -133..=127,
            Self::F16 => -24..=15,
        }
    }
}

/// What a tensor tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scenario {
    /// Normal, mean 0, variance 1.
    Normal,
    /// Uniform in [-1, 1).
    Uniform,
    /// All +0.
    Zeros,
    /// All -0.
    NegativeZeros,
    /// Subnormals of both signs.
    Subnormals,
    /// The largest finite value, both signs.
    MaxFinite,
    /// Normal, one in 16 an Inf of either sign.
    Infinities,
    /// Normal, one in 16 a NaN; the first 32 all NaN.
    Nans,
    /// Normal, with one 1e30 (or the type's largest) in the middle.
    Outlier,
    /// Every exponent of the type alike, both signs.
    Exponents,
    /// Multiples of 7/8 of a power of two: full of exact ties of E4M3, E5M2 and E2M1 at every scale.
    Ties,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Self; 11] = [
        Self::Normal,
        Self::Uniform,
        Self::Zeros,
        Self::NegativeZeros,
        Self::Subnormals,
        Self::MaxFinite,
        Self::Infinities,
        Self::Nans,
        Self::Outlier,
        Self::Exponents,
        Self::Ties,
    ];

    /// A tensor of `len` elements of `dtype`; the same for the same seed.
    pub fn generate(self, dtype: Dtype, len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let mut x: Vec<f32> = (0..len).map(|_| self.element(dtype, &mut random)).collect();
        match self {
            Self::Outlier if len > 0 => x[len / 2] = dtype.round(dtype.largest().min(1e30)),
            Self::Nans => x.iter_mut().take(32).for_each(|v| *v = f32::NAN),
            _ => {}
        }
        x
    }

    fn element(self, dtype: Dtype, random: &mut Random) -> f32 {
        match self {
            Self::Zeros => 0.0,
            Self::NegativeZeros => -0.0,
            Self::Uniform => dtype.round(2.0 * random.unit() - 1.0),
            Self::MaxFinite => random.sign() * dtype.largest(),
            Self::Subnormals => {
                let count = (dtype.smallest_normal() / dtype.smallest()) as u64;
                random.sign() * (1 + random.below(count - 1)) as f32 * dtype.smallest()
            }
            Self::Infinities if random.below(16) == 0 => random.sign() * f32::INFINITY,
            Self::Nans if random.below(16) == 0 => f32::NAN,
            Self::Normal | Self::Infinities | Self::Nans | Self::Outlier => dtype.round(random.normal()),
            Self::Exponents => {
                let range = dtype.exponents();
                let exponent = range.start() + random.below((range.end() - range.start() + 1) as u64) as i32;
                let value = (f64::from(1.0 + random.unit()) * 2f64.powi(exponent)) as f32;
                random.sign() * dtype.round(value).min(dtype.largest())
            }
            Self::Ties => {
                let step = 0.875 * 2f32.powi(random.below(8) as i32 - 4);
                dtype.round((random.below(257) as f32 - 128.0) * step)
            }
        }
    }
}

/// The 16-bit codes of values that `dtype`, `F16` or `Bf16`, holds exactly.
pub fn codes(dtype: Dtype, x: &[f32]) -> Vec<u16> {
    let format = dtype.format().expect("f32 has no 16-bit codes");
    x.iter().map(|&value| format.encode(f64::from(value)) as u16).collect()
}

/// A small seeded generator: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..end`, nearly uniform.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// A number in [0, 1), a multiple of 2^-24.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// +1 or -1.
    pub fn sign(&mut self) -> f32 {
        if self.bits() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// A normal number of mean 0 and variance 1, by Box and Muller.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * f64::from(1.0 - self.unit()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * f64::from(self.unit())).cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_exact_in_their_type() {
        for dtype in Dtype::ALL {
            for scenario in Scenario::ALL {
                let x = scenario.generate(dtype, 1000, 7);
                assert_eq!(x.len(), 1000);
                for value in x {
                    let exact = value.is_nan() || dtype.round(value).to_bits() == value.to_bits();
                    assert!(exact, "{value:e} in {scenario:?} is not {}", dtype.name());
                }
            }
        }
    }

    #[test]
    fn a_scenario_holds_what_it_says() {
        for dtype in Dtype::ALL {
            let make = |scenario: Scenario| scenario.generate(dtype, 4096, 1);
            assert!(make(Scenario::Infinities).contains(&f32::INFINITY));
            assert!(make(Scenario::Infinities).contains(&f32::NEG_INFINITY));
            assert!(make(Scenario::Nans)[..32].iter().all(|v| v.is_nan()));
            assert!(make(Scenario::Nans)[32..].iter().any(|v| !v.is_nan()));
            assert!(make(Scenario::NegativeZeros).iter().all(|v| v.to_bits() == 1 << 31));
            assert!(make(Scenario::Subnormals).iter().all(|v| *v != 0.0 && v.abs() < dtype.smallest_normal()));
            let exponents = make(Scenario::Exponents);
            assert!(exponents.iter().any(|v| v.abs() < dtype.smallest_normal()));
            assert!(exponents.iter().all(|v| v.is_finite()));
            assert_ne!(exponents, Scenario::Exponents.generate(dtype, 4096, 2));
        }
    }
}
