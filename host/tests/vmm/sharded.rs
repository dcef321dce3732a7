//! Weights in shards: what ranks pull in every format, step after step, and as a graph that is replayed with other values.

use oxtile::comm::{HostRank, Team};
use oxtile::num::bf16;
use oxtile::quantize::Direction;
use oxtile::sharded::{self, Bf16, Chain, ChainConfig, Fp8, GradientConfig, GradientScatter, ShardSet, Weight};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{Buffer, Graph, PinnedBuffer, Result, Stream};

use crate::sharded_ranks::{Holder, Oracle, expected, values, weights};
use crate::watch::{doing, settle};

const STEPS: u32 = 3;
const REPLAYS: u32 = 8;

pub fn program(rank: HostRank, options: ArenaOptions) -> Result<()> {
    pulls::<Bf16>(&rank, options.clone())?;
    pulls::<Fp8>(&rank, options.clone())?;
    pulls::<sharded::Mxfp8>(&rank, options.clone())?;
    pulls::<sharded::Nvfp4>(&rank, options.clone())?;
    pulls::<sharded::Nvfp4Squares>(&rank, options.clone())?;
    replays(&rank, options)
}

/// Every rank pulls the cast of the whole, in both passes.
fn pulls<F: Oracle>(rank: &HostRank, options: ArenaOptions) -> Result<()> {
    let (device, arena) = (rank.device(), Arena::open(rank, options)?);
    let stream = device.stream()?;
    let member = Team::all(rank.world()).member(rank.rank()).expect("every rank is of the world");
    let weights = weights::<F>();
    let mut holder = Holder::<F>::new(&stream, &arena, &member, &weights)?;
    let config = ChainConfig::new(&holder.set, holder.set.weights().map(|(id, _)| id))?;
    let mut chain = Chain::new(&stream, &holder.set, &ChainConfig { distance: 2, ..config })?;
    for step in 0..STEPS {
        doing(rank.rank(), format!("step {step} of {}", F::NAME));
        holder.publish(&stream, step)?;
        let forward: Vec<_> = (0..weights.len()).map(|at| expected::<F>(&stream, &weights, (step, at), Direction::Rows)).collect();
        let backward = (0..weights.len() - 1).rev().map(|at| expected::<F>(&stream, &weights, (step, at), Direction::Columns));
        for (is_backward, expected) in [(false, forward), (true, backward.collect::<Vec<_>>())] {
            let found = holder.pass(&mut chain, &stream, is_backward)?;
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(found == expected, "{}, {}, step {step}, backward: {is_backward}, position {at}", rank.rank(), F::NAME);
            }
        }
        arena.check()?;
    }
    settle(&stream)?;
    drop((holder, chain));
    arena.close()?.finish()
}

/// Steps of two weights, one after another; `between` in the middle of a pass of the middle one, when a weight is on its way. It takes less of the arena than [`ROOM`](crate::gathered::ROOM).
///
/// # Errors
/// What ended the arena.
pub fn turns(arena: &Arena, stream: &Stream, steps: u32, between: &dyn Fn()) -> Result<()> {
    let member = Team::all(arena.world()).member(arena.rank()).expect("every rank is of the world");
    let weights = [Weight::new("first", [96, 64]), Weight::new("second", [128, 64])];
    let mut set = ShardSet::<Bf16>::new(stream, arena, &member, weights.to_vec())?;
    let mut chain = Chain::new(stream, &set, &ChainConfig::new(&set, set.weights().map(|(id, _)| id))?)?;
    for step in 0..steps {
        let published = set.update(stream)?.publish()?;
        let mut pass = published.forward(&mut chain)?;
        while let Some(id) = pass.next_weight() {
            pass.take(id, stream)?;
            if step == steps / 2 && id.index() == 0 {
                between();
            }
        }
        pass.finish()?;
    }
    Ok(())
}

/// Steps of the gradients of two weights; `between` in the middle of the middle one, when the rows of a gradient are on their way and the other ranks wait for those of the next. It takes
/// less of the arena than [`ROOM`](crate::gathered::ROOM).
///
/// # Errors
/// What ended the arena.
pub fn scatters(arena: &Arena, stream: &Stream, steps: u32, between: &dyn Fn()) -> Result<()> {
    let member = Team::all(arena.world()).member(arena.rank()).expect("every rank is of the world");
    let weights = [Weight::new("first", [96, 64]), Weight::new("second", [128, 64])];
    let gradients = GradientScatter::<bf16>::new::<Bf16>(stream, arena, &member, &weights, GradientConfig::default())?;
    let (computed, round) = (Buffer::<f32>::zeros(stream, 128 * 64)?, SumParts::<f32, bf16>::new(&stream.device().runtime())?);
    gradients.open()?;
    for step in 0..steps {
        for id in gradients.ids() {
            round.round(stream, computed.view(), gradients.buffer(id, stream)?)?;
            gradients.scatter(id, stream, |_| Ok(()))?;
            if step == steps / 2 && id.index() == 0 {
                between();
            }
        }
        gradients.finish(stream, |_| Ok(()))?;
    }
    Ok(())
}

/// Whole steps in a graph, from the first call on.
fn replays(rank: &HostRank, options: ArenaOptions) -> Result<()> {
    let (device, arena) = (rank.device(), Arena::open(rank, options)?);
    let stream = device.stream()?;
    let member = Team::all(rank.world()).member(rank.rank()).expect("every rank is of the world");
    let weights = [Weight::new("first", [256, 128]), Weight::new("second", [500, 64]), Weight::new("third", [33, 1024])];
    let mut set = ShardSet::<Bf16>::new(&stream, &arena, &member, weights.to_vec())?;
    let ids: Vec<_> = set.weights().map(|(id, _)| id).collect();
    let mut chain = Chain::captured(&stream, &set, &ChainConfig::new(&set, ids.clone())?)?;
    let rows: Vec<_> = ids.iter().map(|id| set.own_rows(*id)).collect::<Result<_>>()?;
    let own = weights.iter().zip(&rows).map(|(weight, rows)| Buffer::<f32>::zeros(&stream, (rows.end - rows.start) * weight.columns));
    let mut own = own.collect::<Result<Vec<_>>>()?;
    let mut read = weights.iter().map(|weight| Buffer::<bf16>::zeros(&stream, weight.rows * weight.columns)).collect::<Result<Vec<_>>>()?;
    let (narrow, copy) = (SumParts::<f32, bf16>::new(&device.runtime())?, SumParts::<bf16, bf16>::new(&device.runtime())?);
    let pulls = chain.pulls().clone();
    doing(rank.rank(), "capturing".to_owned());
    let graph = Graph::capture(&[&stream, &pulls], || {
        let mut updating = set.update(&stream)?;
        for (id, own) in ids.iter().zip(&own) {
            narrow.round(&stream, own.view(), updating.master(*id, 0)?)?;
        }
        let published = updating.publish()?;
        let mut pass = published.forward(&mut chain)?;
        for (id, read) in ids.iter().zip(&mut read) {
            copy.round(&stream, pass.take(*id, &stream)?.tensor().data.view(), read.view_mut())?;
        }
        pass.finish()
    })?;
    for replay in 0..REPLAYS {
        doing(rank.rank(), format!("replay {replay}"));
        for ((own, rows), (at, weight)) in own.iter_mut().zip(&rows).zip(weights.iter().enumerate()) {
            let all = values(replay, at, 0, [weight.rows, weight.columns]);
            let part = &all[(rows.start * weight.columns) as usize..(rows.end * weight.columns) as usize];
            own.copy_from_pinned(&stream, &PinnedBuffer::from_slice(&stream, part)?)?;
        }
        graph.replay(&stream)?;
        settle(&stream)?;
        for (read, (at, weight)) in read.iter().zip(weights.iter().enumerate()) {
            let exact = values(replay, at, 0, [weight.rows, weight.columns]);
            let found = read.to_vec_as::<half::bf16>(&stream)?;
            let is_equal = found.iter().zip(&exact).all(|(found, exact)| *found == half::bf16::from_f32(*exact));
            assert!(is_equal, "{}, replay {replay}, weight {at}", rank.rank());
        }
    }
    drop((graph, chain, set));
    arena.close()?.finish()
}
