//! Signals that a graph may hold: flags that are reset.

use std::fmt;
use std::panic::Location;

use super::arena::Arena;
use super::awaited::Expected;
use super::signal::{Channel, Epoch};
use crate::comm::Rank;
use crate::runtime::backend::Caller;
use crate::runtime::{Result, Stream};

/// A place that one rank fills and another empties, again and again, in work that is captured once and replayed.
///
/// The epoch of a captured [wait](Arena::wait) is frozen: from the second replay on an old signal would satisfy it. Here flags are 0 or 1, and the
/// rank that has waited for one resets it, as NCCL's copy-engine collectives do (`src/ce_coll.cc`). Every rank takes the same handovers from its
/// arena; one serves any pairs of ranks, each pair in each direction as a place of its own. One round of a pair, in stream order on either side:
///
/// 1. the producer [acquires](Self::acquire): it waits until FREE is 1, and sets it to 0;
/// 2. it writes, and [publishes](Self::publish): READY is 1 at the consumer;
/// 3. the consumer [accepts](Self::accept): it waits until READY is 1, and sets it to 0;
/// 4. it reads, and [releases](Self::release): FREE is 1 at the producer.
///
/// A flag is 0 before its writer can set it again, so that none is lost or taken twice, however far one rank is ahead. Before the first round
/// the consumer [opens](Self::open) the place, outside of the graph. Where a producer is to be a round ahead, take two places and use them in
/// turn.
///
/// None of this waits on the host. After the rounds, or every so many replays, take a [ticket of the stream](Arena::ticket) and wait for that:
/// a [`synchronize`](Stream::synchronize) or [`Buffer::to_vec`](crate::Buffer::to_vec) ends by the arena's deadline too, but what it returns in time may be garbage
/// of an arena that another rank has ended.
pub struct Handover {
    arena: Arena,
    ready: Channel,
    free: Channel,
}

const SET: Epoch = Epoch::ZERO.next();

impl Handover {
    /// Takes two channels of the arena: a collective of all ranks, as [`Arena::channel`].
    ///
    /// # Errors
    /// As [`Arena::channel`].
    pub fn take(arena: &Arena) -> Result<Self> {
        Ok(Self { arena: arena.clone(), ready: arena.channel()?, free: arena.channel()? })
    }

    /// Of the consumer, once: what `from` fills is empty, after the earlier work of the stream.
    ///
    /// # Errors
    /// As [`Arena::signal`]; [`Error::NotCapturable`](crate::Error::NotCapturable) in a graph, each replay of which would open it again.
    #[track_caller]
    pub fn open(&self, stream: &Stream, from: Rank) -> Result<()> {
        stream.0.refuse_capture("the opening of a handover", "open it once, before the graph is captured")?;
        self.release(stream, from)
    }

    /// Of the producer: later work of the stream may write what `to` has released.
    ///
    /// # Errors
    /// As [`Arena::wait`].
    #[track_caller]
    pub fn acquire(&self, stream: &Stream, to: Rank) -> Result<()> {
        self.take_back(stream, self.free, to, Location::caller())
    }

    /// Of the producer: `to` may read what the earlier work of the stream has written.
    ///
    /// # Errors
    /// As [`Arena::signal`].
    #[track_caller]
    pub fn publish(&self, stream: &Stream, to: Rank) -> Result<()> {
        self.arena.signal(stream, self.ready, to, SET)
    }

    /// Of the consumer: later work of the stream may read what `from` has published.
    ///
    /// # Errors
    /// As [`Arena::wait`].
    #[track_caller]
    pub fn accept(&self, stream: &Stream, from: Rank) -> Result<()> {
        self.take_back(stream, self.ready, from, Location::caller())
    }

    /// Of the consumer: `from` may write again what the earlier work of the stream has read.
    ///
    /// # Errors
    /// As [`Arena::signal`].
    #[track_caller]
    pub fn release(&self, stream: &Stream, from: Rank) -> Result<()> {
        self.arena.signal(stream, self.free, from, SET)
    }

    /// Waits for a flag that another rank sets here, and resets it, in one call of the driver. Poison satisfies the wait too, since it is
    /// greater. The reset overwrites poison, which is then written again until the stream is done.
    fn take_back(&self, stream: &Stream, channel: Channel, from: Rank, caller: Caller) -> Result<()> {
        let inner = &self.arena.0;
        let (wait, expected) = inner.wait(channel, from, SET, caller)?;
        let reset = inner.reset(expected.word, caller);
        let _enqueuing = inner.enqueuing()?;
        inner.use_on(stream)?;
        inner.await_on(stream, Expected { epoch: None, ..expected });
        stream.0.note(wait.name(), Some(wait.caller()));
        stream.0.runtime.backend.word_operations(stream.0.id, &[wait, reset])
    }
}

impl fmt::Debug for Handover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handover").field("ready", &self.ready).field("free", &self.free).finish_non_exhaustive()
    }
}
