//! Queues of operations and the choice of which stream goes on.

use std::collections::{BTreeMap, VecDeque};

use super::operation::Operation;
use super::random::Random;

/// The queues of several streams, by handle: ordered, so that a seed means the same on every run.
#[derive(Clone, Default)]
pub(super) struct Queues(BTreeMap<u64, VecDeque<Operation>>);

impl Queues {
    pub fn push(&mut self, stream: u64, operation: Operation) {
        self.0.entry(stream).or_default().push_back(operation);
    }

    pub fn is_empty(&self, stream: u64) -> bool {
        self.0.get(&stream).is_none_or(VecDeque::is_empty)
    }

    pub fn are_all_empty(&self) -> bool {
        self.0.values().all(VecDeque::is_empty)
    }

    /// Takes the next operation of a random stream among those that can go on.
    pub fn take(&mut self, random: &mut Random) -> Option<Operation> {
        let is_ready = |queue: &&mut VecDeque<Operation>| queue.front().is_some_and(Operation::is_ready);
        let ready = self.0.values().filter(|queue| queue.front().is_some_and(Operation::is_ready)).count();
        if ready == 0 {
            return None;
        }
        let chosen = random.below(ready);
        self.0.values_mut().filter(is_ready).nth(chosen)?.pop_front()
    }

    /// Forgets a stream that has nothing left to do.
    pub fn forget(&mut self, stream: u64) {
        if self.is_empty(stream) {
            self.0.remove(&stream);
        }
    }

    /// Takes everything, in no order.
    pub fn drain(&mut self) -> Vec<Operation> {
        std::mem::take(&mut self.0).into_values().flatten().collect()
    }

    /// Makes the marks of a graph good for another replay.
    pub fn reset_marks(&self) {
        for operation in self.0.values().flatten() {
            if let Operation::Record(mark) = operation {
                mark.set(None);
            }
        }
    }
}
