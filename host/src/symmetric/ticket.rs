//! Results of work that is under way.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::arena::Arena;
use crate::runtime::watch::LOOK;
use crate::runtime::{Event, Result, Stream};

/// The result of work on a stream that other ranks take part in. It keeps the arena and the result, which only
/// [`wait`](Self::wait) and [`then`](Self::then) give.
#[must_use = "the result is in the ticket"]
pub struct Ticket<R> {
    arena: Arena,
    event: Event,
    what: &'static str,
    sequence: u64,
    result: R,
}

impl Arena {
    /// A ticket for all that was enqueued on the stream so far: a wait on the host with the arena's deadline, for work that has no ticket of its own,
    /// as [handovers](super::Handover) and replays of graphs have none. [`Stream::synchronize`] and copies to the host end by the deadline too, but do not
    /// check whether the arena has ended for all ranks when they are done in time: wait for a ticket first.
    ///
    /// # Errors
    /// [`Invalid`](crate::Error::Invalid) for a stream of another device; [`ForeignRuntime`](crate::Error::ForeignRuntime);
    /// what ended the arena before; [`NotCapturable`](crate::Error::NotCapturable) in a graph; an error of the driver.
    pub fn ticket(&self, stream: &Stream) -> Result<Ticket<()>> {
        stream.0.refuse_capture("a ticket", "take it after Graph::replay")?;
        self.0.check()?;
        self.0.use_on(stream)?;
        Ticket::new(self, stream, "Arena::ticket", ())
    }
}

impl<R> Ticket<R> {
    /// A ticket with the arena's next number.
    pub(super) fn new(arena: &Arena, stream: &Stream, what: &'static str, result: R) -> Result<Self> {
        Ok(Self::after(arena, stream.mark()?, what, result).numbered(arena.0.next_ticket()))
    }

    /// A ticket of work that ends with an event.
    pub(super) fn after(arena: &Arena, event: Event, what: &'static str, result: R) -> Self {
        Self { arena: arena.clone(), event, what, sequence: 0, result }
    }

    /// The number of the operation, which a deadline names.
    pub(super) fn numbered(self, sequence: u64) -> Self {
        Self { sequence, ..self }
    }

    /// Later work of the stream comes after the result, which it may use. The host does not wait. If a rank fails meanwhile the result is
    /// garbage: call [`Arena::check`] before copying it out.
    ///
    /// # Errors
    /// What ended the arena before.
    pub fn then(self, stream: &Stream) -> Result<R> {
        self.arena.0.check()?;
        stream.wait(&self.event)?;
        Ok(self.result)
    }

    /// Waits for the result on the host, at most for the arena's deadline. When that is over, or a rank is gone, the arena is ended for all
    /// ranks.
    ///
    /// # Errors
    /// [`SymmetricError::Deadline`](super::SymmetricError::Deadline) with the ranks that did not signal; [`Error::Mismatch`](crate::Error::Mismatch) where other ranks gather in another way; what ended the
    /// arena, here or on another rank; what went wrong in the stream.
    pub fn wait(self) -> Result<R> {
        self.settle()?;
        Ok(self.result)
    }

    /// As [`wait`](Self::wait), for a result that stays in the ticket.
    pub(super) fn settle(&self) -> Result<()> {
        let (arena, start) = (Arc::clone(&self.arena.0), Instant::now());
        let mut next_look = LOOK;
        while !self.event.is_done()? {
            if start.elapsed() >= next_look {
                arena.check_ranks()?;
                arena.check_verdict(self.what)?;
                arena.compare_declared()?;
                next_look = start.elapsed() + LOOK;
            }
            if start.elapsed() >= arena.options.deadline {
                arena.compare_declared()?;
                if let Some(missing) = arena.overdue(start.elapsed(), self.what)? {
                    return Err(arena.late(self.what, self.sequence, missing)?);
                }
            }
            arena.check_notice()?;
            std::thread::yield_now();
        }
        arena.check_notice()?;
        arena.check_verdict(self.what)?;
        arena.compare_declared()
    }
}

impl<R> fmt::Debug for Ticket<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("what", &self.what).field("sequence", &self.sequence).finish_non_exhaustive()
    }
}
