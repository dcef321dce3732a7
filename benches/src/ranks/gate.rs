//! A barrier with a time limit, since a rank that has failed does not come.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};

/// Where the ranks' threads meet.
pub struct Gate {
    ranks: u32,
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Default)]
struct State {
    waiting: u32,
    /// How often it has opened.
    turn: u64,
}

impl Gate {
    pub fn new(ranks: u32) -> Self {
        Self { ranks, state: Mutex::default(), opened: Condvar::new() }
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// Some did not come within `limit`.
    pub fn pass(&self, limit: Duration) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        if state.waiting == self.ranks {
            *state = State { waiting: 0, turn: state.turn + 1 };
            self.opened.notify_all();
            return Ok(());
        }
        let turn = state.turn;
        let (mut state, _) =
            self.opened.wait_timeout_while(state, limit, |state| state.turn == turn).unwrap_or_else(PoisonError::into_inner);
        if state.turn != turn {
            return Ok(());
        }
        state.waiting -= 1;
        bail!("of {} ranks some did not come within {limit:?}: see which of them failed", self.ranks)
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
}
