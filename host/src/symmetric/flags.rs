//! Flags that streams and kernels set and wait for.

use std::fmt;
use std::sync::{Arc, OnceLock};

use oxtile_tile::arrivals::{LINE, SignalsArgument, WaitsArgument};
use oxtile_tile::launch::{BufferAccess, DeviceFlags, DeviceTable};

use super::arena::Arena;
use super::awaited::Expected;
use super::layout::Item;
use super::signal::{Channel, Epoch};
use crate::comm::Rank;
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::tensor::{Uploaded, Uploads};

/// Flags of 0 and 1 that order streams and kernels of all ranks: of each number, on every rank, one for each rank that sets it. Made by [`Arena::flags`].
///
/// Copies put the chunks of a tensor and set a flag for each; a kernel waits for the flag of a chunk before it first reads it
/// ([`Arrivals`](oxtile_tile::arrivals::Arrivals)). One round of a chunk, for a producer and a consumer:
///
/// 1. the producer's stream [takes FREE back](Self::take_back): it waits until the flag is 1 and resets it;
/// 2. it puts the chunk, and [sets](Self::set) READY at the consumer;
/// 3. the consumer's kernel [waits](Self::waits) for READY, and reads;
/// 4. the consumer's stream, after the kernel, [clears](Self::clear) READY, and then sets FREE at the producer.
///
/// The order of the last two matters: FREE before the reset would let the next READY be lost. A flag is 0 before its writer can set it again, as in a
/// [`Handover`](super::Handover), so the same calls serve eager work and graphs, and the first call may be captured. Before the first round the consumer
/// [opens](Self::open) the place, outside of a graph. Several of these are one call of the driver in a [`Batch`](super::Batch).
///
/// A kernel's wait lasts for seven eighths of the arena's deadline at most, so that it ends before the host's. The kernel then goes on without waiting, and ends; the next [`Ticket`](super::Ticket), or
/// [`Arena::check`], returns [`SymmetricError::Deadline`](super::SymmetricError::Deadline) with the rank, and the flag by the name that was given here.
pub struct Flags {
    arena: Arena,
    name: &'static str,
    number: usize,
    /// The first of its channels: one a flag.
    first: u64,
    count: u32,
    /// All words of signals of this rank.
    lines: Buffer<u64>,
    /// Address and length of every rank's, made when first needed.
    table: OnceLock<(Vec<u64>, Uploaded)>,
}

/// The value of a flag that is set, as a wait's epoch.
pub(super) const SET: Epoch = Epoch::ZERO.next();

impl Arena {
    /// Takes `count` flags, which are named `name` in errors: a collective of all ranks, as [`channel`](Self::channel), and of as many channels.
    ///
    /// # Errors
    /// [`SymmetricError::NoChannel`](super::SymmetricError::NoChannel); [`Error::TooLarge`].
    pub fn flags(&self, name: &'static str, count: u32) -> Result<Flags> {
        let inner = &self.0;
        let (number, first) = inner.layout.take(Item::Flags { count })?;
        inner.publish_layout(number)?;
        inner.add_flags(name, first, count);
        // SAFETY: the words of signals lie at the beginning of the arena, which is not closed before this and its streams' work are done; they are zero.
        let lines = unsafe { Buffer::of_owner(&inner.control.device(), inner.base, inner.layout.heap() / 8, Arc::clone(inner) as _)? };
        Ok(Flags { arena: self.clone(), name, number, first, count, lines, table: OnceLock::new() })
    }
}

impl Flags {
    /// How many.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Sets flag `flag` of this rank at `to`, after the earlier work of the stream, once: what `to` fills is empty before the first round.
    ///
    /// # Errors
    /// As [`set`](Self::set); [`Error::NotCapturable`] in a graph, each replay of which would open it again.
    #[track_caller]
    pub fn open(&self, stream: &Stream, flag: u32, to: Rank) -> Result<()> {
        stream.0.refuse_capture("the opening of a flag", "open it once, before the graph is captured")?;
        self.set(stream, flag, to)
    }

    /// Sets flag `flag` of this rank at `to`, after the earlier work of the stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a flag that is not there, or a stream of another device; as [`Arena::signal`].
    #[track_caller]
    pub fn set(&self, stream: &Stream, flag: u32, to: Rank) -> Result<()> {
        self.arena.batch(stream).set(self, flag, to)?.enqueue()
    }

    /// Later work of the stream waits until `from` has set its flag `flag` here, which is then reset.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    #[track_caller]
    pub fn take_back(&self, stream: &Stream, flag: u32, from: Rank) -> Result<()> {
        self.arena.batch(stream).take_back(self, flag, from)?.enqueue()
    }

    /// Resets the flag `flag` of `from` here: after a kernel on this stream that has waited for it. If a wait of a kernel was not answered, the stream goes no
    /// further until the arena is ended: what it would send is garbage.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    #[track_caller]
    pub fn clear(&self, stream: &Stream, flag: u32, from: Rank) -> Result<()> {
        self.arena.batch(stream).clear(self, flag, from)?.enqueue()
    }

    /// The number by which a kernel knows the flag `flag` of `from`.
    pub fn index(&self, flag: u32, from: Rank) -> u32 {
        flag * self.arena.world().get() + from.index()
    }

    /// What a kernel on `stream` takes that waits for these flags, each of a rank: where a deadline is over, they are what the stream waits for.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a flag that is not there, or a stream of another device; what ended the arena.
    pub fn waits(&self, stream: &Stream, awaited: &[(u32, Rank)]) -> Result<WaitsArgument<'_>> {
        let inner = &self.arena.0;
        let words = awaited.iter().map(|(flag, from)| Ok((inner.word_of(self.channel(*flag)?, *from)?, *from)));
        let words = words.collect::<Result<Vec<_>>>()?;
        inner.check()?;
        inner.use_on(stream)?;
        words.into_iter().for_each(|(word, from)| inner.await_on(stream, Expected { word, from, epoch: None }));
        // Less than the host's: then its error has the kernel's verdict.
        let (first, patience) = (self.line(Rank::ZERO), (inner.options.deadline / 8 * 7).as_nanos().min(1 << 62) as u64);
        // SAFETY: all words of signals are written and waited for as signals alone, by streams and by kernels that have them as flags.
        let lines = unsafe { DeviceFlags::new(self.lines.view()) };
        Ok(WaitsArgument { lines, first, patience })
    }

    /// What kernels on `stream` take that set flags of this rank. The first call meets all ranks, and copies where their flags lie in stream order.
    ///
    /// # Errors
    /// [`Error::NotCapturable`] for a first call in a graph; as [`Arena::signal`].
    pub fn signals(&self, stream: &Stream) -> Result<FlagSignals<'_>> {
        let inner = &self.arena.0;
        inner.use_on(stream)?;
        let ranks = self.arena.world().ranks();
        let bases = ranks.map(|rank| inner.peer(rank, self.number)).collect::<Result<Vec<_>>>()?;
        if self.table.get().is_none() {
            stream.0.refuse_capture("the table of the ranks' flags", "call Flags::signals once before the graph is captured")?;
            let entries: Vec<u64> = bases.iter().flat_map(|base| [*base, self.lines.len()]).collect();
            // Not by a copy that the host waits for: work before it may wait for other ranks.
            let mut uploads = Uploads::default();
            let table = (bases, uploads.add(&entries));
            uploads.copy(stream)?;
            // Another thread may have been faster, with the same table.
            let _ = self.table.set(table);
        }
        let (bases, _) = self.table.get().ok_or_else(|| self.invalid("the table of the ranks' flags is not there".to_owned()))?;
        // SAFETY: as in `waits`.
        let own = unsafe { DeviceFlags::new(self.lines.view()) }.access("signals");
        let members = bases.iter().map(|base| BufferAccess { address: *base, ..own }).collect();
        Ok(FlagSignals { flags: self, members })
    }

    /// The number of their allocation, the same on every rank.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Declares what this rank does with them together with other ranks, for tickets to compare where the arena
    /// [compares calls](super::ArenaOptions::compare_calls). Does not wait.
    pub(crate) fn declare(&self, what: String, others: impl Iterator<Item = Rank>) -> Result<()> {
        self.arena.0.declare(self.number, what, others)
    }

    /// The channel of a flag.
    pub(super) fn channel(&self, flag: u32) -> Result<Channel> {
        if flag >= self.count {
            return Err(self.invalid(format!("there is no flag {flag} of `{}`, which has {}", self.name, self.count)));
        }
        Ok(Channel { arena: self.arena.0.id, number: self.number, index: self.first + u64::from(flag) })
    }

    /// The line of flag 0 of a rank.
    fn line(&self, rank: Rank) -> u32 {
        (self.arena.0.layout.word(self.first, rank) / (8 * LINE)) as u32
    }

    fn invalid(&self, why: String) -> Error {
        Error::Invalid { what: "Flags", why }
    }
}

/// What kernels take that set flags; made by [`Flags::signals`].
pub struct FlagSignals<'a> {
    flags: &'a Flags,
    members: Vec<BufferAccess<'a>>,
}

impl FlagSignals<'_> {
    /// The argument.
    pub fn argument(&self) -> SignalsArgument<'_> {
        let Flags { arena, table, .. } = self.flags;
        let entries = table.get().map_or_else(|| self.flags.lines.view().slice(0, 0), |(_, entries)| entries.view());
        // SAFETY: each entry is the words of a rank's signals, which its member names as flags.
        let lines = unsafe { DeviceTable::from_raw(entries, &self.members) };
        SignalsArgument { lines, first: self.flags.line(arena.rank()), stride: arena.world().get() }
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flags").field("name", &self.name).field("count", &self.count).finish_non_exhaustive()
    }
}

impl fmt::Debug for FlagSignals<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FlagSignals").field(self.flags).finish()
    }
}
