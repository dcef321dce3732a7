//! The all-gather whose members fetch the others' shards.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::num::Pod;

use super::super::arena::Arena;
use super::super::buffer::SymmetricBuffer;
use super::super::signal::{Channel, Epoch};
use super::super::ticket::Ticket;
use super::pieces::{Gathered, Pieces, bounds};
use super::places::{Arrived, Places, Ready, ReleaseError};
use super::{ChunkedGather, INSTEAD, WHAT_GROWS, check_lent, lent, others_of};
use crate::comm::{Member, Rank};
use crate::runtime::backend::{Caller, Copy, CopyRows, Direction};
use crate::runtime::{Buffer, Error, Event, Result, Stream, memory, order};

/// What a [`PullGather`] needs of an arena: every rank takes it, in one order with all else, also one that takes no part in the gather.
#[derive(Debug)]
pub struct GatherMemory<T> {
    shard: SymmetricBuffer<T>,
    pieces: Pieces,
    ready: Channel,
    done: Channel,
}

impl<T: Pod> GatherMemory<T> {
    /// For shards of `len` elements.
    ///
    /// # Errors
    /// As [`Arena::buffer`] and [`Arena::channel`].
    pub fn take(arena: &Arena, len: u64) -> Result<Self> {
        Self::of_pieces(arena, &[len])
    }

    /// For shards of several pieces, such as codes and scales, which are gathered together, each with that of the other members. Each begins at a multiple
    /// of 256 bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no pieces, [`Error::TooLarge`]; as [`take`](Self::take).
    pub fn of_pieces(arena: &Arena, lens: &[u64]) -> Result<Self> {
        let pieces = Pieces::new::<T>("GatherMemory::of_pieces", lens)?;
        Ok(Self { shard: arena.buffer(pieces.shard_len())?, pieces, ready: arena.channel()?, done: arena.channel()? })
    }
}

/// Each member publishes its shard, and pulls those of the others by its copy engine.
///
/// The order of signals, for epoch `e`: the shard is written; READY `e` goes to every other member; a member that sees READY `e` of another
/// copies the shard and sends DONE `e` back; the shard is written again after DONE `e` of all.
pub struct PullGather<T> {
    arena: Arena,
    member: Member,
    memory: GatherMemory<T>,
    /// The pieces of the shard.
    own: Vec<Buffer<T>>,
    /// Where these lie, and how long they are.
    lent: Vec<(u64, u64)>,
    output: Buffer<T>,
    gathered: Gathered,
    places: Places<T>,
    stream: Stream,
    /// The stream that copies this rank's own shard meanwhile.
    side: Stream,
    chunks: u64,
    epoch: Epoch,
    /// The other members.
    others: Arc<[(Rank, Rank)]>,
}

impl<T: Pod> PullGather<T> {
    /// For a member of a team of the arena's world. `stream` carries the copies of the others' shards, a stream of its own that of
    /// this rank's; each shard is copied in `chunks` pieces. With one chunk all shards are waited for at once. What is gathered lies in device memory of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no chunks, a team of another world, memory of another arena or a stream of another device; [`Error::ForeignRuntime`]; as
    /// [`Buffer::uninitialised`].
    pub fn new(arena: &Arena, member: &Member, memory: GatherMemory<T>, stream: &Stream, chunks: u64) -> Result<Self> {
        const WHAT: &str = "PullGather::new";
        if chunks == 0 || member.team().world() != arena.world() || member.world_rank() != arena.rank() {
            let why = format!("{chunks} chunks for {member:?} in an arena of {} of {}", arena.rank(), arena.world());
            return Err(Error::Invalid { what: WHAT, why });
        }
        memory.shard.check_arena(arena, WHAT)?;
        arena.0.check_stream(stream)?;
        let (arena, member, stream) = (arena.clone(), member.clone(), stream.clone());
        let side = stream.device().stream()?;
        let others = others_of(&member);
        let what = format!("PullGather of elements of {} bytes in {:?}", size_of::<T>(), member.team());
        arena.0.declare(memory.ready.number, what, others.iter().map(|(_, rank)| *rank))?;
        let gathered = memory.pieces.gathered::<T>(WHAT, member.team().size().get())?;
        let own =
            (0..memory.pieces.count()).map(|piece| memory.shard.local_part(memory.pieces.in_shard(piece), memory.pieces.lens()[piece]));
        let (own, output) = (own.collect::<Vec<_>>(), Buffer::uninitialised(&stream, gathered.len)?);
        let lent = lent(&own);
        let places = Places::new("PullGather", Some(&arena), &output, &gathered, chunks)?;
        Ok(Self { arena, member, memory, own, lent, output, gathered, places, stream, side, chunks, epoch: Epoch::ZERO, others })
    }

    /// Copies this rank's own shard on a second stream, after the work that `stream` already comes after.
    fn copy_own(&self, caller: Caller) -> Result<Event> {
        self.side.wait(&self.stream.mark()?)?;
        self.arena.0.use_on(&self.side)?;
        let (source, me) = (self.memory.shard.local().address(), self.member.rank());
        let copy = |chunk| self.chunk_copies(source, me, chunk, caller).try_for_each(|copy| enqueue(&self.side, copy));
        let copied = (0..self.chunks).try_for_each(copy);
        let own = self.side.mark()?;
        if let Err(error) = copied {
            self.stream.wait(&own)?;
            return Err(error);
        }
        Ok(own)
    }

    /// Copies the others' shards in one piece each, after READY of all, and sends DONE to all: the fewest calls that a host can make.
    #[track_caller]
    fn pull_whole(&self, caller: Caller) -> Result<()> {
        let mut ready = self.arena.batch(&self.stream);
        for (_, other) in &*self.others {
            ready = ready.wait(self.memory.ready, *other, self.epoch)?;
        }
        ready.enqueue()?;
        let mut copies = Vec::new();
        for (member, rank) in &*self.others {
            copies.extend(self.chunk_copies(self.memory.shard.peer(*rank)?.address(), *member, 0, caller));
        }
        memory::copies(&self.stream.0, &copies, &[])?;
        self.send_done(&self.others)
    }

    /// Copies the others' shards in chunks, each shard after READY of its member, and DONE after it.
    #[track_caller]
    fn pull_chunks(&self, events: &mut [Vec<Vec<Event>>], caller: Caller) -> Result<()> {
        for other in &*self.others {
            let (member, rank) = *other;
            self.arena.wait(&self.stream, self.memory.ready, rank, self.epoch)?;
            let source = self.memory.shard.peer(rank)?.address();
            for chunk in 0..self.chunks {
                self.chunk_copies(source, member, chunk, caller).try_for_each(|copy| enqueue(&self.stream, copy))?;
                events[member.index() as usize].push(vec![self.stream.mark()?]);
            }
            self.send_done(std::slice::from_ref(other))?;
        }
        Ok(())
    }

    #[track_caller]
    fn send_done(&self, others: &[(Rank, Rank)]) -> Result<()> {
        let mut done = self.arena.batch(&self.stream);
        for (_, other) in others {
            done = done.signal(self.memory.done, *other, self.epoch)?;
        }
        done.enqueue()
    }

    /// The copies of a chunk of a shard into its places.
    fn chunk_copies(&self, source: u64, member: Rank, chunk: u64, caller: Caller) -> impl Iterator<Item = Copy> {
        let size = size_of::<T>() as u64;
        (0..self.memory.pieces.count()).map(move |piece| {
            let (start, end) = bounds(self.memory.pieces.lens()[piece], self.chunks, chunk);
            let target = self.output.address() + (self.gathered.place(piece, member) + start) * size;
            let source = source + (self.memory.pieces.in_shard(piece) + start) * size;
            Copy { direction: Direction::DeviceToDevice, target, source, bytes: (end - start) * size, rows: CopyRows::ONE, caller }
        })
    }

    #[track_caller]
    fn end(&self, ready: &Ready<T>) -> Result<()> {
        self.stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        self.places.check_own(ready, "PullGather::release")?;
        self.places.order_after_readers(&self.stream)?;
        self.places.shut();
        Ok(())
    }
}

impl<T: Pod> ChunkedGather<T> for PullGather<T> {
    fn places(&self) -> &Places<T> {
        &self.places
    }

    /// After DONE of all: the others have copied the last shard.
    fn shards(&mut self, stream: &Stream) -> Result<&mut [Buffer<T>]> {
        stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        let mut batch = self.arena.batch(stream);
        for (_, other) in &*self.others {
            batch = batch.wait(self.memory.done, *other, self.epoch)?;
        }
        batch.enqueue()?;
        Ok(&mut self.own)
    }

    fn start(&mut self) -> Result<Ready<T>> {
        const WHAT: &str = "PullGather::start";
        self.stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        check_lent(&self.own, &self.lent, WHAT)?;
        self.arena.0.check()?;
        self.places.check_released(WHAT)?;
        self.epoch = self.epoch.next();
        let caller = Location::caller();
        // The stream reads the shard and writes the output: after the other streams' uses of them.
        order(&self.stream.0, |wait_for| {
            self.own.iter().for_each(|own| own.memory().add_use(&self.stream.0, false, wait_for));
            self.output.memory().add_use(&self.stream.0, true, wait_for);
        })?;
        // In a call of its own, before any wait: in one call with the waits it would come later.
        let mut ready = self.arena.batch(&self.stream);
        for (_, other) in &*self.others {
            ready = ready.signal(self.memory.ready, *other, self.epoch)?;
        }
        ready.enqueue()?;
        let mut events: Vec<Vec<Vec<Event>>> = vec![Vec::new(); self.gathered.members as usize];
        let own = self.copy_own(caller)?;
        let pulled = match self.chunks {
            1 => self.pull_whole(caller),
            _ => self.pull_chunks(&mut events, caller),
        };
        // Also after an error: the output is freed after the stream's work.
        self.stream.wait(&own).and(pulled)?;
        let done = self.stream.mark()?;
        if self.chunks == 1 {
            events.iter_mut().for_each(|events| events.push(vec![done.clone()]));
        } else {
            events[self.member.rank().index() as usize] = vec![vec![own]; self.chunks as usize];
        }
        let ticket = Ticket::after(&self.arena, done.clone(), WHAT, ()).numbered(self.epoch.get());
        Ok(self.places.open(Arrived { epoch: self.epoch, chunks: events, done, ticket: Some(ticket) }))
    }

    fn release(&mut self, ready: Ready<T>) -> Result<(), ReleaseError<T>> {
        self.end(&ready).map_err(|error| ReleaseError { ready, error })
    }
}

/// Enqueues a copy whose uses of memory are noted.
fn enqueue(stream: &Stream, copy: Copy) -> Result<()> {
    if copy.bytes == 0 {
        return Ok(());
    }
    stream.0.note(copy.direction.name(), Some(copy.caller));
    stream.0.runtime.backend.copy(stream.0.id, copy)
}

impl<T> fmt::Debug for PullGather<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullGather").field("member", &self.member).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
