//! Streams beside a grid: what they write is known to a thread that has acquired a flag of theirs, and to no other.

use std::panic::Location;

use oxtile_emulator::{Agent, FaultKind, GridRun, Known, Launch, Memory, Options, Progress, ReadOrder, Scope, Space, device};

/// Whether to acquire the flag, to do so by an acquire, and to fence the proxy; a word of data and a word of flag.
const ACQUIRES: u64 = 1;
const RELAXED: u64 = 2;
const COPIES: u64 = 4;
const FENCES: u64 = 8;
const READ_ONLY: u64 = 16;

/// Polls the flag, then reads the data, by itself or by a bulk copy.
fn reads(arguments: &[u64]) {
    let [how, data, flag] = [0, 1, 2].map(|i| arguments[i]);
    let order = if how & RELAXED != 0 { ReadOrder::Relaxed(Scope::System) } else { ReadOrder::Acquire(Scope::System) };
    while how & ACQUIRES != 0 && u64::from_le_bytes(device::global_read(flag, order)) == 0 {
        device::nanosleep(1);
    }
    if how & FENCES != 0 {
        device::fence_proxy_async(Space::Global);
    }
    if how & COPIES != 0 {
        device::mbarrier_init(0, 1);
        device::fence_mbarrier_init();
        device::mbarrier_arrive_expect_transaction(0, 16);
        device::bulk_load(16, data, 16, 0);
        device::mbarrier_wait_parity(0, 0);
    } else {
        let _: [u8; 16] = device::global_read(data, if how & READ_ONLY != 0 { ReadOrder::ReadOnly } else { ReadOrder::Weak });
    }
}

struct Stream {
    agent: Agent,
    time: u64,
}

impl Stream {
    fn write(&mut self, memory: &Memory, address: u64, bytes: &[u8]) {
        self.time += 1;
        memory.enter(self.agent, self.time, address, bytes.len() as u64, Location::caller());
        memory.write(address, bytes).unwrap();
    }

    fn signal(&mut self, memory: &Memory, address: u64) {
        self.time += 1;
        let mut known = Known::default();
        known.learn(self.agent, self.time);
        memory.publish(self.agent, address, known);
        memory.write(address, &1_u64.to_le_bytes()).unwrap();
    }
}

/// A stream writes the data and the flag while a grid polls, or before it starts.
fn run(seed: u64, how: u64, before: bool) -> Result<(), FaultKind> {
    let memory = Memory::new();
    let (data, flag) = (memory.allocate("data", 16, 0), memory.allocate("flag", 8, 0));
    memory.write(data, &[0; 16]).unwrap();
    memory.write(flag, &[0; 8]).unwrap();
    let [mut own, mut other] = ["stream 1", "stream 2"].map(|name| Stream { agent: memory.agent(name, 0), time: 0 });
    own.time = 1;
    let mut known = Known::default();
    known.learn(own.agent, own.time);
    let mut work = |memory: &Memory| {
        other.write(memory, data, &[7; 16]);
        other.signal(memory, flag);
    };
    if before {
        work(&memory);
    }
    let launch = Launch::new("reads", 1, 1, reads).arguments(&[how, data, flag]).shared(32);
    let mut run = GridRun::new(&memory, launch, Options { known, ..Options::check(seed) }).unwrap();
    // It has begun before the stream's work.
    if !before && how & ACQUIRES != 0 {
        assert!(matches!(run.step(4), Ok(Progress::Running | Progress::Blocked(_))));
    }
    if !before {
        work(&memory);
    }
    while run.step(64).map_err(|fault| fault.kind)? != Progress::Done {}
    assert_eq!((run.known().time(own.agent), run.known().time(other.agent)), (1, 2), "what it has learnt");
    Ok(())
}

#[test]
fn a_thread_knows_what_it_has_acquired() {
    for (seed, before) in (0..32).flat_map(|seed| [false, true].map(|before| (seed, before))) {
        let told = |how| run(seed, how, before);
        assert_eq!(told(ACQUIRES), Ok(()), "seed {seed}");
        assert_eq!(told(ACQUIRES | COPIES | FENCES), Ok(()), "seed {seed}");
        assert_eq!(told(0), Err(FaultKind::Race), "no wait, seed {seed}");
        assert_eq!(told(ACQUIRES | RELAXED), Err(FaultKind::Race), "relaxed, seed {seed}");
        assert_eq!(told(COPIES | FENCES), Err(FaultKind::Race), "no wait before a copy, seed {seed}");
        assert_eq!(told(ACQUIRES | COPIES), Err(FaultKind::MissingProxyFence), "seed {seed}");
        assert_eq!(told(ACQUIRES | READ_ONLY), Err(FaultKind::Race), "a read-only load, seed {seed}");
    }
}

#[test]
fn what_is_discarded_counts_as_never_written() {
    let memory = Memory::new();
    let data = memory.allocate("data", 16, 0);
    memory.write(data, &[1; 16]).unwrap();
    memory.discard(data + 4, 4).unwrap();
    assert_eq!(memory.first_unwritten(data, 16).unwrap(), Some(4));
    memory.write(data + 4, &[2; 4]).unwrap();
    assert_eq!(memory.first_unwritten(data, 16).unwrap(), None);
    assert!(memory.discard(data + 8, 9).is_err());
}
