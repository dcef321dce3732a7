//! How gradients of ranks become one, and the memory that it takes.

use super::slots::SLOTS;
use crate::comm::WorldSize;
use crate::runtime::{Error, Result};

/// How gradients of ranks become one. The same on every rank of the team.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientConfig {
    /// What the sum over the ranks is multiplied by: 1 for the sum, one over the ranks for the mean.
    pub scale: f32,
    /// Bytes of the two slots in the arena, where other teams of the arena have other weights and all take the same: the most of
    /// [`GradientScatter::arena_bytes`](super::GradientScatter::arena_bytes). `None` takes what the weights need.
    pub arena_bytes: Option<u64>,
}

impl Default for GradientConfig {
    /// The sum.
    fn default() -> Self {
        Self { scale: 1.0, arena_bytes: None }
    }
}

impl GradientConfig {
    /// The mean over so many ranks.
    pub fn mean(ranks: WorldSize) -> Self {
        Self { scale: 1.0 / ranks.get() as f32, ..Self::default() }
    }

    /// Fails for a scale that is NaN or infinite.
    pub(super) fn check(&self, what: &'static str) -> Result<()> {
        if self.scale.is_finite() {
            return Ok(());
        }
        let why = format!("the scale is {}: take 1 for the sum, GradientConfig::mean for the mean", self.scale);
        Err(Error::Invalid { what, why })
    }

    /// Elements of a slot of so many at least.
    pub(super) fn slot_elements(&self, needed: u64, element_bytes: u64) -> Result<u64> {
        match self.arena_bytes.map(|bytes| bytes / SLOTS as u64 / element_bytes) {
            Some(elements) if elements < needed => {
                let [bytes, needed] = [elements, needed].map(|elements| elements * element_bytes);
                let why =
                    format!("slots of {bytes} bytes for parts of {needed}: take the most of all teams (GradientScatter::arena_bytes)");
                Err(Error::Invalid { what: "GradientConfig", why })
            }
            Some(elements) => Ok(elements),
            None => Ok(needed),
        }
    }
}

/// What carries the rows of gradients to their owners: it follows from how [`GradientScatter`](super::GradientScatter) was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientCarrier {
    /// Nothing: the team has one rank, whose sums read what it computed.
    Nothing,
    /// Copy engines, into an arena: the ranks are of one host.
    CopyEngines,
    /// The messages of a communicator, as between hosts.
    Messages,
}

/// Device memory of gradients, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientBytes {
    /// The slots in the arena; by messages in memory of this rank, with what is packed and the orders of all ranks.
    pub slots: u64,
    /// The buffers of whole gradients.
    pub buffers: u64,
    /// The main gradients.
    pub main: u64,
}

impl GradientBytes {
    /// All of it.
    pub fn total(self) -> u64 {
        self.slots + self.buffers + self.main
    }
}
