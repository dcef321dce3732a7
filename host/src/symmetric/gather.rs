//! An all-gather that no multiprocessor works for, in chunks that can be waited for one by one.

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex};

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::arena::Arena;
use super::buffer::SymmetricBuffer;
use super::signal::{Channel, Epoch};
use super::ticket::Ticket;
use crate::comm::{Member, Rank};
use crate::runtime::backend::{Caller, Copy, Direction};
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Event, Memory, Result, Stream, order};

/// What a [`PullGather`] needs of an arena: every rank takes it, in one order with all else, also one that takes no part in the gather.
#[derive(Debug)]
pub struct GatherMemory<T> {
    shard: SymmetricBuffer<T>,
    ready: Channel,
    done: Channel,
}

impl<T: Pod> GatherMemory<T> {
    /// For shards of `len` elements.
    ///
    /// # Errors
    /// As [`Arena::buffer`] and [`Arena::channel`].
    pub fn take(arena: &Arena, len: u64) -> Result<Self> {
        Ok(Self { shard: arena.buffer(len)?, ready: arena.channel()?, done: arena.channel()? })
    }
}

/// Each member publishes its shard, and pulls those of the others by its copy engine.
///
/// The order of signals, for epoch `e`: the shard is written; READY `e` goes to every other member; a member that sees READY `e` of another
/// copies the shard and sends DONE `e` back; the shard is written again behind DONE `e` of all.
pub struct PullGather<T> {
    arena: Arena,
    member: Member,
    memory: GatherMemory<T>,
    stream: Stream,
    chunks: u64,
    epoch: Epoch,
}

impl<T: Pod> PullGather<T> {
    /// For a member of a team of the arena's world. `stream` carries the copies; each shard is copied in `chunks` pieces.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no chunks or a team of another world.
    pub fn new(arena: &Arena, member: &Member, memory: GatherMemory<T>, stream: &Stream, chunks: u64) -> Result<Self> {
        if chunks == 0 || member.team().world() != arena.world() || member.world_rank() != arena.rank() {
            let why = format!("{chunks} chunks for {member:?} in an arena of {} of {}", arena.rank(), arena.world());
            return Err(Error::Invalid { what: "PullGather::new", why });
        }
        let (arena, member, stream) = (arena.clone(), member.clone(), stream.clone());
        Ok(Self { arena, member, memory, stream, chunks, epoch: Epoch::ZERO })
    }

    /// The shard to write for the next gather: later work of `stream` comes after the others have copied the last one.
    ///
    /// # Errors
    /// A failure of the arena; an error of the driver.
    #[track_caller]
    pub fn shard(&mut self, stream: &Stream) -> Result<&mut Buffer<T>> {
        for other in self.others() {
            self.arena.wait(stream, self.memory.done, other, self.epoch)?;
        }
        Ok(self.memory.shard.local_mut())
    }

    /// Gathers the members' shards into `output`, in the order of the team, behind the work on the shard so far. Every member calls.
    ///
    /// # Errors
    /// [`Error::Length`] if `output` is not as many shards as there are members; a failure of the arena; an error of the driver.
    #[track_caller]
    pub fn run(&mut self, output: Buffer<T>) -> Result<Gathered<T>> {
        const WHAT: &str = "PullGather::run, output";
        let (shard, team) = (self.memory.shard.len(), self.member.team().size());
        let expected = shard * u64::from(team.get());
        if output.len() != expected {
            return Err(Error::Length { what: WHAT, expected, found: output.len() });
        }
        output.check_stream(&self.stream, WHAT)?;
        self.epoch = self.epoch.next();
        let caller = Location::caller();
        // The stream reads the shard and writes the output: behind what others did with them.
        let local = self.memory.shard.local();
        order(&self.stream.0, |wait_for| {
            local.memory().add_use(&self.stream.0, false, wait_for);
            output.memory().add_use(&self.stream.0, true, wait_for);
        })?;
        for other in self.others() {
            self.arena.signal(&self.stream, self.memory.ready, other, self.epoch)?;
        }
        let mut events: Vec<Vec<Event>> = vec![Vec::new(); team.get() as usize];
        events[self.member.rank().index() as usize] = self.copy(local.address(), &output, self.member.rank(), caller)?;
        for member in self.member.others() {
            let other = self.world_rank(member);
            self.arena.wait(&self.stream, self.memory.ready, other, self.epoch)?;
            let source = self.memory.shard.peer(other)?.address();
            events[member.index() as usize] = self.copy(source, &output, member, caller)?;
            self.arena.signal(&self.stream, self.memory.done, other, self.epoch)?;
        }
        let (of, owner) = (output.memory(), Arc::clone(output.memory()));
        let cell = Memory::borrowed(&of.runtime, of.device, of.address, of.bytes, Some(owner));
        let ticket = Ticket::new(&self.arena, &self.stream, "PullGather::run", output)?.numbered(self.epoch.get());
        Ok(Gathered { ticket, cell, events, shard, readers: Mutex::default() })
    }

    /// Copies a shard into its place, a chunk at a time, with an event behind each.
    fn copy(&self, source: u64, output: &Buffer<T>, member: Rank, caller: Caller) -> Result<Vec<Event>> {
        let (len, size) = (self.memory.shard.len(), size_of::<T>() as u64);
        let target = output.address() + u64::from(member.index()) * len * size;
        (0..self.chunks)
            .map(|chunk| {
                let (start, end) = bounds(len, self.chunks, chunk);
                let (from, bytes) = (start * size, (end - start) * size);
                let copy = Copy { direction: Direction::DeviceToDevice, target: target + from, source: source + from, bytes, caller };
                if bytes > 0 {
                    self.stream.0.runtime.backend.copy(self.stream.0.id, copy)?;
                }
                self.stream.record()
            })
            .collect()
    }

    /// The other members' ranks in the world, beginning behind this one.
    fn others(&self) -> Vec<Rank> {
        self.member.others().map(|member| self.world_rank(member)).collect()
    }

    fn world_rank(&self, member: Rank) -> Rank {
        self.member.team().world_rank(member).unwrap_or(self.member.world_rank())
    }
}

/// Where a chunk begins and ends; the last may be shorter.
pub(super) fn bounds(len: u64, chunks: u64, chunk: u64) -> (u64, u64) {
    let length = len.div_ceil(chunks);
    ((chunk * length).min(len), ((chunk + 1) * length).min(len))
}

/// A gather under way.
#[must_use = "the output is in it"]
pub struct Gathered<T> {
    ticket: Ticket<Buffer<T>>,
    /// The output, without the note that the gather's stream writes it: the chunks' events order that.
    cell: Arc<Memory>,
    events: Vec<Vec<Event>>,
    shard: u64,
    readers: Mutex<Vec<Stream>>,
}

impl<T: Pod> Gathered<T> {
    /// One chunk of a member's shard, for work on `stream`, which waits for this chunk alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chunk that is not there; an error of the driver.
    pub fn chunk(&self, stream: &Stream, member: Rank, chunk: u64) -> Result<DeviceView<'_, T>> {
        let of_member = self.events.get(member.index() as usize);
        let Some(event) = of_member.and_then(|events| events.get(chunk as usize)) else {
            return Err(Error::Invalid { what: "Gathered::chunk", why: format!("there is no chunk {chunk} of {member}") });
        };
        stream.wait(event)?;
        lock(&self.readers).push(stream.clone());
        let (start, end) = bounds(self.shard, self.events[0].len() as u64, chunk);
        let address = self.cell.address + (u64::from(member.index()) * self.shard + start) * size_of::<T>() as u64;
        // SAFETY: the elements lie inside the output, which the cell keeps; the cell stands for it in the
        // order of streams, and every stream that gets a view is behind the chunk and before the output's next use.
        Ok(unsafe { DeviceView::from_raw(address, end - start, &self.cell) })
    }

    /// The whole output, for later work of the stream. The host does not wait.
    ///
    /// # Errors
    /// As [`Ticket::then`].
    pub fn then(self, stream: &Stream) -> Result<Buffer<T>> {
        let (ticket, readers) = (self.ticket, self.readers);
        let output = ticket.then(stream)?;
        note_readers(&output, &readers)?;
        Ok(output)
    }

    /// The whole output, waited for on the host.
    ///
    /// # Errors
    /// As [`Ticket::wait`].
    pub fn wait(self) -> Result<Buffer<T>> {
        let (ticket, readers) = (self.ticket, self.readers);
        let output = ticket.wait()?;
        note_readers(&output, &readers)?;
        Ok(output)
    }
}

/// Whoever writes or frees the output comes behind those that read chunks of it.
fn note_readers<T: Pod>(output: &Buffer<T>, readers: &Mutex<Vec<Stream>>) -> Result<()> {
    let readers = lock(readers);
    readers.iter().try_for_each(|reader| order(&reader.0, |wait_for| output.memory().add_use(&reader.0, false, wait_for)))
}

impl<T> fmt::Debug for PullGather<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PullGather").field("member", &self.member).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Gathered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gathered").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}
