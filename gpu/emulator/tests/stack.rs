//! A stack overflow ends the process with a message; the test is its own child.

mod common;

use oxtile_emulator::{GridRun, Launch, Memory, Options, device};
use std::hint::black_box;
use std::process::Command;

const CHILD: &str = "OXTILE_TEST_OVERFLOW";

fn recurse(depth: u64) -> u64 {
    let frame = black_box([depth; 64]);
    if depth == 0 { frame[1] } else { recurse(depth - 1) + frame[0] }
}

fn deep(arguments: &[u64]) {
    if device::thread_index()[0] == 33 {
        black_box(recurse(arguments[0]));
    }
}

fn run(depth: u64, stack_bytes: usize) {
    let launch = Launch::new("deep", 1, 64, deep).arguments(&[depth]);
    GridRun::new(&Memory::new(), launch, Options { stack_bytes, ..Options::default() }).unwrap().run().unwrap();
}

#[test]
fn overflow_names_kernel_thread_and_setting() {
    if std::env::var_os(CHILD).is_some() {
        return run(1_000_000, 64 << 10);
    }
    let this = std::env::current_exe().unwrap();
    let child = Command::new(this).args(["overflow_names", "--nocapture"]).env(CHILD, "1").output().unwrap();
    assert!(!child.status.success());
    let text = String::from_utf8_lossy(&child.stderr);
    for part in ["stack overflow in kernel `deep`", "thread [33, 0, 0]", "65536 bytes", "Options::stack_bytes"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn a_larger_stack_holds_deeper_recursion() {
    run(500, 2 << 20);
}
