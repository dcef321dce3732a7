//! Halves of the sequences that a rank has, and their valid rows.

use std::fmt;

use oxtile_kernels::thd as kernels;
use oxtile_kernels::thd::{CopyValidArgs, Half, ReadHalfArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::share::{check_start, extent};
use crate::rank::WorldSize;
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// Takes the early or the late half of each sequence out of a rank's tensor, of a zigzag partition.
pub struct ReadHalf {
    kernel: Loaded<kernels::ReadHalf>,
    world: WorldSize,
}

impl ReadHalf {
    /// Loads the kernel, for tensors that the ranks of a world share.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime, world: WorldSize) -> Result<Self> {
        Ok(Self { kernel: runtime.load()?, world })
    }

    /// Enqueues the rows of one half of each sequence of `whole`, `[groups, 2 rows, width]`, to `half`, `[groups, rows, width]`, of which `[rows, width]` are
    /// given. Rows after the last sequence stay as they are.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for rows of no whole 16-byte vectors, and tensors that start between two; as [`Loaded::launch`].
    pub fn run<T: Pod>(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        which: Half,
        whole: DeviceView<'_, T>,
        half: DeviceViewMut<'_, T>,
        [rows, width]: [u64; 2],
    ) -> Result<()> {
        let extent = extent::<T>("ReadHalf", rows, width)?;
        check_start("ReadHalf", "the whole", whole.address())?;
        check_start("ReadHalf", "the half", half.address())?;
        let (whole, half, is_late) = (whole.cast(), half.cast(), which == Half::Late);
        self.kernel.launch(stream, ReadHalfArgs { whole, half, cu_seqlens_padded, world: self.world.get(), extent, is_late })
    }
}

impl fmt::Debug for ReadHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadHalf").field("world", &self.world).finish_non_exhaustive()
    }
}

/// Copies the valid rows of sequences, and leaves the others as they are.
pub struct CopyValid(Loaded<kernels::CopyValid>);

impl CopyValid {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        Ok(Self(runtime.load()?))
    }

    /// Enqueues the copy of the `ends[b + 1] - ends[b]` rows from row `offsets[b]` on, of each sequence `b`, to the same rows of `target`. Rows have `width`
    /// elements, `ends` one more element than there are sequences, and offsets rise. The late or the early chunks of a set of
    /// [`StepSequences`](super::StepSequences) are such sequences.
    ///
    /// # Errors
    /// As [`ReadHalf::run`].
    pub fn run<T: Pod>(
        &self,
        stream: &Stream,
        ends: DeviceView<'_, u32>,
        offsets: DeviceView<'_, u32>,
        source: DeviceView<'_, T>,
        target: DeviceViewMut<'_, T>,
        width: u64,
    ) -> Result<()> {
        let extent = extent::<T>("CopyValid", source.len().checked_div(width).unwrap_or(0), width)?;
        check_start("CopyValid", "the source", source.address())?;
        check_start("CopyValid", "the target", target.address())?;
        self.0.launch(stream, CopyValidArgs { source: source.cast(), target: target.cast(), ends, offsets, extent })
    }
}

impl fmt::Debug for CopyValid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyValid").finish_non_exhaustive()
    }
}
