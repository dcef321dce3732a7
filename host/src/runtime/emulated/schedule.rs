//! Queues of operations and the choice of which goes on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::operation::{Entry, Mark, Operation};
use super::random::Random;
use crate::runtime::error::Result;

/// The queues of several streams, by handle: ordered, so that a seed means the same on every run.
#[derive(Default)]
pub(super) struct Queues(BTreeMap<u64, Queue>);

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    /// For how many choices the queue is held back, as a slow copy or a late device would be.
    held: usize,
}

/// One choice in so many is followed by a delay of its queue.
const DELAYED: usize = 8;
/// The longest delay, in choices.
const LONGEST_DELAY: usize = 24;

impl Queues {
    pub fn push(&mut self, queue: u64, entry: Entry) {
        self.0.entry(queue).or_default().entries.push_back(entry);
    }

    /// Makes an entry the next of its queue.
    pub fn push_first(&mut self, queue: u64, entry: Entry) {
        self.0.entry(queue).or_default().entries.push_front(entry);
    }

    pub fn is_empty(&self, queue: u64) -> bool {
        self.0.get(&queue).is_none_or(|queue| queue.entries.is_empty())
    }

    /// Takes the next entry of a random queue among those that are `ready`; delayed ones only if there is no other.
    pub fn take(&mut self, mut ready: Vec<u64>, random: &mut Random) -> Option<(u64, Entry)> {
        let held: Vec<u64> = ready.iter().filter(|handle| self.hold(**handle)).copied().collect();
        if held.len() < ready.len() {
            ready.retain(|handle| !held.contains(handle));
        }
        if ready.is_empty() {
            return None;
        }
        let chosen = ready[random.below(ready.len())];
        let queue = self.0.get_mut(&chosen)?;
        if random.below(DELAYED) == 0 {
            queue.held = random.below(LONGEST_DELAY);
        }
        queue.entries.pop_front().map(|entry| (chosen, entry))
    }

    /// Takes the next entry of the queue that `choose` picks, of those that are `ready`.
    pub fn take_chosen(&mut self, ready: &[u64], choose: impl FnOnce(&[u64]) -> Option<u64>) -> Option<(u64, Entry)> {
        let chosen = choose(ready)?;
        self.0.get_mut(&chosen)?.entries.pop_front().map(|entry| (chosen, entry))
    }

    /// Takes what `choose` picks among the visible operations of the queues that are `ready`; before that everything else.
    pub fn take_explored(&mut self, ready: &[u64], choose: impl FnOnce(&[u64]) -> Result<usize>) -> Result<Option<(u64, Entry)>> {
        let is_hidden = |queue: &&u64| self.entries(**queue).next().is_some_and(|entry| !entry.operation.is_visible());
        let chosen = match (ready.iter().find(is_hidden).copied(), ready) {
            (_, []) => return Ok(None),
            (Some(hidden), _) => hidden,
            (None, [only]) => *only,
            (None, several) => several[choose(several)?],
        };
        Ok(self.0.get_mut(&chosen).and_then(|queue| queue.entries.pop_front()).map(|entry| (chosen, entry)))
    }

    /// How much each queue has left.
    pub fn lengths(&self) -> Vec<(u64, usize)> {
        self.0.iter().map(|(handle, queue)| (*handle, queue.entries.len())).collect()
    }

    /// Counts a choice against the delay of a queue; whether it is still held.
    fn hold(&mut self, handle: u64) -> bool {
        let Some(queue) = self.0.get_mut(&handle).filter(|queue| queue.held > 0) else { return false };
        queue.held -= 1;
        true
    }

    /// What is in a queue, the next one first.
    pub fn entries(&self, queue: u64) -> impl Iterator<Item = &Entry> {
        self.0.get(&queue).into_iter().flat_map(|queue| &queue.entries)
    }

    /// The next entry of each queue that has one.
    pub fn heads(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.0.iter().filter_map(|(handle, queue)| Some((*handle, queue.entries.front()?)))
    }

    /// Forgets a queue that has nothing left to do; whether it had.
    pub fn forget(&mut self, queue: u64) -> bool {
        self.is_empty(queue) && self.0.remove(&queue).is_some()
    }

    /// Takes everything, in no order.
    pub fn drain(&mut self) -> Vec<Entry> {
        std::mem::take(&mut self.0).into_values().flat_map(|queue| queue.entries).collect()
    }

    fn into_queues(self) -> impl Iterator<Item = VecDeque<Entry>> {
        self.0.into_values().map(|queue| queue.entries)
    }
}

/// A captured graph: queues that a replay adds to the cluster's, so that its work interleaves with all other.
pub(super) struct Graph(Vec<Branch>);

/// What one captured stream does.
pub(super) struct Branch {
    /// The queue that it is replayed on.
    pub queue: u64,
    pub entries: VecDeque<Entry>,
    /// Reached when no replay is under way.
    pub end: Arc<Mark>,
}

impl Graph {
    pub fn new(captured: Queues, mut new_handle: impl FnMut() -> u64) -> Arc<Self> {
        let branch = |entries| {
            let queue = new_handle();
            Branch { queue, entries, end: Mark::reached_at_start(queue) }
        };
        Arc::new(Self(captured.into_queues().map(branch).collect()))
    }

    pub fn branches(&self) -> &[Branch] {
        &self.0
    }

    /// As on CUDA, replays of one graph come one after another.
    pub fn is_idle(&self) -> bool {
        self.0.iter().all(|branch| branch.end.is_reached())
    }

    /// Makes the marks good for another replay.
    pub fn reset(&self) {
        for branch in &self.0 {
            branch.end.reset();
            for entry in &branch.entries {
                if let Operation::Record(mark) = &entry.operation {
                    mark.reset();
                }
            }
        }
    }
}
