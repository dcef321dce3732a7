//! Signals that are reset, in graphs that are replayed.

use oxtile::comm::{Rank, Team};
use oxtile::symmetric::{Arena, ArenaOptions, GatherMemory, Handover, PullGather, PushGather, PushMemory, SymmetricBuffer};
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
    /// The consumer says so before it has read.
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
        let (handover, inbox) = (Handover::take(arena)?, arena.buffer(LEN.into())?);
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
    for (size, slots) in [(2, 1), (3, 1), (2, 2), (4, 2)] {
        for seed in 0..16 {
            ring(size, slots, 4, seed, Bug::None).unwrap_or_else(|error| panic!("{size} ranks, {slots} places, seed {seed}: {error}"));
        }
    }
}

#[test]
fn what_is_left_out_is_reported() {
    for bug in [Bug::NoAcquire, Bug::NoAccept, Bug::ReleasedEarly] {
        for seed in 0..16 {
            let found = ring(2, 1, 3, seed, bug);
            assert!(matches!(found, Err(Error::Race(_))), "{bug:?}, seed {seed}: {found:?}");
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
    let (shard, output) = (Buffer::<u32>::zeros(stream, 4).unwrap(), Buffer::<u32>::zeros(stream, 4).unwrap());
    let memory = PushMemory::take(&arena, 4, 1).unwrap();
    let mut push = PushGather::new(&arena, &member, memory, [stream, &arrivals], 1).unwrap();
    let mut pull = PullGather::new(&arena, &member, GatherMemory::take(&arena, 4).unwrap(), stream, 1).unwrap();
    let pushed = Graph::capture(&[stream], || push.run(&shard).map(|_| ()));
    assert!(matches!(pushed, Err(Error::NotCapturable { .. })), "{pushed:?}");
    let pulled = Graph::capture(&[stream], || pull.run(output).map(|_| ()));
    assert!(matches!(pulled, Err(Error::NotCapturable { .. })), "{pulled:?}");
}
