//! Whether `Schedule::Auto` takes the fastest schedule: each pass of many configurations by the one that it chooses, and by every other that can be taken.
//!
//! `configurations` says what is attended to, `rank` is what a rank does. Ranks are the same for all configurations.

mod configurations;
mod rank;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

pub use self::configurations::{Configuration, configurations};
pub use self::rank::serve;
use super::super::plan::{Comparison, DEVICE, Side};
use super::super::workers::Ranks;
use super::super::{Request, Work};
use super::{By, Direction, Made};
use crate::bench::Size;
pub use crate::choices::FAMILY;
use crate::peers::Check;
use crate::results::{Missing, RanksRecord};

/// Those among which `Auto` chooses, in the order in which ranks make their operations.
const SCHEDULES: [By; 5] = [By::Fused, By::AllToAll, By::Gather, By::Ring, By::Pull];

/// About the milliseconds of a side's calls in a round, and the operations a second of a GPU, which set their number.
const ROUND: f64 = 6.0;
const RATE: f64 = 6e14;
const MOST_CALLS: u64 = 50;
/// The rounds of other benchmarks, and by how much those of a pass are fewer, at least and at most: so that they take about so many milliseconds.
const ROUNDS: f64 = 40.0;
const FEWER: [usize; 2] = [3, 8];
const PASS: f64 = 2000.0;

/// What ranks are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// To make an operation of each schedule, in the place of those of the configuration before.
    Make,
    /// To time a pass by a schedule.
    Time(By, Direction),
}

/// Has the ranks make the operations of a configuration: what is to be compared of either pass.
///
/// # Errors
/// A rank that fails, or no schedule that can be taken: the ranks are of no more use.
pub fn comparisons(ranks: &Ranks, of: Configuration, world: u32, size: Size) -> Result<Vec<Comparison>> {
    let request = Request { work: Work::Choice { of, step: Step::Make }, bytes: 0, calls: 0 };
    ranks.round(request).with_context(|| format!("ranks of {}", of.label(world)))?;
    let made = ranks.gate.taken();
    Direction::BOTH.into_iter().map(|pass| comparison(&made, of, pass, world, size)).collect()
}

fn comparison(made: &[Made], of: Configuration, pass: Direction, world: u32, size: Size) -> Result<Comparison> {
    let auto = made.iter().find(|made| made.by == By::Auto).and_then(|auto| planned(auto, pass)).context("auto has a plan")?;
    let mut taken: Vec<(By, RanksRecord, Option<Check>)> = Vec::new();
    let mut missing = Vec::new();
    for by in SCHEDULES {
        let of_by: Vec<&Made> = made.iter().filter(|made| made.by == by).collect();
        let is_own = |plan: &RanksRecord| is_by(plan, by);
        match of_by.iter().find_map(|made| Some((planned(made, pass).filter(is_own)?, made.check.clone()))) {
            // Of the chosen one the plan of `auto`, which has the times of all of them by the model.
            Some((plan, check)) => taken.push((by, if is_own(&auto) { auto.clone() } else { plan }, check)),
            None => {
                let why = of_by.iter().find_map(|made| made.plan.as_ref().err());
                missing.extend(why.map(|why| Missing { peer: by.label().into(), why: why.clone() }));
            }
        }
    }
    let chosen = taken.iter().map(|(by, ..)| *by).find(|by| is_by(&auto, *by)).context("what auto takes is no schedule of these")?;
    let (calls, fewer) = effort(milliseconds(&of, pass, world), taken.len());
    let calls = size.pick(calls, 1);
    let side =
        |by: By| Side { label: by.label(), request: Request { work: Work::Choice { of, step: Step::Time(by, pass) }, bytes: 0, calls } };
    let sides = taken.iter().map(|(by, ..)| side(*by)).collect();
    let kernel = match pass {
        Direction::Forward => "forward pass",
        Direction::Backward => "backward pass",
    };
    Ok(Comparison {
        flops: of.flops(pass, world),
        missing,
        fewer: size.pick(fewer, 1),
        chosen: Some(chosen.label()),
        details: taken.into_iter().map(|(by, plan, check)| (by.label(), plan, check)).collect(),
        ..Comparison::of(FAMILY, kernel, of.label(world), sides, &[DEVICE])
    })
}

/// What is planned of a pass.
fn planned(made: &Made, pass: Direction) -> Option<RanksRecord> {
    let [_, both] = made.plan.as_ref().ok()?.as_ref()?;
    Some(RanksRecord { passes: vec![both.passes.get(pass as usize)?.clone()], ..both.clone() })
}

/// Whether the pass that is planned is by a schedule.
fn is_by(plan: &RanksRecord, by: By) -> bool {
    plan.passes.iter().any(|pass| pass.schedule == by.label())
}

/// About the time of a pass.
fn milliseconds(of: &Configuration, pass: Direction, world: u32) -> f64 {
    of.flops(pass, world) as f64 / f64::from(world) / RATE * 1e3
}

/// Calls of a side in a round, and by how much rounds of so many sides are fewer than those of other benchmarks.
fn effort(milliseconds: f64, sides: usize) -> (u64, usize) {
    let calls = ((ROUND / milliseconds).ceil() as u64).clamp(1, MOST_CALLS);
    // One more call is not timed.
    let round = sides as f64 * (calls + 1) as f64 * milliseconds;
    let [fewest, most] = FEWER;
    (calls, ((ROUNDS * round / PASS).ceil() as usize).clamp(fewest, most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::PassRecord;

    fn plan(schedules: [&str; 2], why: &str) -> Result<Option<[RanksRecord; 2]>, String> {
        let pass =
            |schedule: &str| PassRecord { schedule: schedule.into(), kernels: Vec::new(), launches: 1, received: 1, why: why.into() };
        let passes = schedules.map(pass);
        Ok(Some([1, 2].map(|count| RanksRecord { passes: passes[..count].to_vec(), memory: 7, ..RanksRecord::default() })))
    }

    #[test]
    fn each_pass_is_held_against_all_that_can_be_taken() {
        let check = Some(Check { equal: true, detail: String::new() });
        let of = |by, plan| Made { by, plan, check: check.clone() };
        let made = [
            of(By::Auto, plan(["fused", "pull"], "by the model")),
            // Of the forward pass alone.
            of(By::Fused, Err("chunks are of 4 rows".into())),
            of(By::Fused, plan(["fused", "gather"], "asked for")),
            of(By::AllToAll, Err("heads is 3".into())),
            of(By::Gather, plan(["gather"; 2], "asked for")),
            of(By::Pull, plan(["pull"; 2], "asked for")),
        ];
        let row = configurations(Size::Full, 2)[0];
        let [forward, backward] = Direction::BOTH.map(|pass| comparison(&made, row, pass, 2, Size::Full).unwrap());
        let labels = |of: &Comparison| of.sides.iter().map(|side| side.label).collect::<Vec<_>>();
        assert_eq!((labels(&forward), forward.chosen), (vec!["fused", "gather", "pull"], Some("fused")));
        assert_eq!((labels(&backward), backward.chosen), (vec!["gather", "pull"], Some("pull")));
        let missing = |of: &Comparison| of.missing.iter().map(|missing| format!("{}: {}", missing.peer, missing.why)).collect::<Vec<_>>();
        assert_eq!(missing(&forward), ["all-to-all: heads is 3"]);
        assert_eq!(missing(&backward), ["fused: chunks are of 4 rows", "all-to-all: heads is 3"]);
        let whys = |of: &Comparison| of.details.iter().map(|(_, plan, _)| plan.passes[0].why.clone()).collect::<Vec<_>>();
        assert_eq!(whys(&forward), ["by the model", "asked for", "asked for"]);
        assert_eq!(whys(&backward), ["asked for", "by the model"]);
        assert!(forward.details.iter().all(|(label, plan, _)| plan.passes.len() == 1 && plan.passes[0].schedule == *label));
        let request = backward.sides[1].request;
        assert_eq!(request.work, Work::Choice { of: row, step: Step::Time(By::Pull, Direction::Backward) });
        assert!(comparison(&made[1..], row, Direction::Forward, 2, Size::Full).is_err(), "nothing was chosen");
    }

    /// Two minutes of products leave as much for all else.
    #[test]
    fn all_configurations_take_two_minutes() {
        let passes = configurations(Size::Full, 2).into_iter().flat_map(|of| Direction::BOTH.map(|pass| milliseconds(&of, pass, 2)));
        let seconds = passes.map(|milliseconds| {
            let (calls, fewer) = effort(milliseconds, SCHEDULES.len());
            // And two rounds that are not counted.
            let rounds = (ROUNDS / fewer as f64).ceil() + 2.0;
            assert!((7.0..=16.0).contains(&rounds), "{rounds} rounds");
            rounds * SCHEDULES.len() as f64 * (calls + 1) as f64 * milliseconds * 1e-3
        });
        let seconds: f64 = seconds.sum();
        assert!((30.0..=120.0).contains(&seconds), "{seconds} s");
    }
}
