//! Buffers that every rank has, and other ranks' views of them.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::arena::Arena;
use super::rows::Rows;
use super::ticket::Ticket;
use crate::comm::Rank;
use crate::runtime::backend::{Caller, Copy, CopyRows, Direction};
use crate::runtime::instances::Lent;
use crate::runtime::module::{enqueue, fill};
use crate::runtime::{Buffer, Error, Kind, Result, Stream, memory};

/// A buffer at one place of every rank's arena. Here it is a [`Buffer`] like any other; those of other ranks are reached through
/// [`peer`](Self::peer).
///
/// The runtime orders the uses of the local buffer by this rank's streams. What other ranks do with it is ordered by signals alone:
/// tell them when it may be read ([`Arena::signal`]), and wait until they have read it before it is written again.
pub struct SymmetricBuffer<T> {
    pub(super) arena: Arc<Arena>,
    pub(super) number: usize,
    pub(super) offset: u64,
    pub(super) local: Buffer<T>,
    /// Where that lies, and how many elements it has.
    pub(super) own: (u64, u64),
    /// The owners of views of all ranks.
    pub(super) lent: Lent,
}

impl<T: Pod> SymmetricBuffer<T> {
    /// What lies in all ranks' arenas from a byte of item `number` on, of which `local` is this rank's.
    pub(super) fn of(arena: Arc<Arena>, (number, offset): (usize, u64), local: Buffer<T>, lent: Lent) -> Self {
        let own = (local.address(), local.len());
        Self { arena, number, offset, local, own, lent }
    }

    /// Fails where another buffer was assigned to this rank's: other ranks have this one's address.
    pub(super) fn check_own(&self) -> Result<()> {
        if (self.local.address(), self.local.len()) == self.own { Ok(()) } else { Err(replaced("SymmetricBuffer", "what local_mut lends")) }
    }

    /// How many elements, on every rank.
    pub fn len(&self) -> u64 {
        self.own.1
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's.
    pub fn local(&self) -> &Buffer<T> {
        &self.local
    }

    /// This rank's, to write into: by copies or kernels. Another buffer that is assigned to it is refused by the next use of a [peer](Self::peer).
    pub fn local_mut(&mut self) -> &mut Buffer<T> {
        &mut self.local
    }

    /// Another rank's, or this one's. The first use of a peer meets all ranks and compares what they took from their arenas.
    ///
    /// # Errors
    /// [`SymmetricError`](super::SymmetricError): ranks that are missing, gave up, or opened or took something else;
    /// [`Error::Invalid`] for a rank of another world, and where another buffer was assigned to [`local_mut`](Self::local_mut).
    pub fn peer(&self, rank: Rank) -> Result<Peer<'_, T>> {
        self.check_own()?;
        let base = self.arena.0.peer(rank, self.number)?;
        Ok(Peer { buffer: self, rank, address: base + self.offset })
    }

    /// Where every rank's instance lies in this rank's addresses, for kernels. Meets all ranks, as [`peer`](Self::peer) does.
    pub(crate) fn addresses(&self) -> Result<Vec<u64>> {
        self.arena.0.world.ranks().map(|rank| Ok(self.peer(rank)?.address())).collect()
    }

    /// Fills this rank's instance with a byte, and waits for that: for no work of any stream but the arena's own.
    pub(crate) fn fill(&mut self, byte: u8) -> Result<()> {
        let Self { arena, local, .. } = self;
        fill(&arena.0.control, local.view_mut(), byte)?;
        arena.0.settle(&arena.0.control)
    }

    /// What these elements of this rank hold is not needed any more, after the earlier work of the stream. On the virtual cluster a read of them before they are
    /// written again is an error with the buffer's name, whatever they hold; on a GPU nothing is done. Before other ranks are told that they may
    /// write them. May be captured.
    ///
    /// # Errors
    /// [`Error::Length`] for a range outside; [`Error::ForeignRuntime`], [`Error::WrongDevice`]; what ended the arena.
    #[track_caller]
    pub fn discard(&mut self, stream: &Stream, range: Range<u64>) -> Result<()> {
        const WHAT: &str = "SymmetricBuffer::discard";
        self.check_own()?;
        self.local.check_stream(stream, WHAT)?;
        let (size, count) = (size_of::<T>() as u64, range.end.saturating_sub(range.start));
        fits(WHAT, range.start, count, self.len())?;
        if count == 0 || stream.0.runtime.kind() == Kind::Cuda {
            return Ok(());
        }
        self.arena.0.check()?;
        self.arena.0.use_on(stream)?;
        let _enqueue = stream.0.runtime.enqueue();
        memory::order(&stream.0, |wait_for| self.local.memory().add_use(&stream.0, true, wait_for))?;
        stream.0.runtime.backend.discard(stream.0.id, self.local.address() + range.start * size, count * size, Location::caller())
    }

    pub(super) fn is_of(&self, arena: &Arena) -> bool {
        Arc::ptr_eq(&self.arena.0, &arena.0)
    }

    /// Checks that the buffer is of that arena: signals of another arena would not order its uses.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(super) fn check_arena(&self, arena: &Arena, what: &'static str) -> Result<()> {
        if self.is_of(arena) {
            return Ok(());
        }
        let why = "the memory is of another arena: take it from the one that is gathered over".to_owned();
        Err(Error::Invalid { what, why })
    }
}

impl<T: Pod> SymmetricBuffer<T> {
    /// Parts of it, as buffers of their own with the same operations: the elements of each range, which ascend and do not overlap. So a value of several arrays, as a
    /// quantized tensor has codes and scales, is taken from an arena at once. What was enqueued on the buffer comes before what is enqueued on the parts. Elements that no
    /// range names are lost until the arena is closed. Every rank takes the same.
    ///
    /// # Errors
    /// [`Error::Length`] for a range outside; [`Error::Invalid`] for ranges that overlap or descend.
    pub fn parts(self, ranges: &[Range<u64>]) -> Result<Vec<Self>> {
        self.check_own()?;
        let mut end = 0;
        for range in ranges {
            if range.start < end || range.end < range.start {
                let why = format!("range {range:?} begins before {end}, where the one before it ends: name them in order");
                return Err(Error::Invalid { what: "SymmetricBuffer::parts", why });
            }
            fits("SymmetricBuffer::parts", range.start, range.end - range.start, self.len())?;
            end = range.end;
        }
        let part = |range: &Range<u64>| {
            let (arena, offset) = (Arc::clone(&self.arena), self.offset + range.start * size_of::<T>() as u64);
            Self::of(arena, (self.number, offset), self.local_part(range.start, range.end - range.start), Lent::default())
        };
        Ok(ranges.iter().map(part).collect())
    }

    /// The same bytes as elements `U`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are no whole number of those, or not aligned for them.
    pub fn cast<U: Pod>(self) -> Result<SymmetricBuffer<U>> {
        self.check_own()?;
        let (bytes, size) = (self.local.memory().bytes, size_of::<U>() as u64);
        if size == 0 || !bytes.is_multiple_of(size) || !self.offset.is_multiple_of(align_of::<U>() as u64) {
            let why = format!("{bytes} bytes from byte {} of the arena on are no whole number of aligned elements of {size}", self.offset);
            return Err(Error::Invalid { what: "SymmetricBuffer::cast", why });
        }
        let Self { arena, number, offset, local, lent, .. } = self;
        // SAFETY: so many elements of any bits lie there, aligned: arenas are to 256 bytes.
        let local = unsafe { Buffer::of(Arc::clone(local.memory()), bytes / size) };
        Ok(SymmetricBuffer::of(arena, (number, offset), local, lent))
    }

    /// Some elements of this rank's instance, ordered after its earlier uses.
    pub(super) fn local_part(&self, start: u64, len: u64) -> Buffer<T> {
        let (size, of) = (size_of::<T>() as u64, self.local.memory());
        // SAFETY: so many elements lie in the part from its beginning, aligned as the buffer's.
        unsafe { Buffer::of(of.part(of.address + start * size, len * size), len) }
    }
}

impl<T: Pod> SymmetricBuffer<T> {
    /// Copies pieces of several ranks to `target`, one after another from its beginning on, in stream order and by the copy engine: each piece is a
    /// rank and the elements of its buffer. Wait for the ranks' signals on the stream first. One ticket has the target.
    ///
    /// # Errors
    /// As [`Peer::get`]; nothing is enqueued then.
    #[track_caller]
    pub fn get_each(&self, stream: &Stream, pieces: &[(Rank, Range<u64>)], target: Buffer<T>) -> Result<Ticket<Buffer<T>>> {
        const WHAT: &str = "SymmetricBuffer::get_each";
        target.check_stream(stream, WHAT)?;
        let (mut copies, mut at, caller) = (Vec::new(), 0_u64, Location::caller());
        for (rank, range) in pieces {
            let (source, count) = self.peer(*rank)?.elements(WHAT, range)?;
            fits("SymmetricBuffer::get_each, target", at, count, target.len())?;
            let (target, bytes) = (target.address() + at * size_of::<T>() as u64, count * size_of::<T>() as u64);
            copies.push(Copy { direction: Direction::DeviceToDevice, target, source, bytes, rows: CopyRows::ONE, caller });
            at += count;
        }
        self.arena.0.check()?;
        self.arena.0.use_on(stream)?;
        copies.into_iter().try_for_each(|copy| memory::copy(&stream.0, copy, Some(target.memory()), None))?;
        Ticket::new(&self.arena, stream, WHAT, target)
    }
}

impl<T: Pod> SymmetricBuffer<T> {
    /// Copies rows of several ranks to places of a view, which do not overlap, in stream order and in any order among themselves, by the copy engine: as
    /// [`Peer::get_rows`], by one call of the driver where that can be.
    #[track_caller]
    pub(crate) fn get_rows_each(&self, stream: &Stream, pieces: &[(Rank, Rows)], target: DeviceViewMut<'_, T>) -> Result<()> {
        let target = target.access("target");
        let copies = self.copies_into(pieces, [target.address, target.bytes / size_of::<T>() as u64], Location::caller())?;
        self.enqueue_copies(stream, "SymmetricBuffer::get_rows_each", &[target], &copies, Calls::Batch)
    }

    /// The copies of rows of several ranks to places of a buffer, which may be enqueued any number of times ([`enqueue_noted`](Self::enqueue_noted)).
    #[track_caller]
    pub(crate) fn copies_of_rows(&self, pieces: &[(Rank, Rows)], target: &Buffer<T>) -> Result<Vec<Copy>> {
        self.copies_into(pieces, [target.address(), target.len()], Location::caller())
    }

    /// Enqueues copies to a buffer of whose use the runtime is not told: the caller has noted it, on this stream or on another one that events order this one after, and before its
    /// later work.
    pub(crate) fn enqueue_noted(&self, stream: &Stream, copies: &[Copy], calls: Calls) -> Result<()> {
        self.enqueue_copies(stream, "SymmetricBuffer::enqueue_noted", &[], copies, calls)
    }

    fn copies_into(&self, pieces: &[(Rank, Rows)], [target, len]: [u64; 2], caller: Caller) -> Result<Vec<Copy>> {
        const WHAT: &str = "SymmetricBuffer::get_rows_each";
        let size = size_of::<T>() as u64;
        let copy = |rank: Rank, rows: Rows| rows.copy(WHAT, size, [self.peer(rank)?.address, target], [self.len(), len], caller);
        let some = pieces.iter().filter(|(_, rows)| rows.count > 0 && rows.width > 0);
        some.flat_map(|(rank, rows)| rows.pieces(size).into_iter().map(|rows| copy(*rank, rows))).collect()
    }
}

impl<T: Pod> SymmetricBuffer<T> {
    /// Copies rows of a view to places of a rank's buffer, which do not overlap, in stream order and in any order among themselves, by the copy engine: as
    /// [`Peer::put_rows`], by one call of the driver where that can be.
    #[track_caller]
    pub(crate) fn put_rows_each(&self, stream: &Stream, source: DeviceView<'_, T>, to: Rank, rows: &[Rows]) -> Result<()> {
        const WHAT: &str = "SymmetricBuffer::put_rows_each";
        let (caller, len, source) = (Location::caller(), source.len(), source.access("source"));
        let (size, peer) = (size_of::<T>() as u64, self.peer(to)?.address);
        let copy = |rows: Rows| rows.copy(WHAT, size, [source.address, peer], [len, self.len()], caller);
        let some = rows.iter().filter(|rows| rows.count > 0 && rows.width > 0);
        let copies = some.flat_map(|rows| rows.pieces(size)).map(copy).collect::<Result<Vec<_>>>()?;
        self.enqueue_copies(stream, WHAT, &[source], &copies, Calls::Batch)
    }

    /// Enqueues copies between buffers of other ranks and a view of this rank's.
    fn enqueue_copies(&self, stream: &Stream, what: &'static str, views: &[BufferAccess<'_>], copies: &[Copy], calls: Calls) -> Result<()> {
        self.arena.0.check()?;
        self.arena.0.use_on(stream)?;
        enqueue(stream, what, views, |id| {
            let backend = &stream.0.runtime.backend;
            match calls == Calls::Batch && copies.len() > 1 && stream.0.takes_batches() {
                true => backend.copies(id, copies),
                false => copies.iter().try_for_each(|copy| backend.copy(id, *copy)),
            }
        })
    }
}

/// How copies are enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    /// By a call of the driver each.
    Each,
    /// By one call, where that can be.
    Batch,
}

/// A rank's instance of a symmetric buffer. It has no address that a program could use: bytes come and go by [`get`](Self::get) and
/// [`put`](Self::put).
pub struct Peer<'a, T> {
    buffer: &'a SymmetricBuffer<T>,
    rank: Rank,
    address: u64,
}

impl<T: Pod> Peer<'_, T> {
    /// The rank that it is of.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Copies elements `range` of the peer to `target`, from element `at` on, in stream order and by the copy engine. Wait for the
    /// peer's signal on the stream first. The ticket has the target.
    ///
    /// # Errors
    /// [`Error::Length`] for what does not fit; [`Error::WrongDevice`], and [`Error::Invalid`] for a stream of another device than the arena's;
    /// [`Error::ForeignRuntime`]; a failure of the arena; an error of the driver.
    #[track_caller]
    pub fn get(&self, stream: &Stream, range: Range<u64>, target: Buffer<T>, at: u64) -> Result<Ticket<Buffer<T>>> {
        target.check_stream(stream, "Peer::get")?;
        let size = size_of::<T>() as u64;
        let (source, count) = self.elements("Peer::get", &range)?;
        fits("Peer::get, target", at, count, target.len())?;
        self.buffer.arena.0.check()?;
        let copy = Copy {
            direction: Direction::DeviceToDevice,
            target: target.address() + at * size,
            source,
            bytes: count * size,
            rows: CopyRows::ONE,
            caller: Location::caller(),
        };
        self.buffer.arena.0.use_on(stream)?;
        memory::copy(&stream.0, copy, Some(target.memory()), None)?;
        Ticket::new(&self.buffer.arena, stream, "Peer::get", target)
    }

    /// As [`get`](Self::get), into a view that an operation bound before may read.
    #[track_caller]
    pub(crate) fn get_into(&self, stream: &Stream, range: Range<u64>, target: DeviceViewMut<'_, T>) -> Result<()> {
        const WHAT: &str = "Peer::get_into";
        let (source, count) = self.elements(WHAT, &range)?;
        Error::check_length(WHAT, count, target.len())?;
        let (target, caller) = (target.access("target"), Location::caller());
        let copy =
            Copy { direction: Direction::DeviceToDevice, target: target.address, source, bytes: target.bytes, rows: CopyRows::ONE, caller };
        self.enqueue_copy(stream, WHAT, target, copy)
    }

    /// As [`put`](Self::put), of all of a view, from byte `at` of the peer's on.
    #[track_caller]
    pub(crate) fn put_from(&self, stream: &Stream, source: DeviceView<'_, u8>, at: u64) -> Result<()> {
        const WHAT: &str = "Peer::put_from";
        fits(WHAT, at, source.len(), self.buffer.len() * size_of::<T>() as u64)?;
        let (source, caller) = (source.access("source"), Location::caller());
        let target = self.address + at;
        let copy =
            Copy { direction: Direction::DeviceToDevice, target, source: source.address, bytes: source.bytes, rows: CopyRows::ONE, caller };
        self.enqueue_copy(stream, WHAT, source, copy)
    }

    /// Enqueues a copy between the peer and a view of this rank's.
    fn enqueue_copy(&self, stream: &Stream, what: &'static str, view: BufferAccess<'_>, copy: Copy) -> Result<()> {
        self.buffer.arena.0.check()?;
        self.buffer.arena.0.use_on(stream)?;
        enqueue(stream, what, &[view], |id| if copy.bytes == 0 { Ok(()) } else { stream.0.runtime.backend.copy(id, copy) })
    }

    /// Copies elements `range` of `source` to the peer, from its element `at` on, in stream order and by the copy engine. Wait for the
    /// peer's signal that it may be written first; signal it after.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    #[track_caller]
    pub fn put(&self, stream: &Stream, source: &Buffer<T>, range: Range<u64>, at: u64) -> Result<()> {
        let copy = self.put_copy(stream, source, range, at, Location::caller())?;
        self.buffer.arena.0.use_on(stream)?;
        memory::copy(&stream.0, copy, None, Some(source.memory()))
    }

    /// The copy that [`put`](Self::put) enqueues.
    pub(super) fn put_copy(&self, stream: &Stream, source: &Buffer<T>, range: Range<u64>, at: u64, caller: Caller) -> Result<Copy> {
        source.check_stream(stream, "Peer::put")?;
        let size = size_of::<T>() as u64;
        let count = range.end.saturating_sub(range.start);
        fits("Peer::put, source", range.start, count, source.len())?;
        let (target, _) = self.elements("Peer::put", &(at..at.saturating_add(count)))?;
        self.buffer.arena.0.check()?;
        let source = source.address() + range.start * size;
        Ok(Copy { direction: Direction::DeviceToDevice, target, source, bytes: count * size, rows: CopyRows::ONE, caller })
    }

    /// Copies rows of the peer to `target`, in stream order and by the copy engine. Wait for the peer's signal on the stream first. The
    /// ticket has the target.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a pitch that is smaller than a row, or of 2 GiB and more; as [`get`](Self::get).
    #[track_caller]
    pub fn get_rows(&self, stream: &Stream, rows: Rows, target: Buffer<T>) -> Result<Ticket<Buffer<T>>> {
        const WHAT: &str = "Peer::get_rows";
        target.check_stream(stream, WHAT)?;
        let (bases, lens) = ([self.address, target.address()], [self.buffer.len(), target.len()]);
        let copy = rows.copy(WHAT, size_of::<T>() as u64, bases, lens, Location::caller())?;
        self.buffer.arena.0.check()?;
        self.buffer.arena.0.use_on(stream)?;
        memory::copy(&stream.0, copy, Some(target.memory()), None)?;
        Ticket::new(&self.buffer.arena, stream, WHAT, target)
    }

    /// Copies rows of `source` to the peer, in stream order and by the copy engine. Wait for the peer's signal that they may be written
    /// first; signal it after.
    ///
    /// # Errors
    /// As [`get_rows`](Self::get_rows).
    #[track_caller]
    pub fn put_rows(&self, stream: &Stream, source: &Buffer<T>, rows: Rows) -> Result<()> {
        let copy = self.put_rows_copy(stream, source, rows, Location::caller())?;
        self.buffer.arena.0.use_on(stream)?;
        memory::copy(&stream.0, copy, None, Some(source.memory()))
    }

    /// The copy that [`put_rows`](Self::put_rows) enqueues.
    pub(super) fn put_rows_copy(&self, stream: &Stream, source: &Buffer<T>, rows: Rows, caller: Caller) -> Result<Copy> {
        const WHAT: &str = "Peer::put_rows";
        source.check_stream(stream, WHAT)?;
        let copy = rows.copy(WHAT, size_of::<T>() as u64, [source.address(), self.address], [source.len(), self.buffer.len()], caller)?;
        self.buffer.arena.0.check()?;
        Ok(copy)
    }

    pub(super) fn is_of(&self, arena: &Arena) -> bool {
        self.buffer.is_of(arena)
    }

    /// The address of its first element.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// The address of the first element of a range, and how many there are.
    fn elements(&self, what: &'static str, range: &Range<u64>) -> Result<(u64, u64)> {
        let count = range.end.saturating_sub(range.start);
        fits(what, range.start, count, self.buffer.len())?;
        Ok((self.address + range.start * size_of::<T>() as u64, count))
    }
}

/// Other ranks know of the memory that was lent, and not of what was assigned in its place.
pub(crate) fn replaced(what: &'static str, lent: &str) -> Error {
    let why = format!("another buffer was assigned to {lent}: write into it, by copies, casts into it or kernels");
    Error::Invalid { what, why }
}

/// `count` elements from `at` on lie inside `len`.
pub(super) fn fits(what: &'static str, at: u64, count: u64, len: u64) -> Result<()> {
    let end = at.checked_add(count);
    if end.is_some_and(|end| end <= len) { Ok(()) } else { Err(Error::Length { what, expected: end.unwrap_or(u64::MAX), found: len }) }
}

impl<T> fmt::Debug for SymmetricBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymmetricBuffer").field("offset", &self.offset).field("local", &self.local).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Peer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("rank", &self.rank).field("buffer", self.buffer).finish_non_exhaustive()
    }
}
