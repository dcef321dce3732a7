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
}

impl Grid {
    /// The first block of the next cluster.
    pub fn next_cluster(&self) -> Option<u64> {
        let next = self.next_block.fetch_add(self.launch.cluster[0].into(), Ordering::Relaxed);
        (next < self.launch.blocks()).then_some(next)
    }

    pub fn blocks_left(&self) -> bool {
        self.next_block.load(Ordering::Relaxed) < self.launch.blocks()
    }
}
