//! Planted bugs of a product whose sum ranks share: what `ScatteredProduct` enqueues, written out by hand on its kernel. With one thing wrong it is reported, or has
//! other bits, under every seed.

use std::marker::PhantomData;
use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::Rank;
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::kernels::gemm::{FusionArgument, GatheredArgument, GemmScattered, GemmScatteredArgs, PRESENT, Shape, Tile128x128};
use oxtile::num::bf16;
use oxtile::symmetric::{Arena, ArenaOptions, Batch, Flags, SymmetricBuffer};
use oxtile::tensor::{TensorMap, TensorMapMut};
use oxtile::{Buffer, Error, Loaded, Result, Runtime, Stream};
use oxtile_tile::arrivals::WaitsArgument;
use oxtile_tile::layout::Swizzle128;

use crate::arenas::Arenas;
use crate::overlap::ROUNDS;
use crate::support::seeds;
use crate::values::values;

/// What a program gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// Nothing: there is one place, with flags of its own. By two places a rank's parts of one call come after all have read those two calls before; here FREE alone orders them.
    NoneByOnePlace,
    /// The list names no flag for the last part.
    NoWait,
    /// READY is set before the part is put.
    SignalFirst,
    /// There is one place, and FREE is not awaited.
    NoCredit,
    /// There is one place, and FREE is set before the kernel that adds the parts.
    FreeBeforeKernel,
    /// READY is not reset.
    NoClear,
    /// The parity of places is not flipped: every call takes the first one, by the flags of both in turn.
    OnePlace,
    /// Parts have the bias too.
    BiasOnEveryRank,
    /// Parts lie in the order in which they came, and are added in that.
    OrderOfArrival,
}

const REPORTED: [Bug; 6] = [Bug::NoWait, Bug::SignalFirst, Bug::NoCredit, Bug::FreeBeforeKernel, Bug::NoClear, Bug::OnePlace];
const OTHER_BITS: [Bug; 2] = [Bug::BiasOnEveryRank, Bug::OrderOfArrival];

type Kernel = GemmScattered<bf16, Tile128x128, true>;
type Map<'a> = TensorMap<'a, bf16, 64, 64, Swizzle128>;

/// Rows of a rank, columns, and a rank's part of the sum.
const M: u64 = 8;
const N: u64 = 16;
const K: u64 = 64;

/// The ranks' operands. Of four ranks the second and the last have parts that cancel each other, and are so large that what is added between is lost.
#[derive(Clone, Copy)]
struct Operands {
    ranks: u32,
}

impl Operands {
    /// All rows of a rank's part of `A` in a round.
    fn a(self, rank: u32, round: u64) -> Vec<Half> {
        let of = if rank == 3 { 1 } else { rank };
        values(1000 + 10 * round + u64::from(of), u64::from(self.ranks) * M * K)
    }

    fn weight(self, rank: u32) -> Vec<Half> {
        let (of, scale) = match rank {
            1 if self.ranks == 4 => (1, 131_072.0),
            3 => (1, -131_072.0),
            of => (of, 1.0),
        };
        values(of.into(), N * K).into_iter().map(|value| Half::from_f32(scale * value.to_f32())).collect()
    }

    fn bias(self) -> Vec<Half> {
        values(77, N)
    }

    /// The bits of a rank's result: its own product in `f32`, then the others' rounded ones by rank, then the bias.
    fn expected(self, rank: u32, round: u64) -> Result<Vec<u16>> {
        let runtime = Runtime::emulated(1)?;
        let stream = runtime.device(0)?.stream()?;
        let rows = |of: u32| {
            let first = (u64::from(rank) * M * K) as usize;
            Buffer::<bf16>::from_slice(&stream, &self.a(of, round)[first..first + (M * K) as usize])
        };
        let plans = CONFIG.plans::<bf16, f32>(&runtime.device(0)?);
        let whole = Gemm::<bf16, f32>::planned(&runtime, CONFIG, *plans.iter().find(|plan| plan.parts == 1).unwrap())?;
        let (a, b) = (rows(rank)?, Buffer::from_slice(&stream, &self.weight(rank))?);
        let mut d = Buffer::<f32>::zeros(&stream, M * N)?;
        whole.run(&stream, a.view(), b.view(), None, d.view_mut())?;
        let mut sums = d.to_vec(&stream)?;
        for other in (0..self.ranks).filter(|other| *other != rank) {
            let (a, b) = (rows(other)?, Buffer::from_slice(&stream, &self.weight(other))?);
            let mut d = Buffer::<bf16>::zeros(&stream, M * N)?;
            Gemm::<bf16, bf16>::new(&runtime, CONFIG)?.run(&stream, a.view(), b.view(), None, d.view_mut())?;
            sums.iter_mut().zip(d.to_vec_as::<Half>(&stream)?).for_each(|(sum, part)| *sum += part.to_f32());
        }
        let bias = self.bias();
        Ok(sums.into_iter().enumerate().map(|(at, sum)| Half::from_f32(sum + bias[at % N as usize].to_f32()).to_bits()).collect())
    }
}

/// The product of a rank's rows with a rank's part of the sum.
const CONFIG: GemmConfig = GemmConfig {
    m: M,
    n: N,
    k: K,
    transpose_a: false,
    transpose_b: false,
    alpha: 1.0,
    beta: 0.0,
    activation: oxtile::gemm::Activation::Identity,
};

/// The same memory, of whose uses the runtime is not told: no order of its own stands in for one that is missing.
fn alias(buffer: &Buffer<bf16>) -> Buffer<bf16> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address(), buffer.len()) }.unwrap()
}

/// What a rank's views are of.
struct Memory {
    a: Vec<Buffer<bf16>>,
    weight: Buffer<bf16>,
    bias: Buffer<bf16>,
    results: Vec<Buffer<bf16>>,
}

/// A rank's part of the program.
struct Side<'a> {
    arena: &'a Arena,
    memory: &'a Memory,
    parts: [SymmetricBuffer<bf16>; 2],
    ready: Flags,
    free: Flags,
    /// Of own rows in each round, and of the weight.
    rows: Vec<Map<'a>>,
    weight: Map<'a>,
    gemm: Gemm<bf16, bf16>,
    /// What is put to each other rank.
    sent: Vec<Buffer<bf16>>,
    tiles: Buffer<u32>,
    listed: Buffer<u32>,
    out: Stream,
    compute: Stream,
    bug: Bug,
}

impl Side<'_> {
    fn ranks(&self) -> u32 {
        self.arena.world().get()
    }

    fn me(&self) -> u32 {
        self.arena.rank().index()
    }

    fn rank(&self, index: u32) -> Rank {
        Rank::new(index, self.arena.world()).unwrap()
    }

    fn targets(&self) -> Vec<u32> {
        (1..self.ranks()).map(|step| (self.me() + step) % self.ranks()).collect()
    }

    /// The place of a round, and the number of its flags.
    fn place(&self, round: u64) -> (usize, u32) {
        let turn = match self.bug {
            Bug::NoneByOnePlace | Bug::NoCredit | Bug::FreeBeforeKernel => 0,
            _ => round % 2,
        };
        (if self.bug == Bug::OnePlace { 0 } else { turn as usize }, turn as u32)
    }

    /// Where the part of this rank lies at another one.
    fn slot(&self, target: u32, round: u64) -> u64 {
        let others = u64::from(self.ranks() - 1);
        let slot = u64::from(if self.me() < target { self.me() } else { self.me() - 1 });
        if self.bug == Bug::OrderOfArrival { (slot + round) % others } else { slot }
    }

    /// Multiplies the rows of the others, and puts them to them.
    fn put(&mut self, round: u64) -> Result<()> {
        let (bug, (place, turn)) = (self.bug, self.place(round));
        for (number, target) in self.targets().into_iter().enumerate() {
            let (to, at) = (self.rank(target), self.slot(target, round) * M * N);
            let Self { arena, memory, parts, ready, free, gemm, sent, out, compute, .. } = self;
            let first = u64::from(target) * M * K;
            let a = memory.a[round as usize].view().slice(first, first + M * K);
            let bias = (bug == Bug::BiasOnEveryRank).then(|| memory.bias.view());
            gemm.run(compute, a, memory.weight.view(), bias, sent[number].view_mut())?;
            out.wait(&compute.record()?)?;
            let mut batch = arena.batch(out);
            if bug != Bug::NoCredit {
                batch = batch.take_back(free, turn, to)?;
            }
            if bug == Bug::SignalFirst {
                batch = batch.set(ready, turn, to)?;
            }
            batch = batch.put(&parts[place].peer(to)?, &sent[number], 0..M * N, at)?;
            if bug != Bug::SignalFirst {
                batch = batch.set(ready, turn, to)?;
            }
            batch.enqueue()?;
        }
        Ok(())
    }

    /// Multiplies own rows, adds what the others put here, and tells them.
    fn add(&mut self, kernel: &Loaded<Kernel>, d: &mut Buffer<bf16>, round: u64) -> Result<()> {
        let (bug, (place, turn)) = (self.bug, self.place(round));
        let others: Vec<_> = self.targets().into_iter().map(|target| self.rank(target)).collect();
        let Self { arena, memory, parts, ready, free, rows, weight, tiles, listed, out, compute, .. } = self;
        let set = |batch| others.iter().try_fold(batch, |batch: Batch<'_>, other| batch.set(free, turn, *other));
        if bug == Bug::FreeBeforeKernel {
            set(arena.batch(compute))?.enqueue()?;
        }
        let awaited: Vec<_> = others.iter().map(|from| (turn, *from)).collect();
        let WaitsArgument { lines, first, patience } = ready.waits(compute, &awaited)?;
        let first = first + ready.index(turn, Rank::ZERO);
        let old = alias(parts[place].local());
        let mut map = TensorMapMut::new(compute, d.view_mut(), [M, N])?;
        let map_of_parts = TensorMap::<_, 64, 64, Swizzle128, 3>::new(compute, old.view(), [others.len() as u64, M, N])?;
        let args = GemmScatteredArgs {
            a: rows[round as usize].view(),
            b: weight.view(),
            d: map.view_mut(),
            parts: Some(map_of_parts.view()),
            others: None,
            shape: Shape { m: M as u32, n: N as u32, k: K as u32 },
            fusion: FusionArgument { bias: Some(memory.bias.view()), a_scale: None, b_scale: None, alpha: 1.0, beta: 0.0, gelu: false },
            gathered: GatheredArgument {
                tiles: tiles.view(),
                flags: listed.view(),
                waits: WaitsArgument { lines, first, patience },
                extent: 256,
                sources: others.len() as u32,
                slab: 1,
                first: 0,
                margin: 0,
            },
            away: None,
            marker: PhantomData,
        };
        kernel.launch(compute, args)?;
        compute.wait(&out.record()?)?;
        let all = 0..parts[place].len();
        parts[place].discard(compute, all)?;
        let mut batch = arena.batch(compute);
        if bug != Bug::NoClear {
            batch = awaited.iter().try_fold(batch, |batch, (flag, from)| batch.clear(ready, *flag, *from))?;
        }
        if bug != Bug::FreeBeforeKernel {
            batch = set(batch)?;
        }
        batch.enqueue()
    }
}

/// The rounds of a program; the bits of each rank's results.
fn run(ranks: u32, seed: u64, bug: Bug) -> Result<Vec<Vec<Vec<u16>>>> {
    let options = ArenaOptions { bytes: 1 << 18, deadline: Duration::from_secs(600), ..ArenaOptions::default() };
    let (all, of) = (Arenas::with(ranks, seed, options), Operands { ranks });
    let kernel = all.world.runtime.load::<Kernel>()?;
    let others = u64::from(ranks - 1);
    let mut memories = Vec::new();
    for i in 0..ranks {
        let upload = |values: &[Half]| Buffer::<bf16>::from_slice(all.stream(i as usize), values);
        let a = (0..ROUNDS).map(|round| upload(&of.a(i, round))).collect::<Result<_>>()?;
        let results = (0..ROUNDS).map(|_| Buffer::named(all.stream(i as usize), "d", M * N)).collect::<Result<_>>()?;
        memories.push(Memory { a, weight: upload(&of.weight(i))?, bias: upload(&of.bias())?, results });
    }
    let mut results: Vec<Vec<_>> = memories.iter_mut().map(|memory| std::mem::take(&mut memory.results)).collect();
    let mut sides = Vec::new();
    for (i, (arena, memory)) in all.arenas.iter().zip(&memories).enumerate() {
        let (compute, own) = (all.stream(i).clone(), i as u64 * M * K);
        let (ready, free) = (arena.flags("part", 2)?, arena.flags("parts were read", 2)?);
        // In ascending order of the others.
        let mut listed: Vec<u32> = all.world.size().ranks().filter(|from| *from != arena.rank()).map(|from| ready.index(0, from)).collect();
        if bug == Bug::NoWait {
            *listed.last_mut().expect("another rank") = PRESENT;
        }
        let rows = memory.a.iter().map(|a| TensorMap::new(&compute, a.view().slice(own, own + M * K), [M, K]));
        let side = Side {
            arena,
            memory,
            parts: [arena.buffer(others * M * N)?, arena.buffer(others * M * N)?],
            rows: rows.collect::<Result<_>>()?,
            weight: TensorMap::new(&compute, memory.weight.view(), [K, N])?,
            gemm: Gemm::new(&all.world.runtime, CONFIG)?,
            sent: (0..others).map(|_| Buffer::named(&compute, "sent", M * N)).collect::<Result<_>>()?,
            tiles: Buffer::from_slice(&compute, &[0_u32])?,
            listed: Buffer::from_slice(&compute, &listed)?,
            out: all.world.ranks[i].device().urgent_stream()?,
            ready,
            free,
            compute,
            bug,
        };
        sides.push(side);
    }
    for side in &mut sides {
        for (place, other) in [0, 1].into_iter().flat_map(|place| side.targets().into_iter().map(move |other| (place, other))) {
            side.free.open(&side.compute, place, side.rank(other))?;
        }
    }
    for round in 0..ROUNDS {
        for (side, results) in sides.iter_mut().zip(&mut results) {
            side.put(round)?;
            side.add(&kernel, &mut results[round as usize], round)?;
        }
    }
    for side in &sides {
        side.out.synchronize()?;
        side.compute.synchronize()?;
    }
    let bits = |i: usize, d: &Buffer<bf16>| Ok(d.to_vec_as::<Half>(all.stream(i))?.into_iter().map(Half::to_bits).collect());
    results.iter().enumerate().map(|(i, results)| results.iter().map(|d| bits(i, d)).collect()).collect()
}

/// What every rank's result is to be in every round.
fn expected(ranks: u32) -> Vec<Vec<Vec<u16>>> {
    let of_rank = |rank| (0..ROUNDS).map(|round| Operands { ranks }.expected(rank, round)).collect::<Result<_>>();
    (0..ranks).map(of_rank).collect::<Result<_>>().expect("the oracle multiplies")
}

#[test]
fn the_right_program_is_silent() {
    for (ranks, bug, count) in [(2, Bug::None, seeds() / 2), (4, Bug::None, seeds() / 8), (2, Bug::NoneByOnePlace, seeds() / 2)] {
        let expected = expected(ranks);
        for seed in 0..count {
            let found = run(ranks, seed, bug).unwrap_or_else(|error| panic!("{bug:?}, {ranks} ranks, seed {seed}: {error}"));
            assert!(found == expected, "{bug:?}, {ranks} ranks, seed {seed}");
        }
    }
}

/// Each under every one of 32 seeds; a seed replays its report.
#[test]
fn what_is_out_of_order_is_reported_under_every_seed() {
    for bug in REPORTED {
        let reported = |seed| match run(2, seed, bug) {
            // A flag that is lost leaves a kernel that waits for ever.
            Err(error @ (Error::Race(_) | Error::Fault(_) | Error::Stuck { .. })) => error.to_string(),
            Err(other) => panic!("{bug:?}, seed {seed}: {other}"),
            Ok(_) => panic!("{bug:?}, seed {seed}: nothing is reported"),
        };
        let reports: Vec<_> = (0..32).map(reported).collect();
        assert_eq!(reported(5), reports[5], "{bug:?}");
    }
}

/// What adds something else, or in another order, has other bits under every seed, or is reported where a part is read before its own flag.
#[test]
fn what_is_added_wrongly_has_other_bits_or_is_reported_under_every_seed() {
    for bug in OTHER_BITS {
        let ranks = if bug == Bug::OrderOfArrival { 4 } else { 2 };
        let expected = expected(ranks);
        for seed in 0..32 {
            match run(ranks, seed, bug) {
                Ok(found) => assert!(found != expected, "{bug:?}, seed {seed}: the bits are those of the right program"),
                // A part that lies where another one is awaited.
                Err(Error::Race(_)) if bug == Bug::OrderOfArrival => {}
                Err(error) => panic!("{bug:?}, seed {seed}: {error}"),
            }
        }
    }
}
