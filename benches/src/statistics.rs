//! Order statistics of rounds.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_of_known_samples() {
        let five = Quartiles::of([5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(five, Some(Quartiles { lower: 2.0, median: 3.0, upper: 4.0 }));
        let two = Quartiles::of([1.0, 2.0]);
        assert_eq!(two, Some(Quartiles { lower: 1.25, median: 1.5, upper: 1.75 }));
        assert_eq!(Quartiles::of([]), None);
    }
}
