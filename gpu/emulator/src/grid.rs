//! A grid under way, as its workers share it.

use crate::launch::{Launch, Options};
use crate::memory::{Memory, Snapshot};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Where a run stands after [`GridRun::step`](crate::GridRun::step).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The budget is used up; there is more to do.
    Running,
    /// All that is left polls memory that others must write; the text says which threads wait where.
    Blocked(String),
    /// Every thread has ended.
    Done,
}

/// What the workers of one launch share.
pub(crate) struct Grid {
    pub launch: Launch,
    pub options: Options,
    pub memory: Arc<Memory>,
    pub snapshot: Snapshot,
    pub next_block: AtomicU64,
    pub stopped: AtomicBool,
    /// How often a thread of any worker went on.
    pub progress: AtomicU64,
    /// By worker: the progress of all when it polled last and nothing answered, [`GOES_ON`] or [`ENDED`].
    pub polls: Vec<AtomicU64>,
}

/// A worker has something else to do than to poll, or has not begun.
pub(crate) const GOES_ON: u64 = u64::MAX - 1;
/// A worker has nothing left to do.
pub(crate) const ENDED: u64 = u64::MAX;

impl Grid {
    /// The first block of the next cluster.
    pub fn next_cluster(&self) -> Option<u64> {
        let next = self.next_block.fetch_add(self.launch.cluster[0].into(), Ordering::Relaxed);
        (next < self.launch.blocks()).then_some(next)
    }

    /// Whether every worker has polled, or ended, since a thread of any went on last.
    pub fn all_poll(&self) -> bool {
        let progress = self.progress.load(Ordering::SeqCst);
        let polls = |worker: &AtomicU64| matches!(worker.load(Ordering::SeqCst), ENDED) || worker.load(Ordering::SeqCst) == progress;
        self.polls.iter().all(polls)
    }

    pub fn blocks_left(&self) -> bool {
        self.next_block.load(Ordering::Relaxed) < self.launch.blocks()
    }
}
