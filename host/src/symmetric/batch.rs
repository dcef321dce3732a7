//! One-sided operations that are enqueued together.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::num::Pod;

use super::arena::Arena;
use super::awaited::Expected;
use super::buffer::Peer;
use super::flags::{Flags, SET};
use super::rows::Rows;
use super::signal::{Channel, Epoch};
use crate::comm::Rank;
use crate::runtime::backend::{Copy, WordOperation};
use crate::runtime::memory::{self, Memory};
use crate::runtime::{Buffer, Error, Result, Stream};

/// Puts, signals and waits of one stream, in the order in which they are named; made by [`Arena::batch`]. Nothing is enqueued before
/// [`enqueue`](Self::enqueue).
///
/// Signals and waits that follow each other are one call of the driver (`cuStreamBatchMemOp`), and so are puts on streams that Oxtile made where nothing
/// is captured (`cuMemcpyBatchAsync`, for rows `cuMemcpy3DBatchAsync`, 16 a call), which saves the time between two calls, on the host and in the copy engine. The order is that of the stream all the same: a signal comes
/// after the puts named before it. Only puts that follow each other have no order, so no two of them may go to the same elements. May be captured.
#[must_use = "nothing of it is enqueued yet"]
pub struct Batch<'a> {
    arena: &'a Arena,
    stream: &'a Stream,
    operations: Vec<Operation<'a>>,
    /// Whether it waits for the kernels' verdict: once serves, since no kernel comes between its operations.
    is_answered: bool,
}

enum Operation<'a> {
    Word(WordOperation, Option<Expected>),
    Put { copy: Copy, source: &'a Arc<Memory> },
}

impl Operation<'_> {
    /// Whether one call of the driver does both.
    fn joins(&self, next: &Self) -> bool {
        matches!(self, Self::Word(..)) == matches!(next, Self::Word(..))
    }
}

impl<'a> Batch<'a> {
    pub(super) fn new(arena: &'a Arena, stream: &'a Stream) -> Self {
        Self { arena, stream, operations: Vec::new(), is_answered: false }
    }

    /// As [`Arena::signal`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a channel of another arena; a failure of the rendezvous or of the arena.
    #[track_caller]
    pub fn signal(mut self, channel: Channel, to: Rank, epoch: Epoch) -> Result<Self> {
        let operation = self.arena.0.signal(channel, to, epoch, Location::caller())?;
        self.operations.push(Operation::Word(operation, None));
        Ok(self)
    }

    /// As [`Arena::wait`].
    ///
    /// # Errors
    /// As [`signal`](Self::signal).
    #[track_caller]
    pub fn wait(mut self, channel: Channel, from: Rank, epoch: Epoch) -> Result<Self> {
        let (operation, expected) = self.arena.0.wait(channel, from, epoch, Location::caller())?;
        self.operations.push(Operation::Word(operation, Some(expected)));
        Ok(self)
    }

    /// As [`Flags::set`].
    ///
    /// # Errors
    /// As [`Flags::set`].
    #[track_caller]
    pub fn set(self, flags: &Flags, flag: u32, to: Rank) -> Result<Self> {
        let channel = flags.channel(flag)?;
        self.signal(channel, to, SET)
    }

    /// As [`Flags::take_back`].
    ///
    /// # Errors
    /// As [`Flags::set`].
    #[track_caller]
    pub fn take_back(mut self, flags: &Flags, flag: u32, from: Rank) -> Result<Self> {
        let (wait, expected) = self.arena.0.wait(flags.channel(flag)?, from, SET, Location::caller())?;
        // A flag that is 0 was not set, or was reset: it names no epoch.
        self.operations.push(Operation::Word(wait, Some(Expected { epoch: None, ..expected })));
        self.operations.push(Operation::Word(self.arena.0.reset(expected.word, Location::caller()), None));
        Ok(self)
    }

    /// As [`take_back`](Self::take_back) of a flag that a kernel of this rank sets. It names no rank where a deadline is over: the kernel waits for others.
    #[track_caller]
    pub(crate) fn take_own(mut self, flags: &Flags, flag: u32) -> Result<Self> {
        let me = self.arena.rank();
        let (wait, expected) = self.arena.0.wait(flags.channel(flag)?, me, SET, Location::caller())?;
        self.operations.push(Operation::Word(wait, None));
        self.operations.push(Operation::Word(self.arena.0.reset(expected.word, Location::caller()), None));
        Ok(self)
    }

    /// Later work of the stream waits until `from` has set its flag `flag` here, which stays set: [clear](Self::clear) it after the last that waits for it.
    ///
    /// # Errors
    /// As [`Flags::set`].
    #[track_caller]
    pub fn wait_flag(mut self, flags: &Flags, flag: u32, from: Rank) -> Result<Self> {
        let (wait, expected) = self.arena.0.wait(flags.channel(flag)?, from, SET, Location::caller())?;
        self.operations.push(Operation::Word(wait, Some(Expected { epoch: None, ..expected })));
        Ok(self)
    }

    /// As [`Flags::clear`].
    ///
    /// # Errors
    /// As [`Flags::set`].
    #[track_caller]
    pub fn clear(mut self, flags: &Flags, flag: u32, from: Rank) -> Result<Self> {
        let word = self.arena.0.word_of(flags.channel(flag)?, from)?;
        self = self.answered();
        self.operations.push(Operation::Word(self.arena.0.reset(word, Location::caller()), None));
        Ok(self)
    }

    /// Later work of the stream is done only if every wait of the kernels before it was answered: what it would tell other ranks of is garbage otherwise.
    #[track_caller]
    pub(crate) fn answered(mut self) -> Self {
        if !std::mem::replace(&mut self.is_answered, true) {
            self.operations.push(Operation::Word(self.arena.0.wait_for_no_verdict(Location::caller()), None));
        }
        self
    }

    /// As [`Peer::put`]. Puts that follow each other are done in any order, all of them before what is named after them.
    ///
    /// # Errors
    /// As [`Peer::put`]; [`Error::Invalid`] for a peer of another arena than the batch's.
    #[track_caller]
    pub fn put<T: Pod>(mut self, peer: &Peer<'_, T>, source: &'a Buffer<T>, range: Range<u64>, at: u64) -> Result<Self> {
        self.check_peer(peer)?;
        let copy = peer.put_copy(self.stream, source, range, at, Location::caller())?;
        self.operations.push(Operation::Put { copy, source: source.memory() });
        Ok(self)
    }

    /// As [`Peer::put_rows`], among puts as [`put`](Self::put).
    ///
    /// # Errors
    /// As [`Peer::put_rows`]; [`Error::Invalid`] for a peer of another arena than the batch's.
    #[track_caller]
    pub fn put_rows<T: Pod>(mut self, peer: &Peer<'_, T>, source: &'a Buffer<T>, rows: Rows) -> Result<Self> {
        self.check_peer(peer)?;
        let copy = peer.put_rows_copy(self.stream, source, rows, Location::caller())?;
        self.operations.push(Operation::Put { copy, source: source.memory() });
        Ok(self)
    }

    /// Another arena would not know of the stream, and could be unmapped before a put to it.
    fn check_peer<T: Pod>(&self, peer: &Peer<'_, T>) -> Result<()> {
        if peer.is_of(self.arena) {
            return Ok(());
        }
        let why = format!("{peer:?} is of another arena: batch its puts with Arena::batch of that one");
        Err(Error::Invalid { what: "Batch::put", why })
    }

    /// Enqueues all of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stream of another device; [`Error::ForeignRuntime`]; a failure of the arena since; an error of the driver.
    pub fn enqueue(self) -> Result<()> {
        let _enqueuing = self.arena.0.enqueuing()?;
        self.arena.0.use_on(self.stream)?;
        let (stream, mut words, mut copies, mut sources) = (&self.stream.0, Vec::new(), Vec::new(), Vec::new());
        for together in self.operations.chunk_by(Operation::joins) {
            for operation in together {
                match operation {
                    Operation::Word(word, expected) => {
                        // Noted only now: a batch that is dropped has enqueued no wait.
                        expected.iter().for_each(|expected| self.arena.0.await_on(self.stream, *expected));
                        words.push(*word);
                    }
                    Operation::Put { copy, source } => {
                        copies.push(*copy);
                        sources.push(*source);
                    }
                }
            }
            if words.is_empty() {
                memory::copies(stream, &copies, &sources)?;
            } else {
                words.last().into_iter().for_each(|word| stream.note(word.name(), Some(word.caller())));
                stream.runtime.backend.word_operations(stream.id, &words)?;
            }
            words.clear();
            copies.clear();
            sources.clear();
        }
        Ok(())
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("arena", self.arena).field("operations", &self.operations.len()).finish_non_exhaustive()
    }
}
