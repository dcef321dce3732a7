//! Gathers whose members put their shards from where they lie in what is gathered.

use oxtile::comm::{Rank, Team};
use oxtile::symmetric::{ChunkedGather, PushGather, PushMemory, PutOrder, Ready, SymmetricError};
use oxtile::{Buffer, Error, PinnedBuffer, Result, Stream};

use crate::arenas::{Arenas, options, symmetric};
use crate::support::{WORLDS, numbers};

/// Elements of a shard.
const LEN: u32 = 5;

/// A gather of a member, and streams of its rank.
struct Side {
    gather: PushGather<u32>,
    /// Waits for what arrives, and reads at times.
    arrivals: Stream,
    /// Writes and reads.
    compute: Stream,
    /// The same.
    side: Stream,
}

fn sides(all: &Arenas, team: &Team, chunks: u64) -> Result<Vec<(usize, Side)>> {
    // Every rank takes the memory, a member or not.
    let take = |arena| PushMemory::<u32>::take(arena, LEN.into(), team.size().get());
    let mut memories: Vec<_> = all.arenas.iter().map(|arena| take(arena).map(Some)).collect::<Result<_>>()?;
    let members = team.size().ranks().map(|member| team.world_rank(member).unwrap());
    let side = |rank: Rank| {
        let (i, member) = (rank.index() as usize, team.member(rank).unwrap());
        let stream = || all.world.ranks[i].device().stream();
        let (memory, out, arrivals, compute, side) = (memories[i].take().unwrap(), stream()?, stream()?, all.stream(i).clone(), stream()?);
        // Members may differ in it.
        let order = [PutOrder::ByPeer, PutOrder::ByChunk, PutOrder::InStep][(i + chunks as usize) % 3];
        let gather = PushGather::new(&all.arenas[i], &member, memory, [&out, &arrivals], chunks)?.in_order(order);
        Ok((i, Side { gather, arrivals, compute, side }))
    };
    members.map(side).collect()
}

/// Without waiting for the stream, which may wait for ranks that this thread has not come to yet.
fn write(gather: &mut PushGather<u32>, stream: &Stream, values: &[u32]) -> Result<()> {
    gather.shard(stream)?.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, values)?)
}

/// What a stream reads, and what it is to find: the host does not wait for it, which would order whatever it enqueues after.
struct Read {
    what: String,
    stream: Stream,
    found: Buffer<u32>,
    expected: Vec<u32>,
}

impl Read {
    /// Of a place that the stream was given.
    fn new(what: String, stream: &Stream, place: &Buffer<u32>, expected: &[u32]) -> Result<Self> {
        let mut found = Buffer::uninitialised(stream, place.len())?;
        found.copy_from(stream, place)?;
        Ok(Self { what, stream: stream.clone(), found, expected: expected.to_vec() })
    }

    fn check(self) -> Result<()> {
        assert_eq!(self.found.to_vec(&self.stream)?, self.expected, "{}", self.what);
        Ok(())
    }
}

fn read_chunks(ready: &Ready<u32>, round: u32, stream: &Stream, member: Rank, chunks: u64, expected: &[u32]) -> Result<Vec<Read>> {
    let piece = expected.len().div_ceil(chunks as usize);
    let read = |(chunk, expected): (u64, &[u32])| {
        let place = ready.chunk(stream, member, chunk)?;
        Read::new(format!("round {round}: chunk {chunk} of {member}"), stream, place, expected)
    };
    (0..).zip(expected.chunks(piece)).map(read).collect()
}

fn read_whole(ready: &Ready<u32>, round: u32, stream: &Stream, expected: &[u32]) -> Result<Read> {
    Read::new(format!("round {round}"), stream, ready.whole(stream)?, expected)
}

/// What a member has put in a round: it is written anew but for the third one.
fn written(round: u32, member: usize) -> Vec<u32> {
    numbers(10 * [0, 1, 1, 2, 3][round as usize] + member as u32, LEN)
}

/// Rounds in place, one of them from elsewhere by some members, and each chunk compared. A rank that does not wait for tickets waits for nothing before all rounds are over.
fn gather(all: &Arenas, team: &Team, chunks: u64, waits: bool) -> Result<()> {
    let (mut sides, mut reads) = (sides(all, team, chunks)?, Vec::new());
    for round in 0..5 {
        let expected: Vec<_> = sides.iter().map(|(i, _)| written(round, *i)).collect();
        let mut running = Vec::new();
        for (turn, (i, Side { gather, compute, side, .. })) in sides.iter_mut().enumerate() {
            let (shard, writer) = (written(round, *i), if round % 2 == 0 { &*compute } else { &*side });
            if round == 3 && turn % 2 == 1 {
                let mut elsewhere = Buffer::uninitialised(compute, LEN.into())?;
                elsewhere.copy_from_pinned(compute, &PinnedBuffer::from_slice(compute, &shard)?)?;
                running.push(gather.start_from(&[&elsewhere])?);
                continue;
            }
            if round == 0 || shard != written(round - 1, *i) {
                write(gather, writer, &shard)?;
            }
            running.push(gather.start()?);
        }
        for ((_, side), ready) in sides.iter_mut().zip(running) {
            for (member, expected) in team.size().ranks().zip(&expected) {
                reads.extend(read_chunks(&ready, round, &side.side, member, chunks, expected)?);
            }
            let reader = if round % 3 == 0 { &side.arrivals } else { &side.compute };
            reads.push(read_whole(&ready, round, reader, &expected.concat())?);
            if waits {
                ready.wait()?;
            }
            side.gather.release(ready)?;
        }
    }
    reads.into_iter().try_for_each(Read::check)
}

#[test]
fn shards_are_pushed_from_their_places_by_the_world_and_by_teams() {
    for size in WORLDS {
        for seed in 0..8 {
            let all = Arenas::new(size, seed);
            gather(&all, &Team::all(all.world.size()), 1 + seed % 2, seed % 3 == 0)
                .unwrap_or_else(|error| panic!("{size} ranks, seed {seed}: {error}"));
            all.close();
        }
    }
    for seed in 0..8 {
        let all = Arenas::new(4, seed);
        let team = Team::new(all.world.size(), &[3, 0, 2].map(|index| all.world.rank(index))).unwrap();
        gather(&all, &team, 1 + seed % 2, seed % 3 == 0).unwrap_or_else(|error| panic!("a team, seed {seed}: {error}"));
        all.close();
    }
}

/// The right programs say nothing under 1000 seeds.
#[test]
fn gathers_in_place_are_silent_under_a_thousand_seeds() {
    for seed in 0..1000 {
        let all = Arenas::new(2, seed);
        gather(&all, &Team::all(all.world.size()), 1 + seed % 2, seed % 3 == 0).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

/// Rank 1 never comes: what rank 0 has in its own place is there at once, and may be written as soon as it has read that.
#[test]
fn the_own_place_waits_for_nobody() {
    for chunks in [1, 2] {
        for seed in 0..16 {
            let all = Arenas::new(2, seed);
            let mut sides = sides(&all, &Team::all(all.world.size()), chunks).unwrap();
            let (_, side) = &mut sides[0];
            write(&mut side.gather, &side.compute, &numbers(0, LEN)).unwrap();
            let ready = side.gather.start().unwrap();
            let reads = read_chunks(&ready, 0, &side.side, Rank::ZERO, chunks, &numbers(0, LEN)).unwrap();
            reads.into_iter().try_for_each(Read::check).unwrap();
            let Side { gather, compute, .. } = side;
            gather.release(ready).unwrap();
            write(gather, compute, &numbers(7, LEN)).unwrap();
            let found = gather.shard(compute).unwrap().to_vec(compute);
            assert_eq!(found.unwrap(), numbers(7, LEN), "seed {seed}");
        }
    }
}

/// With no reader between them, on other streams.
#[test]
fn what_is_written_to_a_place_and_what_is_copied_there_come_in_order() {
    for seed in 0..16 {
        let all = Arenas::new(1, seed);
        let (_, mut one) = sides(&all, &Team::all(all.world.size()), 1).unwrap().remove(0);
        for round in 0..3 {
            write(&mut one.gather, &one.side, &numbers(round, LEN)).unwrap();
            let elsewhere = Buffer::zeros(&one.compute, LEN.into()).unwrap();
            let ready = one.gather.start_from(&[&elsewhere]).unwrap();
            one.gather.release(ready).unwrap();
        }
        write(&mut one.gather, &one.side, &numbers(9, LEN)).unwrap();
        let ready = one.gather.start().unwrap();
        read_whole(&ready, 3, &one.compute, &numbers(9, LEN)).and_then(Read::check).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

/// Of two gathers of one shard the first is read on a stream that does not read the second.
#[test]
fn a_place_is_written_behind_the_readers_of_all_gathers_since() {
    for seed in 0..16 {
        let all = Arenas::new(1, seed);
        let (_, mut one) = sides(&all, &Team::all(all.world.size()), 1).unwrap().remove(0);
        let writer = all.world.ranks[0].device().stream().unwrap();
        write(&mut one.gather, &writer, &numbers(0, LEN)).unwrap();
        let mut reads = Vec::new();
        for (round, reader) in (0..).zip([one.side.clone(), one.compute.clone()]) {
            let ready = one.gather.start().unwrap();
            reads.extend(read_chunks(&ready, round, &reader, Rank::ZERO, 1, &numbers(0, LEN)).unwrap());
            one.gather.release(ready).unwrap();
        }
        write(&mut one.gather, &writer, &numbers(1, LEN)).unwrap();
        writer
            .synchronize()
            .and_then(|()| reads.into_iter().try_for_each(Read::check))
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn what_is_out_of_turn_is_refused_and_changes_nothing() {
    fn refused<R>(result: Result<R>, text: &str) {
        let Err(error) = result else { panic!("not refused: {text}") };
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(text), "{error}");
    }
    let all = Arenas::new(2, 3);
    let mut sides = sides(&all, &Team::all(all.world.size()), 1).unwrap();
    let (stranger, in_use) = (all.stream(1).clone(), "give its Ready back, after its last reader (ChunkedGather::release)");
    for (i, Side { gather, compute, .. }) in &mut sides {
        refused(gather.start(), "this member's place was never handed out: write what ChunkedGather::shard gives first");
        if *i == 0 {
            refused(gather.shard(&stranger), "the stream is on device 1");
        }
        write(gather, compute, &numbers(*i as u32, LEN)).unwrap();
    }
    let running: Vec<_> = sides.iter_mut().map(|(_, side)| side.gather.start().unwrap()).collect();
    let expected = [numbers(0, LEN), numbers(1, LEN)].concat();
    for ((i, side), ready) in sides.iter_mut().zip(running) {
        let Side { gather, compute, .. } = side;
        refused(gather.shard(compute), in_use);
        refused(gather.start(), in_use);
        refused(gather.start_from(&[&Buffer::zeros(compute, LEN.into()).unwrap()]), in_use);
        refused(ready.chunk(compute, Rank::ZERO, 1), "there is no chunk 1 of rank 0");
        if *i == 0 {
            refused(ready.whole(&stranger), "the stream is on device 1");
        }
        ready.wait().unwrap();
        read_whole(&ready, 0, compute, &expected).and_then(Read::check).unwrap();
        gather.release(ready).unwrap();
        let piece = Buffer::zeros(compute, LEN.into()).unwrap();
        refused(gather.start_from(&[&piece, &piece]), "2 pieces where a shard has 1");
    }
    drop(sides);
    all.close();
}

#[test]
fn a_gather_in_place_names_who_did_not_come() {
    let all = Arenas::with(3, 1, options());
    let mut sides = sides(&all, &Team::all(all.world.size()), 1).unwrap();
    let mut running = Vec::new();
    for i in [0, 2] {
        let Side { gather, compute, .. } = &mut sides[i].1;
        write(gather, compute, &numbers(0, LEN)).unwrap();
        running.push(gather.start().unwrap());
    }
    let error = symmetric(running[0].wait());
    assert_eq!(error.to_string(), "rank 0: PushGather::start, number 1: no signal from rank 1 within 200ms");
    assert!(matches!(symmetric(running[1].wait()), SymmetricError::Aborted { .. }));
    for (i, Side { gather, compute, .. }) in &mut sides {
        assert!(matches!(gather.start(), Err(Error::Symmetric(_))) == (*i != 1), "rank {i} knows");
        assert!(matches!(gather.shard(compute), Err(Error::Symmetric(_))) == (*i != 1), "rank {i} knows");
    }
}
