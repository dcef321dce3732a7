//! Races between threads and blocks: planted ones are reported, right versions are silent.

mod common;
use common::*;
use oxtile_emulator::{
    Atomic, AtomicOp, AtomicOrder, FaultKind, GridRun, Launch, Memory, Options, Progress, ReadOrder, Scope, Space, WriteOrder, device,
};

/// Each thread passes its word to its neighbour through shared memory.
fn rotate(arguments: &[u64], barrier: bool) {
    let (me, count) = (thread(), threads());
    shared_store(me * 4, load(arguments[0] + u64::from(me) * 4));
    if barrier {
        device::barrier_sync(0, count);
    }
    let neighbour = (me + 1) % count;
    store(arguments[1] + u64::from(me) * 4, shared_load(neighbour * 4));
}

#[test]
fn shared_memory_needs_a_barrier() {
    let right = || Job::new("rotate", 1, 64, 64, 256, |a| rotate(a, true));
    silent(right, |out| assert!(out.iter().enumerate().all(|(i, &v)| v == (i as u32 + 1) % 64)));
    let wrong = || Job::new("rotate", 1, 64, 64, 256, |a| rotate(a, false));
    for seed in SEEDS {
        let fault = wrong().run(oxtile_emulator::Options::check(seed)).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
    }
}

/// Double buffering: round `r` uses half `r % 2`, so one barrier a round is enough; a single buffer is not.
fn rounds(arguments: &[u64], buffers: u32) {
    let (me, count) = (thread(), threads());
    let mut value = load(arguments[0] + u64::from(me) * 4);
    for round in 0..6 {
        let base = round % buffers * count * 4;
        shared_store(base + me * 4, value);
        device::barrier_sync(0, count);
        value = shared_load(base + (me + 1) % count * 4);
    }
    store(arguments[1] + u64::from(me) * 4, value);
}

#[test]
fn a_reused_buffer_needs_a_second_barrier() {
    silent(
        || {
            Job::new("rounds", 2, 64, 64, 512, |a| {
                if device::block_index()[0] == 0 {
                    rounds(a, 2)
                }
            })
        },
        |out| assert!(out.iter().enumerate().all(|(i, &v)| v == (i as u32 + 6) % 64)),
    );
    let fault = reported(|| Job::new("rounds", 1, 64, 64, 512, |a| rounds(a, 1)), FaultKind::Race);
    assert_eq!(fault.involved.len(), 2, "{fault}");
    assert!(fault.involved.iter().all(|i| i.location.file().ends_with("mod.rs") || i.location.file().ends_with("race.rs")));
}

/// Block 0 hands a value to block 1 through a flag.
fn hand_over(arguments: &[u64], release: WriteOrder, acquire: ReadOrder) {
    let (data, flag) = (arguments[1], arguments[1] + 4);
    if device::block_index()[0] == 0 {
        store(data, 42);
        device::global_write(flag, 1u32.to_le_bytes(), release);
    } else {
        while u32::from_le_bytes(device::global_read(flag, acquire)) == 0 {
            device::nanosleep(20);
        }
        store(arguments[1] + 8, load(data));
    }
}

#[test]
fn blocks_need_release_and_acquire_of_device_scope() {
    use Scope::{Block, Device};
    let job = |body: fn(&[u64])| move || Job::new("hand_over", 2, 1, 4, 0, body);
    silent(job(|a| hand_over(a, WriteOrder::Release(Device), ReadOrder::Acquire(Device))), |out| assert_eq!(out[2], 42));
    reported(job(|a| hand_over(a, WriteOrder::Relaxed(Device), ReadOrder::Acquire(Device))), FaultKind::Race);
    reported(job(|a| hand_over(a, WriteOrder::Release(Device), ReadOrder::Relaxed(Device))), FaultKind::Race);
    reported(job(|a| hand_over(a, WriteOrder::Release(Block), ReadOrder::Acquire(Device))), FaultKind::Race);
    reported(job(|a| hand_over(a, WriteOrder::Weak, ReadOrder::Acquire(Device))), FaultKind::Race);
}

#[test]
fn both_threads_of_a_race_have_their_block() {
    let job = || {
        Job::new("one_element", 3, 32, 4, 0, |a| {
            if thread() == 0 {
                store(a[1], 1)
            }
        })
    };
    let fault = reported(job, FaultKind::Race);
    let blocks: std::collections::BTreeSet<&str> = fault
        .involved
        .iter()
        .map(|line| line.action.strip_prefix("write by thread (0, 0, 0) of block ").expect("it names the block"))
        .collect();
    assert_eq!(blocks.len(), 2, "{fault}");
}

/// The same with fences around relaxed accesses.
fn hand_over_fenced(arguments: &[u64], first: Option<Scope>, second: Option<Scope>) {
    let (data, flag) = (arguments[1], arguments[1] + 4);
    if device::block_index()[0] == 0 {
        store(data, 42);
        if let Some(scope) = first {
            device::fence(scope);
        }
        device::global_write(flag, 1u32.to_le_bytes(), WriteOrder::Relaxed(Scope::Device));
    } else {
        while u32::from_le_bytes(device::global_read(flag, ReadOrder::Relaxed(Scope::Device))) == 0 {
            device::nanosleep(20);
        }
        if let Some(scope) = second {
            device::fence(scope);
        }
        store(arguments[1] + 8, load(data));
    }
}

#[test]
fn fences_order_relaxed_flags() {
    use Scope::{Block, Cluster, Device, System};
    let job = |body: fn(&[u64])| move || Job::new("hand_over_fenced", 2, 1, 4, 0, body);
    silent(job(|a| hand_over_fenced(a, Some(Device), Some(Device))), |out| assert_eq!(out[2], 42));
    silent(job(|a| hand_over_fenced(a, Some(System), Some(Device))), |out| assert_eq!(out[2], 42));
    reported(job(|a| hand_over_fenced(a, None, Some(Device))), FaultKind::Race);
    reported(job(|a| hand_over_fenced(a, Some(Device), None)), FaultKind::Race);
    reported(job(|a| hand_over_fenced(a, Some(Block), Some(Device))), FaultKind::Race);
    reported(job(|a| hand_over_fenced(a, Some(Device), Some(Block))), FaultKind::Race);
    reported(job(|a| hand_over_fenced(a, Some(Device), Some(Cluster))), FaultKind::Race);
}

/// The last block to arrive at a counter sums what the others stored.
fn last_block(arguments: &[u64], order: AtomicOrder, scope: Scope) {
    let blocks = device::grid_dimensions()[0];
    let block = device::block_index()[0];
    let counter = arguments[1] + 60;
    store(arguments[1] + u64::from(block) * 4, load(arguments[0] + u64::from(block) * 4));
    let before = device::atomic(Space::Global, counter, Atomic { order, scope, ..Atomic::relaxed(AtomicOp::Add, 4, 1) });
    if before == u64::from(blocks) - 1 {
        let total = (0..blocks).map(|b| load(arguments[1] + u64::from(b) * 4)).sum();
        store(arguments[1] + 56, total);
    }
}

#[test]
fn a_counter_orders_blocks_if_it_releases_and_acquires() {
    let job = |body: fn(&[u64])| move || Job::new("last_block", 8, 1, 16, 0, body);
    silent(job(|a| last_block(a, AtomicOrder::AcquireRelease, Scope::Device)), |out| assert_eq!(out[14], 28));
    reported(job(|a| last_block(a, AtomicOrder::Relaxed, Scope::Device)), FaultKind::Race);
    reported(job(|a| last_block(a, AtomicOrder::Acquire, Scope::Device)), FaultKind::Race);
    reported(job(|a| last_block(a, AtomicOrder::Release, Scope::Device)), FaultKind::Race);
    reported(job(|a| last_block(a, AtomicOrder::AcquireRelease, Scope::Block)), FaultKind::Race);
}

#[test]
fn atomics_of_shared_memory_do_not_race_with_each_other() {
    fn count(arguments: &[u64], atomically: bool) {
        if thread() == 0 {
            shared_store(0, 0);
        }
        device::barrier_sync(0, threads());
        if atomically {
            device::atomic(Space::Shared, 0, Atomic { scope: Scope::Block, ..Atomic::relaxed(AtomicOp::Add, 4, 1) });
        } else {
            shared_store(0, shared_load(0) + 1);
        }
        device::barrier_sync(0, threads());
        if thread() == 0 {
            store(arguments[1], shared_load(0));
        }
    }
    silent(|| Job::new("count", 1, 96, 1, 4, |a| count(a, true)), |out| assert_eq!(out[0], 96));
    reported(|| Job::new("count", 1, 96, 1, 4, |a| count(a, false)), FaultKind::Race);
}

#[test]
fn bytes_of_one_word_do_not_race() {
    fn bytes(arguments: &[u64], stride: u64) {
        device::global_write(arguments[1] + u64::from(thread()) * stride, [thread() as u8], WriteOrder::Weak);
    }
    silent(|| Job::new("bytes", 1, 64, 16, 0, |a| bytes(a, 1)), |out| assert_eq!(out[0], 0x0302_0100));
    reported(|| Job::new("bytes", 1, 64, 16, 0, |a| bytes(a, 0)), FaultKind::Race);
}

/// Lanes exchange through shared memory: a shuffle orders nothing, a warp barrier does.
fn exchange(arguments: &[u64], synchronise: bool) {
    let lane = device::lane();
    shared_store(lane * 4, lane);
    if synchronise {
        device::warp_sync(u32::MAX);
    } else {
        device::vote(u32::MAX, oxtile_emulator::VoteMode::All, true);
    }
    store(arguments[1] + u64::from(lane) * 4, shared_load((lane ^ 1) * 4));
}

#[test]
fn lanes_need_a_warp_barrier() {
    silent(|| Job::new("exchange", 1, 32, 32, 128, |a| exchange(a, true)), |out| assert_eq!(out[..2], [1, 0]));
    reported(|| Job::new("exchange", 1, 32, 32, 128, |a| exchange(a, false)), FaultKind::Race);
}

#[test]
fn a_read_only_load_must_not_see_a_write_of_its_grid() {
    fn body(arguments: &[u64], order: ReadOrder) {
        store(arguments[1] + u64::from(thread()) * 4, 1);
        let again: [u8; 4] = device::global_read(arguments[1] + u64::from(thread()) * 4, order);
        assert_eq!(again, [1, 0, 0, 0]);
    }
    silent(|| Job::new("reload", 1, 32, 32, 0, |a| body(a, ReadOrder::Weak)), |_| ());
    reported(|| Job::new("reload", 1, 32, 32, 0, |a| body(a, ReadOrder::ReadOnly)), FaultKind::Race);
}

/// Runs a grid on each of two devices under every seed, at once. Both take 256 zeros and their side, 0 or 1. Returns the kind of the first fault.
fn on_devices(devices: [u32; 2], body: fn(&[u64])) -> Option<FaultKind> {
    SEEDS.into_iter().find_map(|seed| {
        let memory = Memory::new();
        let data = memory.allocate("data", 256, 0);
        memory.write(data, &[0; 256]).unwrap();
        let mut sides = [0, 1].map(|side| {
            let mut launch = Launch::new("side", 1, 32, body).arguments(&[data, side]).shared(128);
            launch.device = devices[side as usize];
            (GridRun::new(&memory, launch, Options::check(2 * seed + side)).unwrap(), false)
        });
        for round in 0..100_000 {
            for (run, is_done) in &mut sides {
                match run.step(1 + (seed + round) % 5) {
                    Ok(progress) => *is_done = progress == Progress::Done,
                    Err(fault) => return Some(fault.kind),
                }
            }
            if sides.iter().all(|(_, is_done)| *is_done) {
                return None;
            }
        }
        panic!("seed {seed} does not end");
    })
}

#[test]
fn bulk_sums_are_atomic_on_one_device() {
    fn sums(arguments: &[u64]) {
        device::shared_write(thread() * 4, 1.5f32.to_le_bytes());
        device::fence_proxy_async(Space::Shared);
        device::barrier_sync(0, 32);
        if thread() == 0 {
            device::bulk_reduce_add_f32(arguments[0], 0, 128);
            device::bulk_commit();
            device::bulk_wait(0, false);
        }
    }
    assert_eq!(on_devices([1, 1], sums), None);
    assert_eq!(on_devices([0, 1], sums), Some(FaultKind::Race));
}

#[test]
fn fences_between_devices_are_of_the_system() {
    fn hand_over(arguments: &[u64], fences: [Scope; 2]) {
        let (data, flag) = (arguments[0], arguments[0] + 128);
        if thread() != 0 {
            return;
        }
        if arguments[1] == 0 {
            store(data, 42);
            device::fence(fences[0]);
            device::global_write(flag, [1; 4], WriteOrder::Relaxed(Scope::System));
        } else {
            while device::global_read::<4>(flag, ReadOrder::Relaxed(Scope::System)) == [0; 4] {
                device::nanosleep(20);
            }
            device::fence(fences[1]);
            assert_eq!(load(data), 42);
        }
    }
    assert_eq!(on_devices([0, 1], |a| hand_over(a, [Scope::System; 2])), None);
    assert_eq!(on_devices([0, 1], |a| hand_over(a, [Scope::System, Scope::Device])), Some(FaultKind::Race));
    assert_eq!(on_devices([0, 1], |a| hand_over(a, [Scope::Device, Scope::System])), Some(FaultKind::Race));
    assert_eq!(on_devices([0, 0], |a| hand_over(a, [Scope::Device; 2])), None);
}

/// Waits for a word to reach a value.
fn await_word(address: u64, value: u32, order: ReadOrder) {
    while u32::from_le_bytes(device::global_read(address, order)) < value {
        device::nanosleep(20);
    }
}

#[test]
fn a_narrow_fence_keeps_what_a_wide_one_releases() {
    /// Block 0 stores a word before each of its fences; block 1 reads one of them.
    fn body(arguments: &[u64], word: u64) {
        let (data, flag) = (arguments[1], arguments[1] + 16);
        if device::block_index()[0] == 0 {
            store(data, 1);
            device::fence(Scope::System);
            store(data + 4, 1);
            device::fence(Scope::Block);
            device::global_write(flag, 1u32.to_le_bytes(), WriteOrder::Relaxed(Scope::Device));
        } else {
            await_word(flag, 1, ReadOrder::Acquire(Scope::Device));
            store(data + 8, load(data + word * 4));
        }
    }
    silent(|| Job::new("fences", 2, 1, 8, 0, |a| body(a, 0)), |out| assert_eq!(out[2], 1));
    reported(|| Job::new("fences", 2, 1, 8, 0, |a| body(a, 1)), FaultKind::Race);
}

#[test]
fn a_release_keeps_its_scope_in_a_chain_of_atomics() {
    /// Blocks 0 and 1 add to a counter, one after the other, each after a store; block 2 reads one of the words.
    fn body(arguments: &[u64], releases: [bool; 2], word: u64) {
        let (data, counter) = (arguments[1], arguments[1] + 16);
        let block = device::block_index()[0];
        if block == 2 {
            await_word(counter, 2, ReadOrder::Acquire(Scope::Device));
            store(data + 8, load(data + word * 4));
            return;
        }
        store(data + u64::from(block) * 4, 1);
        await_word(counter, block, ReadOrder::Relaxed(Scope::Device));
        let order = if releases[block as usize] { AtomicOrder::Release } else { AtomicOrder::Relaxed };
        if order == AtomicOrder::Relaxed {
            device::fence(Scope::Block);
        }
        device::atomic(Space::Global, counter, Atomic { order, ..Atomic::relaxed(AtomicOp::Add, 4, 1) });
    }
    silent(|| Job::new("chain", 3, 1, 8, 0, |a| body(a, [true, false], 0)), |out| assert_eq!(out[2], 1));
    silent(|| Job::new("chain", 3, 1, 8, 0, |a| body(a, [false, true], 1)), |out| assert_eq!(out[2], 1));
    silent(|| Job::new("chain", 3, 1, 8, 0, |a| body(a, [true, true], 0)), |out| assert_eq!(out[2], 1));
    reported(|| Job::new("chain", 3, 1, 8, 0, |a| body(a, [true, false], 1)), FaultKind::Race);
    reported(|| Job::new("chain", 3, 1, 8, 0, |a| body(a, [false, true], 0)), FaultKind::Race);
}
