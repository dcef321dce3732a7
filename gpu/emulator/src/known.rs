//! What streams and grids know of one another.

use crate::clock::Knowledge;
use std::fmt;

/// A stream, numbered like the blocks of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Agent(pub(crate) u32);

/// What is known to have happened: of grids, and of streams by the number of their operations.
#[derive(Clone, Default)]
pub struct Known(pub(crate) Knowledge);

impl Known {
    /// Whether it knows of nothing.
    pub fn is_empty(&self) -> bool {
        self.0.generic.is_empty()
    }

    /// All that either knows.
    pub fn join(&mut self, other: &Self) {
        self.0.join(&other.0);
    }

    /// Learns of a stream's operations up to a number.
    pub fn learn(&mut self, agent: Agent, time: u64) {
        self.0.generic.learn(agent.0, 0, time as u32);
    }

    /// How many operations of a stream are known.
    pub fn time(&self, agent: Agent) -> u64 {
        self.0.generic.time(agent.0, 0).into()
    }

    /// The knowledge of a grid that starts with it: its asynchronous copies may rely on all of it.
    pub(crate) fn at_start(&self) -> Knowledge {
        let mut knowledge = self.0.clone();
        knowledge.async_shared.join(&self.0.generic);
        knowledge.async_global.join(&self.0.generic);
        knowledge
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known").finish_non_exhaustive()
    }
}
