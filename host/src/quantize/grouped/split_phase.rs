//! The amaxes of a group in two phases: each rank's own, and all ranks'.

use std::sync::Arc;

use crate::comm::ReduceMax;
use crate::runtime::{Buffer, Result, Stream};

/// The largest magnitudes of this rank's parts of a group's members: of no use but to be [reduced](Self::reduce).
#[derive(Debug)]
#[must_use = "the other ranks wait for this one in `reduce`"]
pub struct LocalAmax {
    pub(super) slots: Buffer<f32>,
}

/// The largest magnitudes of a group's members, of which all ranks have the same. Its clones are handles on one.
#[derive(Debug, Clone)]
pub struct GlobalAmax {
    slots: Arc<Buffer<f32>>,
}

impl LocalAmax {
    /// Agrees with the other ranks on all members by one collective. Every rank takes part, one without rows too.
    ///
    /// # Errors
    /// As [`ReduceMax::reduce_max`].
    pub fn reduce(mut self, ranks: &impl ReduceMax, stream: &Stream) -> Result<GlobalAmax> {
        ranks.reduce_max(stream, &mut self.slots)?;
        Ok(GlobalAmax { slots: Arc::new(self.slots) })
    }
}

impl GlobalAmax {
    /// The amax of each member.
    pub fn slots(&self) -> &Buffer<f32> {
        &self.slots
    }
}
