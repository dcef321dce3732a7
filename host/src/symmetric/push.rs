//! The all-gather whose members put their shards to the others.

use std::fmt;
use std::sync::{Arc, Mutex};

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::arena::Arena;
use super::buffer::SymmetricBuffer;
use super::gather::{INSTEAD, WHAT_GROWS, bounds, others_of};
use super::signal::{Channel, Epoch};
use super::ticket::Ticket;
use crate::comm::{Member, Rank};
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Event, Memory, Owner, Result, Stream, order};

/// What a [`PushGather`] needs of an arena: every rank takes it, in one order with all else, also one that takes no part in the gather.
#[derive(Debug)]
pub struct PushMemory<T> {
    gathered: SymmetricBuffer<T>,
    shard: u64,
    ready: Channel,
    free: Channel,
}

impl<T: Pod> PushMemory<T> {
    /// For `members` shards of `len` elements.
    ///
    /// # Errors
    /// As [`Arena::buffer`] and [`Arena::channel`]; [`Error::TooLarge`].
    pub fn take(arena: &Arena, len: u64, members: u32) -> Result<Self> {
        let whole = len.checked_mul(members.into());
        let whole = whole.ok_or(Error::TooLarge { what: "PushMemory::take", count: len, element_bytes: size_of::<T>() as u64 })?;
        Ok(Self { gathered: arena.buffer(whole)?, shard: len, ready: arena.channel()?, free: arena.channel()? })
    }
}

/// Each member puts its shard to all others by its copy engine: from a buffer of its own ([`run`](Self::run)), or
/// [in place](Self::run_in_place), from where it lies in what is gathered. To the others both are the same, so that in one gather some members may do the
/// one and some the other.
///
/// The order of signals, for epoch `e`: a member that has read what epoch `e - 1` brought sends FREE `e - 1` to all; who sees it puts the chunks
/// of its shard there, READY behind each chunk that all have got.
///
/// No signal is about a member's own place: the others put beside it, and none of them reads it. What uses it is of this rank alone, the copies to the
/// others and who reads what was gathered, and events order these. So it may be [written](Self::shard) for `e` once the copies of `e - 1` are done and this rank's readers of it, before
/// FREE `e - 1` of any other has come: that holds up the copies of `e`, not the writing. And the FREE that this rank sends says nothing of it.
pub struct PushGather<T> {
    arena: Arena,
    member: Member,
    memory: PushMemory<T>,
    /// Carries the copies to the others, one after another: side by side they get three fifths of the rate.
    out: Stream,
    /// Copies this rank's own shard and waits for the others' chunks.
    arrivals: Stream,
    /// This member's place in what is gathered.
    own: Buffer<T>,
    /// Behind the last write of that; none while it may be written.
    there: Option<Event>,
    chunks: u64,
    epoch: Epoch,
    /// The other members.
    others: Arc<[(Rank, Rank)]>,
    /// By member and chunk, of this epoch.
    events: Vec<Vec<Event>>,
    /// All of this epoch.
    done: Option<Event>,
    cell: Arc<Memory>,
    /// Each once.
    readers: Mutex<Vec<Stream>>,
    /// Behind all that read what was gathered since the own place was written, but for `arrivals`; of each stream the last.
    read: Vec<Event>,
    /// Whether the results of this epoch were released.
    is_released: bool,
}

impl<T: Pod> PushGather<T> {
    /// For a member of a team of the arena's world. `out` carries the copies to the others, `arrivals` copies this rank's own shard meanwhile and
    /// waits for those of the others. Each shard is copied in `chunks` pieces, which go to, and are waited for of, all members at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no chunks, a team of another world, memory for fewer members or of another arena, or a stream of another device;
    /// [`Error::ForeignRuntime`].
    pub fn new(arena: &Arena, member: &Member, memory: PushMemory<T>, [out, arrivals]: [&Stream; 2], chunks: u64) -> Result<Self> {
        let fits = memory.gathered.len() == memory.shard * u64::from(member.team().size().get());
        if chunks == 0 || !fits || member.team().world() != arena.world() || member.world_rank() != arena.rank() {
            let why = format!("{chunks} chunks and {} elements for {member:?} in an arena of {}", memory.gathered.len(), arena.world());
            return Err(Error::Invalid { what: "PushGather::new", why });
        }
        memory.gathered.check_arena(arena, "PushGather::new")?;
        [out, arrivals].into_iter().try_for_each(|stream| arena.0.check_stream(stream))?;
        let what = format!("PushGather of {chunks} chunks of elements of {} bytes in {:?}", size_of::<T>(), member.team());
        arena.0.declare(memory.ready.number, what, others_of(member).iter().map(|(_, rank)| *rank))?;
        let of = memory.gathered.local().memory();
        let cell = Memory::borrowed(&of.runtime, of.device, of.address, of.bytes, Some(Arc::clone(of) as _));
        let place = of.address + u64::from(member.rank().index()) * memory.shard * size_of::<T>() as u64;
        // SAFETY: a member's shard lies inside the arena's buffer, which is aligned to 256 bytes and kept, and told of streams, by its memory.
        let own = unsafe { Buffer::lent(&arena.0.control.device(), place, memory.shard, Arc::clone(of) as _)? };
        Ok(Self {
            arena: arena.clone(),
            member: member.clone(),
            memory,
            out: out.clone(),
            arrivals: arrivals.clone(),
            own,
            there: None,
            chunks,
            epoch: Epoch::ZERO,
            others: others_of(member),
            events: Vec::new(),
            done: None,
            cell,
            readers: Mutex::default(),
            read: Vec::new(),
            is_released: true,
        })
    }

    /// Puts `shard` to all members, this one too. Every member calls this or [`run_in_place`](Self::run_in_place); the result of the epoch before has been
    /// [released](Self::release).
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Invalid`] for a result that was not released; [`Error::NotCapturable`] in a graph; a failure of the arena; an error of the driver.
    #[track_caller]
    pub fn run(&mut self, shard: &Buffer<T>) -> Result<Ticket<()>> {
        const WHAT: &str = "PushGather::run";
        self.check_idle(WHAT)?;
        if shard.len() != self.memory.shard {
            return Err(Error::Length { what: "PushGather::run, shard", expected: self.memory.shard, found: shard.len() });
        }
        // Behind the release of what was there: it is on this stream too.
        self.own.copy_from(&self.arrivals, shard)?;
        self.read.clear();
        self.there = if self.chunks > 1 { Some(self.arrivals.mark()?) } else { None };
        self.gather(WHAT, Some(shard))
    }

    /// This member's place in what is gathered, to write for the next gather [in place](Self::run_in_place): later work of `stream` comes after this rank has
    /// read the last gather, and after the copies of this shard to the others. It waits for nothing else of theirs. What is written stays for any number of gathers. It is
    /// to be written by work that is enqueued, not by a graph, whose replays are not ordered behind those who read gathers.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a result that was not released or a stream of another device; [`Error::ForeignRuntime`]; [`Error::NotCapturable`] in a graph; a
    /// failure of the arena; an error of the driver.
    pub fn shard(&mut self, stream: &Stream) -> Result<&mut Buffer<T>> {
        const WHAT: &str = "PushGather::shard";
        stream.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        self.check_released(WHAT)?;
        self.arena.0.use_on(stream)?;
        self.read.iter().try_for_each(|read| stream.wait(read))?;
        // After the copies to the others, which read it. What else writes it comes after this stream, and so does what is put.
        order(&stream.0, |wait_for| self.own.memory().add_use(&stream.0, true, wait_for))?;
        self.read.clear();
        self.there = None;
        Ok(&mut self.own)
    }

    /// Puts what was last written to this member's [place](Self::shard), or copied there by [`run`](Self::run), to the others; within the device nothing is copied, and the
    /// chunks of this member are there as soon as they are written. Every member calls this or [`run`](Self::run); the result of the epoch before has been
    /// [released](Self::release).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a place that was never handed out or a result that was not released; [`Error::NotCapturable`] in a graph; a failure of the arena;
    /// an error of the driver.
    #[track_caller]
    pub fn run_in_place(&mut self) -> Result<Ticket<()>> {
        const WHAT: &str = "PushGather::run_in_place";
        self.check_idle(WHAT)?;
        let there = match &self.there {
            Some(there) => there.clone(),
            None => self.written(WHAT)?,
        };
        self.arrivals.wait(&there)?;
        self.there = Some(there);
        self.gather(WHAT, None)
    }

    /// Behind what has written the own place so far.
    fn written(&self, what: &'static str) -> Result<Event> {
        let Some(writer) = self.own.memory().streams(false).pop() else {
            let why = "this member's place was never handed out: write what PushGather::shard gives first".to_owned();
            return Err(Error::Invalid { what, why });
        };
        writer.refuse_capture(WHAT_GROWS, INSTEAD)?;
        Stream(writer).mark()
    }

    /// Fails where a gather cannot begin.
    fn check_idle(&self, what: &'static str) -> Result<()> {
        [&self.out, &self.arrivals].iter().try_for_each(|stream| stream.0.refuse_capture(WHAT_GROWS, INSTEAD))?;
        self.check_released(what)
    }

    fn check_released(&self, what: &'static str) -> Result<()> {
        self.arena.0.check()?;
        if self.is_released {
            return Ok(());
        }
        let why = "the gather before is still in use: release it behind its last reader".to_owned();
        Err(Error::Invalid { what, why })
    }

    /// Puts `shard`, or what is in place. [`Self::there`] says when the own place has it; without, what comes behind in `arrivals`.
    #[track_caller]
    fn gather(&mut self, what: &'static str, shard: Option<&Buffer<T>>) -> Result<Ticket<()>> {
        let (before, others) = (self.epoch, Arc::clone(&self.others));
        self.epoch = before.next();
        self.is_released = false;
        self.events.resize_with(others.len() + 1, Vec::new);
        self.put(shard.unwrap_or(&self.own), before)?;
        self.await_chunks(before, &others)?;
        // The ticket says that the shard may be written again too.
        self.arrivals.wait(&self.out.mark()?)?;
        let done = self.arrivals.mark()?;
        if self.chunks == 1 {
            self.events.iter_mut().filter(|events| events.is_empty()).for_each(|events| events.push(done.clone()));
        }
        self.done = Some(done.clone());
        Ok(Ticket::behind(&self.arena, done, what, ()).numbered(self.epoch.get()))
    }

    /// READY of a chunk: all chunks of an epoch come before all of the next.
    fn ready(&self, before: Epoch, chunk: u64) -> Epoch {
        Epoch::ZERO.later(before.get() * self.chunks + chunk + 1)
    }

    /// What this rank puts to the others, once all have released what was there. READY follows each chunk; where a shard is one, it goes to all
    /// behind the last: the least that a host can enqueue.
    #[track_caller]
    fn put(&self, shard: &Buffer<T>, before: Epoch) -> Result<()> {
        let place = u64::from(self.member.rank().index()) * self.memory.shard;
        let mut batch = self.arena.batch(&self.out);
        for (_, other) in &*self.others {
            batch = batch.wait(self.memory.free, *other, before)?;
        }
        for chunk in 0..self.chunks {
            let (start, end) = bounds(self.memory.shard, self.chunks, chunk);
            for (_, other) in &*self.others {
                batch = batch.put(&self.memory.gathered.peer(*other)?, shard, start..end, place + start)?;
            }
            for (_, other) in &*self.others {
                batch = batch.signal(self.memory.ready, *other, self.ready(before, chunk))?;
            }
        }
        batch.enqueue()
    }

    /// Waits for each chunk of all members at once, and marks it; where there is but one, the end of all is the mark.
    #[track_caller]
    fn await_chunks(&mut self, before: Epoch, others: &[(Rank, Rank)]) -> Result<()> {
        if let Some(there) = &self.there {
            self.events[self.member.rank().index() as usize] = vec![there.clone(); self.chunks as usize];
        }
        for chunk in 0..self.chunks {
            let mut batch = self.arena.batch(&self.arrivals);
            for (_, other) in others {
                batch = batch.wait(self.memory.ready, *other, self.ready(before, chunk))?;
            }
            batch.enqueue()?;
            if self.chunks > 1 {
                let arrived = self.arrivals.mark()?;
                others.iter().for_each(|(member, _)| self.events[member.index() as usize].push(arrived.clone()));
            }
        }
        Ok(())
    }

    /// One chunk of a member's shard, for work on `stream`, which waits for this chunk alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chunk that is not there, before a gather or behind its release too; an error of the driver.
    pub fn chunk(&self, stream: &Stream, member: Rank, chunk: u64) -> Result<DeviceView<'_, T>> {
        let of_member = self.events.get(member.index() as usize);
        let Some(event) = of_member.and_then(|events| events.get(chunk as usize)) else {
            return Err(Error::Invalid { what: "PushGather::chunk", why: format!("there is no chunk {chunk} of {member}") });
        };
        self.arena.0.use_on(stream)?;
        stream.wait(event)?;
        self.lend_to(stream);
        let (start, end) = bounds(self.memory.shard, self.chunks, chunk);
        let address = self.cell.address + (u64::from(member.index()) * self.memory.shard + start) * size_of::<T>() as u64;
        // SAFETY: the elements lie inside the arena's buffer, which the cell keeps; its next write comes behind `release`, which is behind
        // every stream that got a view, since it takes `&mut self`.
        Ok(unsafe { DeviceView::from_raw(address, end - start, &self.cell) })
    }

    /// All shards, for work on `stream`, which waits for all of them.
    ///
    /// # Errors
    /// [`Error::Invalid`] before a gather, behind its release and for a stream of another device; [`Error::ForeignRuntime`]; an error of the driver.
    pub fn whole(&self, stream: &Stream) -> Result<DeviceView<'_, T>> {
        self.arena.0.use_on(stream)?;
        let Some(done) = &self.done else {
            let why = "nothing is gathered: run it first, and release it behind its last reader".to_owned();
            return Err(Error::Invalid { what: "PushGather::whole", why });
        };
        stream.wait(done)?;
        self.lend_to(stream);
        // SAFETY: as in `chunk`.
        Ok(unsafe { DeviceView::from_raw(self.cell.address, self.memory.gathered.len(), &self.cell) })
    }

    /// Notes who reads.
    fn lend_to(&self, stream: &Stream) {
        let mut readers = lock(&self.readers);
        if !readers.iter().any(|reader| reader.0.id == stream.0.id) {
            readers.push(stream.clone());
        }
    }

    /// Tells the others that what they put has been read by all work enqueued so far on the streams that got views.
    ///
    /// # Errors
    /// [`Error::NotCapturable`] in a graph; a failure of the arena; an error of the driver.
    #[track_caller]
    pub fn release(&mut self) -> Result<()> {
        self.arrivals.0.refuse_capture(WHAT_GROWS, INSTEAD)?;
        // They stay until all are waited for: a release that fails is made again.
        let readers = lock(&self.readers).clone();
        for reader in readers {
            if reader.0.id == self.arrivals.0.id {
                // In its order already, and that of who writes the own place by the note.
                self.own.memory().used_on(&reader.0);
                continue;
            }
            if reader.is_capturing() {
                // Behind what it was given before the capture: the note orders who writes the own place.
                order(&self.arrivals.0, |wait_for| wait_for.push(Arc::clone(&reader.0)))?;
                self.own.memory().used_on(&reader.0);
                continue;
            }
            let read = reader.mark()?;
            self.arrivals.wait(&read)?;
            self.read.retain(|earlier| !earlier.is_of(&reader));
            self.read.push(read);
        }
        lock(&self.readers).clear();
        let mut batch = self.arena.batch(&self.arrivals);
        for (_, other) in &*self.others {
            batch = batch.signal(self.memory.free, *other, self.epoch)?;
        }
        batch.enqueue()?;
        self.events.iter_mut().for_each(Vec::clear);
        self.done = None;
        self.is_released = true;
        Ok(())
    }
}

impl<T> fmt::Debug for PushGather<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushGather").field("member", &self.member).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}
