//! Kernels that wait for chunks which copies bring, and kernels that tell other ranks of theirs.

use std::time::Duration;

use oxtile::runtime::Mode;
use oxtile::symmetric::{ArenaOptions, Flags, SymmetricBuffer};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, Loaded, PinnedBuffer, Result, Stream, testing};
use oxtile_tile::arch::{GlobalMemory, Target};
use oxtile_tile::arrivals::{Arrivals, LINE, Signals, Waits};
use oxtile_tile::flag::{Outcome, Patience};
use oxtile_tile::pipeline::{self, Mbarrier};
use oxtile_tile::prelude::*;

use crate::arenas::{Arenas, options};
use crate::support::{World, numbers, seeds};

/// Words of a chunk.
const CHUNK: u32 = 64;
/// Flags of a chunk: set by the rank that puts it, and by the rank that has read it.
const READY: u32 = 0;
const FREE: u32 = 1;

/// What a program gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Bug {
    None,
    /// The kernel does not wait for the last chunk.
    NoWait,
    /// It waits for the flag of the next chunk.
    Shifted,
    /// It polls by relaxed loads.
    Relaxed,
    /// No proxy fence stands between the wait and the bulk copy.
    NoFence,
    /// It waits after it has issued the copy.
    WaitsLate,
    /// Another thread waits than the one that copies.
    OtherThread,
    /// It reads by a read-only load, which no flag orders.
    ReadOnly,
    /// A kernel that tells others does so before the block's stores are done.
    NoBarrier,
    /// READY is set before the chunk is put.
    SignalFirst,
    /// A chunk is put where the one before it has not been read.
    NoCredit,
    /// FREE is set before READY is reset.
    FreeBeforeClear,
    /// FREE is set before the kernel.
    FreeBeforeKernel,
    /// READY is not reset: the next round takes it for its own.
    NoClear,
}

#[derive(SharedStorage)]
struct Stage {
    chunk: SharedArray<u32, { CHUNK as usize }>,
    full: Mbarrier,
}

/// `sums[i]` is the sum of element `i` of all chunks, each read by a bulk copy once its flag is set.
#[kernel(threads = CHUNK, grid = sum_grid, shared = Stage, requires = sm_90)]
pub fn sum_chunks(gathered: Global<u32>, waits: Waits, sums: GlobalMut<u32>, chunks: u32, bug: u32) {
    let (Stage { chunk, full }, t) = (Stage::claim(), thread::index());
    let mut arrivals = Arrivals::new(waits);
    if t == 0 {
        full.init(1);
        pipeline::publish_barriers();
    }
    block::sync();
    let (mut sum, mut source) = (0_u32, 0);
    while source < chunks {
        if t == u32::from(bug == Bug::OtherThread as u32) {
            full.arrive_expect(CHUNK * 4);
        }
        if t == 0 {
            if bug != Bug::WaitsLate as u32 && bug != Bug::OtherThread as u32 {
                wait(&mut arrivals, waits, source, chunks, bug);
            }
            if bug == Bug::ReadOnly as u32 {
                sum = sum.wrapping_add(gathered.load(u64::from(source * CHUNK)));
            }
            full.load(chunk, &gathered, u64::from(source * CHUNK));
        }
        if (t == 0 && bug == Bug::WaitsLate as u32) || (t == 1 && bug == Bug::OtherThread as u32) {
            arrivals.wait(source);
        }
        full.wait(source % 2);
        sum = sum.wrapping_add(chunk.load(t));
        block::sync();
        source += 1;
    }
    sums.store(t.into(), sum);
}

fn wait(arrivals: &mut Arrivals, waits: Waits, source: u32, chunks: u32, bug: u32) {
    let words = waits.lines.words();
    let word = u64::from(waits.first + source) * LINE;
    if bug == Bug::NoWait as u32 && source + 1 == chunks {
        // Nothing.
    } else if bug == Bug::Shifted as u32 {
        arrivals.wait((source + 1) % chunks);
    } else if bug == Bug::Relaxed as u32 {
        // SAFETY: a word of the flags.
        while unsafe { Target::load_relaxed_system(words.address_of(word)) } == 0 {
            thread::sleep(32);
        }
        sync::fence_proxy_async_global();
    } else if bug == Bug::NoFence as u32 {
        let _: Outcome = Patience::new(words, waits.patience).wait(&words, word, 1);
    } else {
        arrivals.wait(source);
    }
}

fn sum_grid(args: &SumChunksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("gathered", u64::from(args.chunks * CHUNK), args.gathered.len())?;
    LaunchError::check_length("sums", u64::from(CHUNK), args.sums.len())?;
    Ok(Grid::x(1))
}

/// Writes a chunk to its place at every rank, and sets READY there.
#[kernel(threads = CHUNK, grid = deliver_grid)]
pub fn deliver(own: Global<u32>, all: GlobalMut<u32>, stride: u64, signals: Signals, bug: u32) {
    let (t, rank) = (thread::index(), block::index()[0]);
    all.store(u64::from(rank) * stride + u64::from(t), own.load(t.into()));
    if bug != Bug::NoBarrier as u32 {
        block::sync();
    }
    if t == 0 {
        signals.set(rank, READY);
    }
}

fn deliver_grid(args: &DeliverArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(args.signals.lines.len() as u32))
}

/// How chunks travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Copies,
    Kernels,
}

/// A rank's part of the program.
struct Side {
    gathered: SymmetricBuffer<u32>,
    flags: Flags,
    own: Buffer<u32>,
    sums: Buffer<u32>,
    out: Stream,
    compute: Stream,
}

struct Program {
    all: Arenas,
    sides: Vec<Side>,
    sum: Loaded<SumChunks>,
    deliver: Loaded<Deliver>,
    by: By,
    bug: Bug,
}

impl Program {
    fn new(world: World, by: By, bug: Bug) -> Result<Self> {
        let all = Arenas::over(world, ArenaOptions { deadline: Duration::from_secs(30), ..options() });
        let size = all.world.size().get();
        let (sum, deliver) = (all.world.runtime.load()?, all.world.runtime.load()?);
        let mut sides = Vec::new();
        for (i, arena) in all.arenas.iter().enumerate() {
            let (out, compute) = (all.world.ranks[i].device().stream()?, all.stream(i).clone());
            let (gathered, flags) = (arena.buffer(u64::from(size * CHUNK))?, arena.flags("chunk sum", 2)?);
            let (own, sums) = (Buffer::uninitialised(&out, CHUNK.into())?, Buffer::uninitialised(&compute, CHUNK.into())?);
            sides.push(Side { gathered, flags, own, sums, out, compute });
        }
        for side in &sides {
            all.world.size().ranks().try_for_each(|source| side.flags.open(&side.compute, FREE, source))?;
            if by == By::Kernels {
                side.flags.signals(&side.out)?;
            }
        }
        Ok(Self { all, sides, sum, deliver, by, bug })
    }

    /// Puts the own chunk of rank `i` to all ranks.
    fn put(&mut self, i: usize) -> Result<()> {
        let Self { all, sides, deliver, by, bug, .. } = self;
        let (Side { gathered, flags, own, out, .. }, bug) = (&mut sides[i], *bug);
        let (arena, start) = (&all.arenas[i], i as u64 * u64::from(CHUNK));
        let size = all.world.size().get();
        let ranks = (0..size).map(|step| all.world.rank((i as u32 + step) % size));
        let mut batch = arena.batch(out);
        for to in ranks {
            if bug != Bug::NoCredit {
                batch = batch.take_back(flags, FREE, to)?;
            }
            if bug == Bug::SignalFirst {
                batch = batch.set(flags, READY, to)?;
            }
            if *by == By::Copies {
                batch = batch.put(&gathered.peer(to)?, own, 0..CHUNK.into(), start)?;
                if bug != Bug::SignalFirst {
                    batch = batch.set(flags, READY, to)?;
                }
            }
        }
        batch.enqueue()?;
        if *by == By::Kernels {
            let signals = flags.signals(out)?;
            let mut chunk = gathered.contiguous_mut()?.slice(start..start + u64::from(CHUNK))?;
            let stride = chunk.as_view().stride();
            // SAFETY: the kernel writes so many elements of each rank.
            let all = unsafe { chunk.view_mut(out)? };
            deliver.launch(out, DeliverArgs { own: own.view(), all, stride, signals: signals.argument(), bug: bug as u32 })?;
        }
        Ok(())
    }

    /// Sums the chunks that all ranks put to rank `i`.
    fn sum(&mut self, i: usize) -> Result<()> {
        let Self { all, sides, sum, bug, .. } = self;
        let (Side { gathered, flags, sums, compute, .. }, arena, bug) = (&mut sides[i], &all.arenas[i], *bug);
        let ranks: Vec<_> = all.world.size().ranks().collect();
        let free = |batch| ranks.iter().try_fold(batch, |batch: oxtile::symmetric::Batch<'_>, source| batch.set(flags, FREE, *source));
        if bug == Bug::FreeBeforeKernel {
            free(arena.batch(compute))?.enqueue()?;
        }
        let awaited: Vec<_> = ranks.iter().map(|source| (READY, *source)).collect();
        let args = SumChunksArgs {
            gathered: gathered.local().view(),
            waits: flags.waits(compute, &awaited)?,
            sums: sums.view_mut(),
            chunks: ranks.len() as u32,
            bug: bug as u32,
        };
        sum.launch(compute, args)?;
        gathered.discard(compute, 0..gathered.len())?;
        let mut batch = arena.batch(compute);
        if bug == Bug::FreeBeforeClear {
            batch = free(batch)?;
        }
        if bug != Bug::NoClear {
            batch = ranks.iter().try_fold(batch, |batch, source| batch.clear(flags, READY, *source))?;
        }
        if bug != Bug::FreeBeforeClear && bug != Bug::FreeBeforeKernel {
            batch = free(batch)?;
        }
        batch.enqueue()
    }

    fn synchronize(&self) -> Result<()> {
        self.sides.iter().try_for_each(|side| side.out.synchronize().and_then(|()| side.compute.synchronize()))
    }
}

fn run(size: u32, seed: u64, by: By, bug: Bug, captured: bool) -> Result<()> {
    run_on(World::new(size, seed), by, bug, captured, seed)
}

/// Rounds of the program, with other numbers each time: enqueued anew, or a graph of the first call replayed.
fn run_on(world: World, by: By, bug: Bug, captured: bool, seed: u64) -> Result<()> {
    const ROUNDS: u32 = 4;
    let size = world.size().get();
    let mut program = Program::new(world, by, bug)?;
    let indices = 0..size as usize;
    let mut graphs = Vec::new();
    for i in indices.clone().filter(|_| captured) {
        let (out, compute) = (program.sides[i].out.clone(), program.sides[i].compute.clone());
        graphs.push(Graph::capture(&[&out, &compute], || program.put(i).and_then(|()| program.sum(i)))?);
    }
    let mut found = Vec::new();
    for round in 0..ROUNDS {
        let sent = |rank: u32| numbers(10 * round + rank, CHUNK);
        for i in indices.clone() {
            let Side { own, out, .. } = &mut program.sides[i];
            own.copy_from_pinned(out, &PinnedBuffer::from_slice(out, &sent(i as u32))?)?;
            if captured {
                graphs[i].replay(&program.sides[i].compute)?;
            } else {
                program.put(i)?;
                program.sum(i)?;
            }
            let Side { sums, compute, .. } = &program.sides[i];
            let mut host = PinnedBuffer::<u32>::zeros(compute, CHUNK as usize)?;
            sums.copy_to_pinned(compute, &mut host)?;
            found.push((host, (0..CHUNK as usize).map(|at| (0..size).map(|rank| sent(rank)[at]).sum::<u32>()).collect::<Vec<_>>()));
        }
    }
    program.synchronize()?;
    found.iter().try_for_each(|(host, expected)| {
        assert_eq!(host.as_slice()?, expected, "{size} ranks, seed {seed}, by {by:?}");
        Ok(())
    })
}

#[test]
fn chunks_are_summed_as_they_arrive() {
    for (size, count) in [(2, seeds()), (3, seeds() / 2), (4, seeds() / 4), (1, 4)] {
        for (seed, by) in (0..count).flat_map(|seed| [By::Copies, By::Kernels].map(|by| (seed, by))) {
            let captured = seed % 2 == 1;
            run(size, seed, by, Bug::None, captured).unwrap_or_else(|error| panic!("{size} ranks, seed {seed}, by {by:?}: {error}"));
        }
    }
}

/// Every one is reported under each of 32 seeds, and replayed by its seed.
#[test]
fn what_is_wrong_is_reported_under_every_seed() {
    use Bug::*;
    let by_copies = [
        NoWait,
        Shifted,
        Relaxed,
        NoFence,
        WaitsLate,
        OtherThread,
        ReadOnly,
        SignalFirst,
        NoCredit,
        FreeBeforeClear,
        FreeBeforeKernel,
        NoClear,
    ];
    let by_kernels = [NoWait, Shifted, Relaxed, NoFence, WaitsLate, ReadOnly, NoBarrier, NoCredit, FreeBeforeKernel];
    let mut missed = Vec::new();
    for (by, bug) in by_copies.map(|bug| (By::Copies, bug)).into_iter().chain(by_kernels.map(|bug| (By::Kernels, bug))) {
        let found: Vec<_> = (0..32).map(|seed| run(2, seed, by, bug, seed % 2 == 1)).collect();
        // A flag that is lost leaves a kernel that waits for ever.
        let is_report = |found: &Result<()>| matches!(found, Err(Error::Race(_) | Error::Fault(_) | Error::Stuck { .. }));
        let count = found.iter().filter(|found| is_report(found)).count();
        if count < 32 {
            let other: Vec<_> = found.into_iter().filter(|found| !is_report(found)).take(1).collect();
            missed.push(format!("{bug:?} by {by:?}: {count} of 32, else {other:?}"));
            continue;
        }
        assert_eq!(run(2, 5, by, bug, true).unwrap_err().to_string(), found[5].as_ref().unwrap_err().to_string(), "{bug:?} by {by:?}");
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Of two devices a schedule is shrunk as of one, and told in words: races of kernels with streams of either device, and of streams.
#[test]
fn what_is_wrong_is_told_in_a_few_lines() {
    // What is not waited for is read before it is written, or without an order.
    const TOO_EARLY: &[&str] = &[": race", ": uninitialised read"];
    let told = [(Bug::NoWait, TOO_EARLY), (Bug::SignalFirst, TOO_EARLY), (Bug::FreeBeforeClear, &[": stream race"])];
    for (bug, words) in told {
        let options = EmulatedOptions { devices: 2, mode: Mode::Check, seed: Some(5), ..EmulatedOptions::default() };
        let shrunk = testing::shortest_schedule(&options, |runtime| run_on(World::over(runtime.clone()), By::Copies, bug, false, 5));
        let report = shrunk.expect_err("a bug is reported");
        let (_, schedule) = report.split_once("\n  the shortest schedule that fails ").unwrap_or_else(|| panic!("{bug:?}: {report}"));
        assert!(words.iter().any(|words| schedule.contains(words)) && schedule.lines().count() <= 12, "{bug:?}: {report}");
    }
}
