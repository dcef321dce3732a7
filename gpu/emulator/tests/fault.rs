//! Barrier misuse, deadlock, hangs, traps, panics, bad launches: each is typed and names its place.

mod common;
use common::*;
use oxtile_emulator::{FaultKind, GridRun, Launch, Memory, Options, ReadOrder, WriteOrder, device};
use std::time::Duration;

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

/// A worker that the machine does not let run is no silence: the other one polls for longer than its patience.
#[test]
fn a_late_worker_is_waited_for() {
    fn late(arguments: &[u64]) {
        let flag = arguments[1];
        if device::block_index()[0] == 1 {
            std::thread::sleep(Duration::from_millis(300));
            device::global_write(flag, 1u32.to_le_bytes(), WriteOrder::Release(oxtile_emulator::Scope::Device));
        } else {
            while u32::from_le_bytes(device::global_read(flag, ReadOrder::Acquire(oxtile_emulator::Scope::Device))) == 0 {
                device::nanosleep(10);
            }
        }
    }
    let job = Job::new("late", 2, 1, 4, 0, late);
    job.run(Options { workers: 2, patience: Duration::from_millis(5), ..Options::fast() }).unwrap();
    // Both poll: neither is waited for.
    let silent = |arguments: &[u64]| {
        let flag = arguments[1] + u64::from(device::block_index()[0]) * 4;
        while u32::from_le_bytes(device::global_read(flag, ReadOrder::Acquire(oxtile_emulator::Scope::Device))) == 0 {}
    };
    let options = Options { workers: 2, patience: Duration::from_millis(5), ..Options::fast() };
    assert_eq!(Job::new("silent", 2, 1, 4, 0, silent).run(options).unwrap_err().kind, FaultKind::NoProgress);
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
    let limited = Options { time_limit: Duration::from_millis(20), ..Options::default() };
    let text = job(forever)().run(limited).unwrap_err().to_string();
    for part in ["no block has ended for ", "fault.rs:97", "mend: end the loop"] {
        assert!(text.contains(part), "{text}");
    }
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

/// A test or `main` that returns a fault prints it by `Debug`.
#[test]
fn a_fault_reads_the_same_where_it_is_returned() {
    let fault = reported(job(|_| device::trap()), FaultKind::Trap);
    assert_eq!(format!("{fault:?}"), fault.to_string());
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
