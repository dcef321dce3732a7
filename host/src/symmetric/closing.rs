//! The end of an arena, in order: in two halves, so that nothing is freed that another rank still uses.

use std::fmt;
use std::sync::Arc;

use super::arena::{Arena, Inner};
use super::error::SymmetricError;
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// That a rank needs the arena no more.
const CLOSED: &str = "closed";

impl Arena {
    /// Gives the arena up: the first half of closing it, which waits for this rank's streams alone. [`Closing::finish`] is the other.
    ///
    /// # Errors
    /// The arena, which stays open, with [`SymmetricError::InUse`] while buffers, tickets, graphs or clones are there, or what went wrong in a stream.
    pub fn close(self) -> Result<Closing, CloseError> {
        match self.0.close() {
            Ok(()) => Ok(Closing(self.0)),
            Err(error) => Err(CloseError { arena: self, error }),
        }
    }
}

/// Why an arena was not closed, and the arena: still open for this rank and all others. Close it again once that is mended. It becomes an
/// [`Error`](crate::Error) by `?`, which drops the arena.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CloseError {
    /// What is not closed.
    pub arena: Arena,
    /// Why.
    pub error: Error,
}

impl From<CloseError> for Error {
    fn from(not_closed: CloseError) -> Self {
        not_closed.error
    }
}

impl Inner {
    /// Where this is its last handle.
    fn close(self: &Arc<Self>) -> Result<()> {
        let handles = self.watcher.other_handles(self);
        if handles > 0 {
            return Err(SymmetricError::InUse { handles }.into());
        }
        self.drain()?;
        self.meeting.publish(CLOSED, Vec::new())?;
        *lock(&self.closed) = true;
        self.watcher.end();
        Ok(())
    }

    /// Waits for all work that used a peer.
    fn drain(&self) -> Result<()> {
        let streams: Vec<_> = lock(&self.streams).values().cloned().collect();
        streams.iter().try_for_each(|stream| self.settle(stream))
    }
}

/// An arena that this rank has given up, while others may still read it.
#[must_use = "finish it, or the memory is kept"]
pub struct Closing(Arc<Inner>);

impl Closing {
    /// Waits until every rank has given its arena up and frees this one.
    ///
    /// # Errors
    /// [`SymmetricError::Missing`] with who has not, [`SymmetricError::Aborted`] with who is gone: memory that such a rank may still use
    /// is then kept; on `vmm` that rank's own mapping keeps it, and it is freed here all the same.
    pub fn finish(self) -> Result<()> {
        let inner = &self.0;
        let closed = inner.meeting.gather(CLOSED, inner.options.deadline).inspect(|_| inner.meeting.leave());
        if closed.is_ok() || inner.backend.is_kept_by_mappings() {
            inner.backend.close(&inner.control)?;
        }
        closed.map(drop)
    }
}

impl fmt::Debug for Closing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closing").field("rank", &self.0.rank).finish_non_exhaustive()
    }
}
