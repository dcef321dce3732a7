//! `test`: everything that needs no GPU, one count at the end.
//!
//! | file | what it holds |
//! |---|---|
//! | `programs` | the test programs of the workspace, some at a time |
//! | `tally` | counts, times and failures |

mod programs;
mod tally;

use std::{
    fs,
    process::{Command, ExitCode, Output},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use lexopt::Parser;

use self::{programs::Programs, tally::Tally};
use crate::{
    cargo, fuzz, kernels, machine, neighbours, package,
    portable::{self, Extent},
    target, wheel,
};

/// A line that the case binary leaves in the file `OXTILE_TIMES`: seconds, a tab, the name of the case.
fn case_time(line: &str) -> Option<(Duration, String)> {
    let (seconds, name) = line.split_once('\t')?;
    Some((Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?, name.into()))
}

fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(command.status().with_context(|| format!("cannot run {:?}", command.get_program()))?.success())
}

/// The step that compiles the tests.
const TESTS: &str = "cargo test --no-run";

/// A step that ran beside others: its name, time and output.
type Judged = (&'static str, Duration, Result<Output>);

/// Compiles the host's code while the kernels compile: these keep one core busy, in a target directory of their own. The tests' own step
/// comes last.
fn compile_for_the_host(whole: bool) -> Vec<Judged> {
    let judge = |name, command: &mut Command| {
        let start = Instant::now();
        let output = command.output().with_context(|| format!("cannot run {name}"));
        (name, start.elapsed(), output)
    };
    let mut judged = Vec::new();
    if whole {
        let lints = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
        judged.push(judge("cargo clippy", &mut cargo(lints)));
        // A link that leads nowhere is an error.
        let mut doc = cargo(["doc", "--workspace", "--lib", "--no-deps", "--quiet"]);
        judged.push(judge("cargo doc", doc.env("RUSTDOCFLAGS", "-D warnings")));
    }
    judged.push(judge(TESTS, &mut Programs::compiling()));
    judged
}

/// `test [--long] [FILTER...]`: the whole suite; with a filter, only the tests whose names contain it; `--long` tries all of what is
/// sampled otherwise, and more seeds.
pub fn run(arguments: &mut Parser) -> Result<ExitCode> {
    let (long, filter): (Vec<_>, Vec<_>) = arguments.raw_args()?.partition(|argument| argument == "--long");
    let long = (!long.is_empty()).then_some(("OXTILE_LONG", "1"));
    let mut tally = Tally::default();
    machine::ready()?;
    let whole = filter.is_empty();
    if whole {
        machine::components()?;
        tally.step("cargo fmt --check", || succeeds(&mut cargo(["fmt", "--all", "--check"])));
    }
    let judged = tally.part("compiling", |tally| {
        thread::scope(|scope| {
            let judged = scope.spawn(|| compile_for_the_host(whole));
            if whole {
                tally.step("build-ptx for other architectures", || {
                    portable::check(if long.is_some() { Extent::Long } else { Extent::Changed })
                });
            }
            tally.step("build-ptx", || if long.is_some() { kernels::all().map(|_| true) } else { kernels::pass() });
            judged.join().expect("compiling does not panic")
        })
    });
    let mut programs = None;
    for (name, time, output) in judged {
        let mut output = output;
        // What cargo says of the tests is for this program alone.
        let said = output.as_mut().ok().filter(|_| name == TESTS).map(|output| std::mem::take(&mut output.stdout));
        if tally.beside(name, time, output)
            && let Some(said) = said
        {
            programs = Some(Programs::of(&String::from_utf8_lossy(&said))?);
        }
    }
    // Programs that lie there are of other sources.
    let Some(programs) = programs else { return Ok(tally.report()) };
    let times = target().join("case-times.tsv");
    let _ = fs::remove_file(&times);
    let variables = [("OXTILE_TIMES", times.as_os_str())].into_iter().chain(long.map(|(name, value)| (name, value.as_ref())));
    let variables: Vec<_> = variables.map(|(name, value)| (name, value.to_owned())).collect();
    tally.part("testing", |tally| programs.run(tally, &variables, &filter));
    if whole && long.is_some() {
        // A workspace of its own, in release: minutes of compiling.
        tally.part("fuzz", |tally| tally.step("the fuzz targets", fuzz::checked));
        tally.part("wheel", |tally| tally.step("the Python wheel", wheel::checked));
        tally.part("neighbours", |tally| tally.step("the crates for cudarc and candle", neighbours::checked));
        tally.part("packages", |tally| tally.step("package --check", || package::run(&package::architectures()?, true).map(|()| true)));
    }
    let case_times = fs::read_to_string(&times).unwrap_or_default();
    tally.timed(case_times.lines().filter_map(case_time));
    Ok(tally.report())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_cases_are_recognised() {
        assert_eq!(case_time("1.5\temulated::small::amax::f32"), Some((Duration::from_millis(1500), "emulated::small::amax::f32".into())));
        assert_eq!(case_time("noise"), None);
    }
}
