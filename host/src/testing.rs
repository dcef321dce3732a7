//! Tests of kernels on the emulator.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crate::runtime::runtime::seed_from_environment;
use crate::runtime::{Result, Runtime};

/// Runs a test under each seed, on a [checked](Runtime::checked) runtime of its own: an interleaving in which a missing barrier shows is one of many. With
/// `OXTILE_SEED` it runs under that seed alone.
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
/// If the test returns an error or panics: with what it said, the seed, and the command that runs the test under this seed alone. If there are no seeds, or
/// `OXTILE_SEED` is not a number.
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
        let outcome = catch_unwind(AssertUnwindSafe(|| Runtime::checked(seed).and_then(|runtime| test(&runtime))));
        let failure = match outcome {
            Ok(Ok(())) => return None,
            Ok(Err(error)) => error.to_string(),
            Err(payload) => message(&*payload),
        };
        Some(format!("under seed {seed}: {failure}\n  replay: OXTILE_SEED={seed} {}", command(thread::current().name())))
    })
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
