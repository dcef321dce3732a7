//! Prints what fast mode costs: coroutines that each do 4 loads of 16 bytes, 10 shuffles and 4 stores.

use oxtile_emulator::{GridRun, Launch, Memory, Options, ReadOrder, ShuffleMode, WriteOrder, device};
use std::time::Instant;

const BLOCKS: u32 = 2734;
const THREADS: u32 = 256;

fn kernel(arguments: &[u64]) {
    let [x] = device::thread_index()[..1] else { unreachable!("an index has three parts") };
    let thread = u64::from(device::block_index()[0] * THREADS + x);
    let mut total = 0;
    let mut rows = [[0; 16]; 4];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = device::global_read::<16>(arguments[0] + (thread * 4 + i as u64) * 16, ReadOrder::ReadOnly);
        total ^= u32::from_le_bytes([row[0], row[1], row[2], row[3]]);
    }
    for i in 0..10 {
        total = total.max(device::shuffle(u32::MAX, ShuffleMode::Butterfly, total, 1 << (i % 5), 0x1f));
    }
    for (i, row) in rows.iter_mut().enumerate() {
        row[..4].copy_from_slice(&total.to_le_bytes());
        device::global_write(arguments[1] + (thread * 4 + i as u64) * 16, *row, WriteOrder::Weak);
    }
}

fn main() {
    let memory = Memory::new();
    let bytes = u64::from(BLOCKS * THREADS) * 64;
    let input = memory.allocate("input", bytes, 0);
    let output = memory.allocate("output", bytes, 0);
    memory.write(input, &vec![1; bytes as usize]).expect("inside the allocation");
    memory.write(output, &vec![0; bytes as usize]).expect("inside the allocation");
    let time = |what: &str, blocks: u32, options: Options| {
        let launch = Launch::new("speed", blocks, THREADS, kernel).arguments(&[input, output]);
        let start = Instant::now();
        let run = GridRun::new(&memory, launch, options).expect("a valid launch");
        run.run().expect("a correct kernel");
        let seconds = start.elapsed().as_secs_f64();
        let coroutines = f64::from(blocks * THREADS);
        println!("{what}: {coroutines} coroutines in {seconds:.3} s, {:.0} ns each", seconds * 1e9 / coroutines);
    };
    for _ in 0..3 {
        time("fast, one worker", BLOCKS, Options { workers: 1, ..Options::fast() });
        time("fast, a worker a core", BLOCKS, Options::fast());
        time("check", BLOCKS / 64, Options::check(1));
    }
}
