//! Ranks find one another, exchange bytes, and name the one that is gone: as threads, and as real processes under a kill matrix.
//!
//! | file | what it holds |
//! |---|---|
//! | `board`, `exchange` | notes and bytes that ranks exchange |
//! | `faults` | the kill matrix |
//! | `strangers`, `proof`, `cost` | other programs at rank 0's port: other jobs and noise; those that pretend to be of the job; what they cost |

mod board;
mod cost;
mod exchange;
mod faults;
mod proof;
mod strangers;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// What makes this program one rank of a test instead of the tests.
const CHILD: &str = "OXTILE_TEST_FAULT";

fn main() -> ExitCode {
    if let Ok(fault) = std::env::var(CHILD) {
        return match fault.strip_prefix("board:") {
            Some(case) => board::child(case),
            None if fault == "strangers" => strangers::child(),
            None if fault.starts_with("cost") => cost::child(&fault),
            None => faults::child(&fault),
        };
    }
    let mut arguments = Arguments::from_args();
    // They wait more than they work.
    arguments.test_threads = arguments.test_threads.or(Some(8));
    let trials: Vec<Trial> = [board::trials(), cost::trials(), exchange::trials(), proof::trials(), strangers::trials(), faults::trials()]
        .into_iter()
        .flatten()
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A trial that fails by panicking.
fn trial(name: impl Into<String>, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

/// A port at which no program listens.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("an address").port()
}
