//! The end of an arena, in order: in two halves, so that nothing is freed that another rank still uses.

use std::fmt;
use std::sync::Arc;

use super::arena::{Arena, Inner};
use super::error::SymmetricError;
use crate::runtime::Result;
use crate::runtime::runtime::lock;

/// That a rank needs the arena no more.
const CLOSED: &str = "closed";

impl Arena {
    /// Gives the arena up: the first half of closing it, which waits for this rank's streams alone. [`Closing::finish`] is the other.
    ///
    /// # Errors
    /// [`SymmetricError::InUse`] while buffers, tickets, graphs or clones are there: the arena then stays open. What went wrong in a stream.
    pub fn close(self) -> Result<Closing> {
        let handles = Arc::strong_count(&self.0) - 1;
        if handles > 0 {
            return Err(SymmetricError::InUse { handles }.into());
        }
        self.0.drain()?;
        self.0.meeting.publish(CLOSED, Vec::new())?;
        *lock(&self.0.closed) = true;
        Ok(Closing(self.0))
    }
}

impl Inner {
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
