//! Turns that are noted repeat a run; given ones come first, the default order after them; a story tells what they did.

mod common;
use common::*;
use oxtile_emulator::{
    Actor, Atomic, AtomicOp, Fault, FaultKind, Options, ReadOrder, Report, Schedule, Scope, Sentence, Space, Turn, WriteOrder, device,
};
use std::time::Duration;

/// Polling that nothing answers ends by a count, not by the clock.
fn options(seed: u64) -> Options {
    Options { patience: Duration::ZERO, ..Options::check(seed) }
}

/// Runs a fresh job by a schedule, which keeps the record.
fn run(job: &impl Fn() -> Job, seed: u64, schedule: &Schedule) -> (Result<Report, Fault>, Vec<u32>) {
    let job = job();
    let result = job.run(Options { schedule: Some(schedule.clone()), ..options(seed) });
    (result, job.output())
}

/// Every run under a seed is repeated by its turns, under another seed.
fn repeats(job: impl Fn() -> Job) {
    for seed in SEEDS {
        let plain = job().run(options(seed));
        let noted = Schedule::seeded();
        let (first, output) = run(&job, seed, &noted);
        assert_eq!(plain.as_ref().err(), first.as_ref().err(), "seed {seed}: to note turns changes nothing");
        let (again, same) = run(&job, seed + 1, &Schedule::given(&noted.turns()));
        assert_eq!(first.as_ref().err(), again.as_ref().err(), "seed {seed}");
        assert_eq!(output, same, "seed {seed}");
        assert!(!noted.turns().is_empty());
    }
}

/// Each thread passes its word to its neighbour, without a barrier.
fn rotate(arguments: &[u64]) {
    let (me, count) = (thread(), threads());
    shared_store(me * 4, 0);
    device::barrier_sync(0, count);
    shared_store(me * 4, load(arguments[0] + u64::from(me) * 4));
    store(arguments[1] + u64::from(me) * 4, shared_load((me + 1) % count * 4));
}

/// Thread 0 of block 0 takes what block 1 has, if its flag is there already: an acquire is missing.
fn look_once(arguments: &[u64]) {
    let (data, flag) = (arguments[1], arguments[1] + 4);
    if device::block_index()[0] == 1 {
        store(data, 42);
        device::global_write(flag, 1u32.to_le_bytes(), WriteOrder::Release(Scope::Device));
    } else if u32::from_le_bytes(device::global_read(flag, ReadOrder::Relaxed(Scope::Device))) == 1 {
        store(arguments[1] + 8, load(data));
    }
}

/// Two threads add one to a counter, each by a load and a store.
fn lost_update(arguments: &[u64]) {
    let order = Scope::Device;
    let count = u32::from_le_bytes(device::global_read(arguments[1], ReadOrder::Relaxed(order)));
    device::global_write(arguments[1], (count + 1).to_le_bytes(), WriteOrder::Relaxed(order));
}

/// Block 0 hands a value to block 1 through a flag, which is polled.
fn hand_over(arguments: &[u64]) {
    let (data, flag) = (arguments[1], arguments[1] + 4);
    if device::block_index()[0] == 0 {
        store(data, 42);
        device::global_write(flag, 1u32.to_le_bytes(), WriteOrder::Release(Scope::Device));
    } else {
        while u32::from_le_bytes(device::global_read(flag, ReadOrder::Acquire(Scope::Device))) == 0 {}
        store(arguments[1] + 8, load(data));
    }
}

const TILE: u32 = 128;
const TILES: u32 = 6;

/// Warp 0 loads tiles through two stages, warp 1 stores what it finds there; `arrives` says which lanes release a stage.
fn pipeline(arguments: &[u64], arrives: impl Fn(u32) -> bool) {
    let full = |stage: u32| 2 * TILE + stage * 16;
    let empty = |stage: u32| full(stage) + 8;
    if thread() == 0 {
        for stage in 0..2 {
            device::mbarrier_init(full(stage), 1);
            device::mbarrier_init(empty(stage), 32);
        }
        device::fence_mbarrier_init();
    }
    device::barrier_sync(0, 64);
    for tile in 0..TILES {
        let (stage, parity) = (tile % 2, tile / 2 % 2);
        if thread() == 0 {
            while !device::mbarrier_try_wait_parity(empty(stage), parity ^ 1) {}
            device::mbarrier_arrive_expect_transaction(full(stage), TILE);
            device::bulk_load(stage * TILE, arguments[0] + u64::from(tile * TILE), TILE, full(stage));
        } else if thread() >= 32 {
            device::mbarrier_wait_parity(full(stage), parity);
            let value = shared_load(stage * TILE + device::lane() * 4);
            if arrives(device::lane()) {
                device::mbarrier_arrive(empty(stage));
            }
            store(arguments[1] + u64::from(tile * TILE + device::lane() * 4), value);
        }
    }
}

fn tiles(body: fn(&[u64])) -> impl Fn() -> Job {
    move || Job::new("pipeline", 1, 64, TILE / 4 * TILES, 2 * TILE + 32, body)
}

/// Turns that are left after as many as can be were dropped, one after another.
fn needed(job: &impl Fn() -> Job, turns: &[Turn], kind: FaultKind) -> Vec<Turn> {
    let fails = |turns: &[Turn]| run(job, 0, &Schedule::given(turns)).0.is_err_and(|fault| fault.kind == kind);
    let mut left = turns.to_vec();
    assert!(fails(&left));
    for at in (0..left.len()).rev() {
        let without: Vec<Turn> = left.iter().enumerate().filter(|&(i, _)| i != at).map(|(_, &turn)| turn).collect();
        if fails(&without) {
            left = without;
        }
    }
    left
}

#[test]
fn turns_repeat_a_run() {
    repeats(job(rotate));
    repeats(|| Job::new("hand_over", 2, 1, 4, 0, hand_over));
    repeats(|| Job::new("lost_update", 2, 1, 1, 0, lost_update));
    repeats(tiles(|arguments| pipeline(arguments, |_| true)));
    repeats(tiles(|arguments| pipeline(arguments, |lane| lane != 5)));
    // More blocks than are in flight at once, which wait for one another.
    repeats(|| {
        Job::new("many", 40, 32, 64, 0, |arguments| {
            let atomic = Atomic { scope: Scope::Device, ..Atomic::relaxed(AtomicOp::Add, 4, 1) };
            let before = device::atomic(Space::Global, arguments[1], atomic);
            store(arguments[1] + 4 + before % 32 * 4, before as u32);
        })
    });
}

#[test]
fn the_default_order_runs_the_lowest_thread_as_far_as_it_goes() {
    let body = |arguments: &[u64]| {
        let order = device::atomic(Space::Global, arguments[1], Atomic { scope: Scope::Device, ..Atomic::relaxed(AtomicOp::Add, 4, 1) });
        store(arguments[1] + 4 + u64::from(thread()) * 4, order as u32);
    };
    let job = move || Job::new("count", 1, 8, 16, 0, body);
    let (result, output) = run(&job, 3, &Schedule::given(&[]));
    assert!(result.is_ok());
    assert_eq!(output[..9], [8, 0, 1, 2, 3, 4, 5, 6, 7]);
    let first = |thread| Turn { block: 0, actor: Actor::Thread(thread), until: u32::MAX };
    let (_, output) = run(&job, 3, &Schedule::given(&[first(6), first(2)]));
    assert_eq!(output[..9], [8, 2, 3, 1, 4, 5, 6, 0, 7]);
}

/// The turns of the first seed under which a job fails so, and the fault.
fn failing(job: &impl Fn() -> Job, kind: FaultKind) -> (Vec<Turn>, Fault) {
    let found = SEEDS.into_iter().find_map(|seed| {
        let noted = Schedule::seeded();
        let fault = run(job, seed, &noted).0.err()?;
        (fault.kind == kind).then(|| (noted.turns(), fault))
    });
    found.expect("a seed under which it fails")
}

/// What a run by these turns, which fails, is told to do, about the lines of a fault.
fn told(job: &impl Fn() -> Job, turns: &[Turn], fault: &Fault) -> Vec<Sentence> {
    let about: Vec<_> = fault.involved.iter().map(|line| line.location).collect();
    let schedule = Schedule::given(turns).told(&about);
    run(job, 0, &schedule).0.expect_err("as before");
    schedule.story()
}

#[test]
fn a_race_between_all_threads_needs_no_turn() {
    let job = job(rotate);
    let (turns, fault) = failing(&job, FaultKind::Race);
    assert_eq!(needed(&job, &turns, FaultKind::Race), []);
    // Threads that do the same are told together.
    let [first, second, third] = &told(&job, &[], &fault)[..] else { panic!("three sentences") };
    for (sentence, start, end) in [
        (first, "threads 0..63 of block (0, 0, 0) run past ", "(barrier_sync), where they wait"),
        (second, "thread (63, 0, 0) of block (0, 0, 0) runs past ", "(read of offset 0 of the block's shared memory) to the end"),
        (third, "thread (0, 0, 0) of block (0, 0, 0) runs until ", "(write of offset 0 of the block's shared memory)"),
    ] {
        assert!(sentence.text.starts_with(start) && sentence.text.ends_with(end), "{}", sentence.text);
    }
}

#[test]
fn a_race_behind_a_flag_needs_one_turn_and_is_told() {
    let job = || Job::new("look_once", 2, 1, 4, 0, look_once);
    let (turns, fault) = failing(&job, FaultKind::Race);
    let left = needed(&job, &turns, FaultKind::Race);
    assert!(matches!(left[..], [Turn { block: 1, actor: Actor::Thread(0), .. }]), "{left:?}");
    let story = told(&job, &left, &fault);
    let [first, second] = &story[..] else { panic!("{story:#?}") };
    assert!(first.text.starts_with("thread (0, 0, 0) of block (1, 0, 0) runs past gpu/emulator/tests/common/mod.rs:"), "{}", first.text);
    assert!(first.text.contains("(write of offset 0 of `output` (16 bytes))"), "{}", first.text);
    assert!(second.text.starts_with("thread (0, 0, 0) of block (0, 0, 0) runs until"), "{}", second.text);
    assert!(second.text.ends_with("(read of offset 0 of `output` (16 bytes))"), "{}", second.text);
    assert!(first.matters && second.matters);
}

#[test]
fn a_lost_update_needs_one_turn() {
    let job = || Job::new("lost_update", 2, 1, 1, 0, lost_update);
    let is_lost = |turns: &[Turn]| run(&job, 0, &Schedule::given(turns)).1 == [1];
    assert!(!is_lost(&[]));
    let turns = |seed| {
        let noted = Schedule::seeded();
        (run(&job, seed, &noted).1 == [1]).then(|| noted.turns())
    };
    let noted = SEEDS.into_iter().find_map(turns).expect("a seed under which it is lost");
    assert!(is_lost(&noted));
    // Block 1 loads, then block 0 does all, and block 1 stores what it computed before.
    let turn = Turn { block: 1, actor: Actor::Thread(0), until: 2 };
    assert!(is_lost(&[turn]));
    assert!(!is_lost(&[Turn { until: 1, ..turn }]) && !is_lost(&[Turn { until: 3, ..turn }]));
}

#[test]
fn a_missing_arrival_needs_no_turn_and_is_told() {
    let job = tiles(|arguments| pipeline(arguments, |lane| lane != 5));
    let plain = Schedule::given(&[]);
    let fault = run(&job, 0, &plain).0.expect_err("a stage is never released");
    assert!(matches!(fault.kind, FaultKind::Deadlock | FaultKind::NoProgress), "{fault}");
    let story = told(&job, &[], &fault);
    assert!(story.iter().any(|sentence| sentence.text.contains("mbarrier_try_wait_parity") && sentence.matters), "{story:#?}");
}
