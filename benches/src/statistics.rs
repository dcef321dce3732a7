//! Order statistics of rounds, and how sure a median is.

use crate::random::Random;

/// The median of a sample and its quartiles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quartiles {
    /// A quarter of the sample is below.
    pub lower: f64,
    /// Half of it is.
    pub median: f64,
    /// Three quarters are.
    pub upper: f64,
}

impl Quartiles {
    /// With linear interpolation between neighbours; `None` for an empty sample.
    pub fn of(sample: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = sample.into_iter().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at = |share: f64| {
            let place = share * last as f64;
            let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Some(Self { lower: at(0.25), median: at(0.5), upper: at(0.75) })
    }
}

/// The median of a sample of pairs, and between what it lies with a confidence of 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The lower end.
    pub lower: f64,
    /// The median of the sample.
    pub median: f64,
    /// The upper end.
    pub upper: f64,
}

impl Interval {
    /// Samples that are drawn.
    const DRAWN: usize = 2000;

    /// The percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13): pairs are drawn again with replacement, as
    /// many as there are, and the ends are the 2.5th and the 97.5th percentile of the medians. `None` for an empty sample.
    ///
    /// The rounds are paired before: a sample holds one number a round, made of both sides' times, so that what slows a whole round
    /// down is no part of the interval. The same sample has the same interval every time.
    pub fn of(sample: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sample: Vec<f64> = sample.into_iter().collect();
        let median = Quartiles::of(sample.iter().copied())?.median;
        let mut random = Random::new(1);
        let mut draw = || sample[(random.bits() % sample.len() as u64) as usize];
        let mut drawn = vec![0.0; sample.len()];
        let mut medians: Vec<f64> = (0..Self::DRAWN)
            .map(|_| {
                drawn.fill_with(&mut draw);
                drawn.sort_unstable_by(f64::total_cmp);
                let half = drawn.len() / 2;
                if drawn.len() % 2 == 1 { drawn[half] } else { (drawn[half - 1] + drawn[half]) / 2.0 }
            })
            .collect();
        medians.sort_unstable_by(f64::total_cmp);
        let outside = Self::DRAWN / 40;
        Some(Self { lower: medians[outside], median, upper: medians[Self::DRAWN - 1 - outside] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_the_median_of_the_population_95_times_in_100() {
        assert_eq!(Interval::of([]), None);
        assert_eq!(Interval::of([2.0; 30]), Some(Interval { lower: 2.0, median: 2.0, upper: 2.0 }));
        let mut random = Random::new(7);
        // Medians of 30 uniform numbers: the population's is 0.5.
        let intervals = (0..400).map(|_| Interval::of((0..30).map(|_| random.uniform())).unwrap());
        let (mut inside, mut width) = (0, 0.0);
        for Interval { lower, median, upper } in intervals {
            assert!(lower <= median && median <= upper, "{lower} {median} {upper}");
            inside += usize::from((lower..=upper).contains(&0.5));
            width += (upper - lower) / 400.0;
        }
        assert!((364..=394).contains(&inside), "{inside} of 400");
        // Twice 1.96 standard deviations of the median of 30, 0.5 / sqrt(32).
        assert!((0.25..=0.42).contains(&width), "{width}");
    }

    #[test]
    fn quartiles_of_known_samples() {
        let five = Quartiles::of([5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(five, Some(Quartiles { lower: 2.0, median: 3.0, upper: 4.0 }));
        let two = Quartiles::of([1.0, 2.0]);
        assert_eq!(two, Some(Quartiles { lower: 1.25, median: 1.5, upper: 1.75 }));
        assert_eq!(Quartiles::of([]), None);
    }
}
