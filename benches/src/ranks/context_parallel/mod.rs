//! Attention to a sequence that is spread over ranks: every schedule, beside our single GPU on the whole sequence and torch's `context_parallel`.
//!
//! | file | what it holds |
//! |---|---|
//! | `rows` | what is attended to |
//! | `rank` | what a rank does |
//! | `tensors` | what it attends to |
//! | `attends` | operations, bound to them, tried and timed |
//! | `meeting` | how ranks join, and meet |
//! | `auto` | many configurations, in which what is chosen is held against all else |

mod attends;
pub mod auto;
mod meeting;
mod rank;
mod rows;
mod tensors;

use anyhow::{Context, Result};
use oxtile::context_parallel::{PassPlan, Plan, Schedule};
use serde::{Deserialize, Serialize};

pub use self::rank::serve;
pub use self::rows::{Row, rows};
use super::plan::{Comparison, DEVICE, Side};
use super::workers::{Errand, Home, Ranks};
use super::{Request, Work};
use crate::bench::Size;
use crate::peers::Check;
use crate::results::{Divided, Missing, PassRecord, RanksRecord};

/// The family's name.
pub const FAMILY: &str = "context_parallel";

/// What attends, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Rank 0 alone, to the whole sequence.
    OneGpu,
    /// Each rank alone, to the whole sequence, all at once: the slowest GPU's time, which bounds what ranks reach together.
    EachGpu,
    /// All ranks, by the schedule that they choose.
    Auto,
    /// By [`Schedule::AllToAll`].
    AllToAll,
    /// By [`Schedule::Fused`].
    Fused,
    /// By [`Schedule::Gather`].
    Gather,
    /// By [`Schedule::Ring`], over messages.
    Ring,
    /// By [`Schedule::Pull`], over symmetric memory.
    Pull,
    /// Of 8 bits forward, by the schedules that they choose.
    Fp8,
    /// None: puts to the next rank of the bytes that a rank receives.
    Wire,
    /// A peer: torch's `context_parallel`.
    Torch(Rotation, Kernels),
}

/// How keys go round torch's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rotation {
    /// One all-gather before the second step.
    AllGather,
    /// To the next rank in each step.
    AllToAll,
}

/// Whose attention torch calls in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// cuDNN's.
    Cudnn,
    /// FlashAttention-2's.
    Flash,
}

/// The passes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Passes {
    /// The forward pass alone.
    Forward,
    /// The forward pass, and the backward pass after it.
    Both,
}

/// A pass that is timed alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    Forward,
    Backward,
}

impl Direction {
    pub const BOTH: [Self; 2] = [Self::Forward, Self::Backward];

    /// What is planned of it.
    const fn of(self, plan: &Plan) -> &PassPlan {
        match self {
            Self::Forward => &plan.forward,
            Self::Backward => &plan.backward,
        }
    }
}

impl By {
    /// Those that make an operation, in the order in which ranks make them.
    const OPERATIONS: [Self; 7] = [Self::Auto, Self::Fused, Self::AllToAll, Self::Gather, Self::Ring, Self::Pull, Self::Fp8];

    /// The schedule that is asked for.
    fn schedule(self) -> Option<Schedule> {
        match self {
            Self::Auto | Self::Fp8 => Some(Schedule::Auto),
            Self::AllToAll => Some(Schedule::AllToAll),
            Self::Fused => Some(Schedule::Fused),
            Self::Gather => Some(Schedule::Gather),
            Self::Ring => Some(Schedule::Ring),
            Self::Pull => Some(Schedule::Pull),
            Self::OneGpu | Self::EachGpu | Self::Wire | Self::Torch(..) => None,
        }
    }

    /// Those of a row.
    fn operations(row: &Row) -> &'static [Self] {
        if row.is_longest() { &[Self::Fused] } else { &Self::OPERATIONS }
    }

    /// What tables print.
    const fn label(self) -> &'static str {
        match self {
            Self::OneGpu => "one GPU",
            Self::EachGpu => "one GPU, each at once",
            Self::Auto => "auto",
            Self::AllToAll => "all-to-all",
            Self::Fused => "fused",
            Self::Gather => "gather",
            Self::Ring => "ring",
            Self::Pull => "pull",
            Self::Fp8 => "8 bits",
            Self::Wire => "wire alone",
            Self::Torch(Rotation::AllGather, Kernels::Cudnn) => "torch all-gather, cuDNN",
            Self::Torch(Rotation::AllGather, Kernels::Flash) => "torch all-gather, flash",
            Self::Torch(Rotation::AllToAll, Kernels::Cudnn) => "torch all-to-all, cuDNN",
            Self::Torch(Rotation::AllToAll, Kernels::Flash) => "torch all-to-all, flash",
        }
    }
}

/// The sides of which the slowest is the limit of the others: the one GPU's time counts divided by the ranks.
const LIMIT: [&str; 2] = [By::OneGpu.label(), By::Wire.label()];

/// Torch's ways.
const TORCH: [By; 4] = [
    By::Torch(Rotation::AllGather, Kernels::Cudnn),
    By::Torch(Rotation::AllToAll, Kernels::Cudnn),
    By::Torch(Rotation::AllGather, Kernels::Flash),
    By::Torch(Rotation::AllToAll, Kernels::Flash),
];

/// About the milliseconds of a round's calls, and the operations a second of a GPU, which set their number.
const ROUND: f64 = 10.0;
const RATE: f64 = 5e14;

/// An operation that ranks have made, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Made {
    pub by: By,
    /// What is planned of the forward pass, and of both; none of a side that is no operation.
    pub plan: Result<Option<[RanksRecord; 2]>, String>,
    /// Whether it attends as our single GPU does.
    pub check: Option<Check>,
}

/// The ranks of a row, each with its part of the tensors and an operation of every schedule.
pub struct RowRanks {
    pub ranks: Ranks,
    row: Row,
    world: u32,
    made: Vec<Made>,
}

impl RowRanks {
    /// Starts ranks, which make every operation and try it once. A side that fails is left out, and ranks start again.
    ///
    /// # Errors
    /// What fails whatever is left out.
    pub fn start(world: u32, home: &Home, row: Row, progress: &mut dyn FnMut(&str)) -> Result<Self> {
        let mut left_out: Vec<(By, String)> = Vec::new();
        loop {
            let ranks = Ranks::start(world, home, &Errand::Row { row, left_out: left_out.clone() })?;
            let ready = ranks.times();
            match ranks.gate.failed() {
                Some((by, why)) if left_out.iter().all(|(of, _)| *of != by) => {
                    progress(&format!("{} failed: {why}", by.label()));
                    left_out.push((by, why));
                }
                _ => {
                    ready.with_context(|| format!("ranks of {}", row.label(world)))?;
                    let made = ranks.gate.taken();
                    return Ok(Self { ranks, row, world, made });
                }
            }
        }
    }

    /// The forward pass, and both passes.
    pub fn comparisons(&self, size: Size) -> Vec<Comparison> {
        [Passes::Forward, Passes::Both].map(|passes| self.comparison(passes, size)).into()
    }

    fn comparison(&self, passes: Passes, size: Size) -> Comparison {
        let Self { row, world, made, .. } = self;
        let flops = row.flops(passes, *world);
        let milliseconds = flops as f64 / f64::from(*world) / RATE * 1e3;
        let calls = size.pick((ROUND / milliseconds).ceil() as u64, 1).clamp(1, 50);
        // The fewest that any schedule of 16 bits needs.
        let bytes = made.iter().filter(|made| made.by != By::Fp8).filter_map(|made| received(made, passes)).min().unwrap_or(0);
        let side =
            |by: By| Side { label: by.label(), request: Request { work: Work::ContextParallel { by, passes, row: *row }, bytes, calls } };
        let sides = made.iter().filter(|made| made.plan.is_ok()).map(|made| side(made.by)).collect();
        let missing = made.iter().filter_map(|made| {
            let why = made.plan.as_ref().err()?;
            Some(Missing { peer: made.by.label().into(), why: why.clone() })
        });
        let torch = if row.why_no_peers().is_none() { Vec::from(TORCH.map(side)) } else { Vec::new() };
        let packed = row.why_no_peers().map(|why| Missing { peer: "torch".into(), why: why.into() });
        let kernel = match passes {
            Passes::Forward => "context parallel, forward",
            Passes::Both => "context parallel, forward and backward",
        };
        Comparison {
            bytes,
            flops,
            calls,
            peers: torch,
            missing: missing.chain(packed).collect(),
            fewer: size.pick(row.fewer(), 1),
            once: row.is_longest().then_some(By::OneGpu.label()),
            limit: &LIMIT,
            divided: Some(Divided { ranks: *world, alone: By::OneGpu.label().into(), each: Some(By::EachGpu.label().into()) }),
            details: made.iter().filter_map(|made| Some((made.by.label(), detail(made, passes)?.clone(), made.check.clone()))).collect(),
            ..Comparison::of(FAMILY, kernel, row.label(*world), sides, &[DEVICE])
        }
    }
}

/// Bytes that a rank receives.
fn received(made: &Made, passes: Passes) -> Option<u64> {
    detail(made, passes).map(RanksRecord::received)
}

/// What is planned.
fn detail(made: &Made, passes: Passes) -> Option<&RanksRecord> {
    let [forward, both] = made.plan.as_ref().ok()?.as_ref()?;
    Some(if passes == Passes::Both { both } else { forward })
}

/// What a plan says of the forward pass, and of both.
fn planned(plan: &Plan) -> [RanksRecord; 2] {
    let of = |pass: &PassPlan| PassRecord {
        schedule: pass.schedule.to_string(),
        kernels: pass.kernels.iter().map(|&name| name.to_owned()).collect(),
        launches: pass.launches,
        received: pass.received,
        why: pass.why.clone(),
    };
    let passes = [of(&plan.forward), of(&plan.backward)];
    [1, 2].map(|count| RanksRecord { idle: Vec::new(), passes: passes[..count].to_vec(), memory: plan.bytes })
}
