//! The rules of kernels that wait (docs/communication.md): a program that breaks one ends by the deadline with the rank and the flag by name, and the same
//! program in order goes well. The fourth is in `late_flags`.

use std::time::Duration;

use oxtile::comm::{Communicator, Rank, ReduceOp};
use oxtile::symmetric::{ArenaOptions, Epoch, FlagName, Flags, SymmetricError};
use oxtile::{Buffer, EmulatedOptions, Error, Loaded, Result, Stream};
use oxtile_tile::arrivals::{Arrivals, Signals, Waits};
use oxtile_tile::prelude::*;

use crate::arenas::{Arenas, FIRST, options, symmetric};
use crate::support::World;

/// A block takes a multiprocessor, by its shared memory.
#[derive(SharedStorage)]
struct Whole {
    outcome: SharedArray<u32, { 32 << 10 }>,
}

/// Sets the flag `set` at every rank, then waits in every block for the flags `first..last`.
#[kernel(threads = 32, grid = meet_grid, shared = Whole)]
pub fn meet(signals: Signals, waits: Waits, set: u32, first: u32, last: u32, blocks: u32) {
    let Whole { outcome } = Whole::claim();
    if thread::index() == 0 {
        let (mut rank, mut flag, mut arrivals) = (0, first, Arrivals::new(waits));
        while block::index()[0] == 0 && rank < signals.lines.len() as u32 {
            signals.set(rank, set);
            rank += 1;
        }
        while flag < last {
            arrivals.wait(flag);
            flag += 1;
        }
        outcome.store(block::index()[0], u32::from(arrivals.is_over()) * blocks);
    }
}

fn meet_grid(args: &MeetArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(args.blocks))
}

/// Of a virtual GPU.
const MULTIPROCESSORS: u32 = 4;
const SEEDS: u64 = 16;
const NAME: &str = "test meeting";

struct Program {
    all: Arenas,
    flags: Vec<Flags>,
    meet: Loaded<Meet>,
    /// Two a rank.
    streams: Vec<[Stream; 2]>,
}

impl Program {
    fn new(seed: u64, hardware_queues: Option<u32>) -> Self {
        let cluster = EmulatedOptions {
            devices: 2,
            seed: Some(seed),
            multiprocessors: MULTIPROCESSORS,
            hardware_queues,
            ..EmulatedOptions::default()
        };
        let all = Arenas::over(World::with(cluster), ArenaOptions { deadline: Duration::from_millis(200), ..options() });
        let flags: Vec<_> = all.arenas.iter().map(|arena| arena.flags(NAME, 2).unwrap()).collect();
        let streams: Vec<_> = all.world.ranks.iter().map(|rank| [0, 1].map(|_| rank.device().stream().unwrap())).collect();
        let meet = all.world.runtime.load().unwrap();
        flags.iter().zip(&streams).for_each(|(flags, [stream, _])| drop(flags.signals(stream).unwrap()));
        Self { all, flags, meet, streams }
    }

    fn other(&self, rank: usize) -> Rank {
        self.all.world.rank(1 - rank as u32)
    }

    /// Enqueues on a stream of a rank a kernel that sets a flag, and waits for that of the other rank.
    fn launch(&self, rank: usize, stream: usize, flag: u32, blocks: u32) -> Result<()> {
        let (flags, stream) = (&self.flags[rank], &self.streams[rank][stream]);
        let (signals, first) = (flags.signals(stream)?, flags.index(flag, self.other(rank)));
        let waits = flags.waits(stream, &[(flag, self.other(rank))])?;
        self.meet.launch(stream, MeetArgs { signals: signals.argument(), waits, set: flag, first, last: first + 1, blocks })
    }

    /// Waits for a stream of rank 0, and then for all.
    fn end(&self, stream: usize) -> Result<()> {
        self.all.arenas[0].ticket(&self.streams[0][stream])?.wait()?;
        self.streams.iter().flatten().try_for_each(Stream::synchronize)
    }
}

/// How many of the seeds end by the deadline, which names rank 1 and one of the flags.
fn ended_by_the_deadline(what: &str, program: impl Fn(u64) -> Result<()>) -> u64 {
    let is_named = |seed: &u64| {
        let ended = program(*seed);
        if ended.is_ok() {
            return false;
        }
        let error = symmetric(ended);
        let SymmetricError::Deadline { missing, flag, .. } = &error else { panic!("{what}, seed {seed}: {error}") };
        assert_eq!(missing.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [1], "{what}, seed {seed}: {error}");
        assert!(matches!(flag, Some(FlagName { operation: NAME, .. })), "{what}, seed {seed}: {error}");
        true
    };
    (0..SEEDS).filter(is_named).count() as u64
}

/// Rule 1: on one hardware queue, which streams may share, what sets the flags of others is enqueued before the launch that waits for theirs.
#[test]
fn puts_come_before_the_launch_that_waits() {
    let program = |puts_first: bool| {
        move |seed| {
            let program = Program::new(seed, Some(1));
            for rank in [0, 1] {
                let (flags, [compute, out], other) = (&program.flags[rank], &program.streams[rank], program.other(rank));
                if puts_first {
                    flags.set(out, 1, other)?;
                }
                let waits = flags.waits(compute, &[(1, other)])?;
                let (signals, first) = (flags.signals(compute)?, flags.index(1, other));
                let args = MeetArgs { signals: signals.argument(), waits, set: 0, first, last: first + 1, blocks: 1 };
                program.meet.launch(compute, args)?;
                flags.clear(compute, 1, other)?;
                if !puts_first {
                    flags.set(out, 1, other)?;
                }
            }
            program.end(0)
        }
    };
    assert_eq!(ended_by_the_deadline("launches first", program(false)), SEEDS);
    assert_eq!(ended_by_the_deadline("puts first", program(true)), 0);
}

/// Rule 2: two kernels that wait for other ranks' kernels stop each other where they have no order and each takes the device.
#[test]
fn kernels_that_wait_for_kernels_run_one_at_a_time() {
    let program = |blocks: u32, is_chained: bool| {
        move |seed| {
            let program = Program::new(seed, None);
            for rank in [0, 1] {
                // The ranks enqueue them in opposite order.
                let order = if rank == 0 || is_chained { [0, 1] } else { [1, 0] };
                for stream in order {
                    program.launch(rank, stream, stream as u32, blocks)?;
                    if is_chained && stream == 0 {
                        let [first, second] = &program.streams[rank];
                        second.wait(&first.record()?)?;
                    }
                }
            }
            program.end(0).and_then(|()| program.end(1))
        }
    };
    let stopped = ended_by_the_deadline("without an order", program(MULTIPROCESSORS, false));
    assert!(stopped > 0 && stopped < SEEDS, "{stopped} of {SEEDS} seeds: it depends on which kernel is first");
    assert_eq!(ended_by_the_deadline("chained by an event", program(MULTIPROCESSORS, true)), 0);
    assert_eq!(ended_by_the_deadline("with room for both", program(MULTIPROCESSORS / 2, false)), 0);
}

/// Rule 3: a communicator's kernel needs multiprocessors that the waiting kernel leaves free.
#[test]
fn a_collective_beside_a_kernel_that_waits_needs_a_margin() {
    let enqueued = |margin: u32, seed: u64| -> Result<Program> {
        let program = Program::new(seed, None);
        let streams = || program.streams.iter().map(|[_, stream]| stream);
        let mut sums = streams().map(|stream| Buffer::from_slice(stream, &[1_u32])).collect::<Result<Vec<_>>>()?;
        program.launch(0, 0, 0, MULTIPROCESSORS - margin)?;
        for ((rank, stream), sum) in program.all.world.ranks.iter().zip(streams()).zip(&mut sums) {
            rank.all_reduce(stream, sum, ReduceOp::Sum)?;
        }
        // Rank 1 tells rank 0's kernel after the collective.
        program.flags[1].set(&program.streams[1][1], 0, program.other(1))?;
        Ok(program)
    };
    let program = |margin: u32| move |seed| enqueued(margin, seed)?.end(0);
    let stopped = ended_by_the_deadline("no margin", program(0));
    assert!(stopped > 0 && stopped < SEEDS, "{stopped} of {SEEDS} seeds: it depends on which is first");
    assert_eq!(ended_by_the_deadline("a margin of one", program(1)), 0);
    // Where no deadline is looked at first, the report says what holds the device.
    let stuck = |seed: u64| match enqueued(0, seed).unwrap().streams[0][1].synchronize() {
        Err(Error::Stuck { waits }) => Some(waits),
        _ => None,
    };
    let waits = (0..SEEDS).find_map(stuck).expect("a seed takes the kernel first");
    assert!(waits.contains("waits for 1 of 4 multiprocessors, while kernel `meet` holds 4"), "{waits}");
}

/// Rule 5: streams that wait are fewer than the hardware queues, so that the stream on whose signal the others wait has one.
#[test]
fn streams_that_wait_leave_a_hardware_queue() {
    const QUEUES: u32 = 8;
    for (seed, waiting) in (0..SEEDS).flat_map(|seed| [QUEUES - 1, QUEUES].map(|waiting| (seed, waiting))) {
        let cluster = EmulatedOptions { devices: 2, seed: Some(seed), hardware_queues: Some(QUEUES), ..EmulatedOptions::default() };
        let all = Arenas::over(World::with(cluster), ArenaOptions { deadline: Duration::from_millis(200), ..options() });
        let (channels, [zero, one]) = (all.channels(), [0, 1].map(|rank| all.world.rank(rank)));
        let streams: Vec<_> = (0..waiting).map(|_| all.world.ranks[0].device().stream().unwrap()).collect();
        let out = all.world.ranks[0].device().stream().unwrap();
        streams.iter().try_for_each(|stream| all.arenas[0].wait(stream, channels[0], one, FIRST)).unwrap();
        all.arenas[0].signal(&out, channels[0], one, FIRST).unwrap();
        // Rank 1 answers.
        all.arenas[1].wait(all.stream(1), channels[1], zero, FIRST).unwrap();
        all.arenas[1].signal(all.stream(1), channels[1], zero, Epoch::ZERO.next()).unwrap();
        let ended = streams.iter().try_for_each(|stream| all.arenas[0].ticket(stream)?.wait());
        if waiting < QUEUES {
            ended.unwrap_or_else(|error| panic!("seed {seed}, {waiting} streams wait: {error}"));
            continue;
        }
        let error = symmetric(ended);
        assert!(matches!(&error, SymmetricError::Deadline { missing, .. } if *missing == [one]), "seed {seed}: {error}");
    }
}
