//! Planted bugs of streams and ranks: each is reported under every seed tried, with both uses, and its seed replays it. The right
//! programs are silent.

use oxtile::comm::{Communicator, ReduceOp, Team};
use oxtile::runtime::{RaceKind, StreamRace};
use oxtile::symmetric::{Arena, ArenaOptions, ChunkedGather, PushGather, PushMemory, Ready};
use oxtile::{Buffer, Error, PinnedBuffer, Result, Stream};

use crate::support::{World, numbers};

/// How a program goes wrong, or that it does not.
type Program = fn(&World, right: bool) -> Result<()>;

fn run(program: Program, seed: u64, right: bool) -> Result<()> {
    let world = World::new(2, seed);
    program(&world, right)?;
    world.streams.iter().try_for_each(|stream| stream.synchronize())
}

/// The bug is found under every one of 32 seeds, and a seed gives one report.
fn planted(program: Program, kind: RaceKind) -> StreamRace {
    let report = |seed| match run(program, seed, false) {
        Err(Error::Race(race)) => *race,
        other => panic!("seed {seed}: {other:?}"),
    };
    for seed in 0..32 {
        let race = report(seed);
        let kinds = if kind == RaceKind::FreedInUse { vec![kind, RaceKind::UsedAfterFree] } else { vec![kind] };
        assert!(kinds.contains(&race.kind), "{race}");
        assert_eq!(race.to_string(), report(seed).to_string(), "seed {seed} replays its report");
        assert!(race.to_string().ends_with(&format!("OXTILE_SEED={seed}")));
        assert!([&race.first, &race.second].iter().any(|by| by.at.is_some_and(|at| at.file().ends_with("sanitizer.rs"))), "{race}");
    }
    report(0)
}

/// The right program says nothing under 1000 seeds.
fn silent(program: Program) {
    for seed in 0..1000 {
        run(program, seed, true).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

/// The same memory again, whose uses the runtime does not connect with the first buffer's: what a program on raw pointers has.
fn alias(world: &World, rank: usize, buffer: &Buffer<u32>) -> Buffer<u32> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(world.ranks[rank].device(), buffer.address(), buffer.len()) }.unwrap()
}

/// TransformerEngine #2960: the gather runs on a side stream and the consumer does not wait for it.
fn late_gather(world: &World, right: bool) -> Result<()> {
    let (shards, mut gathered, mut used) = (world.buffers(|rank| numbers(rank, 4)), world.zeros(8), world.zeros(8));
    let mut keep = Vec::new();
    for (i, rank) in world.ranks.iter().enumerate() {
        let side = rank.device().stream()?;
        side.wait(&world.streams[i].record()?)?;
        let (shard, mut target) = (alias(world, i, &shards[i]), alias(world, i, &gathered[i]));
        rank.all_gather(&side, &shard, &mut target)?;
        if right {
            world.streams[i].wait(&side.record()?)?;
        }
        let gathered_raw = alias(world, i, &gathered[i]);
        used[i].copy_from(&world.streams[i], &gathered_raw)?;
        keep.push((side, shard, target, gathered_raw));
    }
    world.streams.iter().chain(keep.iter().map(|kept| &kept.0)).try_for_each(|stream| stream.synchronize())?;
    gathered.clear();
    Ok(())
}

#[test]
fn a_gather_that_nobody_waits_for() {
    let race = planted(late_gather, RaceKind::Unordered);
    let text = race.to_string();
    assert!(text.contains("all_gather of shards of 16 bytes writes, for rank ") && text.contains("a copy reads"), "{text}");
    silent(late_gather);
}

/// TransformerEngine #2737: the receive buffer is read while the next message goes into it.
fn half_read_buffer(world: &World, right: bool) -> Result<()> {
    let (own, mut received, mut used) = (world.buffers(|rank| numbers(rank, 4)), world.zeros(4), world.zeros(4));
    let mut keep = Vec::new();
    for (i, rank) in world.ranks.iter().enumerate() {
        let (peer, side) = (world.rank(1 - i as u32), rank.device().stream()?);
        rank.exchange(&world.streams[i], &[(peer, own[i].view())], &[(peer, received[i].view_mut())])?;
        side.wait(&world.streams[i].record()?)?;
        let source = alias(world, i, &received[i]);
        let mut target = alias(world, i, &used[i]);
        target.copy_from(&side, &source)?;
        if right {
            world.streams[i].wait(&side.record()?)?;
        }
        rank.exchange(&world.streams[i], &[(peer, own[i].view())], &[(peer, received[i].view_mut())])?;
        keep.push((side, source, target));
    }
    world.streams.iter().chain(keep.iter().map(|kept| &kept.0)).try_for_each(|stream| stream.synchronize())?;
    used.clear();
    Ok(())
}

#[test]
fn a_buffer_that_is_half_read() {
    planted(half_read_buffer, RaceKind::Unordered);
    silent(half_read_buffer);
}

/// TransformerEngine #2443: the owner frees a buffer that a peer still reads.
fn freed_by_its_owner(world: &World, right: bool) -> Result<()> {
    let (mut owned, mut used) = (world.buffers(|rank| numbers(rank, 4)), world.zeros(4));
    let lent = alias(world, 1, &owned[0]);
    used[1].copy_from(&world.streams[1], &lent)?;
    if right {
        world.streams[0].wait(&world.streams[1].record()?)?;
    }
    drop(owned.remove(0));
    world.streams.iter().try_for_each(|stream| stream.synchronize())
}

#[test]
fn a_buffer_freed_by_its_owner_while_a_peer_reads() {
    let race = planted(freed_by_its_owner, RaceKind::FreedInUse);
    assert!(race.to_string().contains("enqueued when the last handle was dropped"), "{race}");
    silent(freed_by_its_owner);
}

/// TransformerEngine #2960: the gradient buffer goes back to the pool before the reduce-scatter has read it.
fn recycled_input(world: &World, right: bool) -> Result<()> {
    let (mut gradients, mut shards) = (world.buffers(|rank| numbers(rank, 4)), world.zeros(2));
    let mut keep = Vec::new();
    for (i, rank) in world.ranks.iter().enumerate() {
        let side = rank.device().stream()?;
        side.wait(&world.streams[i].record()?)?;
        let input = alias(world, i, &gradients[i]);
        let mut shard = alias(world, i, &shards[i]);
        rank.reduce_scatter(&side, &input, &mut shard, ReduceOp::Sum)?;
        if right {
            world.streams[i].wait(&side.record()?)?;
        }
        gradients[i].fill_zero(&world.streams[i])?;
        keep.push((side, input, shard));
    }
    world.streams.iter().chain(keep.iter().map(|kept| &kept.0)).try_for_each(|stream| stream.synchronize())?;
    shards.clear();
    Ok(())
}

#[test]
fn an_input_recycled_early() {
    planted(recycled_input, RaceKind::Unordered);
    silent(recycled_input);
}

/// TransformerEngine #2829: the gathered key is used before the second gather, of the value, is done, since the event was
/// recorded between the two.
fn event_between(world: &World, right: bool) -> Result<()> {
    let (own, keys, values, mut used) = (world.buffers(|rank| numbers(rank, 2)), world.zeros(4), world.zeros(4), world.zeros(4));
    let mut keep = Vec::new();
    for (i, rank) in world.ranks.iter().enumerate() {
        let side = rank.device().stream()?;
        side.wait(&world.streams[i].record()?)?;
        let (shard, mut key, mut value) = (alias(world, i, &own[i]), alias(world, i, &keys[i]), alias(world, i, &values[i]));
        rank.all_gather(&side, &shard, &mut key)?;
        let early = side.record()?;
        rank.all_gather(&side, &shard, &mut value)?;
        world.streams[i].wait(&if right { side.record()? } else { early })?;
        let source = alias(world, i, &values[i]);
        used[i].copy_from(&world.streams[i], &source)?;
        keep.push((side, shard, key, value, source));
    }
    world.streams.iter().chain(keep.iter().map(|kept| &kept.0)).try_for_each(|stream| stream.synchronize())
}

#[test]
fn an_event_recorded_too_early() {
    planted(event_between, RaceKind::Unordered);
    silent(event_between);
}

/// A rank's gather in place that has been run.
struct InPlace {
    gather: PushGather<u32>,
    ready: Ready<u32>,
    /// The member's own place.
    own: Buffer<u32>,
    /// Those of the gather, one that reads, and one that writes the place again, after the first time.
    streams: [Stream; 4],
}

fn gathers_in_place(world: &World) -> Result<Vec<InPlace>> {
    let arenas = world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default())).collect::<Result<Vec<_>>>()?;
    let memories = arenas.iter().map(|arena| PushMemory::take(arena, 4, 2)).collect::<Result<Vec<_>>>()?;
    let gather = |(i, memory): (usize, PushMemory<u32>)| {
        let (rank, first) = (&world.ranks[i], &world.streams[i]);
        let [out, arrivals, reader, writer] = [(); 4].map(|()| rank.device().stream());
        let streams = [out?, arrivals?, reader?, writer?];
        let member = Team::all(world.size()).member(rank.rank()).expect("of the world");
        let mut gather = PushGather::new(&arenas[i], &member, memory, [&streams[0], &streams[1]], 1)?;
        let own = gather.shard(first)?;
        own.copy_from_pinned(first, &PinnedBuffer::from_slice(first, &numbers(rank.rank().index(), 4))?)?;
        let own = alias(world, i, own);
        streams[3].wait(&first.record()?)?;
        let ready = gather.start()?;
        Ok(InPlace { gather, ready, own, streams })
    };
    memories.into_iter().enumerate().map(gather).collect()
}

/// Writes the own places again on the streams of their writers.
fn write_again(gathers: Vec<InPlace>, asks: bool) -> Result<()> {
    let mut kept = Vec::new();
    for InPlace { mut gather, ready, mut own, streams } in gathers {
        gather.release(ready)?;
        if asks {
            gather.shard(&streams[3])?;
        }
        own.fill_zero(&streams[3])?;
        kept.push((gather, own, streams));
    }
    kept.iter().flat_map(|(_, _, streams)| streams).try_for_each(|stream| stream.synchronize())
}

/// The own place is written again before it has been copied to the others.
fn rewritten_while_it_is_put(world: &World, right: bool) -> Result<()> {
    write_again(gathers_in_place(world)?, right)
}

#[test]
fn an_own_place_that_is_written_while_it_is_put() {
    let text = planted(rewritten_while_it_is_put, RaceKind::Unordered).to_string();
    assert!(text.contains("a fill writes") && text.contains("reads"), "{text}");
    silent(rewritten_while_it_is_put);
}

/// The own place is written again after the copies to the others, before this rank has read what was gathered.
fn rewritten_while_it_is_read(world: &World, right: bool) -> Result<()> {
    let (gathers, mut used) = (gathers_in_place(world)?, Vec::new());
    for InPlace { ready, streams: [_, _, reader, writer], .. } in &gathers {
        let mut read = Buffer::uninitialised(reader, 8)?;
        read.copy_from(reader, ready.whole(reader)?)?;
        ready.whole(writer)?;
        used.push(read);
    }
    write_again(gathers, right)
}

#[test]
fn an_own_place_that_is_written_while_it_is_read() {
    let text = planted(rewritten_while_it_is_read, RaceKind::Unordered).to_string();
    assert!(text.contains("a fill writes") && text.contains("a copy reads"), "{text}");
    silent(rewritten_while_it_is_read);
}

/// A gather's place is read by its address after the epoch was released, while the others put the next one.
fn read_after_its_release(world: &World, right: bool) -> Result<()> {
    let mut kept = Vec::new();
    for (i, InPlace { mut gather, ready, own, streams }) in gathers_in_place(world)?.into_iter().enumerate() {
        let raw = alias(world, i, ready.whole(&streams[2])?);
        let mut read = Buffer::uninitialised(&streams[2], 8)?;
        if right {
            read.copy_from(&streams[2], &raw)?;
        }
        gather.release(ready)?;
        kept.push((gather, own, streams, raw, read));
    }
    let running = kept.iter_mut().map(|(gather, ..)| gather.start()).collect::<Result<Vec<_>>>()?;
    if !right {
        kept.iter_mut().try_for_each(|(_, _, streams, raw, read)| read.copy_from(&streams[2], raw))?;
    }
    kept.iter().flat_map(|(_, _, streams, ..)| streams).try_for_each(|stream| stream.synchronize())?;
    drop(running);
    Ok(())
}

#[test]
fn a_place_that_is_read_after_its_epoch() {
    let text = planted(read_after_its_release, RaceKind::Unordered).to_string();
    assert!(text.contains("a copy reads") && text.contains("writes"), "{text}");
    silent(read_after_its_release);
}

#[test]
fn the_text_of_a_report() {
    let mut race = planted(recycled_input, RaceKind::Unordered);
    race.first.at = None;
    race.second.at = None;
    (race.first.stream, race.second.stream, race.first.device, race.second.device, race.device) = (1, 2, 0, 0, 0);
    (race.first.what, race.second.what) = ("first".to_owned(), "second".to_owned());
    assert_eq!(
        race.to_string(),
        "stream race on bytes 0..16 of `buffer` (device 0): two streams use it, one writes, and nothing orders them\n  \
         first: first, stream 1 of device 0, enqueued when the last handle was dropped\n  \
         then:  second, stream 2 of device 0, enqueued when the last handle was dropped\n  \
         mend: let the second stream wait for an event, ticket or signal that follows the first use\n  \
         replay: OXTILE_SEED=0"
    );
}
