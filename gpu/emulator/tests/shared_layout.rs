//! Reports name the pieces of the shared memory that a kernel claims.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, Options, SharedLayout, device};

/// Four words, then a barrier, then words to the end.
const LAYOUT: SharedLayout = SharedLayout { name: "Shared", bytes: 256, piece };

fn piece(offset: u32, bytes: u32) -> String {
    match (offset, bytes) {
        (0, 16) => "maxima".to_owned(),
        (0..16, _) => format!("maxima[{}]", offset / 4),
        (16..24, _) => "full".to_owned(),
        (24..32, _) => String::new(),
        _ => format!("sums[{}]", (offset - 32) / 4),
    }
}

/// The report of a kernel that claims the layout first.
fn text(body: fn(&[u64]), kind: FaultKind) -> String {
    reported(job(body), kind).to_string()
}

fn contains(text: &str, part: &str) {
    assert!(text.contains(part), "{part} is not in {text}");
}

#[test]
fn accesses_are_named() {
    let race = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        shared_store(32 + thread() % 32 * 4, 0);
    };
    contains(&text(race, FaultKind::Race), "two accesses to `sums[");
    let unwritten = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        shared_load(8);
    };
    contains(&text(unwritten, FaultKind::Uninitialised), "a read of 4 bytes at `maxima[2]` of `Shared`, which was never written");
    let half = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        if thread() == 0 {
            shared_store(32, 0);
            device::shared_read::<8>(32);
        }
    };
    let half = text(half, FaultKind::Uninitialised);
    contains(&half, "a read of 8 bytes at `sums[0]` of `Shared`; `sums[1]` of `Shared` was never written");
    let misaligned = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        device::shared_read::<8>(36);
    };
    contains(&text(misaligned, FaultKind::Misaligned), "an access of 8 bytes at `sums[1]` of `Shared`");
    let beyond = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        device::shared_out_of_bounds(0, 16, 4, 4);
    };
    contains(&text(beyond, FaultKind::OutOfBounds), "index 4 of `maxima` of `Shared`, which has length 4");
}

#[test]
fn barriers_are_named_and_gaps_have_their_offset() {
    let early = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        device::mbarrier_arrive(16);
    };
    contains(&text(early, FaultKind::MbarrierMisuse), "there is no mbarrier at `full` of `Shared`");
    let stuck = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        if thread() == 0 {
            device::mbarrier_init(16, 2);
            device::mbarrier_wait_parity(16, 0);
        }
    };
    contains(&text(stuck, FaultKind::Deadlock), "waits on parity 0 of the mbarrier `full` of `Shared`: phase 0");
    let gap = |_: &[u64]| {
        device::claim_shared(LAYOUT);
        shared_load(24);
    };
    contains(&text(gap, FaultKind::Uninitialised), "at offset 24 of the block's shared memory, which was never written");
}

#[test]
fn a_layout_must_fit_the_launch() {
    let large = |_: &[u64]| device::claim_shared(SharedLayout { bytes: 257, ..LAYOUT });
    let text = text(large, FaultKind::OutOfBounds);
    contains(&text, "the kernel claims `Shared`, 257 bytes of shared memory; its launch has 256");
    contains(&text, "#[kernel(shared = ..)]");
    let fast = job(large)().run(Options::fast()).unwrap_err();
    assert_eq!(fast.kind, FaultKind::OutOfBounds);
}
