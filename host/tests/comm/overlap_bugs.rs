//! Planted bugs of a product whose operand arrives: what `GatheredProduct` enqueues, written out by hand on its kernel. With one thing wrong it is reported
//! under every seed.

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16 as Half;
use oxtile::comm::Rank;
use oxtile::kernels::gemm::{ByRows, FusionArgument, GatheredArgument, GemmGathered, GemmGatheredArgs, PRESENT, Shape, Tile128x128};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, Method};
use oxtile::symmetric::{Arena, Batch, Flags, Pitched, Rows, SymmetricBuffer};
use oxtile::tensor::{TensorMap, TensorMapMut};
use oxtile::{Buffer, Error, Event, Loaded, PinnedBuffer, Result, Stream};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::launch::{BufferAccess, DeviceViewMut};
use oxtile_tile::layout::Swizzle128;

use crate::arenas::Arenas;
use crate::overlap::{Calls, Case, ROUNDS, by};
use crate::support::seeds;

/// What a program gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The list names no flag for the last chunk.
    NoWait,
    /// It names the flags of the next source.
    NextSource,
    /// It is ordered by sources and then by slabs.
    SlabByRows,
    /// READY is set before the chunk is put.
    SignalFirst,
    /// The copies do not wait for the work that writes the shard.
    PutBeforeShard,
    /// FREE is not awaited.
    NoCredit,
    /// FREE is taken back after the put.
    PutBeforeCredit,
    /// FREE is set before READY is reset.
    FreeBeforeClear,
    /// FREE is set before the kernel.
    FreeBeforeKernel,
    /// READY is not reset.
    NoClear,
    /// Every call takes the first place, by the flags of both in turn.
    OnePlace,
    /// The operand is kept after FREE is set.
    KeptAfterFree,
}

const BUGS: [Bug; 12] = [
    Bug::NoWait,
    Bug::NextSource,
    Bug::SlabByRows,
    Bug::SignalFirst,
    Bug::PutBeforeShard,
    Bug::NoCredit,
    Bug::PutBeforeCredit,
    Bug::FreeBeforeClear,
    Bug::FreeBeforeKernel,
    Bug::NoClear,
    Bug::OnePlace,
    Bug::KeptAfterFree,
];

type Kernel = GemmGathered<bf16, bf16, 64, bf16, 64, Tile128x128, ByRows, false, false>;
type Map<'a> = TensorMap<'a, bf16, 64, 64, Swizzle128>;
/// The result of a round, and where it lies.
type Target<'a> = (TensorMapMut<'a, bf16, 64, 64, Swizzle128>, BufferAccess<'a>);

/// Columns of a rank's result, the sum.
const N: u64 = 8;
const K: u64 = 192;
/// Steps of 64 in the first slab; the second has fewer.
const SLAB: u32 = 2;
const SLABS: u32 = 2;

/// The same memory, of whose uses the runtime is not told: no order of its own stands in for one that is missing.
fn alias(buffer: &Buffer<bf16>, range: Range<u64>) -> Buffer<bf16> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address() + 2 * range.start, range.end - range.start) }.unwrap()
}

/// A rank's part of the program.
struct Side<'a> {
    arena: &'a Arena,
    gathered: [SymmetricBuffer<bf16>; 2],
    ready: Flags,
    free: Flags,
    /// Of both places, of the weight, and of the results of all rounds.
    places: [Map<'a>; 2],
    weight: Map<'a>,
    results: Vec<Target<'a>>,
    tiles: Buffer<u32>,
    listed: Buffer<u32>,
    kept: Buffer<bf16>,
    /// Writes shards: the layer before runs on a stream of its own, so that no order of its stands in for FREE.
    before: Stream,
    out: Stream,
    compute: Stream,
    /// After what has read each place last.
    read: [Option<Event>; 2],
    extent: u64,
    bug: Bug,
}

/// What tensor maps are made of.
struct Memory {
    places: [Buffer<bf16>; 2],
    weight: Buffer<bf16>,
    results: Vec<Buffer<bf16>>,
}

impl Side<'_> {
    fn me(&self) -> u32 {
        self.arena.rank().index()
    }

    fn others(&self) -> Vec<Rank> {
        let (me, ranks) = (self.me(), self.arena.world());
        (1..ranks.get()).map(|step| Rank::new((me + step) % ranks.get(), ranks).unwrap()).collect()
    }

    /// The place of a round, and the number of its flags.
    fn place(&self, round: u64) -> (usize, u32) {
        let turn = round % 2;
        (if self.bug == Bug::OnePlace { 0 } else { turn as usize }, turn as u32)
    }

    /// Elements of the own shard.
    fn own(&self) -> Range<u64> {
        let start = u64::from(self.me()) * self.extent * K;
        start..start + self.extent * K
    }

    /// Writes the own shard, and puts it to the others.
    fn put(&mut self, round: u64, shard: &[Half]) -> Result<()> {
        let (bug, (place, turn), others, own, extent) = (self.bug, self.place(round), self.others(), self.own(), self.extent);
        let Self { arena, gathered, ready, free, before, out, compute, read, .. } = self;
        let whole = alias(gathered[place].local(), 0..gathered[place].len());
        read[place].iter().try_for_each(|read| before.wait(read))?;
        alias(&whole, own.clone()).copy_from_pinned(before, &PinnedBuffer::from_slice(before, shard)?)?;
        compute.wait(&before.record()?)?;
        if bug != Bug::PutBeforeShard {
            out.wait(&before.record()?)?;
        }
        let mut batch = arena.batch(out);
        for to in others {
            if !matches!(bug, Bug::NoCredit | Bug::PutBeforeCredit) {
                batch = batch.take_back(free, turn, to)?;
            }
            for slab in 0..SLABS {
                let columns = u64::from(slab * SLAB * 64)..u64::from((slab + 1) * SLAB * 64).min(K);
                let at = Pitched { start: own.start + columns.start, pitch: K };
                let rows = Rows { count: extent, width: columns.end - columns.start, from: at, to: at };
                if bug == Bug::SignalFirst {
                    batch = batch.set(ready, turn * SLABS + slab, to)?;
                }
                batch = batch.put_rows(&gathered[place].peer(to)?, &whole, rows)?;
                if bug != Bug::SignalFirst {
                    batch = batch.set(ready, turn * SLABS + slab, to)?;
                }
            }
            if bug == Bug::PutBeforeCredit {
                batch = batch.take_back(free, turn, to)?;
            }
        }
        batch.enqueue()
    }

    /// Multiplies what the others put here, keeps it, and tells them.
    fn multiply(&mut self, kernel: &Loaded<Kernel>, round: u64) -> Result<()> {
        let (bug, (place, turn), others, own, extent) = (self.bug, self.place(round), self.others(), self.own(), self.extent as u32);
        let Self { arena, gathered, ready, free, places, weight, results, tiles, listed, kept, out, compute, read, .. } = self;
        let set = |batch| others.iter().try_fold(batch, |batch: Batch<'_>, other| batch.set(free, turn, *other));
        if bug == Bug::FreeBeforeKernel {
            set(arena.batch(compute))?.enqueue()?;
        }
        let chunks: Vec<_> = others.iter().flat_map(|of| (0..SLABS).map(move |slab| (turn * SLABS + slab, *of))).collect();
        let WaitsArgument { lines, first, patience } = ready.waits(compute, &chunks)?;
        let first = first + ready.index(turn * SLABS, Rank::ZERO);
        let m = arena.world().get() * extent;
        let (d, memory) = &mut results[round as usize];
        // SAFETY: the map `d` holds the only view of this memory, which is not read: `beta` is 0.
        let old = unsafe { DeviceViewMut::from_raw(memory.address, u64::from(m) * N, memory.owner) };
        let args = GemmGatheredArgs {
            a: places[place].view(),
            b: weight.view(),
            d: d.view_mut(),
            old,
            shape: Shape { m, n: N as u32, k: K as u32 },
            fusion: FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 0.0, gelu: false },
            gathered: GatheredArgument {
                tiles: tiles.view(),
                flags: listed.view(),
                waits: WaitsArgument { lines, first, patience },
                extent,
                sources: arena.world().get(),
                slab: SLAB,
                first: 0,
                margin: 0,
            },
            marker: PhantomData,
        };
        kernel.launch(compute, args)?;
        let whole = alias(gathered[place].local(), 0..gathered[place].len());
        if bug != Bug::KeptAfterFree {
            kept.copy_from(compute, &whole)?;
        }
        compute.wait(&out.record()?)?;
        let end = gathered[place].len();
        [0..own.start, own.end..end].into_iter().try_for_each(|range| gathered[place].discard(compute, range))?;
        let mut batch = arena.batch(compute);
        if bug == Bug::FreeBeforeClear {
            batch = set(batch)?;
        }
        if bug != Bug::NoClear {
            batch = chunks.iter().try_fold(batch, |batch, (flag, from)| batch.clear(ready, *flag, *from))?;
        }
        if !matches!(bug, Bug::FreeBeforeClear | Bug::FreeBeforeKernel) {
            batch = set(batch)?;
        }
        batch.enqueue()?;
        if bug == Bug::KeptAfterFree {
            kept.copy_from(compute, &whole)?;
        }
        read[place] = Some(compute.record()?);
        Ok(())
    }
}

/// The flag of each slab and source, as the kernel's list has them.
fn listed(ready: &Flags, arena: &Arena, bug: Bug) -> Vec<u32> {
    let (ranks, me) = (arena.world(), arena.rank().index());
    let flag = |slab: u32, source: u32| {
        let source = if bug == Bug::NextSource { (source + 1) % ranks.get() } else { source };
        if source == me { PRESENT } else { ready.index(slab, Rank::new(source, ranks).unwrap()) }
    };
    let mut listed: Vec<u32> = match bug {
        Bug::SlabByRows => (0..ranks.get()).flat_map(|source| (0..SLABS).map(move |slab| flag(slab, source))).collect(),
        _ => (0..SLABS).flat_map(|slab| (0..ranks.get()).map(move |source| flag(slab, source))).collect(),
    };
    if bug == Bug::NoWait {
        *listed.iter_mut().rfind(|flag| **flag != PRESENT).expect("another rank") = PRESENT;
    }
    listed
}

/// Ranks whose shards have so many rows.
fn case(ranks: u32, extent: u64, seed: u64) -> Case {
    let sizes = [extent * u64::from(ranks), N * u64::from(ranks), K];
    let config = AllGatherConfig { transpose_b: true, ..by(Method::Fused, None, sizes) };
    Case { ranks, config, calls: Calls::Eager, seed }
}

/// The rounds of a program; the bits of each rank's results.
fn run(ranks: u32, extent: u64, seed: u64, bug: Bug) -> Result<Vec<Vec<Vec<u16>>>> {
    let case = case(ranks, extent, seed);
    let all = Arenas::with(ranks, seed, case.options());
    let kernel = all.world.runtime.load::<Kernel>()?;
    let (len, m) = (u64::from(ranks) * extent * K, u64::from(ranks) * extent);
    let (mut buffers, mut memories) = (Vec::new(), Vec::new());
    for (i, arena) in all.arenas.iter().enumerate() {
        let gathered: [SymmetricBuffer<bf16>; 2] = [arena.buffer(len)?, arena.buffer(len)?];
        let places = gathered.each_ref().map(|place| alias(place.local(), 0..len));
        let results = (0..ROUNDS).map(|_| Buffer::named(all.stream(i), "d", m * N)).collect::<Result<Vec<_>>>()?;
        memories.push(Memory { places, weight: Buffer::from_slice(all.stream(i), &case.weight(i as u32))?, results });
        buffers.push((gathered, arena.flags("gathered chunk", 2 * SLABS)?, arena.flags("gathered operand was read", 2)?));
    }
    let mut sides = Vec::new();
    for (i, ((gathered, ready, free), memory)) in buffers.into_iter().zip(&mut memories).enumerate() {
        let (arena, compute) = (&all.arenas[i], all.stream(i).clone());
        let [first, second] = memory.places.each_ref().map(|place| TensorMap::new(&compute, place.view(), [m, K]));
        let results = memory.results.iter_mut().map(|d| {
            let d = d.view_mut();
            let access = d.access("old");
            Ok((TensorMapMut::new(&compute, d, [m, N])?, access))
        });
        let side = Side {
            arena,
            places: [first?, second?],
            weight: TensorMap::new(&compute, memory.weight.view(), [N, K])?,
            results: results.collect::<Result<_>>()?,
            tiles: Buffer::from_slice(&compute, &(0..m.div_ceil(128) as u32).map(|row| row << 16).collect::<Vec<_>>())?,
            listed: Buffer::from_slice(&compute, &listed(&ready, arena, bug))?,
            kept: Buffer::uninitialised(&compute, len)?,
            before: all.world.ranks[i].device().stream()?,
            out: all.world.ranks[i].device().urgent_stream()?,
            read: [None, None],
            gathered,
            ready,
            free,
            compute,
            extent,
            bug,
        };
        for (place, other) in [0, 1].into_iter().flat_map(|place| side.others().into_iter().map(move |other| (place, other))) {
            side.free.open(&side.compute, place, other)?;
        }
        sides.push(side);
    }
    for round in 0..ROUNDS {
        let operand = case.operand(round);
        for (i, side) in sides.iter_mut().enumerate() {
            side.put(round, &case.shard(&operand, i as u32))?;
            side.multiply(&kernel, round)?;
        }
    }
    for side in &sides {
        side.out.synchronize()?;
        side.compute.synchronize()?;
    }
    for side in sides {
        assert!(side.kept.to_vec_as::<Half>(&side.compute)? == case.operand(ROUNDS - 1), "{ranks} ranks, seed {seed}");
    }
    let bits = |i: usize, d: &Buffer<bf16>| Ok(d.to_vec_as::<Half>(all.stream(i))?.into_iter().map(Half::to_bits).collect());
    memories.iter().enumerate().map(|(i, memory)| memory.results.iter().map(|d| bits(i, d)).collect()).collect()
}

#[test]
fn the_right_program_is_silent() {
    for (ranks, extent, count) in [(2, 8, seeds() / 2), (3, 8, seeds() / 4), (2, 128, seeds() / 4)] {
        let expected = (0..ranks).map(|rank| case(ranks, extent, 0).expected(Method::Fused, rank)).collect::<Result<Vec<_>>>().unwrap();
        for seed in 0..count {
            let found = run(ranks, extent, seed, Bug::None).unwrap_or_else(|error| panic!("{ranks} ranks, seed {seed}: {error}"));
            assert!(found == expected, "{ranks} ranks of {extent} rows, seed {seed}");
        }
    }
}

/// Each under every one of 32 seeds; a seed replays its report.
#[test]
fn what_is_wrong_is_reported_under_every_seed() {
    for bug in BUGS {
        // A tile that has rows of all sources waits for all of their flags, in whichever order.
        let extent = if bug == Bug::NextSource { 128 } else { 8 };
        let reported = |seed| match run(2, extent, seed, bug) {
            // A flag that is lost leaves a kernel that waits for ever.
            Err(error @ (Error::Race(_) | Error::Fault(_) | Error::Stuck { .. })) => error.to_string(),
            Err(other) => panic!("{bug:?}, seed {seed}: {other}"),
            Ok(_) => panic!("{bug:?}, seed {seed}: nothing is reported"),
        };
        let reports: Vec<_> = (0..32).map(reported).collect();
        assert_eq!(reported(5), reports[5], "{bug:?}");
    }
}
