//! Rows from the order of the ranks to that of the tokens, and back.

use std::fmt;

use oxtile_kernels::thd as kernels;
use oxtile_kernels::thd::{PartitionIndicesArgs, ReorderArgs, ReorderNumbersArgs};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::share::{Partition, Share, check_start, extent, narrow};
use crate::rank::{Rank, WorldSize};
use crate::runtime::{Loaded, Result, Runtime, Stream};

/// Moves rows between rank-major order, in which the tensors of all ranks are there one after the other, and natural order, that of the tokens.
///
/// Rows are of any element, of a multiple of 16 bytes. Rows of the tensor after the last sequence are cut into one chunk a rank.
///
/// ```
/// use oxtile::comm::WorldSize;
/// use oxtile::thd::{Partition, Reorder};
/// use oxtile::{Buffer, Result, Runtime};
///
/// # fn main() -> Result<()> {
/// let runtime = Runtime::checked(1)?; // or Runtime::cuda()
/// let stream = runtime.device(0)?.stream()?;
/// // A sequence of 8 rows on two ranks: chunks 0 and 3, and chunks 1 and 2.
/// let offsets = Buffer::from_slice(&stream, &[0_u32, 8])?;
/// let tokens: Vec<f32> = [0, 1, 6, 7, 2, 3, 4, 5].into_iter().flat_map(|token| [token as f32; 4]).collect();
/// let rank_major = Buffer::from_slice(&stream, &tokens)?;
/// let mut natural = Buffer::<f32>::uninitialised(&stream, rank_major.len())?;
///
/// let reorder = Reorder::new(&runtime, WorldSize::new(2).unwrap(), Partition::Zigzag)?;
/// reorder.to_natural(&stream, offsets.view(), rank_major.view(), natural.view_mut(), 4)?;
/// assert!(natural.to_vec(&stream)?.iter().step_by(4).copied().eq([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
/// # Ok(()) }
/// ```
pub struct Reorder {
    kernel: Loaded<kernels::Reorder>,
    numbers: Loaded<kernels::ReorderNumbers>,
    team: kernels::Team,
}

impl Reorder {
    /// Loads the kernel, for tensors that the ranks of a world share.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a world of more than 65536 ranks; as [`Runtime::load`].
    pub fn new(runtime: &Runtime, world: WorldSize, partition: Partition) -> Result<Self> {
        let share = Share { world, rank: Rank::ZERO, partition }.checked("Reorder")?;
        Ok(Self {
            kernel: runtime.load()?,
            numbers: runtime.load()?,
            team: kernels::Team { world: share.world, is_zigzag: share.is_zigzag, count: 1 },
        })
    }

    /// The same of tensors with one of `teams` equal parts of each sequence, which the ranks of a team share: `cu_seqlens_padded` are those of whole sequences, whose padded lengths are multiples
    /// of the chunks of all ranks of all teams.
    #[must_use]
    pub fn of_teams(self, teams: u32) -> Self {
        Self { team: kernels::Team { count: teams, ..self.team }, ..self }
    }

    /// Enqueues the way to natural order, of rows of `width` elements.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for rows of no whole 16-byte vectors, and tensors that start between two; as [`Loaded::launch`].
    pub fn to_natural<T: Pod>(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        rank_major: DeviceView<'_, T>,
        natural: DeviceViewMut<'_, T>,
        width: u64,
    ) -> Result<()> {
        self.run(stream, cu_seqlens_padded, rank_major, natural, width, true)
    }

    /// Enqueues the way to rank-major order.
    ///
    /// # Errors
    /// As [`to_natural`](Self::to_natural).
    pub fn to_rank_major<T: Pod>(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        natural: DeviceView<'_, T>,
        rank_major: DeviceViewMut<'_, T>,
        width: u64,
    ) -> Result<()> {
        self.run(stream, cu_seqlens_padded, natural, rank_major, width, false)
    }

    /// Enqueues the way to natural order of a number for each of `heads` heads and each row: from `[ranks, heads, rows / ranks]` to `[heads, rows]`.
    ///
    /// # Errors
    /// As [`Loaded::launch`].
    pub fn numbers_to_natural(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        rank_major: DeviceView<'_, f32>,
        natural: DeviceViewMut<'_, f32>,
        heads: u64,
    ) -> Result<()> {
        self.run_numbers(stream, cu_seqlens_padded, rank_major, natural, heads, true)
    }

    /// Enqueues the way to rank-major order of such numbers.
    ///
    /// # Errors
    /// As [`numbers_to_natural`](Self::numbers_to_natural).
    pub fn numbers_to_rank_major(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        natural: DeviceView<'_, f32>,
        rank_major: DeviceViewMut<'_, f32>,
        heads: u64,
    ) -> Result<()> {
        self.run_numbers(stream, cu_seqlens_padded, natural, rank_major, heads, false)
    }

    fn run_numbers(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        source: DeviceView<'_, f32>,
        target: DeviceViewMut<'_, f32>,
        heads: u64,
        to_natural: bool,
    ) -> Result<()> {
        let [rows, heads] = [narrow("Reorder", "rows", source.len().checked_div(heads).unwrap_or(0))?, narrow("Reorder", "heads", heads)?];
        let args = ReorderNumbersArgs { source, target, cu_seqlens_padded, team: self.team, rows, heads, to_natural };
        self.numbers.launch(stream, args)
    }

    fn run<T: Pod>(
        &self,
        stream: &Stream,
        cu_seqlens_padded: DeviceView<'_, u32>,
        source: DeviceView<'_, T>,
        target: DeviceViewMut<'_, T>,
        width: u64,
        to_natural: bool,
    ) -> Result<()> {
        let extent = extent::<T>("Reorder", source.len().checked_div(width).unwrap_or(0), width)?;
        check_start("Reorder", "the source", source.address())?;
        check_start("Reorder", "the target", target.address())?;
        let (source, target) = (source.cast(), target.cast());
        self.kernel.launch(stream, ReorderArgs { source, target, cu_seqlens_padded, team: self.team, extent, to_natural })
    }
}

impl fmt::Debug for Reorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reorder").field("team", &self.team).finish_non_exhaustive()
    }
}

/// Writes which row of the whole tensor each row of a rank is.
pub struct PartitionIndices {
    kernel: Loaded<kernels::PartitionIndices>,
    share: kernels::Share,
}

impl PartitionIndices {
    /// Loads the kernel, for the rows of a rank.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a rank that the world does not have, and for a world of more than 65536 ranks; as [`Runtime::load`].
    pub fn new(runtime: &Runtime, share: Share) -> Result<Self> {
        Ok(Self { kernel: runtime.load()?, share: share.checked("PartitionIndices")? })
    }

    /// Enqueues `indices`, one for each of the rank's rows, of a whole tensor of `rows` rows.
    ///
    /// # Errors
    /// As [`Loaded::launch`]: [`Error::Argument`](crate::Error::Argument) for rows that are no multiple of the ranks, or another number of indices.
    pub fn run(&self, stream: &Stream, cu_seqlens_padded: DeviceView<'_, u32>, rows: u64, indices: DeviceViewMut<'_, u32>) -> Result<()> {
        let rows = narrow("PartitionIndices", "rows", rows)?;
        self.kernel.launch(stream, PartitionIndicesArgs { indices, cu_seqlens_padded, share: self.share, rows })
    }
}

impl fmt::Debug for PartitionIndices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartitionIndices").field("share", &self.share).finish_non_exhaustive()
    }
}
