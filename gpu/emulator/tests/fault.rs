//! Memory faults, divergence, barrier misuse, deadlock, hangs, panics: each is typed and names its place.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, GridRun, Launch, Memory, MemoryError, Options, Policy, ReadOrder, ShuffleMode, WriteOrder, device};
use std::time::Duration;

/// A job of one block of 64 threads.
fn job(body: fn(&[u64])) -> impl Fn() -> Job {
    move || Job::new("faulty", 1, 64, 64, 256, body)
}

#[test]
fn memory_faults_name_tensor_offset_and_line() {
    let fault = reported(job(|a| store(a[1] + 4 * u64::from(thread() + 1), 1)), FaultKind::OutOfBounds);
    let text = fault.to_string();
    for part in ["`output`", "offset 256", "256 bytes", "thread (63, 0, 0)", "kernel `faulty`", "mod.rs"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    reported(job(|a| _ = device::global_read::<16>(a[0] + 8, ReadOrder::Weak)), FaultKind::Misaligned);
    reported(job(|_| shared_store(256, 1)), FaultKind::OutOfBounds);
    reported(job(|_| _ = shared_load(thread() * 4)), FaultKind::Uninitialised);
    reported(job(|a| _ = load(a[0] + (1 << 40))), FaultKind::OutOfBounds);
}

#[test]
fn uninitialised_and_freed_global_memory_is_found() {
    let memory = Memory::new();
    let scratch = memory.allocate("scratch", 64, 0);
    let launch = Launch::new("reader", 1, 1, |a| _ = load(a[0] + 8)).arguments(&[scratch]);
    let run = |launch: &Launch| GridRun::new(&memory, launch.clone(), Options::default()).unwrap().run();
    let fault = run(&launch).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised);
    assert!(fault.to_string().contains("offset 8 of `scratch`"), "{fault}");
    memory.write(scratch, &[0; 12]).unwrap();
    run(&launch).unwrap();
    memory.free(scratch).unwrap();
    let fault = run(&launch).unwrap_err();
    assert_eq!(fault.kind, FaultKind::UseAfterFree, "{fault}");
    assert_eq!(memory.free(scratch), Err(MemoryError::NotAllocated { address: scratch }));
}

/// A copy between device buffers initialises nothing.
#[test]
fn copied_bytes_are_as_initialised_as_their_source() {
    let memory = Memory::new();
    let [source, target] = ["source", "target"].map(|name| memory.allocate(name, 64, 0));
    memory.write(source, &[1; 32]).unwrap();
    memory.write(target, &[2; 64]).unwrap();
    memory.copy(target + 8, source + 4, 56).unwrap();
    let launch = |offset| Launch::new("reader", 1, 1, |a| _ = load(a[0])).arguments(&[target + offset]);
    let run = |offset| GridRun::new(&memory, launch(offset), Options::default()).unwrap().run();
    for initialised in [0, 4, 8, 32] {
        run(initialised).unwrap();
    }
    let fault = run(36).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Uninitialised);
    assert!(fault.to_string().contains("offset 36 of `target`"), "{fault}");
    let mut bytes = [0; 64];
    memory.read(target, &mut bytes).unwrap();
    assert_eq!(bytes, *[[2; 8].as_slice(), &[1; 28], &[0; 28]].concat());
    assert!(memory.copy(target + 32, source, 40).is_err());
}

#[test]
fn tensors_are_named_by_their_parameters() {
    let mut job = Job::new("named", 1, 1, 4, 0, |a| store(a[1] + 16, 1));
    let name = oxtile_emulator::TensorName { name: "scales".to_owned(), address: job.output, bytes: 16 };
    job.launch.tensors.push(name);
    let fault = job.run(Options::default()).unwrap_err();
    assert!(fault.to_string().contains("`scales`"), "{fault}");
}

#[test]
fn divergence_names_both_lines() {
    #[expect(clippy::if_same_then_else, reason = "two lines is the bug")]
    fn split(_: &[u64]) {
        if device::lane() < 16 {
            device::warp_sync(u32::MAX);
        } else {
            device::warp_sync(u32::MAX);
        }
    }
    let fault = reported(job(split), FaultKind::Divergence);
    assert_eq!(fault.involved.len(), 2, "{fault}");
    assert_ne!(fault.involved[0].location.line(), fault.involved[1].location.line());
    let fault = reported(
        job(|_| {
            if device::lane() != 3 {
                device::warp_sync(u32::MAX);
            }
        }),
        FaultKind::Divergence,
    );
    assert!(fault.to_string().contains("0x00000008"), "{fault}");
    let read_outside = |_: &[u64]| {
        if device::lane() < 4 {
            device::shuffle(0xf, ShuffleMode::Index, 0, 7, 0x1f);
        }
    };
    reported(job(read_outside), FaultKind::Divergence);
}

#[test]
fn lanes_of_disjoint_masks_may_diverge() {
    fn halves(arguments: &[u64]) {
        let lane = device::lane();
        let sum = if lane < 16 {
            device::reduce(0xffff, oxtile_emulator::ReduceOp::Add, lane)
        } else {
            device::reduce(0xffff_0000, oxtile_emulator::ReduceOp::Add, lane)
        };
        store(arguments[1] + u64::from(lane) * 4, sum);
    }
    silent(|| Job::new("halves", 1, 32, 32, 0, halves), |out| assert_eq!((out[0], out[31]), (120, 376)));
}

/// As many masks at once as lanes can wait in: sixteen pairs, all of which wait before the first is complete.
#[test]
fn every_lane_may_wait_in_a_mask_of_its_own() {
    fn pairs(arguments: &[u64]) {
        let lane = device::lane();
        let mask = 1 << lane | 1 << (lane ^ 16);
        let other = device::shuffle(mask, ShuffleMode::Butterfly, lane, 16, 0x1f);
        device::warp_sync(1 << lane);
        let all_named = device::vote(mask, oxtile_emulator::VoteMode::Ballot, true) == mask;
        store(arguments[1] + u64::from(lane) * 4, other + 100 * u32::from(all_named));
    }
    silent(|| Job::new("pairs", 1, 32, 32, 0, pairs), |out| assert!((0..32).all(|lane| out[lane] == (lane as u32 ^ 16) + 100)));
}

/// Lane 0 waits for lane 1, which waits for both others.
#[test]
fn lanes_that_wait_for_each_other_in_two_masks_diverge() {
    let crossed = |_: &[u64]| device::warp_sync(if device::lane() == 0 { 0b11 } else { 0b111 });
    let text = reported(|| Job::new("crossed", 1, 3, 4, 0, crossed), FaultKind::Divergence).to_string();
    assert!(text.contains("of mask 0x00000003") && text.contains("of mask 0x00000007"), "{text}");
}

/// Lane 1 meets lane 2, then lane 0, which may wait for it already.
#[test]
fn a_lane_may_meet_others_on_its_way() {
    fn chain(arguments: &[u64]) {
        let lane = device::lane();
        let sum = |mask| device::reduce(mask, oxtile_emulator::ReduceOp::Add, lane);
        let late = if lane > 0 { sum(0b110) } else { 0 };
        let early = if lane < 2 { sum(0b11) } else { 0 };
        store(arguments[1] + u64::from(lane) * 4, 10 * late + early);
    }
    silent(|| Job::new("chain", 1, 3, 3, 0, chain), |out| assert_eq!(out, [1, 31, 30]));
}

#[test]
fn barriers_are_checked() {
    reported(job(|_| device::barrier_sync(16, 64)), FaultKind::BarrierMisuse);
    reported(job(|_| device::barrier_sync(0, 48)), FaultKind::BarrierMisuse);
    reported(job(|_| device::barrier_sync(0, if device::lane() == 0 { 32 } else { 64 })), FaultKind::BarrierMisuse);
    let twice = |_: &[u64]| {
        device::barrier_arrive(1, 64);
        if thread() < 32 {
            device::barrier_arrive(1, 64);
        }
    };
    for seed in SEEDS {
        // A second arrival counts for the next phase if the first phase happens to be over.
        let fault = job(twice)().run(Options::check(seed));
        assert!(fault.is_ok() || fault.is_err_and(|f| f.kind == FaultKind::BarrierMisuse));
    }
    reported(job(twice), FaultKind::BarrierMisuse);
}

#[test]
fn a_deadlock_says_who_waits_on_what() {
    fn stuck(_: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(0, 2);
        }
        device::barrier_sync(0, 64);
        if thread() < 32 {
            device::barrier_sync(3, 64);
        } else if thread() == 32 {
            device::mbarrier_arrive(0);
            device::mbarrier_wait_parity(0, 0);
        }
    }
    let text = reported(job(stuck), FaultKind::Deadlock).to_string();
    for part in
        ["threads 0..32", "barrier 3, 32 of 64 threads arrived", "threads 32:", "phase 0, 1 of 2 arrivals and 0 bytes pending", "fault.rs"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let fast = job(stuck)().run(Options::fast()).unwrap_err();
    assert_eq!(fast.kind, FaultKind::Deadlock);
}

#[test]
fn polling_without_end_is_reported() {
    fn poll(arguments: &[u64]) {
        while u32::from_le_bytes(device::global_read(arguments[1], ReadOrder::Acquire(oxtile_emulator::Scope::Device))) == 0 {
            device::nanosleep(10);
        }
    }
    fn spin(_: &[u64]) {
        if thread() == 0 {
            device::mbarrier_init(0, 1);
            while !device::mbarrier_try_wait_parity(0, 0) {}
        }
    }
    for body in [poll as fn(&[u64]), spin] {
        let fault = job(body)().run(Options { patience: Duration::ZERO, ..Options::default() }).unwrap_err();
        assert_eq!(fault.kind, FaultKind::NoProgress, "{fault}");
    }
    let fault = job(poll)().run(Options { patience: Duration::ZERO, ..Options::fast() }).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoProgress, "{fault}");
    fn forever(arguments: &[u64]) {
        loop {
            device::global_write(arguments[1], [0; 4], WriteOrder::Relaxed(oxtile_emulator::Scope::Device));
        }
    }
    let fault = job(forever)().run(Options { step_limit: 10_000, ..Options::default() }).unwrap_err();
    assert_eq!(fault.kind, FaultKind::StepLimit, "{fault}");
}

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

/// A lane that arrives for its warp, under every seed: the warp met before the wait alone, or in one of four ways behind it.
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

#[test]
fn traps_assumptions_and_panics_name_their_line() {
    let line_of = |body: fn(&[u64]), kind| {
        let text = reported(job(body), kind).to_string();
        assert!(text.contains("fault.rs:"), "{text}");
        text
    };
    line_of(|_| device::trap(), FaultKind::Trap);
    assert!(line_of(|_| device::assume(thread() > 100, "more than 100"), FaultKind::Assumption).contains("more than 100"));
    assert!(line_of(|_| device::out_of_bounds("weights", 9, 8), FaultKind::OutOfBounds).contains("index 9 of weights, which has length 8"));
    assert!(line_of(|_| assert_eq!(thread(), 64), FaultKind::Panic).contains("right: 64"));
    let fast = job(|_| panic!("no {}", 1))().run(Options { workers: 2, ..Options::fast() }).unwrap_err();
    assert!(fast.kind == FaultKind::Panic && fast.message.contains("no 1"), "{fast}");
}

#[test]
fn a_bad_launch_is_refused() {
    let memory = Memory::new();
    for (blocks, threads, shared) in [(0, 1, 0), (1, 0, 0), (1, 1025, 0), (1, 1, 1 << 20)] {
        let launch = Launch::new("bad", blocks, threads, |_| ()).shared(shared);
        assert_eq!(GridRun::new(&memory, launch, Options::fast()).err().unwrap().kind, FaultKind::Launch);
    }
}

#[test]
#[should_panic(expected = "outside a kernel")]
fn device_operations_need_a_kernel() {
    device::lane();
}

#[test]
fn a_seed_replays_to_the_same_report() {
    let racy = job(|a| {
        shared_store(thread() % 8 * 4, thread());
        store(a[1], thread());
    });
    for seed in 0..8 {
        let texts = [0; 2].map(|_| racy().run(Options::check(seed)).unwrap_err().to_string());
        assert_eq!(texts[0], texts[1]);
    }
    let right = job(|a| {
        shared_store(thread() * 4, thread());
        device::barrier_sync(0, 64);
        store(a[1] + u64::from(thread()) * 4, shared_load((63 - thread()) * 4));
    });
    for seed in 0..8 {
        let [first, second] = [0; 2].map(|_| right().run(Options::check(seed)).unwrap());
        assert_eq!(first, second);
    }
    let steps: std::collections::BTreeSet<u64> = (0..8).map(|seed| right().run(Options::check(seed)).unwrap().steps).collect();
    assert!(steps.len() > 1, "seeds do not change the interleaving");
}
