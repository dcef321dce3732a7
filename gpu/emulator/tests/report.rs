//! Bank conflicts and coalescing, from real addresses.

mod common;
use common::*;
use oxtile_emulator::{Options, Report, device};

fn report(body: fn(&[u64])) -> Report {
    Job::new("costs", 1, 32, 1024, 4096, body).run(Options::check(3)).unwrap()
}

fn cost(report: &Report, operation: &str) -> (u64, u64, u64) {
    let line = report.lines.iter().find(|line| line.operation == operation).unwrap();
    (line.requests, line.transactions, line.ideal)
}

#[test]
fn bank_conflicts_are_counted() {
    let straight = report(|_| shared_store(thread() * 4, 0));
    assert_eq!(cost(&straight, "shared_write"), (1, 1, 1));
    let strided = report(|_| shared_store(thread() * 8, 0));
    assert_eq!(cost(&strided, "shared_write"), (1, 2, 1));
    let column = report(|_| shared_store(thread() * 128, 0));
    assert_eq!(cost(&column, "shared_write"), (1, 32, 1));
    let vectors = report(|_| device::shared_write(thread() * 16, [0; 16]));
    assert_eq!(cost(&vectors, "shared_write"), (1, 4, 4));
    let same = report(|_| {
        shared_store(thread() * 4, 0);
        device::warp_sync(u32::MAX);
        shared_load(0);
    });
    assert_eq!(cost(&same, "shared_read"), (1, 1, 1));
}

#[test]
fn sectors_are_counted() {
    let coalesced = report(|a| _ = load(a[0] + u64::from(thread()) * 4));
    assert_eq!(cost(&coalesced, "global_read"), (1, 4, 4));
    let strided = report(|a| _ = load(a[0] + u64::from(thread()) * 32));
    assert_eq!(cost(&strided, "global_read"), (1, 32, 4));
    let text = strided.to_string();
    assert!(text.contains("global_read: 1 requests, 32 sectors (ideal 4)"), "{text}");
}
