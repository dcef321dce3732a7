//! Vector clocks over the queues of a cluster.

use std::collections::BTreeMap;

/// What is known to have happened: of each queue, by handle, how many operations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Clock(BTreeMap<u64, u64>);

impl Clock {
    /// One more operation of `queue`.
    pub fn tick(&mut self, queue: u64) {
        *self.0.entry(queue).or_default() += 1;
    }

    /// How many operations of `queue` are known to be done.
    pub fn of(&self, queue: u64) -> u64 {
        self.0.get(&queue).copied().unwrap_or(0)
    }

    /// How many queues it knows of.
    #[cfg(test)]
    pub fn width(&self) -> usize {
        self.0.len()
    }

    /// All that either knows.
    pub fn join(&mut self, other: &Self) {
        for (queue, time) in &other.0 {
            let mine = self.0.entry(*queue).or_default();
            *mine = (*mine).max(*time);
        }
    }
}
