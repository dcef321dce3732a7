//! Two ranks of a virtual cluster hand a shard over while one of them computes, and agree on the largest magnitude; what ran when
//! goes to a file: `cargo run -p oxtile --example timeline -- trace.json`, then `oxtile timeline trace.json --svg trace.svg`.

use std::error::Error;
use std::path::Path;

use oxtile::comm::{EmulatedCommunicator, Rank, ReduceMax, WorldSize};
use oxtile::quantize::Amax;
use oxtile::symmetric::{Arena, ArenaOptions, Epoch};
use oxtile::timeline::{Recording, Timeline};
use oxtile::{Buffer, Result, Runtime};

/// Elements of a shard.
const SHARD: u64 = 1024;

#[allow(dead_code, reason = "tests take the program alone")]
fn main() -> std::result::Result<(), Box<dyn Error>> {
    let file = std::env::args_os().nth(1).ok_or("which file is to be written?")?;
    Ok(recorded(&Runtime::emulated(2)?)?.write(Path::new(&file))?)
}

/// Runs the program and returns what was recorded of it, the preparations left out.
pub fn recorded(runtime: &Runtime) -> Result<Recording> {
    let world = WorldSize::new(2).expect("two ranks");
    let ranks = EmulatedCommunicator::world_of(runtime, world)?;
    let [zero, one] = [0, 1].map(|index| Rank::new(index, world).expect("of this world"));
    let [compute_0, fetch_0, compute_1] = [0, 0, 1].map(|device| runtime.device(device).and_then(|device| device.stream()));
    let (compute_0, fetch_0, compute_1) = (compute_0?, fetch_0?, compute_1?);
    let arenas = ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default())).collect::<Result<Vec<_>>>()?;
    let mut shards = arenas.iter().map(|arena| arena.buffer::<f32>(SHARD)).collect::<Result<Vec<_>>>()?;
    let channels = || arenas.iter().map(Arena::channel).collect::<Result<Vec<_>>>();
    let (ready, done) = (channels()?, channels()?);
    let weights_0 = Buffer::from_slice(&compute_0, &[0.5_f32; SHARD as usize])?;
    let weights_1 = Buffer::from_slice(&compute_1, &[2.0_f32; SHARD as usize])?;
    let (mut amax_0, mut amax_1) = (Buffer::zeros(&compute_0, 1)?, Buffer::zeros(&compute_1, 1)?);
    let amax = Amax::new(runtime)?;
    [&compute_0, &fetch_0, &compute_1].into_iter().try_for_each(|stream| stream.synchronize())?;

    let timeline = Timeline::start(runtime)?;
    let epoch = Epoch::ZERO.next();
    // Rank 1 writes its shard and signals.
    shards[1].local_mut().copy_from(&compute_1, &weights_1)?;
    arenas[1].signal(&compute_1, ready[1], zero, epoch)?;
    // Rank 0 fetches it on a stream of its own, and computes meanwhile.
    arenas[0].wait(&fetch_0, ready[0], one, epoch)?;
    let fetched = Buffer::uninitialised(&fetch_0, SHARD)?;
    let ticket = shards[0].peer(one)?.get(&fetch_0, 0..SHARD, fetched, 0)?;
    arenas[0].signal(&fetch_0, done[0], one, epoch)?;
    for _ in 0..4 {
        amax.run(&compute_0, weights_0.view(), &mut amax_0)?;
    }
    // What needs the shard comes after it.
    let fetched = ticket.then(&compute_0)?;
    amax.run(&compute_0, fetched.view(), &mut amax_0)?;
    // Rank 1 computes too, and writes its shard again once rank 0 has it.
    amax.run(&compute_1, weights_1.view(), &mut amax_1)?;
    arenas[1].wait(&compute_1, done[1], zero, epoch)?;
    shards[1].local_mut().fill_zero(&compute_1)?;
    ranks[0].reduce_max(&compute_0, &mut amax_0)?;
    ranks[1].reduce_max(&compute_1, &mut amax_1)?;
    [&compute_0, &fetch_0, &compute_1].into_iter().try_for_each(|stream| stream.synchronize())?;
    let recording = timeline.finish()?;

    assert_eq!(amax_0.to_vec(&compute_0)?, [2.0]);
    Ok(recording)
}
