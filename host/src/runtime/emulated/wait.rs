//! Threads that wait for a virtual cluster, and so do its work.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::cluster::Cluster;
use super::scheduler::State;
use crate::runtime::backend::{EventId, StreamId};
use crate::runtime::error::Result;
use crate::runtime::runtime::lock;
use crate::runtime::watch::{Looks, Watch};

impl Cluster {
    /// How long a wait goes on where other threads may still enqueue what is missing.
    pub fn patience(&self) -> Duration {
        self.options.patience
    }

    /// How long this thread may wait on the host for other ranks: not at all where it drives all of them.
    pub fn patience_for_others(&self) -> Duration {
        if lock(&self.state).others_may_enqueue() { self.options.patience } else { Duration::ZERO }
    }

    /// A handle for a rank that some thread will drive.
    pub fn add_rank(&self) -> u64 {
        let mut state = lock(&self.state);
        let handle = state.new_handle();
        state.drivers.insert(handle, None);
        handle
    }

    /// The calling thread drives the rank.
    pub fn drive(&self, rank: u64) {
        lock(&self.state).drivers.insert(rank, Some(std::thread::current().id()));
    }

    /// No thread drives the rank any more.
    pub fn remove_rank(&self, rank: u64) {
        lock(&self.state).drivers.remove(&rank);
        self.progress.notify_all();
    }

    /// Runs operations of random streams until `done`, at most for the limit; returns whether it is done. If nothing can go on, and no other thread changes that within
    /// the patience, that ends all work, so that no copy stays queued whose host memory the caller takes back. The stream's watchers are asked meanwhile.
    fn run_until(
        &self,
        limit: Option<Duration>,
        watchers: &[Arc<dyn Watch>],
        done: impl Fn(&State) -> bool,
        after: impl FnOnce(&mut State),
    ) -> Result<bool> {
        let mut state = lock(&self.state);
        let (start, mut looks) = (Instant::now(), Looks::new(watchers));
        let mut last = (state.steps, start);
        loop {
            state.check()?;
            if done(&state) {
                state.waiting.remove(&std::thread::current().id());
                after(&mut state);
                return Ok(true);
            }
            let until_limit = limit.map(|limit| limit.saturating_sub(start.elapsed()));
            if until_limit.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            let until_look = looks.left();
            if until_look.is_some_and(|left| left.is_zero()) {
                // They may enqueue, and end the wait.
                state.waiting.remove(&std::thread::current().id());
                drop(state);
                looks.look()?;
                state = lock(&self.state);
                continue;
            }
            if state.step(&self.memory, &self.options).inspect_err(|_| self.progress.notify_all())? {
                self.progress.notify_all();
                continue;
            }
            // A thread that is told of something new looks again, and is noted anew if that does not help. One with a limit comes back by itself.
            if limit.is_none() {
                state.waiting.insert(std::thread::current().id());
            }
            if state.steps != last.0 {
                last = (state.steps, Instant::now());
            }
            let left = self.options.patience.saturating_sub(last.1.elapsed());
            if left.is_zero() || !state.others_may_enqueue() {
                self.progress.notify_all();
                return Err(state.stuck(&self.memory, &self.options));
            }
            let left = [until_limit, until_look].into_iter().flatten().fold(left, Duration::min);
            state = self.progress.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// As [`Backend::synchronize`], at most for the limit, with the stream's watchers; returns whether all is done.
    pub fn synchronize_within(&self, stream: StreamId, limit: Option<Duration>, watchers: &[Arc<dyn Watch>]) -> Result<bool> {
        self.run_until(limit, watchers, |state| state.queues.is_empty(stream.handle), |state| state.host_waited_for(stream.handle))
    }

    /// As [`Backend::synchronize_event`], at most for the limit, with the stream's watchers; returns whether it is done.
    pub fn synchronize_event_within(&self, event: EventId, limit: Option<Duration>, watchers: &[Arc<dyn Watch>]) -> Result<bool> {
        let is_reached = |state: &State| state.mark(event).is_none_or(|mark| mark.is_reached());
        self.run_until(limit, watchers, is_reached, |state| {
            if let Some(mark) = state.mark(event) {
                state.host_saw(&mark);
            }
        })
    }
}
