//! How long each case took, for the programs that print the slowest: lines of seconds, a tab and the name, appended to
//! the file that `OXTILE_TIMES` names.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Instant;

use libtest_mimic::{Failed, Trial};

/// A trial that records its time.
pub fn trial(name: String, run: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    Trial::test(name.clone(), move || {
        let start = Instant::now();
        let outcome = run();
        record(&name, start.elapsed().as_secs_f64());
        outcome
    })
}

/// A time that cannot be written is no reason for a test to fail.
fn record(name: &str, seconds: f64) {
    let Some(path) = std::env::var_os("OXTILE_TIMES") else { return };
    if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) {
        let _ = file.write_all(format!("{seconds:.3}\t{name}\n").as_bytes());
    }
}
