//! Two ranks of a virtual cluster pass over four weights in shards, forward and backward, and record what ran when:
//! `cargo run -p oxtile --example pulls -- trace.json`, then `oxtile timeline trace.json --svg pulls.svg`.

use std::error::Error;
use std::path::Path;

use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
use oxtile::num::bf16;
use oxtile::sharded::{Bf16, Chain, ChainConfig, Published, ShardSet, Weight};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::timeline::Timeline;
use oxtile::{Buffer, Result, Runtime, Stream};

/// Elements of a side of each weight.
const SIDE: u64 = 32;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let file = std::env::args_os().nth(1).ok_or("which file is to be written?")?;
    let runtime = Runtime::emulated(2)?;
    let world = WorldSize::new(2).expect("two ranks");
    let ranks = EmulatedCommunicator::world_of(&runtime, world)?;
    let streams = ranks.iter().map(|rank| rank.device().stream()).collect::<Result<Vec<Stream>>>()?;
    let read = SumParts::<bf16, bf16>::new(&runtime)?;
    let mut sides = Vec::new();
    for (rank, stream) in ranks.iter().zip(&streams) {
        let arena = Arena::open(rank, ArenaOptions::default())?;
        let member = Team::all(world).member(arena.rank()).expect("every rank is of the world");
        let weights = ["qkv", "out", "up", "down"].map(|name| Weight::new(name, [SIDE, SIDE]));
        let set = ShardSet::<Bf16>::new(stream, &arena, &member, weights.to_vec())?;
        let chain = Chain::new(stream, &set, &ChainConfig::new(&set, set.weights().map(|(id, _)| id))?)?;
        sides.push((set, chain, Buffer::<bf16>::zeros(stream, SIDE * SIDE)?));
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    let timeline = Timeline::start(&runtime)?;
    for ((set, ..), stream) in sides.iter_mut().zip(&streams) {
        set.update(stream)?.publish()?;
    }
    for ((set, chain, output), stream) in sides.iter_mut().zip(&streams) {
        let published = Published::of(set)?;
        for is_backward in [false, true] {
            let mut pass = if is_backward { published.backward(chain)? } else { published.forward(chain)? };
            while let Some(weight) = pass.next_weight() {
                // In place of products: kernels that read the weight.
                let whole = pass.take(weight, stream)?;
                (0..2).try_for_each(|_| read.round(stream, whole.data.view(), output.view_mut()))?;
            }
            pass.finish()?;
        }
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    Ok(timeline.finish()?.write(Path::new(&file))?)
}
