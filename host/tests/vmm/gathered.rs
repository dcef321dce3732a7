//! Products whose operand is gathered while they run: by every method, eager and as a graph, and a long run in which no wrong word is lost.

use std::fmt;
use std::time::{Duration, Instant};

use half::bf16 as Half;
use oxtile::comm::{ArenaRank, HostRank, Rank, Team, WorldSize};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Cut, Global, Method, OverlapMemory};
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{Buffer, Graph, Loaded, PinnedBuffer, Result, Runtime, Stream};

use crate::overlap_case::{by, cut, last};
use crate::soak::{Length, goes_on};
use crate::values::values;
use crate::watch::{doing, settle};
use crate::{gathered_bulk, gathered_forms, gathered_layouts};

/// Replays of each graph of two calls, each of other operands: of small operands; of others; and where ranks share a device, which takes turns of some
/// milliseconds.
const REPLAYS: [u64; 3] = [1000, 100, 4];
/// Elements of a small operand, at most.
const SMALL: u64 = 1 << 12;

/// A rank of a program.
pub struct Side {
    pub rank: Rank,
    pub world: WorldSize,
    pub arena: Arena,
    pub runtime: Runtime,
    pub compute: Stream,
    pub out: Stream,
    pub memory: OverlapMemory,
}

impl Side {
    pub fn open(rank: &HostRank, options: ArenaOptions, bytes: u64) -> Result<Self> {
        let (device, arena) = (rank.device(), Arena::open(rank, options)?);
        let (compute, out) = (device.stream()?, device.urgent_stream()?);
        let member = Team::all(rank.world()).member(rank.rank()).expect("every rank is of the world");
        let memory = OverlapMemory::take(&arena, &member, bytes, &out)?;
        Ok(Self { rank: rank.rank(), world: rank.world(), arena, runtime: device.runtime(), compute, out, memory })
    }

    /// Whether there are more ranks than devices.
    pub fn shares_device(&self) -> bool {
        self.world.get() > self.runtime.device_count()
    }

    pub fn close(self) -> Result<()> {
        let Self { arena, memory, .. } = self;
        drop(memory);
        arena.close()?.finish()
    }

    /// The elements of this rank's shard.
    pub fn shard<'v>(&self, operand: &'v [Half], k: u64) -> &'v [Half] {
        let rows = operand.len() as u64 / k;
        let extent = rows.div_ceil(self.world.get().into());
        let [start, end] = [0, 1].map(|after| ((u64::from(self.rank.index()) + after) * extent).min(rows) * k);
        &operand[start as usize..end as usize]
    }
}

/// Every method, eager and as a graph of two calls, which is replayed with other operands: each rank's result is compared with a plain product.
pub fn program(rank: HostRank, options: ArenaOptions) -> Result<()> {
    let world = u64::from(rank.world().get());
    let side = Side::open(&rank, options, 700 * 520 * 2)?;
    let configs = [
        by(Method::Fused, Some(cut(1, 2)), [512, 128 * world, 512]),
        by(Method::Fused, Some(last(2, 4)), [700, 64 * world, 520]),
        by(Method::Fused, Some(Cut { halving: true, ..last(2, 3) }), [700, 64 * world, 520]),
        by(Method::Fused, Some(cut(1, 1)), [40, 256 * world, 64]),
        by(Method::Chunked, Some(cut(1, 1)), [384, 128 * world, 512]),
        by(Method::Sequential, Some(cut(1, 1)), [700, 64 * world, 520]),
    ];
    for config in configs.into_iter().filter(|config| world > 1 || config.overlap.method == Some(Method::Sequential)) {
        compare(&side, config)?;
    }
    gathered_layouts::compare(&side)?;
    gathered_forms::compare(&side)?;
    gathered_bulk::compare(&side)?;
    side.close()
}

/// The plain product that has the same bits.
pub fn plain(runtime: &Runtime, product: GemmConfig, method: Method) -> Result<Gemm<bf16, bf16>> {
    match method {
        // Its tiles are whole.
        Method::Fused => {
            let plans = product.plans::<bf16, bf16>(&runtime.device(0)?);
            Gemm::planned(runtime, product, *plans.iter().find(|plan| plan.parts == 1).expect("a plan is not split"))
        }
        Method::Sequential | Method::Chunked => Gemm::new(runtime, product),
    }
}

fn compare(side: &Side, config: AllGatherConfig) -> Result<()> {
    let (Side { compute, out, runtime, .. }, Global { m, k, .. }) = (side, config.sizes);
    let product = config.product(side.world)?;
    let len = m * product.n;
    let weight = Buffer::from_slice(compute, &values(side.rank.index().into(), k * product.n))?;
    let gather = AllGatherGemm::<bf16, bf16>::new(&side.memory, compute, config)?;
    let method = gather.choice().method;
    // Chunks are products of as many rows as a shard has: one after another they are what is expected.
    let rows = if method == Method::Chunked { m.div_ceil(side.world.get().into()) } else { m };
    assert!(m.is_multiple_of(rows));
    let plain = plain(runtime, GemmConfig { m: rows, ..product }, method)?;
    let shard = side.shard(&values(0, m * k), k).len() as u64;
    let mut own = [Buffer::<bf16>::zeros(compute, shard)?, Buffer::<bf16>::zeros(compute, shard)?];
    let mut kept = [Buffer::<u32>::zeros(compute, len / 2)?, Buffer::<u32>::zeros(compute, len / 2)?];
    let mut d = Buffer::<bf16>::zeros(compute, len)?;
    let copy: Loaded<CopyWords> = runtime.load()?;
    let mut bound = gather.bind(compute, weight.view(), None, d.view_mut())?;
    let mut step = |own: &Buffer<bf16>, kept: &mut Buffer<u32>| {
        bound.copy_shard(compute, own)?;
        bound.run(compute)?;
        copy.launch(compute, CopyWordsArgs { source: bound.result().cast(), target: kept.view_mut() })
    };
    doing(side.rank, format!("capturing {config:?}"));
    // Two calls, of two operands: both places.
    let graph = Graph::capture(&[compute, out], || (0..2).try_for_each(|call| step(&own[call], &mut kept[call])))?;
    let replays = match side.shares_device() {
        true => REPLAYS[2],
        false => REPLAYS[usize::from(m * k > SMALL)],
    };
    for round in 0..replays + 4 {
        doing(side.rank, format!("round {round} of {config:?}"));
        let operands = [values(1000 + 2 * round, m * k), values(1001 + 2 * round, m * k)];
        for (own, operand) in own.iter_mut().zip(&operands) {
            own.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, side.shard(operand, k))?)?;
        }
        // The host waits between none of the first rounds.
        if round % 2 == 1 && round < 8 {
            (0..2).try_for_each(|call| step(&own[call], &mut kept[call]))?;
        } else {
            graph.replay(compute)?;
        }
        if round < 8 && round % 3 != 2 {
            continue;
        }
        settle(compute)?;
        for (kept, operand) in kept.iter().zip(&operands) {
            let found = kept.to_vec(compute)?;
            let mut expected = Vec::new();
            for rows in operand.chunks((rows * k) as usize) {
                let (gathered, len) = (Buffer::from_slice(compute, rows)?, rows.len() as u64 / k * product.n);
                let mut d = Buffer::<bf16>::zeros(compute, len)?;
                plain.run(compute, gathered.view(), weight.view(), None, d.view_mut())?;
                expected.extend(d.to_vec_as::<Half>(compute)?);
            }
            assert!(found == words(&expected), "{}, round {round} of {config:?}", side.rank);
        }
    }
    side.arena.ticket(compute)?.wait()?;
    drop(graph);
    Ok(())
}

/// Pairs of elements.
pub fn words(values: &[Half]) -> Vec<u32> {
    values.chunks(2).map(|pair| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16).collect()
}

/// Elements of an arena that [`turns`] needs at most, in words of 32 bits.
pub const ROOM: u64 = 1 << 16;

/// Calls of a fused product, one after another; `between` before the middle one.
///
/// # Errors
/// What ended the arena.
pub fn turns(arena: &Arena, [compute, out]: [&Stream; 2], calls: u32, between: &dyn Fn()) -> Result<()> {
    let member = Team::all(arena.world()).member(arena.rank()).expect("every rank is of the world");
    let world = u64::from(arena.world().get());
    let config = by(Method::Fused, Some(cut(2, 1)), [16 * world, 16 * world, 64]);
    let memory = OverlapMemory::take(arena, &member, config.bytes::<bf16, bf16>()?, out)?;
    let gather = AllGatherGemm::<bf16, bf16>::new(&memory, compute, config)?;
    let (weight, mut d) = (Buffer::<bf16>::zeros(compute, 16 * 64)?, Buffer::<bf16>::zeros(compute, 16 * world * 16)?);
    let mut bound = gather.bind(compute, weight.view(), None, d.view_mut())?;
    for call in 0..calls {
        if call == calls / 2 {
            between();
        }
        bound.shard(compute)?.fill_zero(compute)?;
        bound.run(compute)?;
    }
    Ok(())
}

/// What was checked.
pub struct Soaked {
    rank: Rank,
    rounds: u64,
    words: u64,
    took: Duration,
}

impl fmt::Display for Soaked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, rounds, words, took } = self;
        write!(f, "gathered soak: {rank}: {rounds} rounds and {words} words in {took:.1?}, 0 errors")
    }
}

/// Elements of a row, and rows of a shard, of the long run.
const WIDTH: u64 = 128;
const ROWS: u64 = 64;
/// Calls of its graph.
const CALLS: u64 = 20;

/// Gathers and multiplies by one, again and again: each rank's next shard is what it found of the next rank's. So a word that was read before it had arrived, or
/// after it was overwritten, goes round for ever, and is found in the end.
///
/// # Errors
/// A wait that is not answered.
pub fn soak(rank: HostRank, options: ArenaOptions, length: Length) -> Result<Soaked> {
    let (me, world) = (u64::from(rank.rank().index()), u64::from(rank.world().get()));
    let (rows, elements) = (ROWS * world, ROWS * WIDTH);
    let side = Side::open(&rank, options, rows * WIDTH * 2)?;
    let Side { compute, out, runtime, .. } = &side;
    let mut one = vec![Half::ZERO; (WIDTH * WIDTH) as usize];
    one.iter_mut().step_by(WIDTH as usize + 1).for_each(|diagonal| *diagonal = Half::ONE);
    let (one, mut d) = (Buffer::from_slice(compute, &one)?, Buffer::<bf16>::zeros(compute, rows * WIDTH)?);
    let config = by(Method::Fused, Some(cut(1, 2)), [rows, WIDTH * world, WIDTH]);
    let gather = AllGatherGemm::<bf16, bf16>::new(&side.memory, compute, config)?;
    let copy: Loaded<CopyWords> = runtime.load()?;
    let start = |of: u64| values(of, elements);
    let mut first = Buffer::from_slice(compute, &start(me))?;
    let mut bound = gather.bind(compute, one.view(), None, d.view_mut())?;
    let next = (me + 1) % world * elements;
    let graph = Graph::capture(&[compute, out], || {
        for _ in 0..CALLS {
            bound.copy_shard(compute, &first)?;
            bound.run(compute)?;
            let source = bound.result().slice(next, next + elements).cast();
            copy.launch(compute, CopyWordsArgs { source, target: first.view_mut().cast() })?;
        }
        Ok::<_, oxtile::Error>(())
    })?;
    let (meeting, begin) = (rank.next_meeting(), Instant::now());
    let mut replays = 0;
    for batch in 0.. {
        let is_over = match length {
            Length::Batches(count) => batch >= if side.shares_device() { 1 } else { count },
            Length::Time(time) => !goes_on(&meeting, side.rank, batch, begin.elapsed() < time)?,
        };
        if is_over {
            break;
        }
        doing(side.rank, format!("batch {batch} of the gathered soak"));
        for _ in 0..if side.shares_device() { 4 } else { 100 } {
            graph.replay(compute)?;
            replays += 1;
        }
        settle(compute)?;
    }
    side.arena.ticket(compute)?.wait()?;
    let rounds = replays * CALLS;
    let found = first.to_vec_as::<Half>(compute)?;
    assert!(words(&found) == words(&start((me + rounds) % world)), "{}: a word of {rounds} rounds is wrong", side.rank);
    drop((graph, bound));
    let soaked = Soaked { rank: side.rank, rounds, words: rounds * rows * WIDTH, took: begin.elapsed() };
    drop((gather, d, first));
    side.close()?;
    Ok(soaked)
}
