//! Random numbers of a printed seed: the data of the benchmarks and the order of their rounds.

use half::bf16;

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A stream of numbers of its own for each seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// `0..count` in random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, (self.bits() % (last as u64 + 1)) as usize);
        }
        order
    }

    /// `count` values of the standard normal distribution (Box-Muller), rounded to bf16.
    pub fn normal(&mut self, count: usize) -> Vec<bf16> {
        let mut values = Vec::with_capacity(count + 1);
        while values.len() < count {
            let (radius, angle) = ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
            values.extend([radius * angle.cos(), radius * angle.sin()].map(bf16::from_f64));
        }
        values.truncate(count);
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_permutations_and_all_occur() {
        let mut random = Random::new(1);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let order = random.order(3);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2]);
            seen.insert(order);
        }
        assert_eq!(seen.len(), 6);
    }

    #[test]
    fn normal_values_have_the_moments() {
        let values = Random::new(2).normal(100_001);
        assert_eq!(values.len(), 100_001);
        let mean = |power: i32| values.iter().map(|v| v.to_f64().powi(power)).sum::<f64>() / values.len() as f64;
        assert!(mean(1).abs() < 0.02 && (mean(2) - 1.0).abs() < 0.02 && (mean(4) - 3.0).abs() < 0.15);
    }
}
