//! The end of an arena, in order: in two halves, so that nothing is freed that another rank still uses.

use std::fmt;
use std::sync::Arc;

use super::arena::{Arena, Inner};
use crate::rank::SymmetricError;
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result};

/// The note that a rank needs the arena no more.
const CLOSED: &str = "closed";

impl Arena {
    /// Gives the arena up: the first half of closing it, which waits for this rank's streams alone. [`Closing::finish`] is the second half.
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
    /// The arena, if this is its last handle.
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
    /// [`SymmetricError::Missing`] with the ranks that have not, [`SymmetricError::Aborted`] with the rank that is gone: memory that such a rank may still use
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{ArenaRank, HostRank, Team};
    use crate::rank::Rank;
    use crate::runtime::emulated::tables;
    use crate::runtime::{Buffer, Device, Runtime};
    use crate::symmetric::{ArenaOptions, Epoch};

    #[test]
    fn arenas_that_come_and_go_leave_nothing() -> Result<()> {
        let runtime = Runtime::emulated(2)?;
        let devices = [runtime.device(0)?, runtime.device(1)?];
        let ranks = HostRank::threads(&devices)?;
        let one = Rank::new(1, ranks[0].world()).unwrap();
        for round in 0..1000 {
            let open = |rank| Arena::open(rank, ArenaOptions { bytes: 1024, channels: 2, ..ArenaOptions::default() });
            let arenas = ranks.iter().map(open).collect::<Result<Vec<_>>>()?;
            let buffers = arenas.iter().map(|arena| arena.buffer::<u32>(4)).collect::<Result<Vec<_>>>()?;
            let channels = arenas.iter().map(Arena::channel).collect::<Result<Vec<_>>>()?;
            let streams = devices.iter().map(Device::stream).collect::<Result<Vec<_>>>()?;
            let own = Buffer::<u32>::zeros(&streams[0], 4)?;
            buffers[0].peer(one)?.put(&streams[0], &own, 0..4, 0)?;
            arenas[0].signal(&streams[0], channels[0], one, Epoch::ZERO.next())?;
            arenas[1].wait(&streams[1], channels[1], Rank::ZERO, Epoch::ZERO.next())?;
            arenas[1].ticket(&streams[1])?.wait()?;
            drop((buffers, own));
            let closing = arenas.into_iter().map(Arena::close).collect::<Result<Vec<_>, _>>()?;
            closing.into_iter().try_for_each(|arena| arena.finish())?;
            tables::check(&runtime, round);
        }
        Ok(())
    }

    /// A program may make a team a step.
    #[test]
    fn teams_that_are_closed_leave_nothing_on_the_board() {
        let device = Runtime::emulated(1).unwrap().device(0).unwrap();
        let rank = HostRank::threads(&[device]).unwrap().remove(0);
        let gone = || format!("{:?}", rank.next_meeting()).matches("it is gone").count();
        let team = Team::all(rank.world());
        for _ in 0..3 {
            let member = rank.team(&team).unwrap().unwrap();
            Arena::open(&member, ArenaOptions::default()).unwrap().close().unwrap().finish().unwrap();
            member.close().unwrap();
        }
        assert_eq!(gone(), 0);
        drop(rank.team(&team).unwrap());
        assert_eq!(gone(), 1, "one that is not closed is gone");
    }
}
