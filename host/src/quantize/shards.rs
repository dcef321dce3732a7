//! Gathered shards of transposed tensors to the whole.

use std::fmt;

use oxtile_kernels::shards::{Byte, JoinShards as Joining, JoinShardsArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut, Kernel};

use crate::runtime::{Loaded, Result, Runtime, Stream};

/// Joins the shards of a transposed tensor of one-byte codes, data or compact scales, into an existing buffer.
pub struct JoinShards<T: Byte>(Loaded<Joining<T>>);

impl<T: Byte> JoinShards<T>
where
    Joining<T>: Kernel,
{
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        runtime.load().map(Self)
    }

    /// Writes `whole`, rows of `stride` codes: row `r` of each shard of `gathered`, `[shards, rows, width]`, and zeros. One shard is
    /// padded.
    ///
    /// # Errors
    /// As [`Loaded::launch`].
    pub fn run(
        &self,
        stream: &Stream,
        gathered: DeviceView<'_, T>,
        [shards, width, stride]: [u32; 3],
        whole: DeviceViewMut<'_, T>,
    ) -> Result<()> {
        self.0.launch(stream, JoinShardsArgs { gathered, whole, shards, width, stride })
    }
}

impl<T: Byte> fmt::Debug for JoinShards<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JoinShards").field(&self.0).finish()
    }
}
