//! The protocol: in each round every side is timed once, in random order.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::random::Random;

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Rounds run uncounted for this long, until the clocks of an idle GPU have risen, and one of them at least.
    pub warm_up: Duration,
    /// Rounds that count.
    pub rounds: usize,
}

/// One of the things that are compared.
pub trait Side {
    /// What it is, for the tables.
    fn label(&self) -> &str;

    /// Runs the work of one round and returns the milliseconds it took.
    ///
    /// # Errors
    /// The error that stops the work.
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

/// Warms up, then runs the rounds.
///
/// # Errors
/// The first side that fails, named.
pub fn run(sides: &mut [Box<dyn Side + '_>], plan: Plan, random: &mut Random) -> Result<Rounds> {
    let start = Instant::now();
    loop {
        round(sides, &random.order(sides.len())).context("warming up")?;
        if start.elapsed() >= plan.warm_up {
            break;
        }
    }
    let mut result = Rounds { milliseconds: vec![Vec::with_capacity(plan.rounds); sides.len()], order: Vec::new() };
    for number in 0..plan.rounds {
        let order = random.order(sides.len());
        let times = round(sides, &order).with_context(|| format!("round {number}"))?;
        result.milliseconds.iter_mut().zip(times).for_each(|(of_side, time)| of_side.push(time));
        result.order.push(order);
    }
    Ok(result)
}

/// The time of each side, run in this order.
fn round(sides: &mut [Box<dyn Side + '_>], order: &[usize]) -> Result<Vec<f64>> {
    let mut times = vec![0.0; sides.len()];
    for &side in order {
        times[side] = sides[side].round().with_context(|| format!("`{}`", sides[side].label()))?;
    }
    Ok(times)
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
        let result = run(&mut sides, Plan { warm_up: Duration::ZERO, rounds: 30 }, &mut Random::new(5)).unwrap();
        let first: Vec<f64> = (2..=31).map(f64::from).collect();
        assert_eq!(result.milliseconds[0], first);
        assert_eq!(result.milliseconds[1], first.iter().map(|t| t + 100.0).collect::<Vec<_>>());
        assert!(result.order.contains(&vec![0, 1]) && result.order.contains(&vec![1, 0]));
    }
}
