//! Symmetric memory of mapped allocations: ranks as processes and as threads, on files in memory, with faults at every step; and on a GPU, where
//! there is one. Without a GPU those tests are skipped; `OXTILE_REQUIRE=vmm` makes that a failure.

mod board;
mod faults;
mod gpu;
mod program;
mod ranks;
mod threads;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// What makes this program one rank, or one program, of a test instead of the tests.
const CHILD: &str = "OXTILE_TEST_VMM";

fn main() -> ExitCode {
    if let Ok(what) = std::env::var(CHILD) {
        return match what.strip_prefix("gpu:") {
            Some(case) => gpu::child(case),
            None => faults::child(&what),
        };
    }
    let mut arguments = Arguments::from_args();
    // They wait more than they work.
    arguments.test_threads = arguments.test_threads.or(Some(6));
    let trials: Vec<Trial> = [board::trials(), threads::trials(), faults::trials(), gpu::trials()].into_iter().flatten().collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A trial that fails by panicking.
fn trial(name: impl Into<String>, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}
