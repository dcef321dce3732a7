//! Results of work that is under way.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::arena::{Arena, Inner};
use super::error::SymmetricError;
use super::signal::{Channel, Epoch};
use crate::comm::Rank;
use crate::runtime::{Error, Event, Result, Stream};

/// The result of work on a stream that other ranks take part in. It keeps the arena and the result; giving the ticket in is the only way
/// to the result.
#[must_use = "the result is in the ticket"]
pub struct Ticket<R> {
    arena: Arena,
    event: Event,
    what: &'static str,
    sequence: u64,
    waits: Vec<Awaited>,
    result: R,
}

/// A signal that the work waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    pub channel: Channel,
    pub from: Rank,
    pub epoch: Epoch,
}

impl<R> Ticket<R> {
    pub(super) fn new(arena: &Arena, stream: &Stream, what: &'static str, result: R) -> Result<Self> {
        Ok(Self { arena: arena.clone(), event: stream.record()?, what, sequence: 0, waits: Vec::new(), result })
    }

    /// Adds what the work waits for, so that a deadline can name who is missing.
    pub(super) fn waiting(self, sequence: u64, waits: Vec<Awaited>) -> Self {
        Self { sequence, waits, ..self }
    }

    /// Later work of the stream comes after the result, which it may use. The host does not wait. If a rank fails meanwhile the result is
    /// of no account: look ([`Arena::check`]) before it leaves the device.
    ///
    /// # Errors
    /// What ended the arena before.
    pub fn then(self, stream: &Stream) -> Result<R> {
        self.arena.0.check()?;
        stream.wait(&self.event)?;
        Ok(self.result)
    }

    /// Waits for the result on the host, at most for the arena's deadline. When that is over the arena is ended for all ranks.
    ///
    /// # Errors
    /// [`SymmetricError::Deadline`] with who did not signal; what ended the arena, here or on another rank; what went wrong in the stream.
    pub fn wait(self) -> Result<R> {
        let (arena, start) = (Arc::clone(&self.arena.0), Instant::now());
        while !self.event.is_done()? {
            if start.elapsed() >= arena.options.deadline {
                let missing = self.missing(&arena)?;
                let (rank, waited) = (arena.rank, arena.options.deadline);
                let error = SymmetricError::Deadline { rank, operation: self.what, sequence: self.sequence, missing, waited };
                return Err(arena.fail(error.into())?);
            }
            arena.check_notice()?;
            std::thread::yield_now();
        }
        arena.check_notice()?;
        Ok(self.result)
    }

    /// Whose signals have not come.
    fn missing(&self, arena: &Inner) -> Result<Vec<Rank>> {
        let mut missing = Vec::new();
        for wait in &self.waits {
            if arena.word(arena.layout.word(wait.channel.index, wait.from))? < wait.epoch.get() && !missing.contains(&wait.from) {
                missing.push(wait.from);
            }
        }
        Ok(missing)
    }
}

impl<R> fmt::Debug for Ticket<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("what", &self.what).field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl From<SymmetricError> for Error {
    fn from(error: SymmetricError) -> Self {
        Self::Symmetric(error)
    }
}
