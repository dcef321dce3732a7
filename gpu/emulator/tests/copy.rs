//! Asynchronous copies: pipelines, proxy fences, groups.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, Options, device};

/// What a pipeline leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Bug {
    None,
    NoFullWait,
    NoEmptyWait,
    NoInitFence,
    NoInitBarrier,
    TooFewBytes,
    TooManyBytes,
    ReleaseEarly,
}

const STAGES: u32 = 2;
const TILE: u32 = 128;
const TILES: u32 = 6;

/// Warp 0 loads tiles of 128 bytes through a ring of mbarriers; warp 1 writes them out.
fn pipeline(arguments: &[u64], bug: Bug) {
    let full = |stage: u32| STAGES * TILE + stage * 16;
    let empty = |stage: u32| STAGES * TILE + stage * 16 + 8;
    if thread() == 0 {
        for stage in 0..STAGES {
            device::mbarrier_init(full(stage), 1);
            device::mbarrier_init(empty(stage), 32);
        }
        if bug != Bug::NoInitFence {
            device::fence_mbarrier_init();
        }
    }
    if bug != Bug::NoInitBarrier {
        device::barrier_sync(0, 64);
    }
    let bytes = match bug {
        Bug::TooFewBytes => TILE - 16,
        Bug::TooManyBytes => TILE + 16,
        _ => TILE,
    };
    for tile in 0..TILES {
        let (stage, parity) = (tile % STAGES, tile / STAGES % 2);
        if thread() == 0 {
            if bug != Bug::NoEmptyWait {
                device::mbarrier_wait_parity(empty(stage), parity ^ 1);
            }
            device::mbarrier_arrive_expect_transaction(full(stage), bytes);
            device::bulk_load(stage * TILE, arguments[0] + u64::from(tile * TILE), TILE, full(stage));
        } else if thread() >= 32 {
            if bug != Bug::NoFullWait {
                device::mbarrier_wait_parity(full(stage), parity);
            }
            if bug == Bug::ReleaseEarly {
                device::mbarrier_arrive(empty(stage));
            }
            let value = shared_load(stage * TILE + device::lane() * 4);
            if bug != Bug::ReleaseEarly {
                device::mbarrier_arrive(empty(stage));
            }
            store(arguments[1] + u64::from(tile * TILE + device::lane() * 4), value + 1);
        }
    }
}

fn pipeline_job(body: fn(&[u64])) -> impl Fn() -> Job {
    move || Job::new("pipeline", 1, 64, TILES * TILE / 4, STAGES * (TILE + 16), body)
}

#[test]
fn an_mbarrier_pipeline_is_silent() {
    silent(pipeline_job(|a| pipeline(a, Bug::None)), |out| assert!(out.iter().enumerate().all(|(i, &v)| v == i as u32 + 1)));
}

/// The same hand-shake by polling: `try_wait` may fail at any time.
#[test]
fn a_polling_consumer_is_silent() {
    fn body(arguments: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(128, 1);
            device::fence_mbarrier_init();
        }
        device::barrier_sync(0, 64);
        if thread() == 0 {
            device::mbarrier_arrive_expect_transaction(128, 128);
            device::bulk_load(0, arguments[0], 128, 128);
        } else if thread() >= 32 {
            while !device::mbarrier_try_wait_parity(128, 0) {}
            store(arguments[1] + u64::from(device::lane()) * 4, shared_load(device::lane() * 4));
        }
    }
    silent(
        || {
            Job::new("poll", 2, 64, 32, 136, |a| {
                if device::block_index()[0] == 0 {
                    body(a)
                }
            })
        },
        |out| assert_eq!(out[31], 31),
    );
}

/// A copy that no thread waits for, and one that completes on bytes that are no mbarrier.
#[test]
fn a_copy_needs_an_mbarrier_and_a_waiter() {
    fn unwatched(arguments: &[u64]) {
        device::mbarrier_init(128, 1);
        device::fence_mbarrier_init();
        device::mbarrier_arrive_expect_transaction(128, 128);
        device::bulk_load(0, arguments[0], 128, 128);
    }
    reported(|| Job::new("unwatched", 1, 1, 32, 136, unwatched), FaultKind::InFlightAtExit);
    reported(|| Job::new("nowhere", 1, 1, 32, 136, |a| device::bulk_load(0, a[0], 128, 128)), FaultKind::MbarrierMisuse);
}

#[test]
fn a_broken_pipeline_is_reported() {
    let kinds = |body: fn(&[u64]), allowed: &[FaultKind]| {
        for seed in SEEDS {
            let fault = pipeline_job(body)().run(Options::check(seed)).expect_err(&format!("seed {seed} is silent"));
            assert!(allowed.contains(&fault.kind), "seed {seed}: {fault}");
        }
    };
    use FaultKind::{Deadlock, MbarrierMisuse, MissingProxyFence, Race, Uninitialised};
    kinds(|a| pipeline(a, Bug::NoFullWait), &[Race, Uninitialised, MbarrierMisuse]);
    kinds(|a| pipeline(a, Bug::NoEmptyWait), &[Race, MbarrierMisuse]);
    kinds(|a| pipeline(a, Bug::NoInitFence), &[MissingProxyFence]);
    kinds(|a| pipeline(a, Bug::NoInitBarrier), &[Race, MbarrierMisuse]);
    kinds(|a| pipeline(a, Bug::TooManyBytes), &[Deadlock]);
    kinds(|a| pipeline(a, Bug::TooFewBytes), &[Deadlock, Race, Uninitialised, MbarrierMisuse]);
    kinds(|a| pipeline(a, Bug::ReleaseEarly), &[Race]);
}

/// Threads fill shared memory, one of them stores it in bulk.
fn store_in_bulk(arguments: &[u64], fence: bool, commit: bool, wait: bool, reuse: bool) {
    shared_store(thread() * 4, thread() + 7);
    if fence {
        device::fence_proxy_async(oxtile_emulator::Space::Shared);
    }
    device::barrier_sync(0, threads());
    if thread() == 0 {
        device::bulk_store(arguments[1], 0, threads() * 4);
        if commit {
            device::bulk_commit();
        }
        if wait {
            device::bulk_wait(0, true);
        }
    }
    if reuse {
        device::barrier_sync(0, threads());
        shared_store(thread() * 4, 0);
    }
}

#[test]
fn a_bulk_store_needs_fence_commit_and_wait() {
    let job = |body: fn(&[u64])| move || Job::new("store_in_bulk", 1, 64, 64, 256, body);
    let right = |out: &[u32]| assert!(out.iter().enumerate().all(|(i, &v)| v == i as u32 + 7));
    silent(job(|a| store_in_bulk(a, true, true, true, false)), right);
    silent(job(|a| store_in_bulk(a, true, true, true, true)), right);
    let fault = reported(job(|a| store_in_bulk(a, false, true, true, false)), FaultKind::MissingProxyFence);
    assert!(fault.to_string().contains("fence_proxy_async(Shared)"), "{fault}");
    reported(job(|a| store_in_bulk(a, true, false, true, false)), FaultKind::InFlightAtExit);
    reported(job(|a| store_in_bulk(a, true, true, false, false)), FaultKind::InFlightAtExit);
    for seed in SEEDS {
        let fault = job(|a| store_in_bulk(a, true, true, false, true))().run(Options::check(seed)).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::InFlightAtExit), "{fault}");
    }
}

/// `cp.async`, two groups deep: group `r` is used while group `r + 1` is in flight.
fn groups(arguments: &[u64], pending: u32, commit: bool) {
    let lane = thread();
    let fetch = |round: u32| {
        let source = arguments[0] + u64::from(round * 512 + lane * 16);
        device::copy_async(round % 2 * 512 + lane * 16, source, 16, 16);
        if commit {
            device::copy_async_commit();
        }
    };
    fetch(0);
    for round in 0..4 {
        if round < 3 {
            fetch(round + 1);
            device::copy_async_wait(pending);
        } else {
            device::copy_async_wait(0);
        }
        let value = u32::from_le_bytes(device::shared_read(round % 2 * 512 + lane * 16));
        store(arguments[1] + u64::from(round * 512 + lane * 16), value);
    }
}

#[test]
fn cp_async_groups_need_commit_and_wait() {
    let job = |body: fn(&[u64])| move || Job::new("groups", 1, 32, 512, 1024, body);
    silent(job(|a| groups(a, 1, true)), |out| assert!(out.iter().step_by(4).enumerate().all(|(i, &v)| v == i as u32 * 4)));
    for body in [(|a| groups(a, 2, true)) as fn(&[u64]), |a| groups(a, 1, false)] {
        for seed in SEEDS {
            let fault = job(body)().run(Options::check(seed)).unwrap_err();
            assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
        }
    }
}

/// `cp.async` that arrives at an mbarrier which other threads wait on.
#[test]
fn cp_async_arrives_at_an_mbarrier() {
    fn body(arguments: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(512, 32);
        }
        device::barrier_sync(0, 64);
        if thread() < 32 {
            device::copy_async(thread() * 16, arguments[0] + u64::from(thread()) * 16, 16, 8);
            device::copy_async_mbarrier_arrive(512);
        } else {
            device::mbarrier_wait_parity(512, 0);
            let lane = device::lane();
            let row: [u8; 16] = device::shared_read((lane ^ 3) * 16);
            device::global_write(arguments[1] + u64::from(lane) * 16, row, oxtile_emulator::WriteOrder::Weak);
        }
    }
    silent(|| Job::new("arrive", 1, 64, 128, 520, body), |out| assert_eq!(out[..4], [12, 13, 0, 0]));
}

#[test]
fn bulk_sums_of_two_blocks_do_not_race() {
    fn body(arguments: &[u64]) {
        device::shared_write(thread() * 4, 1.5f32.to_le_bytes());
        device::fence_proxy_async(oxtile_emulator::Space::Shared);
        device::barrier_sync(0, 32);
        if thread() == 0 {
            device::bulk_reduce_add_f32(arguments[1], 0, 128);
            device::bulk_commit();
            device::bulk_wait(0, false);
        }
    }
    silent(|| Job::new("sums", 4, 32, 32, 128, body), |out| assert!(out.iter().all(|&v| f32::from_bits(v) == 6.0)));
}

#[test]
fn sizes_and_alignment_are_checked() {
    let job = |body: fn(&[u64])| move || Job::new("misuse", 1, 1, 64, 256, body);
    reported(job(|a| device::bulk_store(a[1], 0, 24)), FaultKind::AsyncMisuse);
    reported(job(|a| device::bulk_store(a[1] + 8, 0, 16)), FaultKind::Misaligned);
    reported(job(|a| device::copy_async(0, a[0], 12, 12)), FaultKind::AsyncMisuse);
    reported(job(|a| device::copy_async(0, a[0] + 256, 16, 16)), FaultKind::OutOfBounds);
    reported(job(|a| device::copy_async(248, a[0], 16, 16)), FaultKind::Misaligned);
    reported(job(|a| device::copy_async(256, a[0], 16, 16)), FaultKind::OutOfBounds);
}

#[test]
fn what_an_mbarrier_observes_no_group_wait_does() {
    /// A copy that an mbarrier observes, then a wait for that, or for groups, of which there are none.
    fn body(arguments: &[u64], waits: bool) {
        device::mbarrier_init(8, 1);
        shared_store(0, 7);
        device::copy_async(0, arguments[1], 4, 4);
        device::copy_async_mbarrier_arrive(8);
        if waits {
            device::mbarrier_wait_parity(8, 0);
        } else {
            device::copy_async_wait(0);
        }
        store(arguments[1], shared_load(0) + 1);
        device::mbarrier_wait_parity(8, 0);
    }
    // With the wait the source, too, is free.
    silent(|| Job::new("observed", 1, 1, 1, 16, |a| body(a, true)), |out| assert_eq!(out[0], 1));
    for seed in SEEDS {
        let fault = Job::new("observed", 1, 1, 1, 16, |a| body(a, false)).run(oxtile_emulator::Options::check(seed)).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Race, "seed {seed}: {fault}");
    }
}
