//! What the compiler says when a kernel is written or called wrongly, and what it must take.
//! `TRYBUILD=overwrite` renews the texts.

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use oxtile_build::recipe::PINNED_RELEASE;

fn main() -> ExitCode {
    let rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into())).arg("--version").output();
    let rustc = String::from_utf8(rustc.expect("rustc runs").stdout).expect("UTF-8");
    // Every release words its errors anew.
    let pinned = rustc.starts_with(&format!("rustc {PINNED_RELEASE} "));
    if !pinned {
        eprintln!("kernel_errors: 1 test skipped: its texts are those of rustc {PINNED_RELEASE}, this is {}", rustc.trim());
    }
    let test = Trial::test("error_texts", || {
        error_texts();
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![test.with_ignored_flag(!pinned)]).exit_code()
}

fn error_texts() {
    let cases = trybuild::TestCases::new();
    // One case that passes makes all of them be built, not checked: some limits show for used functions alone.
    cases.pass("tests/ui/pass/*.rs");
    cases.compile_fail("tests/ui/*.rs");
}
