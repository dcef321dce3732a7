//! What the tests of the emulator share.
#![allow(dead_code, reason = "each test binary uses a part")]

use oxtile_emulator::{Fault, FaultKind, GridRun, Launch, Memory, Options, ReadOrder, Report, WriteOrder, device};
use std::sync::Arc;

/// Seeds that a correct kernel is silent under, and a wrong one is found within.
pub const SEEDS: std::ops::Range<u64> = 0..48;

/// A job of one block of 64 threads.
pub fn job(body: fn(&[u64])) -> impl Fn() -> Job {
    move || Job::new("faulty", 1, 64, 64, 256, body)
}

pub fn load(address: u64) -> u32 {
    u32::from_le_bytes(device::global_read(address, ReadOrder::Weak))
}

pub fn store(address: u64, value: u32) {
    device::global_write(address, value.to_le_bytes(), WriteOrder::Weak);
}

pub fn shared_load(offset: u32) -> u32 {
    u32::from_le_bytes(device::shared_read(offset))
}

pub fn shared_store(offset: u32, value: u32) {
    device::shared_write(offset, value.to_le_bytes());
}

pub fn thread() -> u32 {
    device::thread_index()[0]
}

pub fn threads() -> u32 {
    device::block_dimensions()[0]
}

/// An input of `words` counting words, an output of as many, zeroed; their addresses are the arguments.
pub struct Job {
    pub memory: Arc<Memory>,
    pub input: u64,
    pub output: u64,
    pub launch: Launch,
}

impl Job {
    pub fn new(name: &str, blocks: u32, threads: u32, words: u32, shared: u32, body: fn(&[u64])) -> Self {
        let memory = Memory::new();
        let bytes = u64::from(words) * 4;
        let input = memory.allocate("input", bytes, 0);
        let output = memory.allocate("output", bytes, 0);
        let counting: Vec<u8> = (0..words).flat_map(u32::to_le_bytes).collect();
        memory.write(input, &counting).unwrap();
        memory.write(output, &vec![0; bytes as usize]).unwrap();
        let launch = Launch::new(name, blocks, threads, body).arguments(&[input, output]).shared(shared);
        Self { memory, input, output, launch }
    }

    pub fn run(&self, options: Options) -> Result<Report, Fault> {
        GridRun::new(&self.memory, self.launch.clone(), options)?.run()
    }

    pub fn output(&self) -> Vec<u32> {
        let bytes = self.memory.find(self.output).unwrap().bytes as usize;
        let mut data = vec![0; bytes];
        self.memory.read(self.output, &mut data).unwrap();
        data.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

/// Runs a fresh job under every seed; all must pass, and `check` judges the output.
pub fn silent(job: impl Fn() -> Job, check: impl Fn(&[u32])) {
    for seed in SEEDS {
        let job = job();
        if let Err(fault) = job.run(Options::check(seed)) {
            panic!("seed {seed}: {fault}");
        }
        check(&job.output());
    }
    let job = job();
    job.run(Options::fast()).unwrap();
    check(&job.output());
}

/// Runs a fresh job until a seed reports a fault, which must be of this kind.
pub fn reported(job: impl Fn() -> Job, kind: FaultKind) -> Fault {
    for seed in SEEDS {
        if let Err(fault) = job().run(Options { step_limit: 1_000_000, ..Options::check(seed) }) {
            assert_eq!(fault.kind, kind, "seed {seed}: {fault}");
            assert!(!fault.to_string().is_empty());
            return fault;
        }
    }
    panic!("no seed reports {kind}")
}
