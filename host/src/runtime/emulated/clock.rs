//! Vector clocks over the queues of a cluster.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use oxtile_emulator::Known;

/// What is known to have happened: of each queue, by handle, how many operations; and what threads of kernels under way have told by flags.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    times: BTreeMap<u64, u64>,
    kernels: Known,
    /// Whether something that it knows of was let go by poison.
    is_spoilt: bool,
}

impl Clock {
    /// One more operation of `queue`.
    pub fn tick(&mut self, queue: u64) {
        *self.times.entry(queue).or_default() += 1;
    }

    /// How many operations of `queue` are known to be done.
    pub fn of(&self, queue: u64) -> u64 {
        self.times.get(&queue).copied().unwrap_or(0)
    }

    /// The queues of which it knows an operation.
    pub fn queues(&self) -> impl Iterator<Item = u64> {
        self.times.iter().filter(|(_, time)| **time > 0).map(|(queue, _)| *queue)
    }

    /// Learns of so many operations of `queue`.
    pub fn learn(&mut self, queue: u64, time: u64) {
        if time > self.of(queue) {
            self.times.insert(queue, time);
        }
    }

    /// What threads of kernels have told.
    pub fn kernels(&self) -> &Known {
        &self.kernels
    }

    /// Learns what threads of kernels have told.
    pub fn learn_kernels(&mut self, known: &Known) {
        self.kernels.join(known);
    }

    /// Poison has let it go: what it does from here on, and what others do after it, is meaningless.
    pub fn spoil(&mut self) {
        self.is_spoilt = true;
    }

    /// Whether it is, or something that it knows of.
    pub fn is_spoilt(&self) -> bool {
        self.is_spoilt
    }

    /// Learns what the host knows, which goes on after a failure.
    pub fn join_host(&mut self, host: &Self) {
        let is_spoilt = self.is_spoilt;
        self.join(host);
        self.is_spoilt = is_spoilt;
    }

    /// How many queues it knows of.
    #[cfg(test)]
    pub fn width(&self) -> usize {
        self.times.len()
    }

    /// All that either knows.
    pub fn join(&mut self, other: &Self) {
        for (queue, time) in &other.times {
            let mine = self.times.entry(*queue).or_default();
            *mine = (*mine).max(*time);
        }
        self.kernels.join(&other.kernels);
        self.is_spoilt |= other.is_spoilt;
    }
}

/// Of the queues alone.
impl PartialEq for Clock {
    fn eq(&self, other: &Self) -> bool {
        self.times == other.times
    }
}

impl Eq for Clock {}

impl Hash for Clock {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.times.hash(state);
    }
}
