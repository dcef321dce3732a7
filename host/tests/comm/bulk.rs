//! Calls in two halves: a gathered and a scattered product that are begun together have the bits of calls one after the other, and what is left unfinished is refused.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::comm::{EmulatedCommunicator, WorldSize};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{
    AllGatherConfig, AllGatherGemm, GatheredProduct, GemmReduceScatter, Method, ReduceScatterConfig, ScatterMethod, ScatteredProduct,
};
use oxtile::symmetric::ArenaOptions;
use oxtile::{Buffer, EmulatedOptions, Error, Graph, Loaded, PinnedBuffer, Result, Stream};
use oxtile_tile::launch::DeviceView;

use crate::arenas::Arenas;
use crate::overlap::{self, Calls, ROUNDS, by, cut};
use crate::overlap_calls::Ranks;
use crate::scattered::{self, beside, config};
use crate::support::{World, seeds};

/// The products of every rank, which need nothing of each other.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    gathers: AllGatherConfig,
    scatters: ReduceScatterConfig,
    calls: Calls,
    order: Order,
    seed: u64,
    /// Which the streams of a device share.
    hardware_queues: Option<u32>,
}

/// The order of the halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The gather is begun first, and finished first.
    GatherFirst,
    /// The gather is begun first, and finished last.
    Inside,
    /// The scatter is begun first, and finished first.
    ScatterFirst,
    /// The calls are whole.
    Apart,
}

/// The result of one rank and round, or what it is to be.
type Bits = Vec<u16>;

/// What a rank has.
struct Side {
    gather: AllGatherGemm<bf16, bf16>,
    scatter: GemmReduceScatter<bf16, bf16>,
    weight: Buffer<bf16>,
    shard: Buffer<bf16>,
    a: Buffer<bf16>,
    part: Buffer<bf16>,
    bias: Buffer<bf16>,
    wide: Buffer<bf16>,
    d: Buffer<bf16>,
}

/// A rank's products, bound.
struct Pair<'a> {
    gathered: GatheredProduct<'a, bf16, bf16>,
    scattered: ScatteredProduct<'a, bf16, bf16>,
    shard: &'a Buffer<bf16>,
}

impl Side {
    fn new(ranks: &Ranks, i: usize, case: &Case) -> Result<Self> {
        let (stream, rank) = (ranks.all.stream(i), i as u32);
        let (gathers, scatters) = (case.gathered(), case.scattered());
        let (product, rows) = (gathers.product(), scatters.rows(rank));
        let upload = |values: &[Half]| Buffer::<bf16>::from_slice(stream, values);
        Ok(Self {
            gather: ranks.gather(i, case.gathers)?,
            scatter: GemmReduceScatter::new(&ranks.memories[i], stream, case.scatters)?,
            weight: upload(&gathers.weight(rank))?,
            shard: upload(&gathers.shard(&gathers.operand(0), rank))?,
            a: upload(&scatters.a(rank, 0))?,
            part: upload(&scatters.weight(rank))?,
            bias: upload(&scatters.bias())?,
            wide: Buffer::named(stream, "wide", product.m * product.n)?,
            d: Buffer::named(stream, "d", (rows.end - rows.start) * case.scatters.sizes.n)?,
        })
    }

    fn bind(&mut self, stream: &Stream) -> Result<Pair<'_>> {
        let Self { gather, scatter, weight, shard, a, part, bias, wide, d } = self;
        Ok(Pair {
            gathered: gather.bind(stream, weight.view(), None, wide.view_mut())?,
            scattered: scatter.bind(stream, a.view(), part.view(), Some(bias.view()), d.view_mut())?,
            shard,
        })
    }
}

impl Pair<'_> {
    fn call(&mut self, stream: &Stream, order: Order) -> Result<()> {
        let Self { gathered, scattered, shard } = self;
        if order == Order::ScatterFirst {
            let scattering = scattered.begin(stream)?;
            gathered.copy_shard(stream, shard)?;
            let gathering = gathered.begin(stream)?;
            scattering.finish()?;
            return gathering.finish();
        }
        gathered.copy_shard(stream, shard)?;
        if order == Order::Apart {
            gathered.run(stream)?;
            return scattered.run(stream);
        }
        let gathering = gathered.begin(stream)?;
        let scattering = scattered.begin(stream)?;
        if order == Order::Inside {
            scattering.finish()?;
            return gathering.finish();
        }
        gathering.finish()?;
        scattering.finish()
    }
}

fn options() -> ArenaOptions {
    ArenaOptions { bytes: 2 << 20, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
}

fn keep(copy: &Loaded<CopyWords>, stream: &Stream, result: DeviceView<'_, bf16>) -> Result<Buffer<u32>> {
    let mut kept = Buffer::<u32>::named(stream, "kept", result.len() / 2)?;
    copy.launch(stream, CopyWordsArgs { source: result.cast(), target: kept.view_mut() })?;
    Ok(kept)
}

fn bits(stream: &Stream, kept: &Buffer<u32>) -> Result<Bits> {
    Ok(kept.to_vec(stream)?.into_iter().flat_map(|word| [word as u16, (word >> 16) as u16]).collect())
}

impl Case {
    fn new(ranks: u32, gathers: AllGatherConfig, scatters: ReduceScatterConfig, seed: u64) -> Self {
        Self { ranks, gathers, scatters, calls: Calls::Eager, order: Order::GatherFirst, seed, hardware_queues: None }
    }

    fn gathered(&self) -> overlap::Case {
        overlap::Case { ranks: self.ranks, config: self.gathers, calls: self.calls, seed: self.seed }
    }

    fn scattered(&self) -> scattered::Case {
        scattered::Case { ranks: self.ranks, config: self.scatters, calls: self.calls, seed: self.seed }
    }

    fn ranks(&self, options: ArenaOptions) -> Result<Ranks> {
        let world = WorldSize::new(self.ranks).unwrap();
        let bytes = self.gathers.bytes::<bf16, bf16>()?.max(self.scatters.bytes::<bf16, bf16>(world)?) + 64;
        let cluster = EmulatedOptions {
            devices: self.ranks,
            seed: Some(self.seed),
            hardware_queues: self.hardware_queues,
            ..EmulatedOptions::default()
        };
        Ranks::over(Arenas::over(World::with(cluster), options), bytes)
    }

    /// What both results are to be, by ranks and rounds.
    fn expected(&self) -> Result<Vec<Vec<[Bits; 2]>>> {
        let of_rank = |rank: u32| {
            let gathered = self.gathered().expected(self.gathers.overlap.method.unwrap(), rank)?;
            let of_round = |(round, gathered)| Ok([gathered, self.scattered().expected(rank, round)?]);
            (0..ROUNDS).zip(gathered).map(of_round).collect::<Result<Vec<_>>>()
        };
        (0..self.ranks).map(of_rank).collect()
    }

    fn compare(&self, expected: &[Vec<[Bits; 2]>]) -> Result<()> {
        let ranks = self.ranks(options())?;
        let copy = ranks.all.world.runtime.load::<CopyWords>()?;
        let (mut sides, mut pairs, mut graphs) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..self.ranks as usize {
            sides.push(Side::new(&ranks, i, self)?);
        }
        // Operands are written by copies on the stream of the calls, between them.
        let operands: Vec<_> = sides.iter().map(|side| [&side.shard, &side.a].map(alias)).collect();
        for (i, side) in sides.iter_mut().enumerate() {
            pairs.push(side.bind(ranks.all.stream(i))?);
        }
        for (i, pair) in pairs.iter_mut().enumerate().filter(|_| self.calls != Calls::Eager) {
            let stream = ranks.all.stream(i);
            let count = if self.calls == Calls::Mixed { 2 } else { 1 };
            graphs.push(Graph::capture(&[stream, &ranks.out[i]], || (0..count).try_for_each(|_| pair.call(stream, self.order)))?);
        }
        let mut found: Vec<Vec<[Buffer<u32>; 2]>> = pairs.iter().map(|_| Vec::new()).collect();
        for round in 0..ROUNDS {
            let operand = self.gathered().operand(round);
            for (i, pair) in pairs.iter_mut().enumerate() {
                let (stream, rank, [shard, a]) = (ranks.all.stream(i), i as u32, &operands[i]);
                let upload =
                    |to: &Buffer<bf16>, values: &[Half]| alias(to).copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, values)?);
                upload(shard, &self.gathered().shard(&operand, rank))?;
                upload(a, &self.scattered().a(rank, round))?;
                if self.calls == Calls::Captured || (self.calls == Calls::Mixed && round % 2 == 0) {
                    graphs[i].replay(stream)?;
                } else {
                    pair.call(stream, self.order)?;
                }
                found[i].push([keep(&copy, stream, pair.gathered.result())?, keep(&copy, stream, pair.scattered.result())?]);
            }
        }
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let stream = ranks.all.stream(i);
            ranks.all.arenas[i].ticket(stream)?.wait()?;
            for (round, (found, expected)) in found.iter().zip(expected).enumerate() {
                for (of, (found, expected)) in ["gathered", "scattered"].iter().zip(found.iter().zip(expected)) {
                    assert!(bits(stream, found)? == *expected, "{self:?}, {of}, rank {i}, round {round}");
                }
            }
        }
        Ok(())
    }
}

/// The same memory, to be written between calls.
fn alias(buffer: &Buffer<bf16>) -> Buffer<bf16> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address(), buffer.len()) }.unwrap()
}

#[test]
fn what_is_begun_together_has_the_bits_of_calls_apart() {
    let sum = |config: AllGatherConfig| AllGatherConfig { gathers: oxtile::overlap::Gathers::SumOfB, transpose_a: true, ..config };
    let cases = [
        (1, by(Method::Sequential, None, [40, 16, 72]), config(ScatterMethod::Sequential, 1, [40, 16, 72])),
        (2, sum(by(Method::Sequential, None, [32, 16, 70])), config(ScatterMethod::Sequential, 1, [70, 16, 32])),
        (2, by(Method::Fused, Some(cut(1, 2)), [70, 32, 136]), config(ScatterMethod::Fused, 2, [600, 16, 32])),
        (3, by(Method::Chunked, None, [100, 24, 72]), config(ScatterMethod::Fused, 1, [70, 24, 72])),
        (2, by(Method::Fused, Some(cut(1, 2)), [70, 32, 136]), config(ScatterMethod::Direct, 2, [1024, 16, 32])),
        (2, by(Method::Fused, Some(cut(1, 2)), [70, 32, 136]), config(ScatterMethod::Whole, 2, [1024, 16, 32])),
        // Shards of 3, 3, 3 and 0 rows, of both.
        (4, by(Method::Sequential, None, [9, 32, 64]), config(ScatterMethod::Fused, 1, [9, 16, 64])),
    ];
    for (at, (ranks, gathers, scatters)) in cases.into_iter().enumerate() {
        let case = Case::new(ranks, gathers, scatters, at as u64);
        let expected = case.expected().expect("the oracles multiply");
        let ways = [(Calls::Eager, Order::GatherFirst), (Calls::Captured, Order::Inside), (Calls::Mixed, Order::ScatterFirst)];
        for (calls, order) in ways {
            let case = Case { calls, order, ..case };
            case.compare(&expected).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

/// The same bits under every seed, and so in every order in which shards and parts come.
#[test]
fn the_order_of_arrival_changes_no_bit() {
    let (gathers, scatters) = (by(Method::Sequential, None, [30, 24, 72]), config(ScatterMethod::Fused, 1, [30, 16, 48]));
    let case = Case { calls: Calls::Mixed, ..Case::new(3, gathers, scatters, 0) };
    let expected = case.expected().unwrap();
    for seed in 0..seeds() / 2 {
        let order = [Order::GatherFirst, Order::Inside, Order::ScatterFirst][seed as usize % 3];
        Case { seed, order, ..case }.compare(&expected).unwrap_or_else(|error| panic!("{case:?}, seed {seed}: {error}"));
    }
}

/// Streams of a device may share hardware queues, one of them or many: whole calls and halves go on.
#[test]
fn streams_may_share_hardware_queues() {
    for method in [Method::Fused, Method::Sequential] {
        let expected = two(method).expected().unwrap();
        for (queues, order) in [1, 8, 32].into_iter().flat_map(|queues| [Order::Apart, Order::GatherFirst].map(|order| (queues, order))) {
            for seed in 0..2 {
                let case = Case { order, seed, hardware_queues: Some(queues), ..two(method) };
                case.compare(&expected).unwrap_or_else(|error| panic!("{case:?}: {error}"));
            }
        }
    }
}

/// Two ranks and a product of each kind.
fn two(method: Method) -> Case {
    let (gathers, scatters) = (by(method, None, [70, 32, 136]), config(beside(method), 1, [70, 32, 144]));
    Case::new(2, gathers, scatters, 1)
}

/// A call takes no place of one that is not finished, and goes on once it is. Both ranks do the same.
#[test]
fn a_place_under_way_is_not_given_out() -> Result<()> {
    let case = two(Method::Sequential);
    let (expected, ranks) = (case.expected()?, case.ranks(options())?);
    let mut sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
    let mut others = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
    let mut pairs = Vec::new();
    for (i, (side, other)) in sides.iter_mut().zip(&mut others).enumerate() {
        pairs.push((side.bind(ranks.all.stream(i))?, other.bind(ranks.all.stream(i))?));
    }
    for (i, (pair, other)) in pairs.iter_mut().enumerate() {
        let stream = ranks.all.stream(i);
        let refused = |result: Result<()>| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("is not finished"), "{error}");
        };
        pair.gathered.copy_shard(stream, pair.shard)?;
        // No other product takes the place in which the shard lies.
        for result in [other.gathered.copy_shard(stream, other.shard), pair.scattered.run(stream)] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("call that product first"), "{error}");
        }
        let gathering = pair.gathered.begin(stream)?;
        let scattering = pair.scattered.begin(stream)?;
        refused(other.gathered.copy_shard(stream, other.shard));
        refused(other.scattered.run(stream));
        gathering.finish()?;
        other.gathered.copy_shard(stream, other.shard)?;
        let next = other.gathered.begin(stream)?;
        refused(other.scattered.run(stream));
        scattering.finish()?;
        next.finish()?;
        other.scattered.run(stream)?;
    }
    let copy = ranks.all.world.runtime.load::<CopyWords>()?;
    for (i, (pair, other)) in pairs.iter().enumerate() {
        let stream = ranks.all.stream(i);
        ranks.all.arenas[i].ticket(stream)?.wait()?;
        for of in [pair, other] {
            let found = [of.gathered.result(), of.scattered.result()].map(|result| bits(stream, &keep(&copy, stream, result)?));
            assert!(found.into_iter().collect::<Result<Vec<_>>>()? == expected[i][0], "rank {i}");
        }
    }
    Ok(())
}

/// Scattered products that are under way together put from the same memory: each waits until the one before has left it, whichever is finished first.
#[test]
fn scatters_under_way_share_what_they_put_from() -> Result<()> {
    for seed in 0..seeds() / 4 {
        let case = Case { seed, ..two(Method::Fused) };
        let (expected, ranks) = (case.expected()?, case.ranks(options())?);
        let sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
        let results = |i: usize| (0..3).map(|_| Buffer::<bf16>::named(ranks.all.stream(i), "d", 35 * 32)).collect::<Result<Vec<_>>>();
        let mut results = [results(0)?, results(1)?];
        for (i, (side, results)) in sides.iter().zip(&mut results).enumerate() {
            let (stream, Side { scatter, a, part, bias, .. }) = (ranks.all.stream(i), side);
            let bind = |d| scatter.bind(stream, a.view(), part.view(), Some(bias.view()), d);
            let mut bound = results.iter_mut().map(|d| bind(d.view_mut())).collect::<Result<Vec<_>>>()?;
            let [first, second, third] = &mut bound[..] else { panic!("three results") };
            let (one, two) = (first.begin(stream)?, second.begin(stream)?);
            one.finish()?;
            let three = third.begin(stream)?;
            two.finish()?;
            three.finish()?;
        }
        for (i, results) in results.iter().enumerate() {
            let stream = ranks.all.stream(i);
            ranks.all.arenas[i].ticket(stream)?.wait()?;
            for d in results {
                let found: Bits = d.to_vec_as::<Half>(stream)?.into_iter().map(Half::to_bits).collect();
                assert!(found == expected[i][0][1], "rank {i}, seed {seed}");
            }
        }
    }
    Ok(())
}

/// Calls on two streams: a place is given on by the stream on which the call that had it was finished. Neither stream has written an operand or a map, which would order the other one after all of its work.
#[test]
fn a_place_is_given_on_from_stream_to_stream() -> Result<()> {
    for seed in 0..seeds() {
        let case = Case { seed, ..two(Method::Sequential) };
        let (expected, ranks) = (case.expected()?, case.ranks(options())?);
        let sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
        let results = |i: usize| (0..3).map(|_| Buffer::<bf16>::named(ranks.all.stream(i), "d", 35 * 32)).collect::<Result<Vec<_>>>();
        let mut results = [results(0)?, results(1)?];
        let two_streams = |rank: &EmulatedCommunicator| Ok([rank.device().stream()?, rank.device().stream()?]);
        let streams = ranks.all.world.ranks.iter().map(two_streams).collect::<Result<Vec<_>>>()?;
        for (i, (side, results)) in sides.iter().zip(&mut results).enumerate() {
            let ([stream, other], Side { scatter, a, part, bias, .. }) = (&streams[i], side);
            let bind = |d| scatter.bind(ranks.all.stream(i), a.view(), part.view(), Some(bias.view()), d);
            let mut bound = results.iter_mut().map(|d| bind(d.view_mut())).collect::<Result<Vec<_>>>()?;
            let [first, second, third] = &mut bound[..] else { panic!("three results") };
            let (one, two) = (first.begin(stream)?, second.begin(other)?);
            one.finish()?;
            third.run(other)?;
            two.finish()?;
        }
        for (i, results) in results.iter().enumerate() {
            streams[i].iter().try_for_each(|stream| ranks.all.arenas[i].ticket(stream)?.wait())?;
            for d in results {
                let found: Bits = d.to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
                assert!(found == expected[i][0][1], "rank {i}, seed {seed}");
            }
        }
    }
    Ok(())
}

/// One half in a graph and the other not is refused before anything is enqueued, and the place is kept.
#[test]
fn halves_are_of_one_graph() -> Result<()> {
    let case = two(Method::Sequential);
    let ranks = case.ranks(options())?;
    let mut sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
    let (stream, out) = (ranks.all.stream(0), &ranks.out[0]);
    let mut pair = sides[0].bind(stream)?;
    let is_refused = |result: Result<()>| assert!(matches!(result, Err(Error::NotCapturable { what: "half of a call", .. })), "{result:?}");
    pair.gathered.copy_shard(stream, pair.shard)?;
    let gathering = pair.gathered.begin(stream)?;
    is_refused(Graph::capture(&[stream, out], || gathering.finish()).map(drop));
    let mut outside = None;
    Graph::capture(&[stream, out], || {
        outside = Some(pair.scattered.begin(stream)?);
        Err::<(), _>(Error::Invalid { what: "the capture", why: "is given up".to_owned() })
    })
    .unwrap_err();
    is_refused(outside.expect("it was begun").finish());
    // The place of the gather, once another call has the other one.
    drop(pair.scattered.begin(stream)?);
    let refused = pair.gathered.copy_shard(stream, pair.shard).unwrap_err().to_string();
    assert!(refused.contains("is not finished"), "{refused}");
    Ok(())
}

/// A capture that is given up between the halves leaves the place free; a call that is dropped keeps it.
#[test]
fn what_is_dropped_keeps_its_place_but_in_a_capture() -> Result<()> {
    let case = two(Method::Sequential);
    let (expected, ranks) = (case.expected()?, case.ranks(options())?);
    let mut sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
    let mut pairs = Vec::new();
    for (i, side) in sides.iter_mut().enumerate() {
        pairs.push(side.bind(ranks.all.stream(i))?);
    }
    let copy = ranks.all.world.runtime.load::<CopyWords>()?;
    for (i, pair) in pairs.iter_mut().enumerate() {
        let stream = ranks.all.stream(i);
        // By one rank alone, and an odd number of times: both are at the same place after it.
        for _ in 0..[3, 0][i] {
            let given_up = Graph::capture(&[stream, &ranks.out[i]], || {
                pair.gathered.copy_shard(stream, pair.shard)?;
                let _gathering = pair.gathered.begin(stream)?;
                Err::<(), _>(Error::Invalid { what: "a product beside it", why: "fails".to_owned() })
            });
            assert!(given_up.unwrap_err().to_string().contains("a product beside it"));
        }
        pair.call(stream, Order::GatherFirst)?;
    }
    for (i, pair) in pairs.iter_mut().enumerate() {
        let stream = ranks.all.stream(i);
        ranks.all.arenas[i].ticket(stream)?.wait()?;
        assert!(bits(stream, &keep(&copy, stream, pair.gathered.result())?)? == expected[i][0][0], "rank {i}");
    }
    let (stream, pair) = (ranks.all.stream(0), &mut pairs[0]);
    pair.gathered.copy_shard(stream, pair.shard)?;
    drop(pair.gathered.begin(stream)?);
    drop(pair.scattered.begin(stream)?);
    let refused = pair.gathered.copy_shard(stream, pair.shard).unwrap_err().to_string();
    assert!(refused.contains("is not finished; this one would take its place: finish it first"), "{refused}");
    Ok(())
}

/// A rank that does not call is named, with the chunk that does not come, by each method.
#[test]
fn a_rank_that_does_not_call_is_named() -> Result<()> {
    for method in [Method::Fused, Method::Sequential] {
        let case = two(method);
        let ranks = case.ranks(ArenaOptions { deadline: Duration::from_millis(300), ..options() })?;
        let mut sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
        let stream = ranks.all.stream(0);
        sides[0].bind(stream)?.call(stream, Order::GatherFirst)?;
        let error = ranks.all.arenas[0].ticket(stream)?.wait().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("chunk"), "{method:?}: {error}");
    }
    Ok(())
}

/// After the first call nothing is allocated, and no host waits: over 100 calls.
#[test]
fn a_hundred_calls_allocate_nothing() -> Result<()> {
    let (gathers, scatters) = (by(Method::Sequential, None, [4, 16, 8]), config(ScatterMethod::Sequential, 1, [4, 8, 16]));
    let case = Case::new(2, gathers, scatters, 3);
    let ranks = case.ranks(options())?;
    let mut sides = [Side::new(&ranks, 0, &case)?, Side::new(&ranks, 1, &case)?];
    let mut pairs = Vec::new();
    for (i, side) in sides.iter_mut().enumerate() {
        pairs.push(side.bind(ranks.all.stream(i))?);
    }
    let mut call = || pairs.iter_mut().enumerate().try_for_each(|(i, pair)| pair.call(ranks.all.stream(i), Order::GatherFirst));
    call()?;
    let usage = || ranks.all.world.ranks.iter().map(|rank| rank.device().usage()).collect::<Vec<_>>();
    let before = usage();
    (0..100).try_for_each(|_| call())?;
    assert_eq!(usage(), before);
    (0..2).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())
}
