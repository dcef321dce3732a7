//! The protocol of weights in shards, spelt out with public operations: what it leaves out is reported.
//!
//! [`ShardSet`](oxtile::sharded::ShardSet) cannot be called in a wrong order, so its order is written here once more, on memory of which the runtime knows nothing: that
//! of a program which keeps its events itself.

use oxtile::runtime::{Exploration, Mode, explore};
use oxtile::symmetric::{Arena, ArenaOptions, Flags, Pitched, Rows, SymmetricBuffer};
use oxtile::{Buffer, EmulatedOptions, Error, PinnedBuffer, Result, Stream};

use crate::support::{World, numbers, seeds};

/// Elements of a shard.
const SHARD: u32 = 4;
const READY: u32 = 0;
const DONE: u32 = 1;

/// What a program leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The owner writes its shard without waiting for DONE.
    WritesBeforeDone,
    /// A rank sets DONE before its pulls are done.
    DoneBeforePulls,
    /// A rank pulls without waiting for READY.
    PullsBeforeReady,
    /// READY is set before the cast.
    ReadyBeforeCast,
    /// The pull does not wait for the stream which took READY (TransformerEngine #2960: a gather that raced the cast).
    NoProducerEdge,
    /// The product does not wait for its pull (TransformerEngine #2960: NaN in the second iteration).
    NoConsumerEdge,
    /// The next pull overwrites a slot that is still read.
    SlotReused,
    /// Another stream says that the slot was read than the one that reads it.
    ReleasedByOther,
    /// Two weights that follow one another have one slot.
    OneSlot,
    /// Two chains have one slot.
    ChainsCrossed,
}

const BUGS: [Bug; 10] = [
    Bug::WritesBeforeDone,
    Bug::DoneBeforePulls,
    Bug::PullsBeforeReady,
    Bug::ReadyBeforeCast,
    Bug::NoProducerEdge,
    Bug::NoConsumerEdge,
    Bug::SlotReused,
    Bug::ReleasedByOther,
    Bug::OneSlot,
    Bug::ChainsCrossed,
];

/// A rank: its shards of two weights, two slots for whole weights a chain, and where products leave what they read.
struct Side {
    arena: Arena,
    flags: Flags,
    shards: [SymmetricBuffer<u32>; 2],
    slots: [Buffer<u32>; 2],
    read: [Buffer<u32>; 2],
    values: [Buffer<u32>; 2],
    pulls: Stream,
    other: Stream,
}

/// The same memory, of whose uses the runtime is not told.
fn unknown(stream: &Stream, buffer: &Buffer<u32>) -> Buffer<u32> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&stream.device(), buffer.address(), buffer.len()) }.unwrap()
}

impl Side {
    fn new(world: &World, rank: usize) -> Result<Self> {
        let (communicator, stream) = (&world.ranks[rank], &world.streams[rank]);
        let arena = Arena::open(communicator, ArenaOptions::default())?;
        let flags = arena.flags("shards", 2)?;
        let mut shards = [arena.buffer(SHARD.into())?, arena.buffer(SHARD.into())?];
        // What is read too early is a race then, not a read of what was never written.
        shards.iter_mut().try_for_each(|shard| shard.local_mut().fill_zero(stream))?;
        let whole = u64::from(SHARD * world.size().get());
        let zeros = |len| -> Result<[Buffer<u32>; 2]> { Ok([Buffer::zeros(stream, len)?, Buffer::zeros(stream, len)?]) };
        let (slots, read, values) = (zeros(whole)?, zeros(whole)?, zeros(SHARD.into())?);
        stream.synchronize()?;
        let device = stream.device();
        Ok(Self { arena, flags, shards, slots, read, values, pulls: device.stream()?, other: device.stream()? })
    }

    /// The first half of a step: DONE, the cast, READY.
    fn publish(&mut self, stream: &Stream, bug: Bug, step: u32) -> Result<()> {
        let others: Vec<_> = self.arena.world().ranks().filter(|rank| *rank != self.arena.rank()).collect();
        // The stream has waited for all pulls: its products did.
        if bug != Bug::DoneBeforePulls || step == 0 {
            others.iter().try_for_each(|owner| self.flags.set(stream, DONE, *owner))?;
        }
        if bug == Bug::ReadyBeforeCast {
            others.iter().try_for_each(|reader| self.flags.set(stream, READY, *reader))?;
        }
        if bug != Bug::WritesBeforeDone {
            others.iter().try_for_each(|reader| self.flags.take_back(stream, DONE, *reader))?;
        }
        for (shard, values) in self.shards.iter().zip(&self.values) {
            unknown(stream, shard.local()).copy_from(stream, &unknown(stream, values))?;
        }
        if bug == Bug::WritesBeforeDone {
            others.iter().try_for_each(|reader| self.flags.take_back(stream, DONE, *reader))?;
        }
        if bug != Bug::ReadyBeforeCast {
            others.iter().try_for_each(|reader| self.flags.set(stream, READY, *reader))?;
        }
        if bug != Bug::PullsBeforeReady {
            others.iter().try_for_each(|owner| self.flags.take_back(stream, READY, *owner))?;
        }
        Ok(())
    }

    /// Pulls a weight into a slot.
    fn pull(&self, stream: &Stream, weight: usize, slot: usize) -> Result<()> {
        for rank in self.arena.world().ranks() {
            let to = Pitched { start: u64::from(rank.index() * SHARD), pitch: SHARD.into() };
            let rows = Rows { count: 1, width: SHARD.into(), from: Pitched { start: 0, pitch: SHARD.into() }, to };
            drop(self.shards[weight].peer(rank)?.get_rows(stream, rows, unknown(stream, &self.slots[slot]))?);
        }
        Ok(())
    }

    /// A product with what is in a slot: it is copied to where the host looks.
    fn product(&self, stream: &Stream, weight: usize, slot: usize) -> Result<()> {
        unknown(stream, &self.read[weight]).copy_from(stream, &unknown(stream, &self.slots[slot]))
    }

    /// The second half: the second weight is pulled while the product of the first is computed.
    fn pass(&mut self, stream: &Stream, bug: Bug) -> Result<()> {
        if bug != Bug::NoProducerEdge {
            self.pulls.wait(&stream.record()?)?;
            self.other.wait(&stream.record()?)?;
        }
        self.pull(&self.pulls, 0, 0)?;
        let first = self.pulls.record()?;
        if matches!(bug, Bug::SlotReused | Bug::ReleasedByOther) {
            // One slot for both is right where the second pull waits for the first product.
            stream.wait(&first)?;
            self.product(stream, 0, 0)?;
            if bug == Bug::ReleasedByOther {
                self.pulls.wait(&self.other.record()?)?;
            }
            self.pull(&self.pulls, 1, 0)?;
            stream.wait(&self.pulls.record()?)?;
            return self.product(stream, 1, 0);
        }
        let (pulls, slot) = match bug {
            Bug::OneSlot => (&self.pulls, 0),
            Bug::ChainsCrossed => (&self.other, 0),
            _ => (&self.pulls, 1),
        };
        self.pull(pulls, 1, slot)?;
        let second = pulls.record()?;
        if bug == Bug::DoneBeforePulls {
            let others = self.arena.world().ranks().filter(|rank| *rank != self.arena.rank());
            others.into_iter().try_for_each(|owner| self.flags.set(stream, DONE, owner))?;
        }
        if bug != Bug::NoConsumerEdge {
            stream.wait(&first)?;
        }
        self.product(stream, 0, 0)?;
        stream.wait(&second)?;
        self.product(stream, 1, slot)
    }
}

/// Some steps on all ranks; what products read is compared.
fn steps(world: &World, count: u32, bug: Bug) -> Result<()> {
    let mut sides = (0..world.ranks.len()).map(|rank| Side::new(world, rank)).collect::<Result<Vec<_>>>()?;
    let of = |rank: u32, weight: u32, step: u32| numbers(100 * step + 10 * weight + rank, SHARD);
    let mut found = Vec::new();
    for step in 0..count {
        for ((side, stream), rank) in sides.iter_mut().zip(&world.streams).zip(0..) {
            for (values, weight) in side.values.iter_mut().zip(0..) {
                values.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, &of(rank, weight, step))?)?;
            }
            side.publish(stream, bug, step)?;
            side.pass(stream, bug)?;
            for (read, weight) in side.read.iter().zip(0..) {
                let mut host = PinnedBuffer::<u32>::zeros(stream, read.len() as usize)?;
                unknown(stream, read).copy_to_pinned(stream, &mut host)?;
                let expected: Vec<u32> = (0..world.size().get()).flat_map(|rank| of(rank, weight, step)).collect();
                found.push((host, expected));
            }
        }
    }
    world.streams.iter().try_for_each(|stream| stream.synchronize())?;
    found.iter().try_for_each(|(host, expected)| {
        assert_eq!(host.as_slice()?, expected, "{bug:?}");
        Ok(())
    })
}

#[test]
fn the_right_protocol_is_silent() {
    for (ranks, seed) in [2, 3].into_iter().flat_map(|ranks| (0..seeds()).map(move |seed| (ranks, seed))) {
        steps(&World::new(ranks, seed), 3, Bug::None).unwrap_or_else(|error| panic!("{ranks} ranks, seed {seed}: {error}"));
    }
}

/// The same under every order of signals and waits.
#[test]
fn every_order_of_two_and_three_ranks_is_right() {
    for (ranks, count) in [(2, 3), (3, 2)] {
        let program = |exploration: &Exploration| {
            let exploration = Some(exploration.clone());
            let options = EmulatedOptions { devices: ranks, mode: Mode::Check, exploration, ..EmulatedOptions::default() };
            steps(&World::with(options), count, Bug::None)
        };
        let explored = explore(program).unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
        assert!(explored.schedules > 1, "{ranks} ranks: {explored:?}");
    }
}

#[test]
fn what_is_left_out_is_reported() {
    for bug in BUGS {
        for seed in 0..32 {
            let found = steps(&World::new(2, seed), 3, bug);
            let Err(Error::Race(race)) = found else { panic!("{bug:?}, seed {seed}: {found:?}") };
            let again = steps(&World::new(2, seed), 3, bug).unwrap_err().to_string();
            assert_eq!(again, Error::Race(race).to_string(), "{bug:?}: seed {seed} replays its report");
        }
    }
}
