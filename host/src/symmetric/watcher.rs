//! How an arena watches hosts that wait for its streams.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use super::arena::Inner;
use super::awaited::Missing;
use crate::rank::SymmetricError;
use crate::runtime::watch::Watch;
use crate::runtime::{Error, Result};

/// What a host does that an arena watches.
const WAIT: &str = "a host's wait for a stream";
/// How long a host that has waited reads a verdict at most.
const MOMENT: Duration = Duration::from_millis(20);

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

    /// Also after work that has ended before anything was looked at: a kernel may have left a verdict, and gone on.
    fn check(&self) -> Result<()> {
        self.with(|arena| {
            arena.check()?;
            match arena.check_verdict_within(WAIT, MOMENT) {
                // The word may be behind another stream's wait, where streams share a hardware queue: a later wait of the host reads it.
                Err(Error::Deadline { .. }) => Ok(()),
                checked => checked,
            }
        })
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
        self.check_verdict(WAIT)?;
        if waited < self.options.deadline {
            return Ok(());
        }
        match self.overdue(waited, WAIT)?.filter(|missing| !missing.ranks.is_empty()) {
            Some(missing) => Err(self.late(WAIT, self.next_ticket(), missing)?),
            None => Ok(()),
        }
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
    use std::panic::Location;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use oxtile_tile::arrivals::HOLD;

    use super::super::layout::LINE;
    use super::*;
    use crate::Runtime;
    use crate::comm::{EmulatedCommunicator, WorldSize};
    use crate::symmetric::{Arena, ArenaOptions};

    /// Of two flags that are 0 the host cannot know which is missing: it waits for the kernel's verdict, and guesses only when that does not come either.
    #[test]
    fn a_verdict_is_waited_for_before_a_flag_is_guessed() {
        let rank = EmulatedCommunicator::world_of(&Runtime::emulated(1).unwrap(), WorldSize::ONE).unwrap().remove(0);
        let deadline = Duration::from_secs(2);
        for comes in [true, false] {
            let arena = Arena::open(&rank, ArenaOptions { deadline, ..ArenaOptions::default() }).unwrap();
            let (flags, stream, inner) = (arena.flags("test sum", 2).unwrap(), rank.device().stream().unwrap(), &arena.0);
            assert_eq!(flags.waits(&stream, &[(0, arena.rank()), (1, arena.rank())]).unwrap().patience, 1_750_000_000);
            let look = |waited: Duration| inner.watcher.look(waited);
            look(deadline + Duration::from_millis(499)).unwrap();
            if comes {
                let word = inner.word_of(flags.channel(1).unwrap(), arena.rank()).unwrap();
                let (backend, id) = (&inner.control.0.runtime.backend, inner.control.0.id);
                backend.write_value(id, inner.base + inner.layout.verdict(), HOLD | (word / LINE), Location::caller()).unwrap();
                inner.control.synchronize().unwrap();
            }
            let waited = if comes { Duration::ZERO } else { deadline + Duration::from_millis(500) };
            let Err(Error::Symmetric(SymmetricError::Deadline { flag: Some(found), .. })) = look(waited) else {
                panic!("no flag is named")
            };
            assert_eq!(found.flag, u32::from(comes));
        }
    }

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
