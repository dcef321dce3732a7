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
use crate::runtime::{Buffer, Error, Event, Memory, Result, Stream, memory, order};

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
    /// Copies this rank's own shard meanwhile.
    side: Stream,
    chunks: u64,
    epoch: Epoch,
    /// The other members.
    others: Arc<[(Rank, Rank)]>,
}

impl<T: Pod> PullGather<T> {
    /// For a member of a team of the arena's world. `stream` carries the copies of the others' shards, a stream of its own that of
    /// this rank's; each shard is copied in `chunks` pieces. What comes in one piece is waited for all at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no chunks, a team of another world, memory of another arena or a stream of another device; [`Error::ForeignRuntime`].
    pub fn new(arena: &Arena, member: &Member, memory: GatherMemory<T>, stream: &Stream, chunks: u64) -> Result<Self> {
        if chunks == 0 || member.team().world() != arena.world() || member.world_rank() != arena.rank() {
            let why = format!("{chunks} chunks for {member:?} in an arena of {} of {}", arena.rank(), arena.world());
            return Err(Error::Invalid { what: "PullGather::new", why });
        }
        memory.shard.check_arena(arena, "PullGather::new")?;
        arena.0.check_stream(stream)?;
        let (arena, member, stream) = (arena.clone(), member.clone(), stream.clone());
        let side = stream.device().stream()?;
        let others = others_of(&member);
        let what = format!("PullGather of elements of {} bytes in {:?}", size_of::<T>(), member.team());
        arena.0.declare(memory.ready.number, what, others.iter().map(|(_, rank)| *rank))?;
        Ok(Self { arena, member, memory, stream, side, chunks, epoch: Epoch::ZERO, others })
    }

    /// The shard to write for the next gather: later work of `stream` comes after the others have copied the last one.
    ///
    /// # Errors
    /// [`Error::NotCapturable`] in a graph; a failure of the arena; an error of the driver.
    #[track_caller]
    pub fn shard(&mut self, stream: &Stream) -> Result<&mut Buffer<T>> {
        stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        let mut batch = self.arena.batch(stream);
        for (_, other) in &*self.others {
            batch = batch.wait(self.memory.done, *other, self.epoch)?;
        }
        batch.enqueue()?;
        Ok(self.memory.shard.local_mut())
    }

    /// Gathers the members' shards into `output`, in the order of the team, behind the work on the shard so far. Every member calls.
    ///
    /// # Errors
    /// [`Error::Length`] if `output` is not as many shards as there are members; [`Error::NotCapturable`] in a graph; a failure of the arena; an error of the driver.
    #[track_caller]
    pub fn run(&mut self, output: Buffer<T>) -> Result<Gathered<T>> {
        const WHAT: &str = "PullGather::run, output";
        self.stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
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
        // By itself, and before anything waits: in one call with the waits it would come later.
        let mut ready = self.arena.batch(&self.stream);
        for (_, other) in &*self.others {
            ready = ready.signal(self.memory.ready, *other, self.epoch)?;
        }
        ready.enqueue()?;
        let mut events: Vec<Vec<Event>> = vec![Vec::new(); team.get() as usize];
        let own = self.copy_own(&output, caller)?;
        let pulled = match self.chunks {
            1 => self.pull_whole(&output, caller),
            _ => self.pull_chunks(&output, &mut events, caller),
        };
        // Whatever that gave: the output is freed behind the stream.
        self.stream.wait(&own).and(pulled)?;
        let done = self.stream.mark()?;
        if self.chunks == 1 {
            events.iter_mut().for_each(|events| events.push(done.clone()));
        } else {
            events[self.member.rank().index() as usize] = vec![own; self.chunks as usize];
        }
        let (of, owner) = (output.memory(), Arc::clone(output.memory()));
        let cell = Memory::borrowed(&of.runtime, of.device, of.address, of.bytes, Some(owner));
        let ticket = Ticket::behind(&self.arena, done, "PullGather::run", output).numbered(self.epoch.get());
        Ok(Gathered { ticket, cell, events, shard, readers: Mutex::default() })
    }

    /// This rank's own shard, on the side, behind what the stream is behind.
    fn copy_own(&self, output: &Buffer<T>, caller: Caller) -> Result<Event> {
        self.side.wait(&self.stream.mark()?)?;
        self.arena.0.use_on(&self.side)?;
        let source = self.memory.shard.local().address();
        let copy = |chunk| enqueue(&self.side, self.chunk_copy(source, output, self.member.rank(), chunk, caller));
        let copied = (0..self.chunks).try_for_each(copy);
        let own = self.side.mark()?;
        if let Err(error) = copied {
            self.stream.wait(&own)?;
            return Err(error);
        }
        Ok(own)
    }

    /// The others' shards in one piece each, behind READY of all; DONE goes to all: the least that a host can enqueue.
    #[track_caller]
    fn pull_whole(&self, output: &Buffer<T>, caller: Caller) -> Result<()> {
        let mut ready = self.arena.batch(&self.stream);
        for (_, other) in &*self.others {
            ready = ready.wait(self.memory.ready, *other, self.epoch)?;
        }
        ready.enqueue()?;
        let copy = |(member, rank): &(Rank, Rank)| {
            let source = self.memory.shard.peer(*rank)?.address();
            Ok(self.chunk_copy(source, output, *member, 0, caller))
        };
        let copies = self.others.iter().map(copy).collect::<Result<Vec<_>>>()?;
        memory::copies(&self.stream.0, &copies, &[])?;
        self.send_done(&self.others)
    }

    /// The others' shards in chunks, each shard behind READY of its member, DONE behind it.
    #[track_caller]
    fn pull_chunks(&self, output: &Buffer<T>, events: &mut [Vec<Event>], caller: Caller) -> Result<()> {
        for other in &*self.others {
            let (member, rank) = *other;
            self.arena.wait(&self.stream, self.memory.ready, rank, self.epoch)?;
            let source = self.memory.shard.peer(rank)?.address();
            for chunk in 0..self.chunks {
                enqueue(&self.stream, self.chunk_copy(source, output, member, chunk, caller))?;
                events[member.index() as usize].push(self.stream.mark()?);
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

    /// The copy of a chunk of a shard into its place.
    fn chunk_copy(&self, source: u64, output: &Buffer<T>, member: Rank, chunk: u64, caller: Caller) -> Copy {
        let (len, size) = (self.memory.shard.len(), size_of::<T>() as u64);
        let target = output.address() + u64::from(member.index()) * len * size;
        let (start, end) = bounds(len, self.chunks, chunk);
        let (from, bytes) = (start * size, (end - start) * size);
        Copy { direction: Direction::DeviceToDevice, target: target + from, source: source + from, bytes, caller }
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

/// The other members of a team by their numbers in it and in the world, beginning behind this one.
pub(super) fn others_of(member: &Member) -> Arc<[(Rank, Rank)]> {
    let world_rank = |of| member.team().world_rank(of).unwrap_or(member.world_rank());
    member.others().map(|of| (of, world_rank(of))).collect()
}

/// Why a gather is in no graph.
pub(super) const WHAT_GROWS: &str = "a gather, whose epochs grow";
pub(super) const INSTEAD: &str = "capture puts, gets and a Handover in place of it";

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
        let mut readers = lock(&self.readers);
        if !readers.iter().any(|reader| reader.0.id == stream.0.id) {
            readers.push(stream.clone());
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{EmulatedCommunicator, Team, WorldSize};
    use crate::runtime::Runtime;
    use crate::symmetric::ArenaOptions;

    /// A layer reads each chunk for each head: the list of readers holds a stream once, however often it reads.
    #[test]
    fn readers_are_noted_once() {
        let rank = EmulatedCommunicator::world_of(&Runtime::emulated(1).unwrap(), WorldSize::ONE).unwrap().remove(0);
        let arena = Arena::open(&rank, ArenaOptions::default()).unwrap();
        let [copies, reader] = [(); 2].map(|()| rank.device().stream().unwrap());
        let member = Team::all(WorldSize::ONE).member(Rank::ZERO).unwrap();
        let mut gather = PullGather::<u32>::new(&arena, &member, GatherMemory::take(&arena, 4).unwrap(), &copies, 2).unwrap();
        gather.shard(&copies).unwrap().fill_zero(&copies).unwrap();
        let gathered = gather.run(Buffer::uninitialised(&copies, 4).unwrap()).unwrap();
        for read in 0..1000 {
            gathered.chunk(&reader, Rank::ZERO, read % 2).unwrap();
        }
        assert_eq!(lock(&gathered.readers).len(), 1);
    }
}
