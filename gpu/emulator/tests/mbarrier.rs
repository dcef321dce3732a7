//! Faults of mbarriers: misuse, waiters that are lapped, lanes that speak for their warp.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, Options, Policy, ShuffleMode, device};

#[test]
fn mbarriers_are_checked() {
    use FaultKind::MbarrierMisuse;
    reported(job(|_| device::mbarrier_init(0, 0)), MbarrierMisuse);
    reported(job(|_| device::mbarrier_init(4, 1)), MbarrierMisuse);
    reported(job(|_| device::mbarrier_arrive(0)), MbarrierMisuse);
    let single = |body: fn(&[u64])| move || Job::new("single", 1, 1, 64, 256, body);
    let twice = |_: &[u64]| {
        device::mbarrier_init(0, 1);
        device::mbarrier_init(0, 1);
    };
    reported(single(twice), MbarrierMisuse);
    let over = |_: &[u64]| {
        device::mbarrier_init(0, 1);
        device::mbarrier_arrive_expect_transaction(0, 16);
        device::mbarrier_arrive(0);
    };
    reported(single(over), MbarrierMisuse);
    let overwritten = |_: &[u64]| {
        device::mbarrier_init(0, 1);
        shared_store(4, 0);
    };
    reported(single(overwritten), MbarrierMisuse);
    let overflow = |_: &[u64]| {
        device::mbarrier_init(0, 1);
        device::mbarrier_expect_transaction(0, 1 << 20);
    };
    reported(single(overflow), MbarrierMisuse);
    let reused = |_: &[u64]| {
        device::mbarrier_init(0, 1);
        device::mbarrier_invalidate(0);
        shared_store(4, 0);
        device::mbarrier_init(8, 1);
        device::mbarrier_arrive(8);
        device::mbarrier_wait_parity(8, 0);
    };
    silent(single(reused), |_| ());
}

/// Lane 1 is not counted, so lane 0 may run two phases ahead of it.
#[test]
fn a_lapped_waiter_is_found() {
    fn lapped(_: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(0, 1);
        }
        device::barrier_sync(0, 64);
        for round in 0..4 {
            if thread() == 0 {
                device::mbarrier_arrive(0);
            }
            if thread() == 0 || thread() == 32 {
                device::mbarrier_wait_parity(0, round % 2);
            }
        }
    }
    let mut found = false;
    for seed in SEEDS {
        if let Err(fault) = job(lapped)().run(Options::check(seed)) {
            assert!(matches!(fault.kind, FaultKind::MbarrierMisuse | FaultKind::Deadlock), "{fault}");
            found |= fault.kind == FaultKind::MbarrierMisuse;
        }
    }
    assert!(found);
}

/// A lane that arrives for its warp, under every seed: the warp met before the wait alone, or in one of four ways after it.
#[test]
fn a_lane_speaks_for_its_warp_only_once_the_warp_has_met() {
    fn wait_and_arrive(meet: fn()) {
        if thread() == 0 {
            device::mbarrier_init(0, 1);
            device::mbarrier_init(8, 2);
            device::mbarrier_arrive(0);
        }
        device::barrier_sync(0, 64);
        device::mbarrier_wait_parity(0, 0);
        meet();
        device::warp_met_since_wait(0);
        if device::lane() == 0 {
            device::mbarrier_arrive(8);
        }
    }
    let lonely = job(|_| wait_and_arrive(|| ()));
    let part = job(|_| {
        wait_and_arrive(|| {
            if device::lane() < 16 {
                device::warp_sync(0xffff)
            }
        })
    });
    for seed in SEEDS {
        for job in [&lonely as &dyn Fn() -> Job, &part] {
            let fault = job().run(Options::check(seed)).expect_err("nothing says that the other lanes have waited");
            assert_eq!(fault.kind, FaultKind::MbarrierMisuse, "seed {seed}: {fault}");
            assert!(fault.to_string().contains("arrives for its warp"), "seed {seed}: {fault}");
        }
    }
    silent(job(|_| wait_and_arrive(|| device::warp_sync(!0))), |_| ());
    silent(job(|_| wait_and_arrive(|| _ = device::shuffle(!0, ShuffleMode::Index, thread(), 0, 31))), |_| ());
    silent(job(|_| wait_and_arrive(|| device::barrier_sync(1, 64))), |_| ());
    silent(job(|_| wait_and_arrive(device::cluster_sync)), |_| ());
}

/// A warp that drains a ring of one stage; its first lane hands the stage back for all, as soon as it has seen it full itself.
#[test]
fn a_starved_lane_is_lapped() {
    fn drain(_: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(0, 1);
            device::mbarrier_init(8, 1);
        }
        device::barrier_sync(0, 64);
        for round in 0..8 {
            if thread() == 0 {
                device::mbarrier_wait_parity(8, (round % 2) ^ 1);
                device::mbarrier_arrive(0);
            } else if thread() >= 32 {
                device::mbarrier_wait_parity(0, round % 2);
                if thread() == 32 {
                    device::mbarrier_arrive(8);
                }
            }
        }
    }
    let found = |policy| {
        let runs = SEEDS.map(|seed| job(drain)().run(Options { policy, ..Options::check(seed) }));
        runs.filter(|run| run.as_ref().is_err_and(|fault| fault.kind == FaultKind::MbarrierMisuse)).count()
    };
    // The lane that arrives may be the starved one, and the first lanes' warp has no other that matters.
    assert!(found(Policy::StarveLane) >= SEEDS.count() * 3 / 4, "{} of {}", found(Policy::StarveLane), SEEDS.count());
    assert!(found(Policy::Random) < found(Policy::StarveLane), "{} of {}", found(Policy::Random), SEEDS.count());
}
