//! Two ranks of a virtual cluster multiply an operand that they gather meanwhile, three times, and record what ran when:
//! `cargo run -p oxtile --example gathered_product -- trace.json`, then `oxtile timeline trace.json --svg overlap.svg`.

use std::error::Error;
use std::path::Path;

use oxtile::comm::{EmulatedCommunicator, Team, WorldSize};
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, Cut, Global, Method, OverlapConfig, OverlapMemory};
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::timeline::Timeline;
use oxtile::{Buffer, Result, Runtime, Stream};

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let file = std::env::args_os().nth(1).ok_or("which file is to be written?")?;
    let runtime = Runtime::emulated(2)?;
    let world = WorldSize::new(2).expect("two ranks");
    let ranks = EmulatedCommunicator::world_of(&runtime, world)?;
    let streams = ranks.iter().map(|rank| rank.device().stream()).collect::<Result<Vec<Stream>>>()?;
    // Each rank has 256 rows of A, and 16 columns of B. A shard travels in two panels.
    let cut = Cut { panels: 2, ..Cut::WHOLE };
    let overlap = OverlapConfig { method: Some(Method::Fused), cut: Some(cut), ..OverlapConfig::default() };
    let config = AllGatherConfig { transpose_b: true, overlap, ..AllGatherConfig::new(Global { m: 512, n: 32, k: 64 }) };
    let mut sides = Vec::new();
    for (rank, stream) in ranks.iter().zip(&streams) {
        let arena = Arena::open(rank, ArenaOptions::default())?;
        let member = Team::all(world).member(arena.rank()).expect("every rank is of the world");
        let memory = OverlapMemory::take(&arena, &member, config.bytes::<bf16, bf16>()?, &rank.device().urgent_stream()?)?;
        let gather = AllGatherGemm::<bf16, bf16>::new(&memory, stream, config)?;
        sides.push((gather, Buffer::<bf16>::zeros(stream, 16 * 64)?, Buffer::<bf16>::uninitialised(stream, 512 * 16)?));
    }
    let mut products = Vec::new();
    for ((gather, weight, d), stream) in sides.iter_mut().zip(&streams) {
        products.push(gather.bind(stream, weight.view(), None, d.view_mut())?);
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    let timeline = Timeline::start(&runtime)?;
    for _ in 0..3 {
        for (product, stream) in products.iter_mut().zip(&streams) {
            // In place of the layer before: what writes the shard.
            product.shard(stream)?.fill_zero(stream)?;
            product.run(stream)?;
        }
    }
    streams.iter().try_for_each(Stream::synchronize)?;
    Ok(timeline.finish()?.write(Path::new(&file))?)
}
