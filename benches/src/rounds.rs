//! The protocol: in each round every side is timed once, in random order.

use anyhow::{Context, Result};

use crate::random::Random;

/// Rounds that warm up and are not counted.
pub const WARM_UP: usize = 3;

/// One of the things that are compared.
pub trait Side {
    /// What it is, for the tables.
    fn label(&self) -> &str;

    /// Runs the work of one round and returns the milliseconds it took.
    ///
    /// # Errors
    /// Whatever stops the work.
    fn round(&mut self) -> Result<f64>;
}

/// The raw result of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Rounds {
    /// Milliseconds: one list a side, one entry a round.
    pub milliseconds: Vec<Vec<f64>>,
    /// The sides in the order they ran in, a list a round.
    pub order: Vec<Vec<usize>>,
}

/// Warms up, then runs `rounds` rounds.
///
/// # Errors
/// The first side that fails, named.
pub fn run(sides: &mut [Box<dyn Side + '_>], rounds: usize, random: &mut Random) -> Result<Rounds> {
    let mut result = Rounds { milliseconds: vec![Vec::with_capacity(rounds); sides.len()], order: Vec::new() };
    for round in 0..WARM_UP + rounds {
        let order = random.order(sides.len());
        for &side in &order {
            let time = sides[side].round().with_context(|| format!("`{}`, round {round}", sides[side].label()))?;
            if round >= WARM_UP {
                result.milliseconds[side].push(time);
            }
        }
        if round >= WARM_UP {
            result.order.push(order);
        }
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counter(f64);

    impl Side for Counter {
        fn label(&self) -> &str {
            "counter"
        }

        fn round(&mut self) -> Result<f64> {
            self.0 += 1.0;
            Ok(self.0)
        }
    }

    #[test]
    fn every_side_runs_once_a_round_and_warm_up_is_not_counted() {
        let mut sides: Vec<Box<dyn Side>> = vec![Box::new(Counter(0.0)), Box::new(Counter(100.0))];
        let result = run(&mut sides, 30, &mut Random::new(5)).unwrap();
        let first: Vec<f64> = (WARM_UP + 1..=WARM_UP + 30).map(|i| i as f64).collect();
        assert_eq!(result.milliseconds[0], first);
        assert_eq!(result.milliseconds[1], first.iter().map(|t| t + 100.0).collect::<Vec<_>>());
        assert!(result.order.contains(&vec![0, 1]) && result.order.contains(&vec![1, 0]));
    }
}
