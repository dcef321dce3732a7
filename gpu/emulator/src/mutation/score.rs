//! What became of the mutants of a job.

use super::change::{Change, Mutation};
use crate::fault::Fault;
use crate::launch::Options;
use crate::report::Report;
use std::fmt;
use std::time::Duration;

/// How a job ended that was run with given options.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Its output is right.
    Passed(Box<Report>),
    /// Its output is wrong; the text says where.
    WrongOutput(String),
    /// The emulator reported a fault.
    Faulted(Fault),
}

/// Mutants that change nothing that matters, with the reason.
#[derive(Clone, Copy, Debug)]
pub struct Equivalent<'a> {
    /// Picks the mutants.
    pub matches: fn(&Mutation) -> bool,
    /// Why they are equivalent, for the reader of the table.
    pub reason: &'a str,
}

/// What became of one mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The emulator reported this fault under one seed at least.
    Reported(String),
    /// Nothing is reported under any seed, but the output is wrong under one.
    WrongOutput(String),
    /// It passes under every seed, and is listed as equivalent for this reason.
    Equivalent(String),
    /// It passes under every seed.
    Survived,
}

/// One mutant and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// The change.
    pub mutation: Mutation,
    /// What became of it.
    pub verdict: Verdict,
    /// Seeds tried.
    pub seeds: usize,
}

/// The mutants of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Score {
    /// All mutants, by site.
    pub mutants: Vec<Mutant>,
}

impl Score {
    /// Mutants with a verdict that `pick` accepts.
    fn count(&self, pick: impl Fn(&Verdict) -> bool) -> usize {
        self.mutants.iter().filter(|mutant| pick(&mutant.verdict)).count()
    }

    /// Mutants that the emulator did not report and no list excuses: those whose output is wrong, and those that survived.
    pub fn unreported(&self) -> impl Iterator<Item = &Mutant> {
        self.mutants.iter().filter(|mutant| matches!(mutant.verdict, Verdict::WrongOutput(_) | Verdict::Survived))
    }

    /// Whether every mutant is reported by the emulator or listed as equivalent. A wrong output is not enough: a person who
    /// debugs a kernel has no right one to compare with.
    pub fn is_complete(&self) -> bool {
        self.unreported().next().is_none()
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mutants.is_empty() {
            return f.write_str("no synchronisation, no mutants");
        }
        let reported = self.count(|v| matches!(v, Verdict::Reported(_)));
        let wrong = self.count(|v| matches!(v, Verdict::WrongOutput(_)));
        let equivalent = self.count(|v| matches!(v, Verdict::Equivalent(_)));
        let survived = self.count(|v| matches!(v, Verdict::Survived));
        write!(f, "{} mutants: {reported} reported, {wrong} by a wrong output alone, ", self.mutants.len())?;
        write!(f, "{equivalent} equivalent, {survived} survived")?;
        for Mutant { mutation, verdict, seeds } in self.unreported() {
            match verdict {
                Verdict::WrongOutput(problem) => write!(f, "\n  by a wrong output alone, {seeds} seeds: {mutation}: {problem}")?,
                _ => write!(f, "\n  survived {seeds} seeds: {mutation}")?,
            }
        }
        Ok(())
    }
}

/// The unchanged job does not pass: there is nothing to mutate.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the unchanged job fails under seed {seed}: {problem}")]
pub struct BaselineFailure {
    /// The seed.
    pub seed: u64,
    /// The fault, or what is wrong with the output.
    pub problem: String,
}

/// The seeds of a score. All are alike where a list is given alone.
#[derive(Clone, Copy, Debug)]
pub struct Seeds<'a> {
    /// The seeds of the unchanged job, and those under which a mutant runs until it is reported.
    pub mutants: &'a [u64],
    /// The seeds of mutants that a list excuses: these run under all of them.
    pub excused: &'a [u64],
}

impl<'a> From<&'a [u64]> for Seeds<'a> {
    fn from(seeds: &'a [u64]) -> Self {
        Self { mutants: seeds, excused: seeds }
    }
}

impl<'a, const N: usize> From<&'a [u64; N]> for Seeds<'a> {
    fn from(seeds: &'a [u64; N]) -> Self {
        seeds.as_slice().into()
    }
}

/// Runs a job unchanged, then each mutant until the emulator reports it. A mutant whose output is wrong
/// runs under the seeds that are left, which may show a report.
///
/// `run` must use the options for each of its launches, merge their reports, and check its output. A mutant
/// that loops is ended by the step limit, some times the steps of the unchanged job.
pub fn score<'a>(
    run: impl Fn(&Options) -> Outcome,
    seeds: impl Into<Seeds<'a>>,
    equivalents: &[Equivalent<'_>],
) -> Result<Score, BaselineFailure> {
    let seeds = seeds.into();
    let mut baseline = Report::default();
    let mut longest = 0;
    for &seed in seeds.mutants {
        match run(&Options::check(seed)) {
            Outcome::Passed(report) => {
                longest = longest.max(report.steps);
                baseline.merge(&report);
            }
            Outcome::WrongOutput(problem) => return Err(BaselineFailure { seed, problem }),
            Outcome::Faulted(fault) => return Err(BaselineFailure { seed, problem: fault.to_string() }),
        }
    }
    let options = |seed, mutation| Options {
        step_limit: longest * 8 + 10_000,
        patience: Duration::ZERO,
        mutation: Some(mutation),
        ..Options::check(seed)
    };
    let judge = |mutation: Mutation| {
        let mut wrong = None;
        let excuse = equivalents.iter().find(|equivalent| (equivalent.matches)(&mutation));
        let seeds = if excuse.is_some() { seeds.excused } else { seeds.mutants };
        for (tried, &seed) in seeds.iter().enumerate() {
            match run(&options(seed, mutation.clone())) {
                Outcome::Passed(_) => {}
                Outcome::WrongOutput(problem) => _ = wrong.get_or_insert(problem),
                Outcome::Faulted(fault) => return Mutant { mutation, verdict: Verdict::Reported(fault.to_string()), seeds: tried + 1 },
            }
        }
        let survived = || excuse.map_or(Verdict::Survived, |equivalent| Verdict::Equivalent(equivalent.reason.to_owned()));
        let verdict = wrong.map_or_else(survived, Verdict::WrongOutput);
        Mutant { mutation, verdict, seeds: seeds.len() }
    };
    Ok(Score { mutants: mutants(&baseline).map(judge).collect() })
}

/// Every site skipped, and every count shifted where it can be.
fn mutants(report: &Report) -> impl Iterator<Item = Mutation> {
    report.sites.iter().flat_map(|(site, seen)| {
        let changes =
            [Some(Change::Skip), seen.count.map(|_| Change::CountUp), seen.count.filter(|&count| count > 0).map(|_| Change::CountDown)];
        changes.into_iter().flatten().map(|change| Mutation { site: site.clone(), change })
    })
}
