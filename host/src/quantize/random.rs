//! Random numbers of stochastic rounding.

use oxtile_kernels::nvfp4::RandomArgument;

use crate::runtime::{Buffer, Result, Stream};

/// Where the random numbers of a cast start. The same state gives the same codes in every launch.
#[derive(Debug)]
pub struct RandomState {
    /// Which sequence.
    pub seed: u64,
    /// The offset in the sequence, one element, or none. If it is written between two replays of a graph, the second draws other numbers.
    pub offset: Buffer<u64>,
}

impl RandomState {
    /// A state on the device.
    ///
    /// # Errors
    /// As [`Buffer::from_slice`].
    pub fn new(stream: &Stream, seed: u64, offset: u64) -> Result<Self> {
        Ok(Self { seed, offset: Buffer::from_slice(stream, &[offset])? })
    }

    /// The state as kernels take it.
    pub(super) fn argument(&self) -> RandomArgument<'_> {
        RandomArgument { seed: self.seed, offset: Some(self.offset.view()).filter(|offset| !offset.is_empty()) }
    }

    /// The empty state that [`Nearest`](super::nvfp4_columns::Nearest) takes.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`].
    pub fn none(stream: &Stream) -> Result<Self> {
        Ok(Self { seed: 0, offset: Buffer::uninitialised(stream, 0)? })
    }
}
