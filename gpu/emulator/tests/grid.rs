//! Launches: identity, results, grids that signal each other.

use oxtile_emulator::{GridRun, Launch, Memory, Mode, Options, Progress, ReadOrder, Scope, ShuffleMode, WriteOrder, device};
use std::sync::Arc;

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
