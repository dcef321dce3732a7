//! Many calls on one memory, between which no host waits: each takes its place after the release of the call before the last one.

use std::time::Duration;

use half::bf16 as Half;
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, GemmReduceScatter, Method, OverlapConfig, ScatterMethod};
use oxtile::runtime::Mode;
use oxtile::symmetric::{Arena, ArenaOptions, PutOrder, SymmetricError};
use oxtile::timeline::{Activity, Timeline};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, PinnedBuffer, Result, Stream};

use crate::arenas::Arenas;
use crate::gathers::out_of_step;
use crate::overlap::{Calls, Case, by, cut, last};
use crate::overlap_calls::Ranks;
use crate::overlap_usage::ranks;
use crate::scattered;
use crate::support::{World, is_long, seeds};

const METHODS: [Method; 4] = [Method::Fused, Method::Fused, Method::Sequential, Method::Chunked];

/// A place is read, released, and written again for the call after the next one.
#[test]
fn many_gathers_run_ahead() -> Result<()> {
    for seed in 0..seeds() / 4 {
        let (method, calls) = (METHODS[seed as usize % 4], [Calls::Eager, Calls::Mixed][seed as usize / 4 % 2]);
        let case = Case { ranks: 2, config: by(method, Some(cut(1, 1)), [16, 32, 64]), calls, seed };
        case.run_rounds(24, calls == Calls::Eager && seed % 2 == 0)?;
    }
    Ok(())
}

/// The same of parts of sums.
#[test]
fn many_scatters_run_ahead() -> Result<()> {
    for seed in 0..seeds() / 8 {
        let method = [Method::Sequential, Method::Fused][seed as usize % 2];
        let case =
            scattered::Case { ranks: 2, config: scattered::config(scattered::beside(method), 1, [16, 16, 32]), calls: Calls::Eager, seed };
        case.run_rounds(24)?;
    }
    Ok(())
}

/// Replays of a graph of the first call, each of another operand.
#[test]
fn many_replays_of_other_operands() -> Result<()> {
    for seed in 0..if is_long() { 20 } else { 1 } {
        let case = Case { ranks: 2, config: by(Method::Fused, Some(cut(1, 1)), [16, 32, 64]), calls: Calls::Captured, seed };
        case.run_rounds(50, false)?;
    }
    Ok(())
}

/// How often ranks of four put to the next one before what comes in the same step is there: the puts of a gathered product.
fn puts_out_of_step(order: PutOrder) -> Result<u32> {
    let config = by(Method::Fused, Some(cut(2, 1)), [64, 32, 64]);
    let config = AllGatherConfig { overlap: OverlapConfig { order: Some(order), ..config.overlap }, ..config };
    let mut count = 0;
    for seed in 0..12 {
        let case = Case { ranks: 4, config, calls: Calls::Eager, seed };
        let ranks = ranks(&case, EmulatedOptions { mode: Mode::Fast, ..EmulatedOptions::default() })?;
        let mut memory = Vec::new();
        for i in 0..4 {
            let stream = ranks.all.stream(i);
            memory.push((ranks.gather(i, config)?, Buffer::<bf16>::zeros(stream, 8 * 64)?, Buffer::<bf16>::zeros(stream, 64 * 8)?));
        }
        let mut bound = Vec::new();
        for (i, (gather, weight, d)) in memory.iter_mut().enumerate() {
            bound.push(gather.bind(ranks.all.stream(i), weight.view(), None, d.view_mut())?);
        }
        for (i, product) in bound.iter_mut().enumerate() {
            product.shard(ranks.all.stream(i))?.fill_zero(ranks.all.stream(i))?;
        }
        let timeline = Timeline::start(&ranks.all.world.runtime)?;
        bound.iter_mut().enumerate().try_for_each(|(i, product)| product.run(ranks.all.stream(i)))?;
        (0..4).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())?;
        count += out_of_step(&timeline.finish()?, 4, 2);
    }
    Ok(count)
}

/// Members that put by peer run ahead of one another; in step they do not.
#[test]
fn the_puts_of_a_product_keep_step() -> Result<()> {
    assert_eq!(puts_out_of_step(PutOrder::InStep)?, 0);
    assert!(puts_out_of_step(PutOrder::ByPeer)? > 12);
    Ok(())
}

/// After a product whose operand did not come, nothing of its stream leaves the rank: what is told then is not heard.
#[test]
fn what_follows_a_product_without_its_operand_does_not_leave_the_rank() -> Result<()> {
    for seed in 0..4 {
        let config = by(Method::Fused, Some(cut(1, 1)), [16, 32, 64]);
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed };
        let world = World::new(2, seed);
        // The kernel of rank 0 polls for some steps, and rank 1 waits for longer than that.
        let options = |deadline| ArenaOptions { deadline, channels: 100, ..case.options() };
        let deadlines = [Duration::from_nanos(800), Duration::from_millis(500)];
        let open = |(rank, deadline)| Arena::open(rank, options(deadline));
        let arenas = world.ranks.iter().zip(deadlines).map(open).collect::<Result<Vec<_>>>()?;
        let ranks = Ranks::over(Arenas { world, arenas }, 16 * 64 * 2)?;
        let flags = [0, 1].map(|i| ranks.all.arenas[i].flags("result", 1)).into_iter().collect::<Result<Vec<_>>>()?;
        let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
        let ([stream, other], [zero, one]) = ([0, 1].map(|i| ranks.all.stream(i)), [0, 1].map(|i| ranks.all.world.rank(i)));
        let (weight, mut d) = (Buffer::<bf16>::zeros(stream, 16 * 64)?, Buffer::<bf16>::zeros(stream, 16 * 16)?);
        let mut product = gathers[0].bind(stream, weight.view(), None, d.view_mut())?;
        product.shard(stream)?.fill_zero(stream)?;
        product.run(stream)?;
        flags[0].set(stream, 0, one)?;
        // The result is taken for good, or not.
        flags[1].take_back(other, 0, zero)?;
        assert!(ranks.all.arenas[1].ticket(other)?.wait().is_err(), "seed {seed}: rank 1 heard of a result of garbage");
        let error = ranks.all.arenas[0].ticket(stream)?.wait().unwrap_err();
        assert!(matches!(error, Error::Symmetric(SymmetricError::Deadline { .. } | SymmetricError::Aborted { .. })), "{error}");
    }
    Ok(())
}

/// Layers of other methods in one graph, each of which takes both places; and what the graph keeps.
#[test]
fn layers_of_one_graph() -> Result<()> {
    let layers = [
        by(Method::Fused, Some(last(2, 2)), [72, 32, 136]),
        by(Method::Chunked, Some(cut(1, 1)), [72, 32, 136]),
        by(Method::Sequential, Some(cut(1, 1)), [72, 32, 136]),
    ];
    let case = |which: usize| Case { ranks: 2, config: layers[which], calls: Calls::Captured, seed: 1 };
    let ranks = Ranks::new(2, 72 * 136 * 2, case(0).options())?;
    let of_rank = |i| layers.iter().map(|config| ranks.gather(i, *config)).collect::<Result<Vec<_>>>();
    let all_gathers = [of_rank(0)?, of_rank(1)?];
    let (mut graphs, mut results, mut owns) = (Vec::new(), Vec::new(), Vec::new());
    for (i, gathers) in all_gathers.iter().enumerate() {
        let stream = ranks.all.stream(i);
        let weight = Buffer::from_slice(stream, &case(0).weight(i as u32))?;
        let own = Buffer::from_slice(stream, &case(0).shard(&case(0).operand(0), i as u32))?;
        let mut d = (0..5).map(|_| Buffer::<bf16>::zeros(stream, 72 * 16)).collect::<Result<Vec<_>>>()?;
        let mut calls = Vec::new();
        for (d, which) in d.iter_mut().zip([0, 1, 2, 0, 1]) {
            calls.push(gathers[which].bind(stream, weight.view(), None, d.view_mut())?);
        }
        let all = |call: &mut oxtile::overlap::GatheredProduct<'_, _, _>| call.copy_shard(stream, &own).and_then(|()| call.run(stream));
        graphs.push(Graph::capture(&[stream, &ranks.out[i]], || calls.iter_mut().try_for_each(all))?);
        drop(calls);
        results.push(d);
        owns.push(own);
    }
    for round in 0..2 {
        for (i, own) in owns.iter_mut().enumerate() {
            own.copy_from_slice(ranks.all.stream(i), &case(0).shard(&case(0).operand(round), i as u32))?;
        }
        (0..2).try_for_each(|i| graphs[i].replay(ranks.all.stream(i)))?;
        (0..2).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())?;
        for (i, results) in results.iter().enumerate() {
            for (d, which) in results.iter().zip([0, 1, 2, 0, 1]) {
                let found: Vec<u16> = d.to_vec_as::<Half>(ranks.all.stream(i))?.into_iter().map(Half::to_bits).collect();
                let expected = case(which).expected_of(layers[which].overlap.method.unwrap(), i as u32, &[case(0).operand(round)])?;
                assert!(found == expected[0], "rank {i}, round {round}, {:?}", layers[which].overlap.method);
            }
        }
    }
    // The operations and the memory are gone; a graph of them keeps the arena.
    let Ranks { all, out, memories } = ranks;
    drop((all_gathers, memories, out));
    let kept = all.arenas[0].clone().close().map_err(Error::from).unwrap_err();
    assert!(matches!(kept, Error::Symmetric(SymmetricError::InUse { .. })), "{kept}");
    drop((graphs, results, owns));
    all.close();
    Ok(())
}

/// The words that tell others are not in the stream of the calls, which would delay them.
#[test]
fn others_are_told_on_another_stream() -> Result<()> {
    let config = by(Method::Fused, Some(cut(1, 1)), [16, 32, 64]);
    let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, 16 * 64 * 2, case.options())?;
    let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
    let zeros = |i: usize| Ok((Buffer::<bf16>::zeros(ranks.all.stream(i), 16 * 64)?, Buffer::<bf16>::zeros(ranks.all.stream(i), 16 * 16)?));
    let mut memory = [zeros(0), zeros(1)].into_iter().collect::<Result<Vec<_>>>()?;
    let mut bound = Vec::new();
    for (i, (weight, d)) in memory.iter_mut().enumerate() {
        bound.push(gathers[i].bind(ranks.all.stream(i), weight.view(), None, d.view_mut())?);
    }
    ranks.all.world.streams.iter().try_for_each(Stream::synchronize)?;
    let timeline = Timeline::start(&ranks.all.world.runtime)?;
    for (i, product) in bound.iter_mut().enumerate() {
        let stream = ranks.all.stream(i);
        for _ in 0..3 {
            product.shard(stream)?.fill_zero(stream)?;
            product.run(stream)?;
        }
    }
    (0..2).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())?;
    let recording = timeline.finish()?;
    for rank in 0..2 {
        let of = |activity| recording.spans.iter().filter(move |span| span.rank == rank && span.activity == activity);
        let kernels: std::collections::BTreeSet<_> =
            of(Activity::Kernel).filter(|span| span.name.starts_with("gemm_gathered")).map(|span| span.stream).collect();
        let signals: Vec<_> = of(Activity::Signal).map(|span| span.stream).collect();
        assert!(kernels.len() == 1 && signals.len() >= 6, "{kernels:?}, {signals:?}");
        assert!(signals.iter().all(|stream| !kernels.contains(stream)), "rank {rank} tells the others on the stream of its products");
    }
    Ok(())
}

/// What uploads, or meets other ranks, is refused in a capture.
#[test]
fn what_is_made_is_refused_in_a_graph() -> Result<()> {
    let config = by(Method::Fused, Some(cut(1, 1)), [16, 32, 64]);
    let case = Case { ranks: 2, config, calls: Calls::Eager, seed: 1 };
    let ranks = Ranks::new(2, 16 * 64 * 2, case.options())?;
    let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
    let stream = ranks.all.stream(0);
    let (weight, mut d) = (Buffer::<bf16>::zeros(stream, 16 * 64)?, Buffer::<bf16>::zeros(stream, 16 * 16)?);
    let made = Graph::capture(&[stream], || ranks.gather(0, config).map(drop)).unwrap_err();
    assert!(matches!(made, Error::NotCapturable { .. }), "{made}");
    let bound = Graph::capture(&[stream], || gathers[0].bind(stream, weight.view(), None, d.view_mut()).map(drop)).unwrap_err();
    assert!(matches!(bound, Error::NotCapturable { .. }), "{bound}");
    // Neither has changed anything.
    gathers[0].bind(stream, weight.view(), None, d.view_mut()).map(drop)
}

/// Replays of a scattered product and gathered products by turns, of members of which the last has no rows: its graph takes FREE of the place as those of the others do.
#[test]
fn a_member_without_rows_keeps_its_turn() -> Result<()> {
    const SIZES: [u64; 3] = [9, 64, 64];
    let config = by(Method::Sequential, Some(cut(1, 1)), SIZES);
    for seed in 0..8 {
        let case = Case { ranks: 4, config, calls: Calls::Eager, seed };
        let ranks = ranks(&case, EmulatedOptions { mode: Mode::Check, ..EmulatedOptions::default() })?;
        let scattered = scattered::config(ScatterMethod::Sequential, 1, SIZES);
        let (mut made, mut memory) = (Vec::new(), Vec::new());
        for i in 0..4_u32 {
            let stream = ranks.all.stream(i as usize);
            made.push((
                ranks.gather(i as usize, config)?,
                GemmReduceScatter::<bf16, bf16>::new(&ranks.memories[i as usize], stream, scattered)?,
            ));
            let own = Buffer::from_slice(stream, &case.shard(&case.operand(0), i))?;
            let zeros = |len| Buffer::<bf16>::zeros(stream, len);
            let sums = zeros(if i < 3 { 3 * 64 } else { 0 })?;
            memory.push((Buffer::from_slice(stream, &case.weight(i))?, own, zeros(9 * 16)?, zeros(16 * 64)?, sums));
        }
        let mut bound = Vec::new();
        for (i, (weight, own, d, part, sums)) in memory.iter_mut().enumerate() {
            let (stream, (gather, scatter)) = (ranks.all.stream(i), &made[i]);
            let scattered = scatter.bind(stream, d.view(), part.view(), None, sums.view_mut())?;
            let result = Buffer::<bf16>::zeros(stream, 9 * 16)?;
            bound.push((gather, weight, own, scattered, result));
        }
        let mut graphs = Vec::new();
        for (i, (.., scattered, _)) in bound.iter_mut().enumerate() {
            let stream = ranks.all.stream(i);
            graphs.push(Graph::capture(&[stream, &ranks.out[i]], || scattered.run(stream))?);
        }
        for round in 0..6 {
            // The place of the graph is the first one; gathers have both in turn.
            for (i, (gather, weight, own, _, result)) in bound.iter_mut().enumerate() {
                let stream = ranks.all.stream(i);
                own.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, &case.shard(&case.operand(round), i as u32))?)?;
                graphs[i].replay(stream)?;
                let mut product = gather.bind(stream, weight.view(), None, result.view_mut())?;
                product.copy_shard(stream, own)?;
                product.run(stream)?;
            }
            for (i, (.., result)) in bound.iter().enumerate() {
                let stream = ranks.all.stream(i);
                ranks.all.arenas[i].ticket(stream)?.wait()?;
                let found: Vec<u16> = result.to_vec_as::<Half>(stream)?.into_iter().map(Half::to_bits).collect();
                assert!(
                    found == case.expected_of(Method::Sequential, i as u32, &[case.operand(round)])?[0],
                    "seed {seed}, rank {i}, {round}"
                );
            }
        }
    }
    Ok(())
}

/// What another stream reads of a shard is read before the place's next shard is written, without an event between the streams.
#[test]
fn a_shard_is_kept_for_all_that_read_it() -> Result<()> {
    let config = by(Method::Fused, Some(cut(1, 1)), [16, 32, 64]);
    for seed in 0..8 {
        let case = Case { ranks: 2, config, calls: Calls::Eager, seed };
        let ranks = ranks(&case, EmulatedOptions { mode: Mode::Check, ..EmulatedOptions::default() })?;
        let gathers = [ranks.gather(0, config)?, ranks.gather(1, config)?];
        let zeros =
            |i: usize| Ok((Buffer::<bf16>::zeros(ranks.all.stream(i), 16 * 64)?, Buffer::<bf16>::zeros(ranks.all.stream(i), 16 * 16)?));
        let mut memory = [zeros(0), zeros(1)].into_iter().collect::<Result<Vec<_>>>()?;
        let mut bound = Vec::new();
        for (i, (weight, d)) in memory.iter_mut().enumerate() {
            let beside = ranks.all.stream(i).device().stream()?;
            let read = Buffer::<bf16>::uninitialised(&beside, 8 * 64)?;
            bound.push((gathers[i].bind(ranks.all.stream(i), weight.view(), None, d.view_mut())?, beside, read));
        }
        for _ in 0..4 {
            for (i, (product, beside, read)) in bound.iter_mut().enumerate() {
                let stream = ranks.all.stream(i);
                let shard = product.shard(stream)?;
                shard.fill_zero(stream)?;
                read.copy_from(beside, shard)?;
                product.run(stream)?;
            }
        }
        (0..2).try_for_each(|i| ranks.all.arenas[i].ticket(ranks.all.stream(i))?.wait())?;
        bound.iter().try_for_each(|(_, beside, _)| beside.synchronize())?;
    }
    Ok(())
}
