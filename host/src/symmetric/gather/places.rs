//! What is read of a gather: its places, which stay, and the token of an epoch, without which no stream reads them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use oxtile_tile::num::Pod;

use super::super::arena::Arena;
use super::super::signal::Epoch;
use super::super::ticket::Ticket;
use super::pieces::{Gathered, bounds};
use crate::comm::Rank;
use crate::runtime::runtime::lock;
use crate::runtime::stream::StreamInner;
use crate::runtime::{Buffer, Error, Event, Memory, Owner, Result, Stream, order};

/// Where what is gathered lies, in every epoch: buffers to bind to once. A clone is another handle on the same places.
///
/// Any work may be bound to them at any time. It may be enqueued only on streams that were given the epoch ([`Ready`]): on others it is
/// [`Error::NotReady`].
pub struct Places<T>(Arc<Inner<T>>);

struct Inner<T> {
    gate: Arc<Gate>,
    chunks: u64,
    /// By piece, of all members.
    whole: Vec<Buffer<T>>,
    /// By member and chunk, then by piece.
    parts: Vec<Vec<Buffer<T>>>,
}

impl<T: Pod> Places<T> {
    /// The places in a buffer, which holds what is gathered from its beginning on, in so many chunks.
    pub(super) fn new(what: &'static str, arena: Option<&Arena>, of: &Buffer<T>, gathered: &Gathered, chunks: u64) -> Result<Self> {
        debug_assert!(gathered.len <= of.len(), "what is gathered leaves its memory");
        let (memory, state) = (Arc::clone(of.memory()), Mutex::default());
        let gate = Arc::new(Gate { what, arena: arena.cloned(), memory, state });
        let lend = |start: u64, len: u64, door: &Arc<Door>| {
            let address = of.address() + start * size_of::<T>() as u64;
            // SAFETY: the elements lie inside the buffer, whose memory the door keeps and tells of streams; no other place is written by its views.
            unsafe { Buffer::of_owner(&of.device(), address, len, Arc::clone(door) as _) }
        };
        let door = |part| Arc::new(Door { gate: Arc::clone(&gate), part });
        let (count, all) = (gathered.pieces.count(), door(None));
        let piece = |piece| gathered.whole(piece);
        let whole = (0..count).map(piece).map(|(start, len)| lend(start, len, &all)).collect::<Result<_>>()?;
        let part = |part: u64| {
            let (member, chunk, door) = (part / chunks, part % chunks, door(Some(part)));
            let piece = |piece: usize| {
                let len = gathered.pieces.lens()[piece];
                let (start, end) = bounds(len, chunks, chunk);
                lend(gathered.whole(piece).0 + member * len + start, end - start, &door)
            };
            (0..count).map(piece).collect::<Result<_>>()
        };
        let parts = (0..u64::from(gathered.members) * chunks).map(part).collect::<Result<_>>()?;
        Ok(Self(Arc::new(Inner { gate, chunks, whole, parts })))
    }

    /// All members' shards one after another, in the order of the team. Where a shard has several pieces, only the first piece.
    pub fn whole(&self) -> &Buffer<T> {
        &self.0.whole[0]
    }

    /// Each piece of all members' shards one after another.
    pub fn pieces(&self) -> &[Buffer<T>] {
        &self.0.whole
    }

    /// A chunk of a member's shard. Where that has several pieces, of the first piece.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chunk that is not there.
    pub fn chunk(&self, member: Rank, chunk: u64) -> Result<&Buffer<T>> {
        self.chunk_pieces(member, chunk).map(|pieces| &pieces[0])
    }

    /// A chunk of each piece of a member's shard.
    ///
    /// # Errors
    /// As [`chunk`](Self::chunk).
    pub fn chunk_pieces(&self, member: Rank, chunk: u64) -> Result<&[Buffer<T>]> {
        let part = (chunk < self.0.chunks).then(|| u64::from(member.index()) * self.0.chunks + chunk);
        match part.and_then(|part| self.0.parts.get(part as usize)) {
            Some(pieces) => Ok(pieces),
            None => Err(Error::Invalid { what: "Places::chunk", why: format!("there is no chunk {chunk} of {member}") }),
        }
    }

    /// Another handle on a piece of all members' shards, as elements `U`, for a value that owns its buffers, as a quantized tensor does. Only read it: a write
    /// would not be ordered after reads through other handles.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a piece that is not there, or whose bytes are no whole number of such elements.
    pub fn buffer<U: Pod>(&self, piece: usize) -> Result<Buffer<U>> {
        let invalid = |why| Error::Invalid { what: "Places::buffer", why };
        let of =
            self.0.whole.get(piece).ok_or_else(|| invalid(format!("there is no piece {piece}: a shard has {}", self.0.whole.len())))?;
        let (bytes, size) = (of.memory().bytes, size_of::<U>() as u64);
        if size == 0 || !bytes.is_multiple_of(size) || !of.address().is_multiple_of(align_of::<U>() as u64) {
            return Err(invalid(format!("piece {piece} has {bytes} bytes, no whole number of aligned elements of {size}")));
        }
        let memory = of.memory().part(of.address(), bytes);
        // SAFETY: so many elements of any bits lie there, aligned.
        Ok(unsafe { Buffer::of(memory, bytes / size) })
    }

    /// Begins an epoch, whose parts are there when `arrived` says.
    pub(super) fn open(&self, arrived: Arrived) -> Ready<T> {
        *lock(&self.0.gate.state) = State { epoch: Some(arrived.epoch), readers: Vec::new() };
        Ready { places: self.clone(), arrived: Box::new(arrived) }
    }

    /// Fails where an epoch was not released.
    pub(super) fn check_released(&self, what: &'static str) -> Result<()> {
        let Some(epoch) = lock(&self.0.gate.state).epoch else { return Ok(()) };
        let why = format!("epoch {} is still in use: give its Ready back, after its last reader (ChunkedGather::release)", epoch.get());
        Err(Error::Invalid { what, why })
    }

    /// Fails for the epoch of another gather.
    pub(super) fn check_own(&self, ready: &Ready<T>, what: &'static str) -> Result<()> {
        if Arc::ptr_eq(&self.0, &ready.places.0) {
            return Ok(());
        }
        Err(Error::Invalid { what, why: "the epoch is of another gather: give it to the one that began it".to_owned() })
    }

    /// Later work of `stream` comes after all work that the readers of the epoch have enqueued so far. Returns those readers, each with the event after that
    /// work, or none where no event is needed.
    pub(super) fn order_after_readers(&self, stream: &Stream) -> Result<Vec<(Stream, Option<Event>)>> {
        let readers: Vec<_> = lock(&self.0.gate.state).readers.iter().map(|reader| reader.stream.clone()).collect();
        let after = |reader: Stream| {
            if reader.0.id == stream.0.id || reader.is_capturing() {
                // After the work that a capturing stream had before its capture. The note orders other writes, and the freeing, of the memory.
                order(&stream.0, |wait_for| wait_for.push(Arc::clone(&reader.0)))?;
                self.0.gate.memory.used_on(&reader.0);
                return Ok((reader, None));
            }
            let read = reader.mark()?;
            stream.wait(&read)?;
            Ok((reader, Some(read)))
        };
        readers.into_iter().map(after).collect()
    }

    /// Ends the epoch, once the next writes of the places are ordered after its readers.
    pub(super) fn shut(&self) {
        *lock(&self.0.gate.state) = State::default();
        self.0.whole.iter().chain(self.0.parts.iter().flatten()).for_each(|place| place.memory().forget_uses());
    }
}

/// An epoch of a gather that is under way: what a stream needs to read its [`Places`]. It goes back to the gather
/// ([`ChunkedGather::release`](super::ChunkedGather::release)).
#[must_use = "without it no stream can read what is gathered, and the gather needs it back"]
pub struct Ready<T> {
    places: Places<T>,
    arrived: Box<Arrived>,
}

/// When the parts of an epoch are there.
pub(super) struct Arrived {
    pub epoch: Epoch,
    /// By member and chunk: the events after which the chunk is there.
    pub chunks: Vec<Vec<Vec<Event>>>,
    pub done: Event,
    /// The ticket of a gather over an arena.
    pub ticket: Option<Ticket<()>>,
}

impl<T: Pod> Ready<T> {
    /// Which epoch: the first is 1.
    pub fn epoch(&self) -> Epoch {
        self.arrived.epoch
    }

    /// All members' shards, as [`Places::whole`], for later work of the stream, which waits for all of them. The host does not wait.
    ///
    /// # Errors
    /// [`Error::NotCapturable`] in a graph, [`Error::Invalid`] for a stream of another device; [`Error::ForeignRuntime`]; what ended the arena; an error of the
    /// driver.
    pub fn whole(&self, stream: &Stream) -> Result<&Buffer<T>> {
        self.pieces(stream).map(|pieces| &pieces[0])
    }

    /// Each piece of all members' shards, as [`Places::pieces`]: see [`whole`](Self::whole).
    ///
    /// # Errors
    /// As [`whole`](Self::whole).
    pub fn pieces(&self, stream: &Stream) -> Result<&[Buffer<T>]> {
        self.places.0.gate.admit(stream, None, std::slice::from_ref(&self.arrived.done))?;
        Ok(self.places.pieces())
    }

    /// A chunk of a member's shard, as [`Places::chunk`], for later work of the stream, which waits for this chunk alone. The host does not wait.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chunk that is not there; as [`whole`](Self::whole).
    pub fn chunk(&self, stream: &Stream, member: Rank, chunk: u64) -> Result<&Buffer<T>> {
        self.chunk_pieces(stream, member, chunk).map(|pieces| &pieces[0])
    }

    /// A chunk of each piece of a member's shard: see [`chunk`](Self::chunk).
    ///
    /// # Errors
    /// As [`chunk`](Self::chunk).
    pub fn chunk_pieces(&self, stream: &Stream, member: Rank, chunk: u64) -> Result<&[Buffer<T>]> {
        let pieces = self.places.chunk_pieces(member, chunk)?;
        let (part, of_member) = (u64::from(member.index()) * self.places.0.chunks + chunk, &self.arrived.chunks[member.index() as usize]);
        self.places.0.gate.admit(stream, Some(part), &of_member[chunk as usize])?;
        Ok(pieces)
    }

    /// Waits on the host until everything is there and this member's shard may be written again, over an arena at most for its deadline.
    ///
    /// # Errors
    /// As [`Ticket::wait`], and without an arena as [`Event::synchronize`].
    pub fn wait(&self) -> Result<()> {
        self.arrived.ticket.as_ref().map_or_else(|| self.arrived.done.synchronize(), Ticket::settle)
    }
}

/// The streams that may read the places of a gather.
struct Gate {
    what: &'static str,
    arena: Option<Arena>,
    /// What the places lie in.
    memory: Arc<Memory>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None between two epochs.
    epoch: Option<Epoch>,
    /// Each stream once.
    readers: Vec<Reader>,
}

/// A stream that was given the epoch.
struct Reader {
    stream: Stream,
    has_whole: bool,
    parts: BTreeSet<u64>,
}

impl Reader {
    fn has(&self, part: Option<u64>) -> bool {
        self.has_whole || part.is_some_and(|part| self.parts.contains(&part))
    }
}

impl Gate {
    /// Gives the stream a part of the epoch, or all of it, which is there once the events are done.
    fn admit(&self, stream: &Stream, part: Option<u64>, arrived: &[Event]) -> Result<()> {
        stream.0.refuse_capture("the epoch of a gather", "give it to the stream that replays the graph, before Graph::replay")?;
        if let Some(arena) = &self.arena {
            arena.0.check()?;
            arena.0.use_on(stream)?;
        }
        let find = |state: &State| state.readers.iter().position(|reader| reader.stream.0.id == stream.0.id);
        let is_known = {
            let state = lock(&self.state);
            find(&state).is_some_and(|at| state.readers[at].has(part))
        };
        if is_known {
            return Ok(());
        }
        arrived.iter().try_for_each(|event| stream.wait(event))?;
        let state = &mut *lock(&self.state);
        let at = find(state).unwrap_or_else(|| {
            state.readers.push(Reader { stream: stream.clone(), has_whole: false, parts: BTreeSet::new() });
            state.readers.len() - 1
        });
        match part {
            None => state.readers[at].has_whole = true,
            Some(part) => _ = state.readers[at].parts.insert(part),
        }
        Ok(())
    }
}

/// The owner of a place: it lends a part, or the whole, to the streams that were given it.
struct Door {
    gate: Arc<Gate>,
    part: Option<u64>,
}

impl Owner for Door {
    fn admits(&self, stream: &StreamInner) -> Result<(), String> {
        let (what, state) = (self.gate.what, lock(&self.gate.state));
        let Some(epoch) = state.epoch else {
            return Err(format!("nothing is gathered in this place of a {what} now: start it, and give the stream its Ready"));
        };
        let reader = state.readers.iter().find(|reader| reader.stream.0.id == stream.id);
        if reader.is_some_and(|reader| reader.has(self.part)) {
            return Ok(());
        }
        let (found, mend) = match self.part {
            None => ("the whole", "Ready::whole"),
            Some(_) => ("this chunk", "Ready::chunk or Ready::whole"),
        };
        Err(format!("the stream was not given {found} of epoch {} of a {what}: call {mend} with it first", epoch.get()))
    }

    fn used_on(&self, stream: &Arc<StreamInner>) {
        self.gate.memory.used_on(stream);
    }
}

/// Why an epoch was not released, and the epoch: its places are still in use. Release it again once that is mended. It becomes an [`Error`] by `?`, which drops the
/// epoch.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct ReleaseError<T> {
    /// What is not released.
    pub ready: Ready<T>,
    /// Why.
    pub error: Error,
}

impl<T> From<ReleaseError<T>> for Error {
    fn from(not_released: ReleaseError<T>) -> Self {
        not_released.error
    }
}

impl<T> Clone for Places<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Places<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").field("of", &self.0.gate.what).field("chunks", &self.0.chunks).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Ready<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ready").field("of", &self.places.0.gate.what).field("epoch", &self.arrived.epoch).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for ReleaseError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseError").field("ready", &self.ready).field("error", &self.error).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ChunkedGather, GatherMemory, PullGather};
    use super::*;
    use crate::comm::{EmulatedCommunicator, Team, WorldSize};
    use crate::runtime::Runtime;
    use crate::symmetric::ArenaOptions;

    /// A layer reads each chunk for each head: a stream is held once, however often it reads, and no longer than the epoch.
    #[test]
    fn readers_are_noted_once() {
        let rank = EmulatedCommunicator::world_of(&Runtime::emulated(1).unwrap(), WorldSize::ONE).unwrap().remove(0);
        let arena = Arena::open(&rank, ArenaOptions::default()).unwrap();
        let [copies, reader] = [(); 2].map(|()| rank.device().stream().unwrap());
        let member = Team::all(WorldSize::ONE).member(Rank::ZERO).unwrap();
        let mut gather = PullGather::<u32>::new(&arena, &member, GatherMemory::take(&arena, 4).unwrap(), &copies, 2).unwrap();
        let handles = Arc::strong_count(&reader.0);
        for _ in 0..3 {
            gather.shard(&copies).unwrap().fill_zero(&copies).unwrap();
            let ready = gather.start().unwrap();
            for read in 0..1000 {
                ready.chunk(&reader, Rank::ZERO, read % 2).unwrap().to_vec(&reader).unwrap();
            }
            let inner = &gather.places().0;
            assert_eq!(lock(&inner.gate.state).readers.len(), 1);
            gather.release(ready).unwrap();
            // Only the arena still holds it.
            assert_eq!(Arc::strong_count(&reader.0), handles + 1);
        }
    }
}
