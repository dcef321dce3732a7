//! What ends an arena out of order.

use std::panic::Location;
use std::sync::{PoisonError, RwLockReadGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use oxtile_tile::arrivals::HOLD;

use super::arena::{Arena, Inner};
use super::awaited::Missing;
use super::layout::LINE;
use crate::rank::{FlagName, SymmetricError};
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Kind, POISON, Result, Stream};

/// Never pinned: a rank that ended the arena pins nothing any more.
const NOTICE: &str = "notice";
/// How long after poison the reason of the rank that wrote it is waited for, and after a deadline a kernel's verdict.
const PATIENCE: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(1);
/// The least time between two looks of calls.
const GLANCES: Duration = Duration::from_millis(10);

impl Arena {
    /// Checks whether the arena is still good on all ranks. It does not wait for a rank. The waits of [tickets](super::Ticket) check it
    /// by themselves.
    ///
    /// # Errors
    /// What ended it here, or [`SymmetricError::Aborted`] with the rank that ended it for all, or that is gone: then it is ended here too.
    pub fn check(&self) -> Result<()> {
        self.0.check_notice()?;
        self.0.check_ranks()?;
        self.0.check_verdict("a kernel's wait")
    }

    /// As [`check`](Self::check), before a call of an operation is enqueued. On a GPU its words are read at most once in [`GLANCES`]: two copies from the device take longer than enqueuing the call. What is found later is found by the host's
    /// wait for the call all the same.
    pub(crate) fn glance(&self) -> Result<()> {
        let mut looked = lock(&self.0.looked);
        if self.0.control.0.runtime.kind() == Kind::Cuda && looked.is_some_and(|last| last.elapsed() < GLANCES) {
            return self.0.check();
        }
        *looked = Some(Instant::now());
        drop(looked);
        self.check()
    }

    /// Ends the arena for all ranks: every wait of this rank's streams goes on with garbage, every ticket is an
    /// error, here and on the others.
    ///
    /// # Errors
    /// What went wrong in the streams meanwhile.
    pub fn abort(&self, why: &str) -> Result<()> {
        let error = SymmetricError::Aborted { rank: self.0.rank, why: why.to_owned() };
        self.0.fail(error.into()).map(|_| ())
    }

    /// Passes on how a call ended that all ranks make. The others go on with what did not come about here: so one that failed ends the arena for them, with the reason, unless
    /// it was only captured.
    pub(crate) fn or_abort<R>(&self, stream: &Stream, what: &str, done: Result<R>) -> Result<R> {
        if let Err(error) = &done
            && !stream.is_capturing()
        {
            // What is returned is why.
            let _ = self.abort(&format!("{what}: {error}"));
        }
        done
    }
}

impl Inner {
    /// Ends the arena: first tells the others, then lets this rank's streams go. Returns the error that ended it.
    pub fn fail(&self, error: Error) -> Result<Error> {
        let first = lock(&self.failure).get_or_insert(error).clone();
        self.watcher.stop();
        self.meeting.give_up(&first.to_string());
        self.tell_peers()?;
        if !self.release_waits()? {
            tracing::warn!(rank = self.rank.index(), "streams of an ended arena wait for something else than its signals");
        }
        Ok(first)
    }

    /// Whether the arena is still good. Held until a wait is enqueued, so that what ends the arena meanwhile releases that wait too: the reset
    /// after a wait overwrites poison, and a later wait would find none.
    ///
    /// # Errors
    /// What ended it.
    pub fn enqueuing(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let enqueuing = self.enqueuing.read().unwrap_or_else(PoisonError::into_inner);
        self.check().map(|()| enqueuing)
    }

    /// Writes poison to the notice of every rank, after a copy of a word to the host by the same stream. Where every hardware queue has a stream that
    /// waits, writes after a copy go through, and others do not. Seen on H200s by the case `gpu::silence`, whose arenas end by a deadline or an abort.
    fn tell_peers(&self) -> Result<()> {
        let Some(peers) = self.peers.get() else { return Ok(()) };
        // The word, and whether it comes in time, does not matter: poison is written all the same.
        let _ = self.word(self.layout.notice());
        peers.iter().try_for_each(|base| self.poison(base + self.layout.notice()))
    }

    /// Writes poison to all words of signals of this rank, and to the verdict, which holds streams too.
    fn poison_signals(&self) -> Result<()> {
        self.poison(self.base + self.layout.verdict())?;
        self.layout.words().try_for_each(|offset| self.poison(self.base + offset))?;
        self.settle(&self.control)
    }

    #[track_caller]
    fn poison(&self, address: u64) -> Result<()> {
        self.control.0.runtime.backend.write_value(self.control.0.id, address, POISON, Location::caller())
    }

    /// Writes poison until the streams are done, since a late signal may overwrite it. Returns whether they are done within the deadline.
    fn release_waits(&self) -> Result<bool> {
        let start = Instant::now();
        // A thread that checked before the end may still enqueue, or wait for a place in a full queue until there is poison: so poison is written before this waits.
        while matches!(self.enqueuing.try_write(), Err(TryLockError::WouldBlock)) {
            self.poison_signals()?;
            if start.elapsed() > self.options.deadline {
                return Ok(false);
            }
            thread::sleep(TICK);
        }
        let streams: Vec<_> = lock(&self.streams).values().cloned().collect();
        // Work that is being captured does not run; what was enqueued before it does.
        let (captured, running): (Vec<_>, Vec<_>) = streams.into_iter().partition(Stream::is_capturing);
        let ends = running.iter().map(Stream::mark).collect::<Result<Vec<_>>>()?;
        loop {
            self.poison_signals()?;
            let mut all_done = true;
            for end in &ends {
                all_done &= end.is_done()?;
            }
            for stream in &captured {
                all_done &= stream.0.is_done_before_capture()?;
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
        // Its reason comes another way, and may arrive after its poison.
        let start = Instant::now();
        let mut gave_up = self.who_gave_up();
        while gave_up.is_none() && start.elapsed() < PATIENCE {
            thread::sleep(TICK);
            gave_up = self.who_gave_up();
        }
        let unknown = || SymmetricError::Aborted { rank: self.rank, why: "another rank wrote poison".to_owned() }.into();
        Err(self.fail(gave_up.unwrap_or_else(unknown))?)
    }

    /// Whether a rank is known to be gone, which cannot write poison itself: then the arena is ended.
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

    /// Whether a kernel left a flag that did not come: then the arena is ended.
    pub fn check_verdict(&self, operation: &'static str) -> Result<()> {
        self.check_verdict_within(operation, self.options.deadline)
    }

    /// The same, where the word is read within so long, or [`Error::Deadline`].
    pub fn check_verdict_within(&self, operation: &'static str, limit: Duration) -> Result<()> {
        if lock(&self.flags).is_empty() {
            return Ok(());
        }
        let verdict = self.word_within(self.layout.verdict(), limit)?;
        if verdict & HOLD == 0 {
            return Ok(());
        }
        let word = LINE * (verdict & !HOLD);
        let ranks = self.layout.writer(word).map(|(_, from)| from).into_iter().collect();
        Err(self.late(operation, self.next_ticket(), Missing { ranks, is_guess: false, are_flags: true, flag: Some(word) })?)
    }

    /// What ends the arena where a wait has lasted so long, the deadline or more. Where flags alone could name a rank, the verdict of a kernel is waited for a little
    /// longer: a flag is 0 after it was reset too.
    pub fn overdue(&self, waited: Duration, operation: &'static str) -> Result<Option<Missing>> {
        self.check_verdict(operation)?;
        let (missing, deadline) = (self.missing()?, self.options.deadline);
        let may_be_polled = missing.are_flags && !missing.ranks.is_empty() && !lock(&self.flags).is_empty();
        let has_time = may_be_polled && waited < deadline + PATIENCE.min(deadline);
        Ok(Some(missing).filter(|_| !has_time))
    }

    /// Remembers the name of flags.
    pub fn add_flags(&self, name: &'static str, first: u64, count: u32) {
        lock(&self.flags).push((name, first..first + u64::from(count)));
    }

    /// The name of the flag in a word, if it is one.
    pub fn flag_in(&self, word: u64) -> Option<FlagName> {
        let (channel, _) = self.layout.writer(word)?;
        let flags = lock(&self.flags);
        let (operation, channels) = flags.iter().find(|(_, channels)| channels.contains(&channel))?;
        Some(FlagName { operation, flag: (channel - channels.start) as u32 })
    }

    /// The ranks for whose signals streams of this rank still wait.
    pub fn missing(&self) -> Result<Missing> {
        let awaited = lock(&self.awaited).clone();
        awaited.missing(|word| self.word(word))
    }

    /// The value of a word of this rank's arena.
    pub fn word(&self, offset: u64) -> Result<u64> {
        self.word_within(offset, self.options.deadline)
    }

    /// The same, or [`Error::Deadline`].
    fn word_within(&self, offset: u64, limit: Duration) -> Result<u64> {
        self.control.0.runtime.backend.read_word(self.control.0.id, self.base + offset, limit)
    }
}

/// Tells every rank that waits for this one. Memory that others, or streams of this rank, may still use is kept.
impl Drop for Inner {
    fn drop(&mut self) {
        self.watcher.stop();
        if *lock(&self.closed) {
            return;
        }
        self.meeting.give_up("it dropped its arena without closing it");
        let freed = self.tell_peers().and_then(|()| {
            let is_free = self.backend.is_kept_by_mappings() && self.release_waits()?;
            if is_free { self.backend.close(&self.control).map(|()| true) } else { Ok(false) }
        });
        let (rank, bytes) = (self.rank.index(), self.layout.bytes());
        tracing::warn!(rank, bytes, ?freed, "an arena was dropped without being closed: memory that is not freed is kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{EmulatedCommunicator, WorldSize};
    use crate::runtime::EmulatedOptions;
    use crate::runtime::backend::WordOperation;
    use crate::symmetric::ArenaOptions;
    use crate::{Graph, Runtime};

    /// The only rank's arena, and a stream of it.
    fn alone(seed: u64) -> (Arena, Stream) {
        let runtime = Runtime::emulated_with(EmulatedOptions { seed: Some(seed), ..EmulatedOptions::default() }).unwrap();
        let rank = EmulatedCommunicator::world_of(&runtime, WorldSize::new(1).unwrap()).unwrap().remove(0);
        let (arena, stream) = (Arena::open(&rank, ArenaOptions::default()).unwrap(), rank.device().stream().unwrap());
        arena.0.use_on(&stream).unwrap();
        (arena, stream)
    }

    /// A handover's wait for a flag that no rank sets, and its reset.
    fn take_back(arena: &Arena, stream: &Stream) {
        let (address, caller) = (arena.0.base + arena.0.layout.words().next().unwrap(), Location::caller());
        let operations = [WordOperation::Wait { address, value: 1, caller }, WordOperation::Write { address, value: 0, caller }];
        stream.0.runtime.backend.word_operations(stream.0.id, &operations).unwrap();
    }

    #[test]
    fn what_was_enqueued_before_a_capture_is_let_go_when_the_arena_ends_within() {
        for seed in 0..16 {
            let (arena, stream) = alone(seed);
            (0..3).for_each(|_| take_back(&arena, &stream));
            let end = stream.mark().unwrap();
            let captured = Graph::capture(&[&stream], || arena.abort("the test"));
            assert!((0..100).any(|_| end.is_done().unwrap()), "seed {seed}: a wait was left behind");
            captured.unwrap();
        }
    }

    /// A handover's wait that is enqueued by a thread that checked before the arena ended: the reset of an earlier one has overwritten the poison.
    #[test]
    fn what_is_enqueued_while_the_arena_ends_is_let_go() {
        for seed in 0..16 {
            let (arena, stream) = alone(seed);
            let inner = &arena.0;
            take_back(&arena, &stream);
            thread::scope(|scope| {
                let looked = inner.enqueuing().unwrap();
                let ending = scope.spawn(|| arena.abort("the test"));
                let start = Instant::now();
                while inner.check().is_ok() {
                    assert!(start.elapsed() < Duration::from_secs(10), "it ends meanwhile");
                    thread::yield_now();
                }
                (0..3).for_each(|_| take_back(&arena, &stream));
                drop(looked);
                ending.join().unwrap().unwrap();
            });
            let end = stream.record().unwrap();
            assert!((0..100).any(|_| end.is_done().unwrap()), "seed {seed}: a wait was left behind");
        }
    }
}
