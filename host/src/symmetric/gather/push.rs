//! The all-gather whose members put their shards to the others.

use std::fmt;
use std::ops::Range;
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
use crate::runtime::{Buffer, Error, Event, Owner, Result, Stream, order};

/// What a [`PushGather`] needs of an arena: every rank takes it, in one order with all else, also one that takes no part in the gather.
#[derive(Debug)]
pub struct PushMemory<T> {
    memory: SymmetricBuffer<T>,
    gathered: Gathered,
    ready: Channel,
    free: Channel,
}

impl<T: Pod> PushMemory<T> {
    /// For `members` shards of `len` elements.
    ///
    /// # Errors
    /// As [`Arena::buffer`] and [`Arena::channel`]; [`Error::TooLarge`].
    pub fn take(arena: &Arena, len: u64, members: u32) -> Result<Self> {
        Self::of_pieces(arena, &[len], members)
    }

    /// For `members` shards of several pieces, such as codes and scales, which are gathered together, each with that of the other members. Each piece of all
    /// members begins at a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no pieces; as [`take`](Self::take).
    pub fn of_pieces(arena: &Arena, lens: &[u64], members: u32) -> Result<Self> {
        const WHAT: &str = "PushMemory::of_pieces";
        let gathered = Pieces::new::<T>(WHAT, lens)?.gathered::<T>(WHAT, members)?;
        Ok(Self { memory: arena.buffer(gathered.len)?, gathered, ready: arena.channel()?, free: arena.channel()? })
    }
}

/// The order in which a [`PushGather`] puts the chunks of a shard to the other members. Each member may have an order of its own: what arrives is
/// the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOrder {
    /// All chunks to the next member, then all to the one after it. A member's FREE is waited for just before the puts to it, so that one that
    /// reads for long delays no put to the members before it; READY is told after each chunk. At each step the members put to different ones, and each
    /// link carries the chunks of one member, as long as none falls behind: members that are half a put out of step share links, and push 223 GB/s instead of
    /// 371 among four H200s.
    ByPeer,
    /// As [`ByPeer`](Self::ByPeer), in step: before the puts to the next member, the chunks of the member that puts to this one in the same step have come. Members that
    /// begin at different times are in step from the second member on, and a member that reads for long delays all.
    InStep,
    /// A chunk to all members, then the next chunk. The first put comes after FREE of all members, and READY of a chunk after its puts to all: a member that
    /// reads for long delays all. The fewest calls of the driver; never taken unless it is asked for.
    ByChunk,
}

impl PutOrder {
    /// Shards of fewer bytes are put without keeping step, which costs them more than shared links do.
    const LEAST_IN_STEP: u64 = 8 << 20;

    /// The order for shards of so many bytes.
    pub const fn of(shard_bytes: u64) -> Self {
        if shard_bytes < Self::LEAST_IN_STEP { Self::ByPeer } else { Self::InStep }
    }
}

/// Each member puts its shard to all others by its copy engine: from [buffers of its own](Self::start_from), or in place
/// ([`start`](ChunkedGather::start)), from where it lies in what is gathered. To the others both look the same, so in one gather some members may do the
/// one and some the other.
///
/// The order of signals, for epoch `e`: a member that has read what epoch `e - 1` brought sends FREE `e - 1` to all; a member that sees it puts the chunks
/// of its shard there, with READY after each chunk. Which member comes first is the [`PutOrder`].
///
/// No signal is about a member's own place: the others put beside it, and none of them reads it. Only this rank uses it, by the copies to the
/// others and by the readers of what was gathered, and events order these. So it may be [written](ChunkedGather::shard) for `e` once the copies of `e - 1` are done and this rank's readers of it, before
/// FREE `e - 1` of any other has come: that delays the copies of `e`, not the writing. The FREE that this rank sends does not cover its own place.
pub struct PushGather<T> {
    arena: Arena,
    member: Member,
    memory: PushMemory<T>,
    /// Carries the copies to the others, one after another: side by side they get three fifths of the rate.
    out: Stream,
    /// Copies this rank's own shard and waits for the others' chunks.
    arrivals: Stream,
    /// This member's places in what is gathered, by piece.
    own: Vec<Buffer<T>>,
    /// Where these lie, and how long they are.
    lent: Vec<(u64, u64)>,
    /// After the last writes of those; none while they may be written.
    there: Option<Vec<Event>>,
    places: Places<T>,
    chunks: u64,
    order: PutOrder,
    epoch: Epoch,
    /// The other members.
    others: Arc<[(Rank, Rank)]>,
    /// After all work that read what was gathered since the own places were written, except that of `arrivals`: the last event of each stream.
    read: Vec<Event>,
}

impl<T: Pod> PushGather<T> {
    /// For a member of a team of the arena's world. `out` carries the copies to the others, `arrivals` copies this rank's own shard meanwhile and
    /// waits for those of the others. Each shard is copied in `chunks` pieces, which are waited for one by one, in [the order](PutOrder::of) for its bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no chunks, a team of another world, memory for another number of members or of another arena, or a stream of another device;
    /// [`Error::ForeignRuntime`].
    pub fn new(arena: &Arena, member: &Member, memory: PushMemory<T>, [out, arrivals]: [&Stream; 2], chunks: u64) -> Result<Self> {
        const WHAT: &str = "PushGather::new";
        let fits = memory.gathered.members == member.team().size().get();
        if chunks == 0 || !fits || member.team().world() != arena.world() || member.world_rank() != arena.rank() {
            let why = format!(
                "{chunks} chunks and memory of {} members for {member:?} in an arena of {}",
                memory.gathered.members,
                arena.world()
            );
            return Err(Error::Invalid { what: WHAT, why });
        }
        memory.memory.check_arena(arena, WHAT)?;
        [out, arrivals].into_iter().try_for_each(|stream| arena.0.check_stream(stream))?;
        let what = format!("PushGather of {chunks} chunks of elements of {} bytes in {:?}", size_of::<T>(), member.team());
        arena.0.declare(memory.ready.number, what, others_of(member).iter().map(|(_, rank)| *rank))?;
        let (of, device) = (memory.memory.local(), arena.0.control.device());
        let places = Places::new("PushGather", Some(arena), of, &memory.gathered, chunks)?;
        let own = memory.gathered.pieces.lens().iter().enumerate().map(|(piece, len)| {
            let place = of.address() + memory.gathered.place(piece, member.rank()) * size_of::<T>() as u64;
            // SAFETY: a member's piece lies inside the arena's buffer, which is aligned to 256 bytes and kept, and told of streams, by its memory.
            unsafe { Buffer::of_owner(&device, place, *len, Arc::clone(of.memory()) as _) }
        });
        let (own, others) = (own.collect::<Result<Vec<_>>>()?, others_of(member));
        let lent = lent(&own);
        let (arena, member, out, arrivals) = (arena.clone(), member.clone(), out.clone(), arrivals.clone());
        let (there, epoch, read) = (None, Epoch::ZERO, Vec::new());
        let order = PutOrder::of(memory.gathered.pieces.lens().iter().sum::<u64>().saturating_mul(size_of::<T>() as u64));
        Ok(Self { arena, member, memory, out, arrivals, own, lent, there, places, chunks, order, epoch, others, read })
    }

    /// The same gather with the puts of this member, and its waits for chunks of the others, in this order.
    #[must_use]
    pub fn in_order(self, order: PutOrder) -> Self {
        Self { order, ..self }
    }

    /// The order of this member's puts.
    pub fn order(&self) -> PutOrder {
        self.order
    }

    /// As [`start`](ChunkedGather::start), from buffers elsewhere: puts `pieces` to all members, this one too.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Invalid`] for another number of pieces; as [`start`](ChunkedGather::start).
    #[track_caller]
    pub fn start_from(&mut self, pieces: &[&Buffer<T>]) -> Result<Ready<T>> {
        const WHAT: &str = "PushGather::start_from";
        self.check_idle(WHAT)?;
        if pieces.len() != self.own.len() {
            let why = format!("{} pieces where a shard has {}: give each", pieces.len(), self.own.len());
            return Err(Error::Invalid { what: WHAT, why });
        }
        for (piece, own) in pieces.iter().zip(&self.own) {
            if piece.len() != own.len() {
                return Err(Error::Length { what: "PushGather::start_from, a piece", expected: own.len(), found: piece.len() });
            }
        }
        // After the release of the epoch before: it is on this stream too.
        self.own.iter_mut().zip(pieces).try_for_each(|(own, piece)| own.copy_from(&self.arrivals, piece))?;
        self.read.clear();
        self.there = if self.chunks > 1 { Some(vec![self.arrivals.mark()?]) } else { None };
        self.gather(WHAT, Some(pieces))
    }

    /// The events after what has written the own places so far.
    fn written(&self, what: &'static str) -> Result<Vec<Event>> {
        let mut writers: Vec<Stream> = Vec::new();
        for own in &self.own {
            let Some(writer) = own.memory().streams(false).pop() else {
                let why = "this member's place was never handed out: write what ChunkedGather::shard gives first".to_owned();
                return Err(Error::Invalid { what, why });
            };
            writer.refuse_capture(WHAT_GROWS, INSTEAD)?;
            if writers.iter().all(|known| known.0.id != writer.id) {
                writers.push(Stream(writer));
            }
        }
        writers.iter().map(Stream::mark).collect()
    }

    /// Fails where a gather cannot begin.
    fn check_idle(&self, what: &'static str) -> Result<()> {
        [&self.out, &self.arrivals].iter().try_for_each(|stream| stream.0.refuse_capture(WHAT_GROWS, INSTEAD))?;
        self.check_released(what)
    }

    fn check_released(&self, what: &'static str) -> Result<()> {
        self.arena.0.check()?;
        self.places.check_released(what)
    }

    /// Puts `pieces`, or what is in place. The own places hold the shard after the events [`Self::there`]; where there are none, after what follows in `arrivals`.
    #[track_caller]
    fn gather(&mut self, what: &'static str, pieces: Option<&[&Buffer<T>]>) -> Result<Ready<T>> {
        let before = self.epoch;
        match pieces {
            Some(pieces) => self.put(pieces, before)?,
            None => self.put(&self.own.iter().collect::<Vec<_>>(), before)?,
        }
        let mut events = self.await_chunks(before)?;
        // After the end the shard may be written again too.
        self.arrivals.wait(&self.out.mark()?)?;
        let done = self.arrivals.mark()?;
        if self.chunks == 1 {
            events.iter_mut().filter(|events| events.is_empty()).for_each(|events| events.push(vec![done.clone()]));
        }
        self.epoch = before.next();
        let ticket = Ticket::after(&self.arena, done.clone(), what, ()).numbered(self.epoch.get());
        Ok(self.places.open(Arrived { epoch: self.epoch, chunks: events, done, ticket: Some(ticket) }))
    }

    /// READY of a chunk: all chunks of an epoch come before all of the next.
    fn ready(&self, before: Epoch, chunk: u64) -> Epoch {
        Epoch::ZERO.later(before.get() * self.chunks + chunk + 1)
    }

    /// Puts to the others, each once it has released the epoch before.
    #[track_caller]
    fn put(&self, pieces: &[&Buffer<T>], before: Epoch) -> Result<()> {
        let mut batch = self.arena.batch(&self.out);
        for step in self.steps() {
            if let Some(source) = self.source_before(&step) {
                batch = batch.wait(self.memory.ready, source, self.ready(before, self.chunks - 1))?;
            }
            for other in step.peers(&self.others).filter(|_| step.is_first) {
                batch = batch.wait(self.memory.free, other, before)?;
            }
            for other in step.peers(&self.others) {
                for (piece, source) in pieces.iter().enumerate() {
                    let (start, end) = bounds(source.len(), self.chunks, step.chunk);
                    let place = self.memory.gathered.place(piece, self.member.rank());
                    batch = batch.put(&self.memory.memory.peer(other)?, source, start..end, place + start)?;
                }
            }
            for other in step.peers(&self.others) {
                batch = batch.signal(self.memory.ready, other, self.ready(before, step.chunk))?;
            }
        }
        batch.enqueue()
    }

    /// What is put between two signals, in order.
    fn steps(&self) -> Vec<Step> {
        let (all, chunks) = (self.others.len(), 0..self.chunks);
        match self.order {
            PutOrder::ByChunk => chunks.map(|chunk| Step { peers: 0..all, chunk, is_first: chunk == 0 }).collect(),
            PutOrder::ByPeer | PutOrder::InStep => {
                let of = |peer: usize| chunks.clone().map(move |chunk| Step { peers: peer..peer + 1, chunk, is_first: chunk == 0 });
                (0..all).flat_map(of).collect()
            }
        }
    }

    /// The member whose chunks have come before this step: the one that put to this one in the step before, where members keep step.
    fn source_before(&self, step: &Step) -> Option<Rank> {
        let begins = self.order == PutOrder::InStep && step.is_first && step.peers.start > 0;
        // The member before this one puts to this one first.
        begins.then(|| self.others[self.others.len() - step.peers.start].1)
    }

    /// Waits for the chunks of the others, in the order in which they arrive if all put in this member's order, and marks each; where there is only one chunk, the end of
    /// all is the mark. The marks, by member and chunk.
    #[track_caller]
    fn await_chunks(&self, before: Epoch) -> Result<Vec<Vec<Vec<Event>>>> {
        let mut events = vec![Vec::new(); self.others.len() + 1];
        if let Some(there) = &self.there {
            events[self.member.rank().index() as usize] = vec![there.clone(); self.chunks as usize];
        }
        if self.chunks == 1 {
            let batch = self.arena.batch(&self.arrivals);
            self.others
                .iter()
                .try_fold(batch, |batch, (_, other)| batch.wait(self.memory.ready, *other, self.ready(before, 0)))?
                .enqueue()?;
            return Ok(events);
        }
        // The member before this one puts to this one first.
        let sources: Vec<_> = self.others.iter().rev().copied().collect();
        for step in self.steps() {
            let batch = self.arena.batch(&self.arrivals);
            let ready = self.ready(before, step.chunk);
            step.peers(&sources).try_fold(batch, |batch, other| batch.wait(self.memory.ready, other, ready))?.enqueue()?;
            let arrived = vec![self.arrivals.mark()?];
            sources[step.peers].iter().for_each(|(member, _)| events[member.index() as usize].push(arrived.clone()));
        }
        Ok(events)
    }

    /// Tells the others that what they put has been read by all work enqueued so far on the streams that were given the epoch.
    #[track_caller]
    fn end(&mut self, ready: &Ready<T>) -> Result<()> {
        self.arrivals.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        self.places.check_own(ready, "PushGather::release")?;
        for (reader, read) in self.places.order_after_readers(&self.arrivals)? {
            match read {
                Some(read) => {
                    self.read.retain(|earlier| !earlier.is_of(&reader));
                    self.read.push(read);
                }
                // In the order of `arrivals`; the note orders later writes of the own places.
                None => self.own.iter().for_each(|own| own.memory().used_on(&reader.0)),
            }
        }
        let mut batch = self.arena.batch(&self.arrivals);
        for (_, other) in &*self.others {
            batch = batch.signal(self.memory.free, *other, self.epoch)?;
        }
        batch.enqueue()?;
        self.places.shut();
        Ok(())
    }
}

/// A chunk, and the other members that it is put to, or comes from, before the next signal.
struct Step {
    /// Their places among the other members.
    peers: Range<usize>,
    chunk: u64,
    /// Whether nothing was put to them before.
    is_first: bool,
}

impl Step {
    /// Their ranks in the world.
    fn peers<'a>(&self, others: &'a [(Rank, Rank)]) -> impl Iterator<Item = Rank> + use<'a> {
        others[self.peers.clone()].iter().map(|(_, rank)| *rank)
    }
}

impl<T: Pod> ChunkedGather<T> for PushGather<T> {
    fn places(&self) -> &Places<T> {
        &self.places
    }

    /// This member's places in what is gathered: later work of `stream` comes after this rank has read the last gather, and after the copies of this shard
    /// to the others. It waits for nothing else of the others. What is written stays for any number of epochs.
    fn shards(&mut self, stream: &Stream) -> Result<&mut [Buffer<T>]> {
        const WHAT: &str = "PushGather::shard";
        stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        self.check_released(WHAT)?;
        self.arena.0.use_on(stream)?;
        self.read.iter().try_for_each(|read| stream.wait(read))?;
        // After the copies to the others, which read it. Other writes of it come after this stream, and so do later puts.
        order(&stream.0, |wait_for| self.own.iter().for_each(|own| own.memory().add_use(&stream.0, true, wait_for)))?;
        self.read.clear();
        self.there = None;
        Ok(&mut self.own)
    }

    /// In place: puts what was last written to this member's [shard](ChunkedGather::shards), or copied there by [`start_from`](Self::start_from), to the others;
    /// within the device nothing is copied, and the chunks of this member are there as soon as they are written.
    fn start(&mut self) -> Result<Ready<T>> {
        const WHAT: &str = "PushGather::start";
        check_lent(&self.own, &self.lent, WHAT)?;
        self.check_idle(WHAT)?;
        let there = match &self.there {
            Some(there) => there.clone(),
            None => self.written(WHAT)?,
        };
        there.iter().try_for_each(|there| self.arrivals.wait(there))?;
        self.there = Some(there);
        self.gather(WHAT, None)
    }

    fn release(&mut self, ready: Ready<T>) -> Result<(), ReleaseError<T>> {
        self.end(&ready).map_err(|error| ReleaseError { ready, error })
    }
}

impl<T> fmt::Debug for PushGather<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushGather").field("member", &self.member).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
