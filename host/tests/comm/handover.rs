//! Signals that are reset, in graphs that are replayed.

use std::time::{Duration, Instant};

use oxtile::comm::{Rank, Team};
use oxtile::symmetric::{
    Arena, ArenaOptions, ChunkedGather, Epoch, GatherMemory, Handover, PullGather, PushGather, PushMemory, SymmetricBuffer, SymmetricError,
};
use oxtile::{Buffer, Error, Graph, PinnedBuffer, Result, Stream};

use crate::support::{World, numbers};

const LEN: u32 = 4;

/// What a program leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The producer writes what may not be read yet.
    NoAcquire,
    /// The consumer reads what may not be there yet.
    NoAccept,
    /// The consumer signals before it has read.
    ReleasedEarly,
}

/// A place that a rank fills at the next one of a ring, and empties of what the rank before has put here.
struct Place {
    handover: Handover,
    inbox: SymmetricBuffer<u32>,
    own: Buffer<u32>,
    taken: Buffer<u32>,
}

impl Place {
    fn take(arena: &Arena, stream: &Stream) -> Result<Self> {
        let (handover, mut inbox) = (Handover::take(arena)?, arena.buffer(LEN.into())?);
        // What is read too early is a race then, not a read of what was never written.
        inbox.local_mut().fill_zero(stream)?;
        stream.synchronize()?;
        Ok(Self { handover, inbox, own: Buffer::zeros(stream, LEN.into())?, taken: Buffer::zeros(stream, LEN.into())? })
    }

    fn fill(&self, stream: &Stream, next: Rank, bug: Bug) -> Result<()> {
        if bug != Bug::NoAcquire {
            self.handover.acquire(stream, next)?;
        }
        self.inbox.peer(next)?.put(stream, &self.own, 0..LEN.into(), 0)?;
        self.handover.publish(stream, next)
    }

    fn empty(&mut self, stream: &Stream, last: Rank, bug: Bug) -> Result<()> {
        if bug != Bug::NoAccept {
            self.handover.accept(stream, last)?;
        }
        if bug == Bug::ReleasedEarly {
            self.handover.release(stream, last)?;
            return self.taken.copy_from(stream, self.inbox.local());
        }
        self.taken.copy_from(stream, self.inbox.local())?;
        self.handover.release(stream, last)
    }
}

/// Every rank captures one graph that fills all places of the next rank and empties its own, and replays it, with other numbers each time.
fn ring(size: u32, slots: u32, replays: u32, seed: u64, bug: Bug) -> Result<()> {
    let world = World::new(size, seed);
    let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default())).collect::<Result<_>>()?;
    let places = |(arena, stream)| (0..slots).map(|_| Place::take(arena, stream)).collect();
    let mut ranks: Vec<Vec<Place>> = arenas.iter().zip(&world.streams).map(places).collect::<Result<_>>()?;
    let before = |i: usize| world.rank((i as u32 + size - 1) % size);
    let mut graphs = Vec::new();
    for (i, places) in ranks.iter_mut().enumerate() {
        let (stream, next, last) = (&world.streams[i], world.rank((i as u32 + 1) % size), before(i));
        places.iter().try_for_each(|place| place.handover.open(stream, last))?;
        graphs.push(Graph::capture(&[stream], || {
            places.iter().try_for_each(|place| place.fill(stream, next, bug))?;
            places.iter_mut().try_for_each(|place| place.empty(stream, last, bug))
        })?);
    }
    let sent = |rank: Rank, slot: u32, replay: u32| numbers(100 * replay + 10 * slot + rank.index(), LEN);
    let mut found = Vec::new();
    for replay in 0..replays {
        for (i, places) in ranks.iter_mut().enumerate() {
            let stream = &world.streams[i];
            for (slot, place) in (0..).zip(&mut *places) {
                place.own.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, &sent(world.rank(i as u32), slot, replay))?)?;
            }
            graphs[i].replay(stream)?;
            for (slot, place) in (0..).zip(&*places) {
                let mut host = PinnedBuffer::<u32>::zeros(stream, LEN as usize)?;
                place.taken.copy_to_pinned(stream, &mut host)?;
                found.push((host, sent(before(i), slot, replay)));
            }
        }
    }
    world.streams.iter().try_for_each(|stream| stream.synchronize())?;
    found.iter().try_for_each(|(host, expected)| {
        assert_eq!(host.as_slice()?, expected, "{size} ranks, {slots} places, seed {seed}");
        Ok(())
    })
}

#[test]
fn a_graph_is_replayed_without_a_flag_lost() {
    // The right program says nothing under 1000 seeds.
    for (size, slots, seeds) in [(2, 1, 1000), (3, 1, 16), (2, 2, 16), (4, 2, 16)] {
        for seed in 0..seeds {
            ring(size, slots, 4, seed, Bug::None).unwrap_or_else(|error| panic!("{size} ranks, {slots} places, seed {seed}: {error}"));
        }
    }
}

#[test]
fn what_is_left_out_is_reported() {
    for bug in [Bug::NoAcquire, Bug::NoAccept, Bug::ReleasedEarly] {
        for seed in 0..16 {
            let found = ring(2, 1, 3, seed, bug);
            let Err(Error::Race(race)) = found else { panic!("{bug:?}, seed {seed}: {found:?}") };
            let again = ring(2, 1, 3, seed, bug).unwrap_err().to_string();
            assert_eq!(again, Error::Race(race).to_string(), "{bug:?}: seed {seed} replays its report");
        }
    }
}

#[test]
fn a_place_is_not_opened_in_a_graph() {
    let world = World::new(1, 0);
    let arena = Arena::open(&world.ranks[0], ArenaOptions::default()).unwrap();
    let (place, stream) = (Handover::take(&arena).unwrap(), &world.streams[0]);
    arena.buffer::<u32>(1).unwrap().peer(world.rank(0)).unwrap();
    let opened = Graph::capture(&[stream], || place.open(stream, world.rank(0)));
    assert!(matches!(opened, Err(Error::NotCapturable { .. })), "{opened:?}");
}

/// Its epochs would be frozen: the second replay would wait for nothing.
#[test]
fn gathers_are_not_captured() {
    let world = World::new(1, 0);
    let (arena, stream) = (Arena::open(&world.ranks[0], ArenaOptions::default()).unwrap(), &world.streams[0]);
    let member = Team::all(world.size()).member(world.rank(0)).unwrap();
    let arrivals = world.ranks[0].device().stream().unwrap();
    let shard = Buffer::<u32>::zeros(stream, 4).unwrap();
    let memory = PushMemory::take(&arena, 4, 1).unwrap();
    let mut push = PushGather::new(&arena, &member, memory, [stream, &arrivals], 1).unwrap();
    let memory = GatherMemory::<u32>::take(&arena, 4).unwrap();
    let mut pull = PullGather::new(&arena, &member, memory, stream, 1).unwrap();
    let pushed = Graph::capture(&[stream], || push.start_from(&[&shard]).map(|_| ()));
    assert!(matches!(pushed, Err(Error::NotCapturable { .. })), "{pushed:?}");
    let pulled = Graph::capture(&[stream], || pull.start().map(|_| ()));
    assert!(matches!(pulled, Err(Error::NotCapturable { .. })), "{pulled:?}");
    let shard_of_pull = Graph::capture(&[&arrivals], || pull.shard(&arrivals).map(|_| ()));
    assert!(matches!(shard_of_pull, Err(Error::NotCapturable { .. })), "{shard_of_pull:?}");
    let arrived = Graph::capture(&[&arrivals], || push.start_from(&[&shard]).map(|_| ()));
    assert!(matches!(arrived, Err(Error::NotCapturable { .. })), "{arrived:?}");
    let writer = world.ranks[0].device().stream().unwrap();
    let own_place = Graph::capture(&[&writer], || push.shard(&writer).map(|_| ()));
    assert!(matches!(own_place, Err(Error::NotCapturable { .. })), "{own_place:?}");
    push.shard(&writer).unwrap().fill_zero(&writer).unwrap();
    // Behind a write that is captured meanwhile there is no moment.
    for capturing in [&writer, stream, &arrivals] {
        let in_place = Graph::capture(&[capturing], || push.start().map(|_| ()));
        assert!(matches!(in_place, Err(Error::NotCapturable { .. })), "{in_place:?}");
    }
    let ready = push.start().expect("what was refused has changed nothing");
    ready.wait().unwrap();
    push.release(ready).unwrap();
    let ready = push.start_from(&[&shard]).expect("what was refused has changed nothing");
    ready.wait().unwrap();
    let mut kept = None;
    let released = Graph::capture(&[&arrivals], || {
        push.release(ready).map_err(|refused| {
            kept = Some(refused.ready);
            refused.error
        })
    });
    assert!(matches!(released, Err(Error::NotCapturable { .. })), "{released:?}");
    push.release(kept.expect("the epoch comes back with the error")).unwrap();
    push.start_from(&[&shard]).unwrap().wait().unwrap();
}

fn arenas(world: &World, deadline: Duration) -> Vec<Arena> {
    let options = ArenaOptions { deadline, ..ArenaOptions::default() };
    world.ranks.iter().map(|rank| Arena::open(rank, options.clone()).unwrap()).collect()
}

fn aborted(error: &Error) -> Option<Rank> {
    if let Error::Symmetric(SymmetricError::Aborted { rank, .. }) = error { Some(*rank) } else { None }
}

/// A program of handovers has no ticket but the stream's: that one, and a look at the arena, tell of a rank that is gone, long before the deadline.
#[test]
fn who_waits_for_a_rank_that_is_gone_is_told() {
    for looks in [true, false] {
        let world = World::new(2, 0);
        let mut arenas = arenas(&world, Duration::from_secs(30));
        let (places, stream): (Vec<_>, _) = (arenas.iter().map(|arena| Handover::take(arena).unwrap()).collect(), &world.streams[0]);
        places[0].open(stream, world.rank(1)).unwrap();
        let graph = Graph::capture(&[stream], || places[0].accept(stream, world.rank(1))).unwrap();
        (0..3).for_each(|_| graph.replay(stream).unwrap());
        arenas[0].check().unwrap();
        drop((arenas.pop(), places.into_iter().nth(1)));
        let (gone, start) = (arenas.pop().unwrap(), Instant::now());
        let told = if looks { gone.check() } else { gone.ticket(stream).unwrap().wait() };
        assert_eq!(aborted(&told.unwrap_err()), Some(world.rank(1)));
        assert!(start.elapsed() < Duration::from_secs(20), "before the deadline");
        assert!(graph.replay(stream).is_err() && gone.ticket(stream).is_err(), "nothing is begun any more");
        stream.synchronize().unwrap();
    }
}

/// Rank 2 is silent, rank 1 has done all it had to: its flag is 0 since it was taken back.
#[test]
fn a_deadline_does_not_name_whose_flag_was_taken_back() {
    for with_epoch in [true, false] {
        let world = World::new(3, 0);
        let arenas = arenas(&world, Duration::from_millis(200));
        let places: Vec<_> = arenas.iter().map(|arena| Handover::take(arena).unwrap()).collect();
        let channels: Vec<_> = arenas.iter().map(|arena| arena.channel().unwrap()).collect();
        places[1].publish(&world.streams[1], world.rank(0)).unwrap();
        places[0].accept(&world.streams[0], world.rank(1)).unwrap();
        arenas[0].ticket(&world.streams[0]).unwrap().wait().unwrap();
        if with_epoch {
            arenas[0].wait(&world.streams[0], channels[0], world.rank(2), Epoch::ZERO.next()).unwrap();
        } else {
            places[0].accept(&world.streams[0], world.rank(2)).unwrap();
        }
        let error = arenas[0].ticket(&world.streams[0]).unwrap().wait().unwrap_err();
        let Error::Symmetric(SymmetricError::Deadline { missing, is_guess, .. }) = &error else { panic!("{error}") };
        // Flags alone do not tell the missing rank, and the error states that.
        let expected = if with_epoch { vec![world.rank(2)] } else { vec![world.rank(1), world.rank(2)] };
        assert_eq!((missing, *is_guess), (&expected, !with_epoch), "{error}");
        assert_eq!(error.to_string().contains("one or more of rank 1, rank 2"), !with_epoch, "{error}");
    }
}

/// The reset of a flag takes poison back too: whatever was queued when a rank ended the arena gets through all the same, and every rank is told.
#[test]
fn replays_that_are_queued_get_through_when_a_rank_ends_the_arena() {
    for seed in 0..32 {
        let (world, long) = (World::new(3, seed), Duration::from_secs(30));
        let arenas = arenas(&world, long);
        let mut places: Vec<_> = arenas.iter().zip(&world.streams).map(|(arena, stream)| Place::take(arena, stream).unwrap()).collect();
        for (i, place) in places.iter_mut().enumerate() {
            let (stream, next, last) = (&world.streams[i], world.rank((i as u32 + 1) % 3), world.rank((i as u32 + 2) % 3));
            place.handover.open(stream, last).unwrap();
            let graph = Graph::capture(&[stream], || {
                place.fill(stream, next, Bug::None)?;
                place.empty(stream, last, Bug::None)
            });
            let graph = graph.unwrap();
            // Rank 1 stops first, so that the others hang in their last rounds.
            (0..if i == 1 { 3 } else { 8 }).for_each(|_| graph.replay(stream).unwrap());
        }
        let tickets: Vec<_> = arenas.iter().zip(&world.streams).map(|(arena, stream)| arena.ticket(stream).unwrap()).collect();
        let start = Instant::now();
        arenas[1].abort("the test").unwrap();
        for ticket in tickets {
            // Rank 2 may hear it of rank 0.
            let error = ticket.wait().unwrap_err();
            assert!(aborted(&error).is_some() && error.to_string().contains("rank 1 gave up: the test"), "seed {seed}: {error}");
        }
        for stream in &world.streams {
            stream.synchronize().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
        assert!(start.elapsed() < long / 2, "seed {seed}: not before the deadline");
    }
}

#[test]
fn an_arena_ends_while_a_stream_of_it_is_captured() {
    let world = World::new(1, 0);
    let arenas = arenas(&world, Duration::from_secs(30));
    let (arena, stream, zero) = (&arenas[0], &world.streams[0], world.rank(0));
    let place = Handover::take(arena).unwrap();
    place.accept(stream, zero).unwrap();
    let captured = Graph::capture(&[stream], || {
        place.accept(stream, zero)?;
        arena.abort("the test").expect("what is captured is not waited for");
        place.accept(stream, zero)
    });
    assert_eq!(aborted(&captured.unwrap_err()), Some(zero));
}
