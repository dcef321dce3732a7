//! A barrier with a time limit, since a rank that has failed does not come; and what ranks tell those that have come.

use std::sync::mpsc::Receiver;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::context_parallel::{By, Made};
use super::process::{FromRank, Opened};

/// A side that failed, and why.
pub type Failed = (By, String);

/// Where the ranks meet.
pub struct Gate {
    way: Way,
    told: Mutex<Told>,
}

/// What ranks have told.
#[derive(Default)]
struct Told {
    /// What rank 0 has made.
    made: Vec<Made>,
    /// The side that failed first.
    failed: Option<Failed>,
}

/// How a rank comes to the others.
enum Way {
    /// By threads of one process, which are ranks or stand for the processes of ranks.
    Threads { ranks: u32, state: Mutex<State>, opened: Condvar },
    /// A rank that is a process comes by the program that started it, which says when all have come.
    Process(Mutex<Receiver<Opened>>),
}

#[derive(Default)]
struct State {
    waiting: u32,
    /// How often it has opened.
    turn: u64,
    /// Why it opens no more, and since when.
    ended: Option<(String, Instant)>,
}

/// How much later than its limit the starting program may tell that some did not come.
const GRACE: Duration = Duration::from_secs(5);

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    pub fn new(ranks: u32) -> Self {
        Self { way: Way::Threads { ranks, state: Mutex::default(), opened: Condvar::new() }, told: Mutex::default() }
    }

    /// That of a rank that is a process: it hears there when the gate has opened.
    pub fn of_process(opened: Receiver<Opened>) -> Self {
        Self { way: Way::Process(Mutex::new(opened)), told: Mutex::default() }
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// Some did not come within `limit`, or one has ended.
    pub fn pass(&self, limit: Duration) -> Result<()> {
        let (ranks, state, opened) = match &self.way {
            Way::Threads { ranks, state, opened } => (*ranks, state, opened),
            Way::Process(opened) => return self.pass_by_parent(opened, limit),
        };
        let mut state = lock(state);
        if let Some((why, _)) = &state.ended {
            bail!("{why}");
        }
        state.waiting += 1;
        if state.waiting == ranks {
            *state = State { waiting: 0, turn: state.turn + 1, ended: None };
            opened.notify_all();
            return Ok(());
        }
        let turn = state.turn;
        let is_shut = |state: &mut State| state.turn == turn && state.ended.is_none();
        let (mut state, _) = opened.wait_timeout_while(state, limit, is_shut).unwrap_or_else(PoisonError::into_inner);
        if state.turn != turn {
            return Ok(());
        }
        state.waiting -= 1;
        match &state.ended {
            Some((why, _)) => bail!("{why}"),
            None => bail!("of {ranks} ranks some did not come within {limit:?}: see which of them failed"),
        }
    }

    fn pass_by_parent(&self, opened: &Mutex<Receiver<Opened>>, limit: Duration) -> Result<()> {
        FromRank::Meet { limit }.send()?;
        match lock(opened).recv_timeout(limit + GRACE) {
            Ok(Opened::Open { failed }) => {
                lock(&self.told).failed = failed;
                Ok(())
            }
            Ok(Opened::Shut { why }) => bail!("{why}"),
            Err(_) => bail!("the program that started this rank did not say within {limit:?} that all ranks came"),
        }
    }

    /// Does a rank's part of something, and waits for all ranks to have done theirs, also where it has failed.
    ///
    /// # Errors
    /// Those of the part; as [`pass`](Self::pass).
    pub fn after<R>(&self, limit: Duration, part: impl FnOnce() -> Result<R>) -> Result<R> {
        let (result, passed) = (part(), self.pass(limit));
        let result = result?;
        passed?;
        Ok(result)
    }

    /// Tells what rank 0 has made.
    ///
    /// # Errors
    /// The program that started this rank has ended.
    pub fn made(&self, made: Made) -> Result<()> {
        match self.way {
            Way::Threads { .. } => lock(&self.told).made.push(made),
            Way::Process(_) => FromRank::Made(made).send()?,
        }
        Ok(())
    }

    /// Tells that a side failed, before the gate is passed: all know it after.
    pub fn fail(&self, by: By, why: String) {
        match self.way {
            Way::Threads { .. } => _ = lock(&self.told).failed.get_or_insert((by, why)),
            // Where it cannot be sent, the gate cannot be passed either.
            Way::Process(_) => _ = FromRank::Failed(by, why).send(),
        }
    }

    /// The side that failed first, of what was told before the gate was passed.
    pub fn failed(&self) -> Option<Failed> {
        lock(&self.told).failed.clone()
    }

    /// What rank 0 has made.
    pub fn taken(&self) -> Vec<Made> {
        std::mem::take(&mut lock(&self.told).made)
    }

    /// No rank passes any more: one has failed. The first reason counts.
    pub fn end(&self, why: String) {
        if let Way::Threads { state, opened, .. } = &self.way {
            lock(state).ended.get_or_insert_with(|| (why, Instant::now()));
            opened.notify_all();
        }
    }

    /// Why no rank passes any more, and since when.
    pub fn ended(&self) -> Option<(String, Instant)> {
        match &self.way {
            Way::Threads { state, .. } => lock(state).ended.clone(),
            Way::Process(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pass_or_those_that_came_are_told() {
        let gate = Gate::new(3);
        for _ in 0..3 {
            std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3).map(|_| scope.spawn(|| gate.pass(Duration::from_secs(20)))).collect();
                ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
            });
            assert!(gate.pass(Duration::from_millis(1)).unwrap_err().to_string().contains("3 ranks"));
        }
    }

    #[test]
    fn those_that_wait_are_told_at_once_that_a_rank_has_ended() {
        let gate = Gate::new(2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.pass(Duration::from_secs(600)));
            gate.end("rank 1 has ended".into());
            gate.end("rank 0 has ended".into());
            assert_eq!(waits.join().unwrap().unwrap_err().to_string(), "rank 1 has ended");
        });
        assert_eq!(gate.pass(Duration::from_secs(600)).unwrap_err().to_string(), "rank 1 has ended");
    }

    #[test]
    fn the_first_side_that_failed_is_told() {
        let gate = Gate::new(1);
        gate.fail(By::Ring, "no memory".into());
        gate.fail(By::Pull, "another".into());
        assert_eq!(gate.failed(), Some((By::Ring, "no memory".into())));
    }
}
