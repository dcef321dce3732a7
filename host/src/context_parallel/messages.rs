//! What schedules ask of a communicator, whichever it is.

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use crate::comm::{Communicator, Rank, WorldSize};
use crate::runtime::{Result, Stream};

/// The calls of a [`Communicator`] that schedules make.
pub(super) trait Messages: Send + Sync {
    fn rank(&self) -> Rank;
    fn world(&self) -> WorldSize;
    fn exchange(&self, stream: &Stream, sends: &[(Rank, DeviceView<'_, u8>)], receives: &[(Rank, DeviceViewMut<'_, u8>)]) -> Result<()>;
    fn gather(&self, stream: &Stream, shard: DeviceView<'_, u8>, all: DeviceViewMut<'_, u8>) -> Result<()>;
    fn gather_numbers(&self, stream: &Stream, shard: DeviceView<'_, f32>, all: DeviceViewMut<'_, f32>) -> Result<()>;
    fn wait(&self, stream: &Stream) -> Result<()>;
}

impl<C: Communicator + Send + Sync> Messages for C {
    fn rank(&self) -> Rank {
        Communicator::rank(self)
    }

    fn world(&self) -> WorldSize {
        Communicator::world(self)
    }

    fn exchange(&self, stream: &Stream, sends: &[(Rank, DeviceView<'_, u8>)], receives: &[(Rank, DeviceViewMut<'_, u8>)]) -> Result<()> {
        // Ranks that neither send nor receive do not call.
        if sends.is_empty() && receives.is_empty() { Ok(()) } else { Communicator::exchange(self, stream, sends, receives) }
    }

    fn gather(&self, stream: &Stream, shard: DeviceView<'_, u8>, all: DeviceViewMut<'_, u8>) -> Result<()> {
        self.all_gather(stream, shard, all)
    }

    fn gather_numbers(&self, stream: &Stream, shard: DeviceView<'_, f32>, all: DeviceViewMut<'_, f32>) -> Result<()> {
        self.all_gather(stream, shard, all)
    }

    fn wait(&self, stream: &Stream) -> Result<()> {
        Communicator::wait(self, stream)
    }
}
