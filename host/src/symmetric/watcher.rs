//! How an arena watches hosts that wait for its streams.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use super::arena::Inner;
use super::awaited::Missing;
use crate::rank::SymmetricError;
use crate::runtime::watch::Watch;
use crate::runtime::{Error, Result};

/// What the streams of an arena hold of it. It does not keep the arena alive.
#[derive(Default)]
pub(super) struct Watcher {
    /// Whether the arena has ended, in order or not.
    is_over: AtomicBool,
    /// Read-locked by a thread that looks at the arena: its handle meanwhile is not counted.
    arena: RwLock<Weak<Inner>>,
}

impl Watcher {
    pub fn begin(&self, arena: &Arc<Inner>) {
        *self.arena.write().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(arena);
    }

    /// Stops the watch: the arena has ended.
    pub fn stop(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// How many handles there are on the arena besides this one. Those of threads that look are not counted.
    pub fn other_handles(&self, arena: &Arc<Inner>) -> usize {
        let _nobody_looks = self.arena.write().unwrap_or_else(PoisonError::into_inner);
        Arc::strong_count(arena) - 1
    }

    /// Waits until no thread looks at the arena any more: its memory may then be freed.
    pub fn end(&self) {
        self.stop();
        *self.arena.write().unwrap_or_else(PoisonError::into_inner) = Weak::new();
    }

    fn with(&self, look: impl FnOnce(&Inner) -> Result<()>) -> Result<()> {
        let arena = self.arena.read().unwrap_or_else(PoisonError::into_inner);
        match arena.upgrade() {
            Some(arena) => look(&arena),
            None => Ok(()),
        }
    }
}

impl Watch for Watcher {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn look(&self, waited: Duration) -> Result<()> {
        self.with(|arena| arena.look(waited))
    }

    fn check(&self) -> Result<()> {
        self.with(Inner::check)
    }
}

impl Inner {
    /// Checks a host's wait for a stream of the arena, as a ticket's wait does. The deadline ends it only while a rank's signal is missing: work that takes
    /// longer on the device is not a rank's fault.
    ///
    /// # Errors
    /// [`SymmetricError::Deadline`]; what ended the arena.
    fn look(&self, waited: Duration) -> Result<()> {
        self.check_notice()?;
        self.check_ranks()?;
        self.compare_declared()?;
        if waited < self.options.deadline {
            return Ok(());
        }
        self.check_verdict("a host's wait for a stream")?;
        let missing = self.missing()?;
        if missing.ranks.is_empty() {
            return Ok(());
        }
        Err(self.late("a host's wait for a stream", self.next_ticket(), missing)?)
    }

    /// Ends the arena, since a wait has lasted for the deadline.
    pub fn late(&self, operation: &'static str, sequence: u64, missing: Missing) -> Result<Error> {
        let (rank, waited, flag) = (self.rank, self.options.deadline, missing.flag.and_then(|word| self.flag_in(word)));
        let Missing { ranks: missing, is_guess, .. } = missing;
        self.fail(SymmetricError::Deadline { rank, operation, sequence, missing, is_guess, flag, waited }.into())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;
    use crate::Runtime;
    use crate::comm::{EmulatedCommunicator, WorldSize};
    use crate::symmetric::{Arena, ArenaOptions};

    /// A thread that looks while an arena is closed does not keep it open, and does not see freed memory.
    #[test]
    fn an_arena_is_closed_while_others_look() {
        let rank = EmulatedCommunicator::world_of(&Runtime::emulated(1).unwrap(), WorldSize::ONE).unwrap().remove(0);
        for _ in 0..100 {
            let arena = Arena::open(&rank, ArenaOptions::default()).unwrap();
            let (watcher, looks) = (Arc::clone(&arena.0.watcher), AtomicUsize::new(0));
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while !watcher.is_over() {
                            watcher.look(Duration::ZERO).unwrap();
                            looks.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                while looks.load(Ordering::Relaxed) < 4 {
                    thread::yield_now();
                }
                let closing = arena.close();
                watcher.stop();
                closing.unwrap().finish().unwrap();
            });
        }
    }
}
