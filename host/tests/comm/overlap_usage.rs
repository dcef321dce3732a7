//! Gathered products call after call: what they allocate, what they give back, and beside collectives.

use half::bf16 as Half;
use oxtile::comm::{Communicator, ReduceOp};
use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Method, OverlapConfig, OverlapMemory};
use oxtile::runtime::{DeviceUsage, Mode};
use oxtile::symmetric::{ArenaOptions, SymmetricError};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, PinnedBuffer, Result, Stream};

use crate::arenas::Arenas;
use crate::overlap::{Calls, Case, ROUNDS, by, cut, last, member};
use crate::overlap_calls::Ranks;
use crate::support::{World, is_long, seeds};

const METHODS: [Method; 3] = [Method::Fused, Method::Chunked, Method::Sequential];

/// Two ranks for the products of a case.
pub fn ranks(case: &Case, options: EmulatedOptions) -> Result<Ranks> {
    let cluster = EmulatedOptions { devices: case.ranks, seed: Some(case.seed), ..options };
    Ranks::over(Arenas::over(World::with(cluster), case.options()), case.config.bytes::<bf16, bf16>()?)
}

/// By every method, eagerly and by a graph of the first call: after the first call nothing is allocated and no host waits, however many there are.
#[test]
fn after_the_first_call_nothing_is_allocated_and_no_host_waits() -> Result<()> {
    let calls = if is_long() { 1000 } else { 100 };
    for (method, is_captured) in METHODS.into_iter().flat_map(|method| [false, true].map(|is_captured| (method, is_captured))) {
        let case = Case { ranks: 2, config: by(method, Some(cut(1, 2)), [70, 32, 136]), calls: Calls::Eager, seed: 1 };
        let ranks = ranks(&case, EmulatedOptions { mode: Mode::Fast, ..EmulatedOptions::default() })?;
        let gathers = [0, 1].map(|i| ranks.gather(i, case.config)).into_iter().collect::<Result<Vec<_>>>()?;
        let product = case.product();
        let mut sides = Vec::new();
        for i in 0..2 {
            let stream = ranks.all.stream(i);
            let weight = Buffer::from_slice(stream, &case.weight(i as u32))?;
            let own = Buffer::from_slice(stream, &case.shard(&case.operand(0), i as u32))?;
            let kept = Buffer::<bf16>::uninitialised(stream, case.operand(0).len() as u64)?;
            sides.push((weight, own, Buffer::<bf16>::uninitialised(stream, product.m * product.n)?, kept));
        }
        let mut bound = Vec::new();
        for (i, (weight, own, d, kept)) in sides.iter_mut().enumerate() {
            let mut product = gathers[i].bind(ranks.all.stream(i), weight.view(), None, d.view_mut())?;
            product.keep_gathered(kept)?;
            bound.push((product, &*own));
        }
        let mut graphs = Vec::new();
        for (i, (product, own)) in bound.iter_mut().enumerate().filter(|_| is_captured) {
            let stream = ranks.all.stream(i);
            graphs.push(Graph::capture(&[stream, &ranks.out[i]], || product.copy_shard(stream, own).and_then(|()| product.run(stream)))?);
        }
        let usage = || [0, 1].map(|i| ranks.all.stream(i).device().usage());
        let (mut after_first, mut waits) = (usage(), 0);
        for call in 0..calls {
            for (i, (product, own)) in bound.iter_mut().enumerate() {
                let stream = ranks.all.stream(i);
                match graphs.get(i) {
                    Some(graph) => graph.replay(stream)?,
                    None => product.copy_shard(stream, own).and_then(|()| product.run(stream))?,
                }
            }
            if call == 0 {
                after_first = usage();
            }
            let expected = after_first.map(|first| DeviceUsage { host_waits: first.host_waits + waits, ..first });
            assert_eq!(usage(), expected, "{method:?}, captured {is_captured}, call {call}: no host waits but for the test");
            // So that what is enqueued has an end.
            if call % 10 == 9 {
                ranks.all.world.streams.iter().try_for_each(Stream::synchronize)?;
                waits += 1;
            }
        }
        let ticket = |i: usize| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait();
        (0..2).try_for_each(ticket)?;
    }
    Ok(())
}

/// What fails half-way gives back what it took, and the arena can be closed.
#[test]
fn what_fails_half_way_gives_back_what_it_took() -> Result<()> {
    let case = Case { ranks: 2, config: by(Method::Fused, None, [70, 32, 136]), calls: Calls::Eager, seed: 1 };
    // Memory for which the arena has no flags left.
    let all = Arenas::with(2, 1, ArenaOptions { channels: 20, ..case.options() });
    let out = all.world.ranks[0].device().urgent_stream()?;
    let error = OverlapMemory::take(&all.arenas[0], &member(&all, 0), 64, &out).unwrap_err();
    assert!(matches!(error, Error::Symmetric(SymmetricError::NoChannel { .. })), "{error}");
    all.close();

    let ranks = ranks(&case, EmulatedOptions::default())?;
    let (stream, product) = (ranks.all.stream(0), case.product());
    let (len, mut d) = (product.k * product.n, Buffer::<bf16>::zeros(stream, product.m * product.n)?);
    let (weight, bias) = (Buffer::<bf16>::zeros(stream, len + 1)?, Buffer::<bf16>::zeros(stream, product.n + 1)?);
    stream.synchronize()?;
    let before = stream.device().usage().bytes;
    {
        let gathers = [ranks.gather(0, case.config)?, ranks.gather(1, case.config)?];
        let made = stream.device().usage().bytes;
        // The map of the gathered operand is there when that of the weight is refused: no tensor map begins at 2 bytes.
        let error = gathers[0].bind(stream, weight.view().slice(1, len + 1), None, d.view_mut()).unwrap_err().to_string();
        assert!(error.contains("no multiple of 16 bytes: begin the view at one, or copy it"), "{error}");
        let error = gathers[0].bind(stream, weight.view().slice(0, len), Some(bias.view()), d.view_mut()).unwrap_err();
        assert!(matches!(error, Error::Length { .. }), "{error}");
        stream.synchronize()?;
        assert_eq!(stream.device().usage().bytes, made);
        drop(gathers[0].bind(stream, weight.view().slice(0, len), None, d.view_mut())?);
        stream.synchronize()?;
        assert_eq!(stream.device().usage().bytes, made, "what is bound gives its maps back");
        assert!(made > before, "an operation has lists of tiles and flags");
    }
    stream.synchronize()?;
    assert_eq!(stream.device().usage().bytes, before);
    let Ranks { all, out, memories } = ranks;
    drop((weight, bias, d, out, memories));
    all.close();
    Ok(())
}

/// All methods in turn, each call beside a collective of the communicator on another stream: the bits of both.
#[test]
fn every_method_beside_collectives() -> Result<()> {
    for seed in 0..seeds() / 4 {
        let method = METHODS[seed as usize % 3];
        let config = by(method, Some(last(2, 2)), [264, 32, 136]);
        let config = AllGatherConfig { overlap: OverlapConfig { margin: 1, ..config.overlap }, ..config };
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed };
        let ranks = ranks(&case, EmulatedOptions { mode: Mode::Check, ..EmulatedOptions::default() })?;
        let gathers = [0, 1].map(|i| ranks.gather(i, config)).into_iter().collect::<Result<Vec<_>>>()?;
        let (world, product) = (&ranks.all.world, case.product());
        let beside = world.ranks.iter().map(|rank| rank.device().stream()).collect::<Result<Vec<_>>>()?;
        let mut sums = beside.iter().map(|stream| Buffer::from_slice(stream, &[1_u32; 64])).collect::<Result<Vec<_>>>()?;
        let results = |i: usize| (0..ROUNDS).map(|_| Buffer::<bf16>::uninitialised(ranks.all.stream(i), product.m * product.n)).collect();
        let mut results = [results(0), results(1)].into_iter().collect::<Result<Vec<Vec<_>>>>()?;
        let weights = [0, 1].map(|i| Buffer::from_slice(ranks.all.stream(i), &case.weight(i as u32)));
        let weights = weights.into_iter().collect::<Result<Vec<Buffer<bf16>>>>()?;
        let mut bound = Vec::new();
        for (i, results) in results.iter_mut().enumerate() {
            let bind = |d| gathers[i].bind(ranks.all.stream(i), weights[i].view(), None, d);
            bound.push(results.iter_mut().map(|d| bind(d.view_mut())).collect::<Result<Vec<_>>>()?);
        }
        for round in 0..ROUNDS {
            let operand = case.operand(round);
            for i in 0..2 {
                let (stream, product) = (ranks.all.stream(i), &mut bound[i][round as usize]);
                let shard = PinnedBuffer::from_slice(stream, &case.shard(&operand, i as u32))?;
                // One rank's collective is enqueued before its product, the other's after it.
                if i == 0 {
                    world.ranks[i].all_reduce(&beside[i], &mut sums[i], ReduceOp::Sum)?;
                }
                product.shard(stream)?.copy_from_pinned(stream, &shard)?;
                product.run(stream)?;
                if i == 1 {
                    world.ranks[i].all_reduce(&beside[i], &mut sums[i], ReduceOp::Sum)?;
                }
            }
        }
        drop(bound);
        for i in 0..2 {
            let stream = ranks.all.stream(i);
            ranks.all.arenas[i].ticket(stream)?.wait()?;
            for (d, expected) in results[i].iter().zip(case.expected(method, i as u32)?) {
                let found: Vec<u16> = d.to_vec_as::<Half>(stream)?.into_iter().map(Half::to_bits).collect();
                assert!(found == expected, "{method:?}, seed {seed}, rank {i}");
            }
            assert_eq!(sums[i].to_vec(&beside[i])?, [1 << ROUNDS; 64], "{method:?}, seed {seed}, rank {i}");
        }
    }
    Ok(())
}

/// The third rule of kernels that wait: rank 1 puts its shard after a collective, for which rank 0 needs a multiprocessor beside its product.
#[test]
fn a_collective_before_a_shard_needs_a_margin() -> Result<()> {
    let stuck = |margin: u32, seed: u64| -> Result<Option<String>> {
        // More tiles than multiprocessors, so that the product takes all that it may.
        let config = by(Method::Fused, None, [600, 16, 72]);
        let config = AllGatherConfig { overlap: OverlapConfig { margin, ..config.overlap }, ..config };
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed };
        let ranks = ranks(&case, EmulatedOptions { mode: Mode::Fast, multiprocessors: 4, ..EmulatedOptions::default() })?;
        let gathers = [0, 1].map(|i| ranks.gather(i, config)).into_iter().collect::<Result<Vec<AllGatherGemm<bf16, bf16>>>>()?;
        let (world, product) = (&ranks.all.world, case.product());
        let beside = world.ranks[0].device().stream()?;
        let streams = [&beside, ranks.all.stream(1)];
        let mut sums = streams.map(|stream| Buffer::from_slice(stream, &[1_u32])).into_iter().collect::<Result<Vec<_>>>()?;
        let mut memory = Vec::new();
        for i in 0..2 {
            let stream = ranks.all.stream(i);
            memory.push((Buffer::<bf16>::zeros(stream, product.k * product.n)?, Buffer::<bf16>::zeros(stream, product.m * product.n)?));
        }
        let mut bound = Vec::new();
        for (i, (weight, d)) in memory.iter_mut().enumerate() {
            bound.push(gathers[i].bind(ranks.all.stream(i), weight.view(), None, d.view_mut())?);
        }
        world.ranks[1].all_reduce(ranks.all.stream(1), &mut sums[1], ReduceOp::Sum)?;
        for (i, product) in bound.iter_mut().enumerate() {
            product.shard(ranks.all.stream(i))?.fill_zero(ranks.all.stream(i))?;
            product.run(ranks.all.stream(i))?;
        }
        // So that the product is the first under some seeds.
        (0..6).try_for_each(|_| sums[0].fill_zero(&beside))?;
        world.ranks[0].all_reduce(&beside, &mut sums[0], ReduceOp::Sum)?;
        match ranks.all.stream(0).synchronize() {
            Err(Error::Stuck { waits }) => Ok(Some(waits)),
            other => other.map(|()| None),
        }
    };
    let mut reports = Vec::new();
    for seed in 0..16 {
        reports.extend(stuck(0, seed)?);
        assert_eq!(stuck(1, seed)?, None, "a margin of one, seed {seed}");
    }
    assert!(!reports.is_empty(), "the product is first under no seed");
    assert!(reports.iter().all(|waits| waits.contains("waits for 1 of 4 multiprocessors, while kernel `gemm_gathered")), "{}", reports[0]);
    Ok(())
}

/// Shards that kernels write, of two memories: each launch can hold all multiprocessors, while the shard that the other rank waits for is not written. Calls in one order that an event
/// keeps, or with a margin, go well.
#[test]
fn two_memories_need_one_order_or_a_margin() -> Result<()> {
    let stuck = |margin: u32, is_chained: bool, seed: u64| -> Result<bool> {
        let config = by(Method::Fused, None, [600, 16, 72]);
        let config = AllGatherConfig { overlap: OverlapConfig { margin, ..config.overlap }, ..config };
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed };
        let cluster = EmulatedOptions { devices: 2, seed: Some(seed), mode: Mode::Fast, multiprocessors: 4, ..EmulatedOptions::default() };
        // Flags of two memories.
        let arenas = Arenas::over(World::with(cluster), ArenaOptions { channels: 160, ..case.options() });
        let ranks = Ranks::over(arenas, config.bytes::<bf16, bf16>()?)?;
        let (product, copy) = (case.product(), ranks.all.world.runtime.load::<CopyWords>()?);
        let (mut streams, mut gathers, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for (i, rank) in ranks.all.world.ranks.iter().enumerate() {
            let (stream, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
            let second = OverlapMemory::take(&ranks.all.arenas[i], &member(&ranks.all, i), config.bytes::<bf16, bf16>()?, &out)?;
            gathers.push([ranks.gather(i, config)?, AllGatherGemm::<bf16, bf16>::new(&second, &stream, config)?]);
            let zeros = |len| Buffer::<bf16>::zeros(&stream, len);
            memory.push((zeros(product.k * product.n)?, [zeros(product.m * product.n)?, zeros(product.m * product.n)?]));
            streams.push([ranks.all.stream(i).clone(), stream]);
        }
        let mut bound = Vec::new();
        for (i, (weight, d)) in memory.iter_mut().enumerate() {
            for (which, d) in d.iter_mut().enumerate() {
                bound.push(gathers[i][which].bind(&streams[i][which], weight.view(), None, d.view_mut())?);
            }
        }
        let shards = [0, 1].map(|i| Buffer::<bf16>::zeros(&streams[i][0], 600 * 72 / 2)).into_iter().collect::<Result<Vec<_>>>()?;
        for (i, own) in shards.iter().enumerate() {
            // The other rank begins with the other memory.
            for which in if is_chained || i == 0 { [0, 1] } else { [1, 0] } {
                let (stream, product) = (&streams[i][which], &mut bound[2 * i + which]);
                if is_chained && which == 1 {
                    stream.wait(&streams[i][0].record()?)?;
                }
                let shard = product.shard(stream)?.view_mut().cast();
                copy.launch(stream, CopyWordsArgs { source: own.view().cast(), target: shard })?;
                product.run(stream)?;
            }
        }
        let ends = streams.iter().flatten().map(Stream::synchronize).collect::<Result<Vec<_>>>();
        if let Err(Error::Stuck { .. }) = ends { Ok(true) } else { ends.map(|_| false) }
    };
    let mut count = 0;
    for seed in 0..16 {
        count += u32::from(stuck(0, false, seed)?);
        assert!(!stuck(1, false, seed)?, "a margin of one, seed {seed}");
        assert!(!stuck(0, true, seed)?, "in one order, seed {seed}");
    }
    assert!(count > 0, "each shard is written first under every seed");
    Ok(())
}
