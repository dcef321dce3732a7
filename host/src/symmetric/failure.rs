//! What ends an arena out of order.

use std::panic::Location;
use std::thread;
use std::time::{Duration, Instant};

use super::arena::Inner;
use super::error::SymmetricError;
use crate::comm::Rank;
use crate::runtime::runtime::lock;
use crate::runtime::{Error, POISON, Result, Stream};

/// Never pinned: whoever ended the arena pins nothing any more.
const NOTICE: &str = "notice";
/// How long poison is taken for that of a rank whose reason is under way.
const PATIENCE: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(1);

impl Inner {
    /// Ends the arena: first tells the others, then lets this rank's streams go. Returns the error that ended it.
    pub fn fail(&self, error: Error) -> Result<Error> {
        let first = lock(&self.failure).get_or_insert(error).clone();
        self.meeting.give_up(&first.to_string());
        if let Some(peers) = self.peers.get() {
            let notice = self.layout.notice();
            peers.iter().try_for_each(|base| self.poison(base + notice))?;
        }
        if !self.release_waits()? {
            tracing::warn!(rank = self.rank.index(), "streams of an ended arena wait for something else than its signals");
        }
        Ok(first)
    }

    #[track_caller]
    fn poison(&self, address: u64) -> Result<()> {
        self.control.0.runtime.backend.write_value(self.control.0.id, address, POISON, Location::caller())
    }

    /// Writes poison until the streams are through: a late signal may undo one. Whether they are, when the deadline is over.
    fn release_waits(&self) -> Result<bool> {
        let streams: Vec<_> = lock(&self.streams).values().cloned().collect();
        let ends: Vec<_> = streams.iter().map(Stream::record).collect::<Result<_>>()?;
        let start = Instant::now();
        loop {
            self.layout.words().try_for_each(|offset| self.poison(self.base + offset))?;
            self.settle(&self.control)?;
            let mut all_done = true;
            for end in &ends {
                all_done &= end.is_done()?;
            }
            if all_done || start.elapsed() > self.options.deadline {
                return Ok(all_done);
            }
        }
    }

    /// Whether another rank has ended the arena; then it is ended here too.
    pub fn check_notice(&self) -> Result<()> {
        self.check()?;
        let word = self.word(self.layout.notice())?;
        if word < POISON {
            return Ok(());
        }
        // What it said goes another way, and may be behind its poison.
        let start = Instant::now();
        let mut gave_up = self.who_gave_up();
        while gave_up.is_none() && start.elapsed() < PATIENCE {
            thread::sleep(TICK);
            gave_up = self.who_gave_up();
        }
        let unknown = || SymmetricError::Aborted { rank: self.rank, why: "another rank wrote poison".to_owned() }.into();
        Err(self.fail(gave_up.unwrap_or_else(unknown))?)
    }

    /// Whether a rank is known to be gone, which then cannot write that itself: the arena is ended.
    pub fn check_ranks(&self) -> Result<()> {
        self.who_gave_up().map_or(Ok(()), |error| Err(self.fail(error)?))
    }

    /// The first other rank that gave the arena up out of order, or is gone.
    fn who_gave_up(&self) -> Option<Error> {
        self.world.ranks().filter(|rank| *rank != self.rank).find_map(|rank| {
            let error = self.meeting.read(rank, NOTICE, Duration::ZERO).err()?;
            matches!(error, Error::Symmetric(SymmetricError::Aborted { .. })).then_some(error)
        })
    }

    /// Whose signals have not come that streams of this rank wait for.
    pub fn missing(&self) -> Result<Vec<Rank>> {
        let awaited = lock(&self.awaited).clone();
        let mut missing = Vec::new();
        for ((_, word, from), epoch) in awaited {
            if !missing.contains(&from) && self.word(word)? < epoch.0 {
                missing.push(from);
            }
        }
        missing.sort_unstable();
        Ok(missing)
    }

    /// A word of this rank's arena, now.
    pub fn word(&self, offset: u64) -> Result<u64> {
        self.control.0.runtime.backend.read_word(self.control.0.id, self.base + offset, self.options.deadline)
    }
}

/// Whoever waits for this rank is told. Memory that others, or streams of this rank, may still use is kept.
impl Drop for Inner {
    fn drop(&mut self) {
        if *lock(&self.closed) {
            return;
        }
        self.meeting.give_up("it dropped its arena without closing it");
        let notice = self.layout.notice();
        let told = self.peers.get().map_or(Ok(()), |peers| peers.iter().try_for_each(|base| self.poison(base + notice)));
        let freed = told.and_then(|()| {
            let is_free = self.backend.is_kept_by_mappings() && self.release_waits()?;
            if is_free { self.backend.close(&self.control).map(|()| true) } else { Ok(false) }
        });
        let (rank, bytes) = (self.rank.index(), self.layout.bytes());
        tracing::warn!(rank, bytes, ?freed, "an arena was dropped without being closed: memory that is not freed is kept");
    }
}
