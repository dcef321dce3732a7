//! Gathers of copy engines.

use std::time::Duration;

use oxtile::comm::{Rank, Team};
use oxtile::symmetric::{ArenaOptions, ChunkedGather, CollectiveGather, GatherMemory, PullGather, PushGather, PushMemory, PutOrder};
use oxtile::timeline::{Recording, Timeline};
use oxtile::{Buffer, Error, Result, Stream};

use crate::arenas::{Arenas, options, symmetric};
use crate::support::{WORLDS, numbers};

/// Three rounds of a gather on a team, the result read a chunk at a time on another stream.
fn pull(all: &Arenas, team: &Team, members: &[usize], chunks: u64) -> Result<()> {
    let mut memories: Vec<_> = all.arenas.iter().map(|arena| Some(GatherMemory::<u32>::take(arena, 5).unwrap())).collect();
    let mut gathers = Vec::new();
    for &i in members {
        let member = team.member(all.arenas[i].rank()).unwrap();
        let stream = all.world.ranks[i].device().stream()?;
        gathers.push(PullGather::new(&all.arenas[i], &member, memories[i].take().unwrap(), &stream, chunks)?);
    }
    for round in 0..3 {
        let mut running = Vec::new();
        for (gather, &i) in gathers.iter_mut().zip(members) {
            let value = numbers(10 * round + i as u32, 5);
            gather.shard(all.stream(i))?.copy_from_slice_later(all.stream(i), &value)?;
            running.push(gather.start()?);
        }
        for ((gather, ready), &i) in gathers.iter_mut().zip(running).zip(members) {
            let side = all.world.ranks[i].device().stream()?;
            for (member, &from) in (0..).zip(members) {
                let member = Rank::new(member, team.size()).unwrap();
                for chunk in 0..chunks {
                    let place = ready.chunk(&side, member, chunk)?;
                    assert_eq!(place.len(), length(chunks, chunk), "of rank {from}");
                }
            }
            let expected: Vec<_> = members.iter().flat_map(|from| numbers(10 * round + *from as u32, 5)).collect();
            assert_eq!(ready.whole(all.stream(i))?.to_vec(all.stream(i))?, expected);
            gather.release(ready)?;
        }
    }
    Ok(())
}

/// Of a chunk of five elements.
fn length(chunks: u64, chunk: u64) -> u64 {
    if chunks == 1 { 5 } else { [3, 2][chunk as usize] }
}

trait Later {
    fn copy_from_slice_later(&mut self, stream: &Stream, values: &[u32]) -> Result<()>;
}

/// Without waiting for the stream, which may wait for ranks that this thread has not come to yet.
impl Later for Buffer<u32> {
    fn copy_from_slice_later(&mut self, stream: &Stream, values: &[u32]) -> Result<()> {
        self.copy_from_pinned(stream, &oxtile::PinnedBuffer::from_slice(stream, values)?)
    }
}

#[test]
fn shards_are_pulled_by_the_world_and_by_teams() {
    for size in WORLDS {
        for seed in 0..8 {
            let all = Arenas::new(size, seed);
            pull(&all, &Team::all(all.world.size()), &(0..size as usize).collect::<Vec<_>>(), 1 + seed % 2).unwrap();
            all.close();
        }
    }
    for seed in 0..8 {
        let all = Arenas::new(4, seed);
        let team = Team::new(all.world.size(), &[all.world.rank(3), all.world.rank(0), all.world.rank(2)]).unwrap();
        pull(&all, &team, &[3, 0, 2], 1 + seed % 2).unwrap();
        assert!(team.member(all.world.rank(1)).is_none(), "rank 1 cannot hold a place in the team");
        all.close();
    }
}

fn push(all: &Arenas, rounds: u32, chunks: u64, order: PutOrder) -> Result<()> {
    let size = all.world.size();
    let team = Team::all(size);
    let mut gathers = Vec::new();
    for (i, arena) in all.arenas.iter().enumerate() {
        let member = team.member(arena.rank()).unwrap();
        let streams = [all.world.ranks[i].device().stream()?, all.world.ranks[i].device().stream()?];
        let memory = PushMemory::<u32>::take(arena, 5, size.get())?;
        gathers.push(PushGather::new(arena, &member, memory, [&streams[0], &streams[1]], chunks)?.in_order(order));
    }
    for round in 0..rounds {
        let mut shards = all.world.buffers(|rank| numbers(10 * round + rank, 5));
        // As memory of another library, whose uses are not noted: tickets alone say when it may be written again.
        // SAFETY: the elements of `shards`, which outlive this round's work.
        let raw = |shard: &Buffer<u32>| unsafe { Buffer::<u32>::borrow_raw(&shard.device(), shard.address(), 5) };
        let raw: Vec<_> = shards.iter().map(raw).collect::<Result<_>>()?;
        let running: Vec<_> = gathers.iter_mut().zip(&raw).map(|(gather, shard)| gather.start_from(&[shard])).collect::<Result<_>>()?;
        for (i, (gather, ready)) in gathers.iter_mut().zip(running).enumerate() {
            let side = all.world.ranks[i].device().stream()?;
            let last = ready.chunk(&side, Rank::new(size.get() - 1, size).unwrap(), chunks - 1)?;
            assert_eq!(last.len(), length(chunks, chunks - 1));
            assert_eq!(ready.whole(all.stream(i))?.len(), 5 * u64::from(size.get()));
            ready.wait()?;
            shards[i].fill_zero(&side)?;
            gather.release(ready)?;
        }
        shards.iter().zip(&all.world.streams).try_for_each(|(shard, stream)| shard.to_vec(stream).map(|_| ()))?;
    }
    Ok(())
}

/// One of the orders, for either number of chunks.
fn order(seed: u64) -> PutOrder {
    [PutOrder::ByPeer, PutOrder::ByChunk, PutOrder::InStep][(seed / 2 % 3) as usize]
}

#[test]
fn shards_are_pushed() {
    for size in WORLDS {
        for seed in 0..8 {
            let all = Arenas::new(size, seed);
            push(&all, 3, 1 + seed % 2, order(seed)).unwrap();
            all.close();
        }
    }
}

/// Rank 2 never releases the first epoch: what rank 1 gets from rank 0 in the second.
fn beside_a_late_reader(seed: u64, order: PutOrder) -> Result<Vec<u32>> {
    let all = Arenas::new(3, seed);
    let (team, mut gathers) = (Team::all(all.world.size()), Vec::new());
    for (i, arena) in all.arenas.iter().enumerate() {
        let streams = [all.world.ranks[i].device().stream()?, all.world.ranks[i].device().stream()?];
        let (member, memory) = (team.member(arena.rank()).unwrap(), PushMemory::<u32>::take(arena, 5, 3)?);
        gathers.push(PushGather::new(arena, &member, memory, [&streams[0], &streams[1]], 2)?.in_order(order));
    }
    let mut epochs = Vec::new();
    for (i, gather) in gathers.iter_mut().enumerate() {
        gather.shard(all.stream(i))?.fill_zero(all.stream(i))?;
        epochs.push(gather.start()?);
    }
    let late = epochs.pop();
    for (i, (gather, ready)) in gathers.iter_mut().zip(epochs).enumerate() {
        gather.release(ready)?;
        gather.shard(all.stream(i))?.copy_from(all.stream(i), &Buffer::from_slice(all.stream(i), &numbers(i as u32, 5))?)?;
    }
    let ready = gathers[..2].iter_mut().map(|gather| gather.start()).collect::<Result<Vec<_>>>()?;
    let chunks = [0, 1].map(|chunk| ready[1].chunk(all.stream(1), Rank::ZERO, chunk).and_then(|chunk| chunk.to_vec(all.stream(1))));
    let [first, second] = chunks;
    drop(late);
    Ok([first?, second?].concat())
}

#[test]
fn a_late_reader_delays_no_put_to_those_before_it() {
    for seed in 0..32 {
        for order in [PutOrder::ByPeer, PutOrder::InStep] {
            assert_eq!(beside_a_late_reader(seed, order).unwrap(), numbers(0, 5), "seed {seed}, {order:?}");
        }
    }
    assert!(matches!(beside_a_late_reader(0, PutOrder::ByChunk), Err(Error::Stuck { .. })));
    assert_eq!([(8 << 20) - 1, 8 << 20].map(PutOrder::of), [PutOrder::ByPeer, PutOrder::InStep]);
}

/// How often a rank begins to put to the next one, so many chunks each, before what it gets in the same step has come. Each puts to the rank after it first, in every recorded call.
pub fn out_of_step(recording: &Recording, ranks: u32, chunks: usize) -> u32 {
    let size = ranks as usize;
    let puts = |rank: u32| {
        let puts = recording.spans.iter().filter(|span| span.rank == rank && span.name.starts_with("put to"));
        let mut puts: Vec<_> = puts.map(|put| (put.start, put.end)).collect();
        puts.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert_eq!(puts.len(), chunks * (size - 1), "of rank {rank}");
        puts
    };
    let puts: Vec<_> = (0..ranks).map(puts).collect();
    let steps = (0..size).flat_map(|rank| (1..size - 1).map(move |step| (rank, step)));
    let is_early = |(rank, step): &(usize, usize)| puts[*rank][step * chunks].0 < puts[(rank + size - step) % size][step * chunks - 1].1;
    steps.filter(is_early).count() as u32
}

/// The same of pushes of four ranks under all seeds.
fn pushes_out_of_step(order: PutOrder) -> u32 {
    let push = |seed| {
        let all = Arenas::new(4, seed);
        let timeline = Timeline::start(&all.world.runtime).unwrap();
        push(&all, 1, 2, order).unwrap();
        out_of_step(&timeline.finish().unwrap(), 4, 2)
    };
    (0..32).map(push).sum()
}

/// Members that put by peer run ahead of one another; in step they do not, whatever the order of their streams.
#[test]
fn puts_keep_step() {
    assert_eq!(pushes_out_of_step(PutOrder::InStep), 0);
    assert!(pushes_out_of_step(PutOrder::ByPeer) > 32);
}

/// The right programs say nothing under 1000 seeds.
#[test]
fn gathers_are_silent_under_a_thousand_seeds() {
    for seed in 0..1000 {
        let all = Arenas::new(2, seed);
        pull(&all, &Team::all(all.world.size()), &[0, 1], 1 + seed % 2).unwrap_or_else(|error| panic!("pull, seed {seed}: {error}"));
        push(&all, 2, 1 + seed % 2, order(seed)).unwrap_or_else(|error| panic!("push, seed {seed}: {error}"));
    }
}

/// Two gathers of a rank on the same streams, in one chunk each.
#[test]
fn a_rank_pulls_and_pushes_on_the_same_streams() {
    const LEN: u64 = 1001;
    let bytes = 4 * (LEN + 64) * 4;
    for seed in 0..4 {
        let all = Arenas::with(3, seed, ArenaOptions { bytes, deadline: Duration::from_secs(30), ..options() });
        let team = Team::all(all.world.size());
        let members: Vec<_> = all.world.size().ranks().map(|rank| team.member(rank).unwrap()).collect();
        let (mut pulls, mut pushes) = (Vec::new(), Vec::new());
        for (i, (arena, member)) in all.arenas.iter().zip(&members).enumerate() {
            let streams = [(); 2].map(|()| arena_stream(&all, i));
            pulls.push(PullGather::new(arena, member, GatherMemory::<u32>::take(arena, LEN).unwrap(), &streams[0], 1).unwrap());
            let memory = PushMemory::<u32>::take(arena, LEN, 3).unwrap();
            pushes.push(PushGather::new(arena, member, memory, [&streams[0], &streams[1]], 1).unwrap());
        }
        for round in 0..2 {
            let shard = |rank: usize| vec![10 * round + rank as u32; LEN as usize];
            let mut pulled = Vec::new();
            for (i, pull) in pulls.iter_mut().enumerate() {
                pull.shard(all.stream(i)).unwrap().copy_from_slice_later(all.stream(i), &shard(i)).unwrap();
                pulled.push(pull.start().unwrap());
            }
            let pushed: Vec<_> = pushes
                .iter_mut()
                .enumerate()
                .map(|(i, push)| {
                    let own = Buffer::from_slice(all.stream(i), &shard(i)).unwrap();
                    (push.start_from(&[&own]).unwrap(), own)
                })
                .collect();
            let expected: Vec<_> = (0..3).flat_map(shard).collect();
            for (i, (pulled, (pushed, _own))) in pulled.into_iter().zip(pushed).enumerate() {
                for (what, ready) in [("pulled by", &pulled), ("pushed to", &pushed)] {
                    ready.wait().unwrap();
                    let found = ready.whole(all.stream(i)).unwrap().to_vec(all.stream(i)).unwrap();
                    assert!(found == expected, "seed {seed}, round {round}: {what} rank {i}");
                }
                pulls[i].release(pulled).unwrap();
                pushes[i].release(pushed).unwrap();
            }
        }
        drop((pulls, pushes));
        all.close();
    }
}

/// One more of the rank.
fn arena_stream(all: &Arenas, rank: usize) -> Stream {
    all.stream(rank).device().stream().unwrap()
}

#[test]
fn a_gather_names_who_did_not_publish() {
    let all = Arenas::with(3, 1, options());
    let team = Team::all(all.world.size());
    let mut gathers: Vec<_> = (0..3)
        .map(|i| {
            let memory = GatherMemory::<u32>::take(&all.arenas[i], 2).unwrap();
            let member = team.member(all.arenas[i].rank()).unwrap();
            PullGather::new(&all.arenas[i], &member, memory, all.stream(i), 1).unwrap()
        })
        .collect();
    let mut running = Vec::new();
    for i in [0, 2] {
        gathers[i].shard(all.stream(i)).unwrap().fill_zero(all.stream(i)).unwrap();
        running.push(gathers[i].start().unwrap());
    }
    let error = symmetric(running[0].wait());
    assert_eq!(error.to_string(), "rank 0: PullGather::start, number 1: no signal from rank 1 within 200ms");
}

/// What is assigned to a piece of a shard is read by no rank: the others know of the memory that was lent.
#[test]
fn a_shard_that_was_replaced_is_refused() {
    let all = Arenas::new(2, 1);
    let (arena, stream) = (&all.arenas[0], all.stream(0));
    let member = Team::all(all.world.size()).member(arena.rank()).unwrap();
    let memory = |arena| (GatherMemory::<u32>::take(arena, 5).unwrap(), PushMemory::<u32>::take(arena, 5, 2).unwrap());
    let ((pulled, pushed), _other) = (memory(arena), memory(&all.arenas[1]));
    let side = all.world.ranks[0].device().stream().unwrap();
    let mut pull = PullGather::new(arena, &member, pulled, stream, 1).unwrap();
    let mut push = PushGather::new(arena, &member, pushed, [stream, &side], 1).unwrap();
    let mut collective = CollectiveGather::<u32, _>::new(&all.world.ranks[0], stream, &[5], 1).unwrap();
    let gathers: [&mut dyn ChunkedGather<u32>; 3] = [&mut pull, &mut push, &mut collective];
    for gather in gathers {
        *gather.shard(stream).unwrap() = Buffer::zeros(stream, 8).unwrap();
        let error = gather.start().map(drop).unwrap_err().to_string();
        assert!(error.contains("another buffer was assigned to what ChunkedGather::shards lends"), "{error}");
    }
}
