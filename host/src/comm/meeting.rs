//! Where the ranks of an arena meet.

use std::sync::Arc;
use std::time::Duration;

use super::sequence::Sequence;
use crate::bootstrap::board::{Board, gather};
use crate::rank::{Rank, WorldSize};
use crate::runtime::{Device, Result};

/// A rank that can open arenas with the others of its world.
pub trait ArenaRank {
    /// The device of its arenas.
    fn device(&self) -> &Device;

    /// Where it meets the others for its next arena. Every rank calls it the same number of times, in one order.
    fn next_meeting(&self) -> Meeting;
}

/// One subject on which the ranks of a world agree over a [`Board`]: the names of its notes begin with its own.
#[derive(Clone, Debug)]
pub struct Meeting {
    rank: Rank,
    world: WorldSize,
    board: Arc<dyn Board>,
    name: String,
}

impl Meeting {
    /// A meeting of this name, the same on every rank.
    pub fn new(board: Arc<dyn Board>, rank: Rank, world: WorldSize, name: impl Into<String>) -> Self {
        Self { rank, world, board, name: name.into() }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// Pins this rank's note.
    ///
    /// # Errors
    /// As [`Board::publish`].
    pub fn publish(&self, what: &str, note: Vec<u8>) -> Result<()> {
        self.board.publish(self.rank, &self.key(what), note)
    }

    /// Waits for a rank's note.
    ///
    /// # Errors
    /// As [`Board::read`].
    pub fn read(&self, from: Rank, what: &str, patience: Duration) -> Result<Vec<u8>> {
        self.board.read(from, &self.key(what), patience)
    }

    /// Waits for every rank's note.
    ///
    /// # Errors
    /// As [`Board::read`]; all that are missing are named.
    pub fn gather(&self, what: &str, patience: Duration) -> Result<Vec<Vec<u8>>> {
        gather(&*self.board, self.world, &self.key(what), patience)
    }

    /// The ranks' calls of something that they do together, to be compared.
    pub(crate) fn calls(&self, what: &str, patience: Duration) -> Sequence {
        Sequence::new(Arc::clone(&self.board), &self.key(what), self.rank, self.world.ranks().collect(), patience)
    }

    /// A name that this meeting has on all ranks and that no other one of this process has; none where ranks are processes.
    pub(crate) fn process_wide_name(&self) -> Option<String> {
        self.board.name().map(|board| format!("{board}: {}", self.name))
    }

    /// Drops its notes: all ranks are done with it.
    pub(crate) fn leave(&self) {
        self.board.leave(&self.scope());
    }

    /// This rank publishes nothing more here; a rank that waits for it gets the reason.
    pub fn give_up(&self, why: &str) {
        self.board.give_up(self.rank, Some(&self.scope()), why);
    }

    /// The beginning of its notes' keys.
    fn scope(&self) -> String {
        format!("{}: ", self.name)
    }

    fn key(&self, what: &str) -> String {
        format!("{}{what}", self.scope())
    }
}
