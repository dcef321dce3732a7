//! Cases times back ends.

use std::{
    any::Any,
    collections::HashMap,
    env, fs,
    panic::{self, AssertUnwindSafe},
    process::Command,
    sync::{Arc, OnceLock},
};

use libtest_mimic::{Failed, Trial};
use oxtile::timeline::{Activity, Timeline};
use oxtile::{EmulatedOptions, Runtime, testing};
use oxtile_emulator::Mode;
use oxtile_tests::{driver, launches};

use crate::case::{Case, Outcome, Size};
use crate::coverage;
use crate::times::trial;

/// Every case on the emulator and on the GPU.
pub fn trials(cases: Vec<Case>) -> Vec<Trial> {
    let cases: Vec<_> = cases.into_iter().map(Arc::new).collect();
    let seeds = Seeds::of(&crate::cases::all());
    let emulated = cases.iter().filter(|case| runs_emulated(case.size)).map(|case| {
        let (case, seeds) = (case.clone(), seeds.of_case(case));
        trial(name("emulated", &case), move || failed(emulate(&case, &seeds)))
    });
    let missing = cuda().as_ref().err();
    if let Some(reason) = missing {
        eprintln!("cuda: {} cases skipped: {reason}", cases.len());
    }
    let required = env::var("OXTILE_REQUIRE").is_ok_and(|v| v == "cuda");
    let on_device = cases.iter().map(|case| {
        let case = case.clone();
        let on_gpu = trial(name("cuda", &case), move || match cuda() {
            Ok(runtime) => failed((case.run)(runtime)),
            Err(reason) => Err(format!("OXTILE_REQUIRE=cuda, but {reason}").into()),
        });
        on_gpu.with_ignored_flag(missing.is_some() && !required)
    });
    emulated.chain(on_device).collect()
}

fn runs_emulated(size: Size) -> bool {
    match size {
        Size::Small | Size::Large => true,
        Size::Twin => long(),
        Size::Waves => false,
    }
}

fn name(backend: &str, case: &Case) -> String {
    let size = match case.size {
        Size::Small => "small",
        Size::Large | Size::Twin => "large",
        Size::Waves => "waves",
    };
    format!("{backend}::{size}::{}", case.name)
}

fn failed(outcome: Outcome) -> Result<(), Failed> {
    outcome.map_err(Failed::from)
}

/// Checked under every seed and then fast; large cases fast alone.
fn emulate(case: &Case, seeds: &[u64]) -> Outcome {
    let run = |mode, seed: u64| {
        let options = EmulatedOptions { mode, seed: Some(seed), ..EmulatedOptions::default() };
        let runtime = Runtime::emulated_with(options.clone()).map_err(|e| e.to_string())?;
        // A runtime has one recording: with OXTILE_TRACE it is that one, and no test reads it.
        let notes = (coverage::counts(case) || launches::wanted()) && env::var_os("OXTILE_TRACE").is_none();
        let timeline = notes.then(|| Timeline::start(&runtime)).transpose().map_err(|e| e.to_string())?;
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| (case.run)(&runtime)))
            .map_err(|panic| format!("{mode:?} mode, seed {seed}: it panicked: {}", said(&*panic)))?;
        // After a fault there may be none: what failed is said.
        let recorded =
            timeline.map(Timeline::finish).transpose().or_else(|error| if outcome.is_ok() { Err(error.to_string()) } else { Ok(None) })?;
        if let Some(recorded) = recorded {
            let kernels = recorded.spans.into_iter().filter(|span| span.activity == Activity::Kernel).map(|span| span.name).collect();
            launches::note(&case.name, &kernels);
            if coverage::counts(case) && outcome.is_ok() {
                coverage::note(case, &kernels);
            }
        }
        if let Err(error) = outcome {
            let shrunk = if mode == Mode::Check { testing::shortest_schedule(&options, |runtime| (case.run)(runtime)) } else { Ok(()) };
            return Err(format!("{mode:?} mode, seed {seed}: {}", shrunk.err().unwrap_or(error)));
        }
        Ok(())
    };
    if case.size == Size::Small {
        seeds.iter().try_for_each(|&seed| run(Mode::Check, seed))?;
    }
    run(Mode::Fast, seeds[0])
}

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}

/// The GPUs, opened once.
fn cuda() -> &'static Result<Runtime, String> {
    static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let runtime = Runtime::cuda().map_err(|error| error.to_string())?;
        runtime.check_kernels()?;
        Ok(runtime)
    })
}

/// What the GPU is, for the golden file's first line.
pub fn device_line() -> String {
    let device = cuda().as_ref().ok().and_then(|runtime| runtime.device(0).ok());
    let name = device.map_or_else(|| "none".to_owned(), |device| device.name().to_owned());
    format!("device {name}, driver {}, commit {}", driver(), commit().unwrap_or_else(|| "unknown".into()))
}

/// The release of the kernel module.
fn driver() -> String {
    let line = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    driver::release(&line).unwrap_or("unknown").to_owned()
}

/// Each case is run under seeds of its own, which change with the commit, so that a family is run under many. A case that fails says its seed.
enum Seeds {
    /// The one that is asked for.
    Asked(u64),
    /// A number that the commit gives, and how many cases each family has that are run under seeds.
    Drawn { start: u64, cases: HashMap<String, usize> },
}

/// Seeds of each case of long runs.
const MANY: usize = 64;
/// Each case of a family of fewer cases than this runs under [`MOST`] seeds, of a larger family under one.
const OF_FAMILY: usize = 16;
const MOST: usize = 2;

impl Seeds {
    fn of(cases: &[Case]) -> Self {
        if let Some(seed) = env::var("OXTILE_SEED").ok().and_then(|text| text.parse().ok()) {
            return Self::Asked(seed);
        }
        let mut count = HashMap::new();
        for case in cases.iter().filter(|case| case.size == Size::Small) {
            *count.entry(family(&case.name).to_owned()).or_default() += 1;
        }
        Self::Drawn { start: hash(0xcbf2_9ce4_8422_2325, &commit().unwrap_or_else(|| "working tree".into())), cases: count }
    }

    fn of_case(&self, case: &Case) -> Vec<u64> {
        match self {
            Self::Asked(seed) => vec![*seed],
            Self::Drawn { start, cases } => {
                let alike = cases.get(family(&case.name)).copied().unwrap_or(1);
                let count = if long() {
                    MANY
                } else if alike < OF_FAMILY {
                    MOST
                } else {
                    1
                };
                let start = hash(*start, &case.name);
                (0..count as u64).map(|i| start.wrapping_add(i) % 1_000_000).collect()
            }
        }
    }
}

/// The first part of a case's name.
fn family(name: &str) -> &str {
    name.split("::").next().unwrap_or(name)
}

/// FNV-1a, from a number on.
fn hash(start: u64, text: &str) -> u64 {
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The commit: `OXTILE_COMMIT`, else the file `commit` beside the executable, else that of the checkout this was built in.
/// None is compiled in: it would be stale after the next commit, or have all of this compiled again.
fn commit() -> Option<String> {
    let beside = || fs::read_to_string(env::current_exe().ok()?.with_file_name("commit")).ok();
    let checkout = || {
        let head = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "HEAD"]).output().ok()?;
        String::from_utf8(head.stdout).ok().filter(|_| head.status.success())
    };
    let commit = env::var("OXTILE_COMMIT").ok().or_else(beside).or_else(checkout)?;
    Some(commit.trim().to_owned()).filter(|commit| !commit.is_empty())
}

/// Whether full sweeps were asked for.
pub fn long() -> bool {
    env::var("OXTILE_LONG").is_ok_and(|v| v == "1")
}
