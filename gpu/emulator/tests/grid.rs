//! Launches: identity, results, grids that signal each other.

mod common;
use common::{Job, SEEDS, thread};
use oxtile_emulator::{
    Atomic, AtomicOp, AtomicOrder, FaultKind, GridRun, Launch, Memory, Mode, Options, Progress, ReadOrder, Scope, ShuffleMode, Space,
    VoteMode, WriteOrder, device,
};
use std::sync::Arc;
use std::time::Duration;

fn read_u32(memory: &Memory, address: u64, index: u64) -> u32 {
    let mut bytes = [0; 4];
    memory.read(address + index * 4, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// Each block sums its threads' inputs through shuffles, shared memory and a barrier.
fn block_sum(arguments: &[u64]) {
    let (thread, block) = (device::thread_index()[0], device::block_index()[0]);
    let threads = device::block_dimensions()[0];
    let at = arguments[0] + u64::from(block * threads + thread) * 4;
    let mut sum = u32::from_le_bytes(device::global_read(at, ReadOrder::ReadOnly));
    for distance in [16, 8, 4, 2, 1] {
        sum += device::shuffle(u32::MAX, ShuffleMode::Butterfly, sum, distance, 0x1f);
    }
    if device::lane() == 0 {
        device::shared_write(device::warp() * 4, sum.to_le_bytes());
    }
    device::barrier_sync(0, threads);
    if thread == 0 {
        let total: u32 = (0..threads / 32).map(|warp| u32::from_le_bytes(device::shared_read(warp * 4))).sum();
        device::global_write(arguments[1] + u64::from(block) * 4, total.to_le_bytes(), WriteOrder::Weak);
    }
}

fn run_block_sum(options: Options) -> Vec<u32> {
    let memory = Memory::new();
    let input = memory.allocate("input", 5 * 128 * 4, 0);
    let output = memory.allocate("output", 5 * 4, 0);
    for i in 0..5 * 128u32 {
        memory.write(input + u64::from(i) * 4, &i.to_le_bytes()).unwrap();
    }
    let launch = Launch::new("block_sum", 5, 128, block_sum).arguments(&[input, output]).shared(16);
    GridRun::new(&memory, launch, options).unwrap().run().unwrap();
    (0..5).map(|i| read_u32(&memory, output, i)).collect()
}

#[test]
fn fast_and_check_modes_give_the_same_bytes() {
    let expected: Vec<u32> = (0..5).map(|block| (block * 128..(block + 1) * 128).sum()).collect();
    assert_eq!(run_block_sum(Options { workers: 1, ..Options::fast() }), expected);
    assert_eq!(run_block_sum(Options { workers: 2, ..Options::fast() }), expected);
    for seed in 0..32 {
        assert_eq!(run_block_sum(Options::check(seed)), expected, "seed {seed}");
    }
}

/// Adds one to the data of the other side, round by round, when the other side signals.
fn ping_pong(arguments: &[u64]) {
    let [data, mine, theirs, first] = *arguments else { unreachable!("four arguments") };
    for round in 1..=4u32 {
        let awaited = if first == 1 { round - 1 } else { round };
        while u32::from_le_bytes(device::global_read(theirs, ReadOrder::Acquire(Scope::System))) < awaited {
            device::nanosleep(100);
        }
        let value = u32::from_le_bytes(device::global_read(data, ReadOrder::Weak));
        device::global_write(data, (value + 1).to_le_bytes(), WriteOrder::Weak);
        device::global_write(mine, round.to_le_bytes(), WriteOrder::Release(Scope::System));
    }
}

fn ping_pong_pair(memory: &Arc<Memory>, options: &Options) -> (u64, GridRun, GridRun) {
    let [data, a, b] = ["data", "flag a", "flag b"].map(|name| {
        let address = memory.allocate(name, 4, 0);
        memory.write(address, &[0; 4]).unwrap();
        address
    });
    let grid = |arguments: [u64; 4], device| {
        let mut launch = Launch::new("ping_pong", 1, 1, ping_pong).arguments(&arguments);
        launch.device = device;
        GridRun::new(memory, launch, options.clone()).unwrap()
    };
    (data, grid([data, a, b, 1], 0), grid([data, b, a, 0], 1))
}

#[test]
fn two_grids_signal_each_other_under_every_seed() {
    for mode in [Mode::Check, Mode::Fast] {
        for seed in 0..64 {
            let memory = Memory::new();
            let options = Options { mode, ..Options::check(seed) };
            let (data, mut left, mut right) = ping_pong_pair(&memory, &options);
            let mut rounds = 0;
            loop {
                let (left, right) = (left.step(1 + seed % 5).unwrap(), right.step(1 + seed % 3).unwrap());
                if left == Progress::Done && right == Progress::Done {
                    break;
                }
                rounds += 1;
                assert!(rounds < 100_000, "seed {seed} does not end");
            }
            assert_eq!(read_u32(&memory, data, 0), 8);
        }
    }
}

/// Signals with relaxed accesses: the data is not ordered between the grids.
fn careless(arguments: &[u64]) {
    let [data, flag, writes] = *arguments else { unreachable!("three arguments") };
    if writes == 1 {
        device::global_write(data, [1; 4], WriteOrder::Weak);
        device::global_write(flag, [1; 4], WriteOrder::Relaxed(Scope::System));
    } else {
        while device::global_read::<4>(flag, ReadOrder::Relaxed(Scope::System)) == [0; 4] {
            device::nanosleep(100);
        }
        device::global_write(data, [2; 4], WriteOrder::Weak);
    }
}

#[test]
fn a_race_between_grids_names_both_kernels() {
    for seed in 0..16 {
        let memory = Memory::new();
        let addresses = ["data", "flag"].map(|name| memory.allocate(name, 4, 0));
        addresses.iter().for_each(|&address| memory.write(address, &[0; 4]).unwrap());
        let grid = |name: &str, writes| {
            let launch = Launch::new(name, 1, 1, careless).arguments(&[addresses[0], addresses[1], writes]);
            GridRun::new(&memory, launch, Options::check(seed)).unwrap()
        };
        let (mut reader, mut writer) = (grid("reader", 0), grid("writer", 1));
        reader.step(4).unwrap();
        writer.step(100).unwrap();
        let fault = reader.step(1000).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Race);
        let text = fault.to_string();
        assert!(text.contains("kernel `reader`") && text.contains("of kernel `writer` on device 0"), "{text}");
    }
}

#[test]
fn a_launch_is_ordered_after_the_one_before() {
    fn add_one(arguments: &[u64]) {
        let at = arguments[0] + u64::from(device::block_index()[0] ^ arguments[1] as u32) * 4;
        let value = u32::from_le_bytes(device::global_read(at, ReadOrder::ReadOnly));
        device::global_write(at + 32, (value + 1).to_le_bytes(), WriteOrder::Weak);
    }
    let memory = Memory::new();
    let data = memory.allocate("data", 4 * 32, 0);
    memory.write(data, &[0; 32]).unwrap();
    for launch in 0..3 {
        let launch = Launch::new("add_one", 8, 1, add_one).arguments(&[data + launch * 32, launch]);
        GridRun::new(&memory, launch, Options::check(7)).unwrap().run().unwrap();
    }
    assert!((24..32).all(|i| read_u32(&memory, data, i) == 3));
}

#[test]
fn a_polled_grid_reports_that_it_is_blocked() {
    let memory = Memory::new();
    let (_, _, mut right) = ping_pong_pair(&memory, &Options::check(1));
    let Progress::Blocked(on) = right.step(1_000_000).unwrap() else { panic!("it should poll") };
    assert!((on.contains("nanosleep") || on.contains("polls memory")) && on.contains("grid.rs"), "{on}");
}

#[test]
fn workers_share_atomics() {
    fn count(arguments: &[u64]) {
        device::atomic(Space::Global, arguments[0] + 4, Atomic::relaxed(AtomicOp::Add, 4, 1));
        let one = u64::from(1f32.to_bits());
        device::atomic(Space::Global, arguments[0], Atomic::relaxed(AtomicOp::AddF32, 4, one));
    }
    for options in [Options { workers: 4, ..Options::fast() }, Options::check(5)] {
        let memory = Memory::new();
        let data = memory.allocate("data", 8, 0);
        memory.write(data, &[0; 8]).unwrap();
        let launch = Launch::new("count", 40, 64, count).arguments(&[data]);
        GridRun::new(&memory, launch, options).unwrap().run().unwrap();
        assert_eq!(f32::from_bits(read_u32(&memory, data, 0)), 2560.0);
        assert_eq!(read_u32(&memory, data, 1), 2560);
    }
}

/// Each block waits for a flag of the next, and sets its own.
fn chain(arguments: &[u64], wait: impl Fn(u64)) {
    let (block, blocks) = (device::block_index()[0], device::grid_dimensions()[0]);
    let flag = |b: u32| arguments[0] + u64::from(b) * 4;
    if block + 1 < blocks {
        wait(flag(block + 1));
    }
    device::global_write(flag(block), [1; 4], WriteOrder::Release(Scope::Device));
}

fn is_set(flag: u64) -> bool {
    device::global_read::<4>(flag, ReadOrder::Acquire(Scope::Device)) != [0; 4]
}

#[test]
fn fast_blocks_that_wait_for_later_blocks_end() {
    fn sleeping(arguments: &[u64]) {
        chain(arguments, |flag| {
            while !is_set(flag) {
                device::nanosleep(10);
            }
        });
    }
    fn spinning(arguments: &[u64]) {
        chain(arguments, |flag| while !is_set(flag) {});
    }
    fn exchanging(arguments: &[u64]) {
        let swap = Atomic { compare: 1, order: AtomicOrder::AcquireRelease, ..Atomic::relaxed(AtomicOp::CompareAndSwap, 4, 2) };
        let taken = |flag| device::atomic(Space::Global, flag, swap);
        chain(arguments, |flag| while taken(flag) == 0 {});
    }
    fn alternating(arguments: &[u64]) {
        chain(arguments, |flag| while !is_set(flag) && !is_set(arguments[0]) {});
    }
    fn taking(arguments: &[u64]) {
        let take = Atomic { order: AtomicOrder::AcquireRelease, ..Atomic::relaxed(AtomicOp::Exchange, 4, 0) };
        chain(arguments, |flag| while device::atomic(Space::Global, flag, take) == 0 {});
    }
    fn adding_nothing(arguments: &[u64]) {
        let look = Atomic { order: AtomicOrder::Acquire, ..Atomic::relaxed(AtomicOp::Add, 4, 0) };
        chain(arguments, |flag| while device::atomic(Space::Global, flag, look) == 0 {});
    }
    for options in [Options { workers: 1, ..Options::fast() }, Options { workers: 2, ..Options::fast() }, Options::check(0)] {
        for body in [sleeping as fn(&[u64]), spinning, exchanging, alternating, taking, adding_nothing] {
            let options = options.clone();
            ends(move || {
                let memory = Memory::new();
                let flags = memory.allocate("flags", 48, 0);
                memory.write(flags, &[0; 48]).unwrap();
                let launch = Launch::new("chain", 12, 1, body).arguments(&[flags]);
                GridRun::new(&memory, launch, options).unwrap().run().unwrap();
            });
        }
    }
}

/// Fails if a run that may hang does not end. It goes on until the test program ends.
#[track_caller]
fn ends(run: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        run();
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(20)).expect("the run ends, without a fault");
}

#[test]
fn threads_that_poll_shared_memory_end() {
    fn poll(_: &[u64]) {
        let thread = device::thread_index()[0];
        if thread == 0 {
            device::shared_write(0, [0; 4]);
        }
        device::barrier_sync(0, 96);
        let look = Atomic { order: AtomicOrder::Acquire, scope: Scope::Block, ..Atomic::relaxed(AtomicOp::Or, 4, 0) };
        let set = Atomic { order: AtomicOrder::Release, scope: Scope::Block, ..Atomic::relaxed(AtomicOp::Or, 4, 1) };
        match thread {
            0 => while device::atomic(Space::Shared, 0, look) == 0 {},
            32 => drop(device::atomic(Space::Shared, 0, set)),
            _ => {}
        }
    }
    for options in [Options { workers: 1, ..Options::fast() }, Options::check(0)] {
        ends(|| {
            GridRun::new(&Memory::new(), Launch::new("poll", 1, 96, poll).shared(4), options).unwrap().run().unwrap();
        });
    }
}

/// Block 0 polls together, which is work of the emulator in each round, for what block 1 writes.
fn polls_together(arguments: &[u64]) {
    if device::block_index()[0] == 1 {
        if thread() == 0 {
            device::global_write(arguments[1], 1u32.to_le_bytes(), WriteOrder::Release(Scope::Device));
        }
        return;
    }
    let is_set = || device::global_read(arguments[1], ReadOrder::Acquire(Scope::Device)) != 0u32.to_le_bytes();
    while device::vote(u32::MAX, VoteMode::Any, is_set()) == 0 {}
}

#[test]
fn a_block_that_others_poll_for_starts_under_every_seed() {
    for seed in SEEDS {
        Job::new("poll", 2, 32, 64, 0, polls_together).run(Options { step_limit: 2_000_000, ..Options::check(seed) }).unwrap();
    }
}
