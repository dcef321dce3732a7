//! Tests of kernels on the emulator.
//!
//! | file | what it holds |
//! |---|---|
//! | `shrink` | scheduling decisions under which a test still fails, of which none can be left out |
//! | `likeness` | whether two failures are the same |
//! | `close` | comparison of results with an oracle |
//! | `planted` | tests: bugs on purpose |

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crate::runtime::emulated::Script;
use crate::runtime::runtime::seed_from_environment;
use crate::runtime::{EmulatedOptions, Error, Result, Runtime};
use likeness::Failure;

pub use close::assert_close;

mod close;
mod likeness;
#[cfg(test)]
mod planted;
mod shrink;

/// Runs a test under each seed, on a [checked](Runtime::checked) runtime of its own: an interleaving in which a missing barrier shows is one of many. With
/// `OXTILE_SEED` it runs under that seed alone.
///
/// A test that fails is run again, many times, to find the [shortest schedule](shortest_schedule) under which it still fails. So it must do the same each time it is
/// called: what it waits for outside may not come again. What it said first is an event of `tracing` before that.
///
/// ```
/// use oxtile::{Buffer, testing};
///
/// testing::seeds(0..4, |runtime| {
///     let stream = runtime.device(0)?.stream()?;
///     let numbers = Buffer::from_slice(&stream, &[1, 2, 3])?;
///     assert_eq!(numbers.to_vec(&stream)?, [1, 2, 3]);
///     Ok(())
/// });
/// ```
///
/// # Panics
/// If the test returns an error or panics: with what it said, the seed, the command that runs the test under this seed alone, and the shortest schedule. If there
/// are no seeds, or `OXTILE_SEED` is not a number.
#[track_caller]
pub fn seeds(seeds: impl IntoIterator<Item = u64>, test: impl FnMut(&Runtime) -> Result<()>) {
    let asked = seed_from_environment().unwrap_or_else(|error| panic!("{error}"));
    let seeds = asked.map_or_else(|| seeds.into_iter().collect(), |seed| vec![seed]);
    assert!(!seeds.is_empty(), "testing::seeds was given no seed: nothing would be tested");
    if let Some(failure) = first_failure(&seeds, test) {
        panic!("{failure}");
    }
}

/// The report of the first seed under which the test fails.
fn first_failure(seeds: &[u64], mut test: impl FnMut(&Runtime) -> Result<()>) -> Option<String> {
    seeds.iter().find_map(|&seed| {
        let options = EmulatedOptions { seed: Some(seed), ..EmulatedOptions::default() };
        let failure = attempt(&options, None, &mut test).0?;
        let replay = format!("under seed {seed}: {}\n  replay: OXTILE_SEED={seed} {}", failure.text, command(thread::current().name()));
        tracing::error!("{replay}");
        Some(replay + &shrunk(&options, &failure, &mut test))
    })
}

/// Runs a test on a checked runtime with these options. If it fails, runs it again with other schedules, for scheduling decisions, of which none can be left out, under which it fails in the
/// same way: the same fault in the same kernel at the same source lines, or the same words of the test. The error ends with that schedule in words, at most 12 lines:
/// which thread runs until which source line, and what it does there.
///
/// A decision lets one thread, copy or stream go on before all others. What is not decided is the default order: the lowest that can go on runs until it waits.
/// The search begins no run after 10 seconds; `OXTILE_SHRINK` is another number of seconds, 0 turns it off. The test must do the same each time it is called, enqueue
/// from one host thread, and use no other runtime.
///
/// # Errors
/// What the test said, then the schedule.
pub fn shortest_schedule<E: Display>(options: &EmulatedOptions, mut test: impl FnMut(&Runtime) -> Result<(), E>) -> Result<(), String> {
    match attempt(options, None, &mut test).0 {
        None => Ok(()),
        Some(failure) => {
            let schedule = shrunk(options, &failure, &mut test);
            Err(failure.text + &schedule)
        }
    }
}

/// The report on the shortest schedule of a failure.
fn shrunk<E: Display>(options: &EmulatedOptions, failure: &Failure, test: &mut impl FnMut(&Runtime) -> Result<(), E>) -> String {
    let patience = match shrink::patience() {
        Ok(patience) => patience,
        Err(error) => return format!("\n  {error}"),
    };
    shrink::report(options, failure, patience, |options, script| {
        let (failure, script) = oxtile_emulator::quietly(|| attempt(options, Some(script), test));
        (failure, script.unwrap_or_else(Script::seeded))
    })
}

/// Runs a test on a runtime of its own, by a script if there is one.
fn attempt<E: Display>(
    options: &EmulatedOptions,
    script: Option<Script>,
    test: &mut impl FnMut(&Runtime) -> Result<(), E>,
) -> (Option<Failure>, Option<Script>) {
    let without_runtime = |error: Error| (Some(Failure { text: error.to_string(), fault: Some(error) }), None);
    let runtime = match Runtime::emulated_with(options.clone()) {
        Ok(runtime) => runtime,
        Err(error) => return without_runtime(error),
    };
    let cluster = runtime.0.backend.cluster();
    if let (Some(cluster), Some(script)) = (cluster, script) {
        cluster.follow(script);
    }
    let text = match catch_unwind(AssertUnwindSafe(|| test(&runtime))) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(payload) => Some(message(&*payload)),
    };
    let (script, fault) = cluster.map_or((None, None), |cluster| cluster.outcome());
    (text.map(|text| Failure { text, fault }), script)
}

/// What a panic said.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "the test panicked".to_owned())
}

/// What runs the test again: libtest calls a test's thread by its name.
fn command(thread: Option<&str>) -> String {
    match thread {
        Some(test) if test != "main" => format!("cargo test {test}"),
        _ => "cargo test".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{Error, Mode};

    #[test]
    fn a_failure_names_the_seed_and_its_replay() {
        let mut ran = 0;
        let of_error = first_failure(&[3, 4, 5], |_| {
            ran += 1;
            if ran == 2 { Err(Error::Invalid { what: "sums", why: "they differ".to_owned() }) } else { Ok(()) }
        });
        let of_error = of_error.expect("the second seed fails");
        let replay = "replay: OXTILE_SEED=4 cargo test testing::tests::a_failure_names_the_seed_and_its_replay";
        assert!(of_error.starts_with("under seed 4: sums: they differ") && of_error.contains(replay), "{of_error}");
        let of_panic = first_failure(&[3], |_| panic!("sums differ by {}", 1)).expect("it panics");
        assert!(of_panic.starts_with("under seed 3: sums differ by 1"), "{of_panic}");
        assert_eq!(command(Some("main")), "cargo test");
    }

    #[test]
    fn every_seed_has_a_checked_runtime_of_its_own() {
        let mut found = Vec::new();
        let failure = first_failure(&[7, 9], |runtime| {
            let options = &runtime.0.backend.cluster().expect("the emulator").options;
            found.push((options.seed, options.mode, runtime.device_count()));
            Ok(())
        });
        assert_eq!(failure, None);
        assert_eq!(found, [(Some(7), Mode::Check, 1), (Some(9), Mode::Check, 1)]);
    }
}
