//! Partitions, and the rank that is meant.

use oxtile_kernels::thd as kernels;
use oxtile_kernels::thd::{Extent, MOST_ROWS, MOST_WORLD, PackedArgument, Rows};
use oxtile_tile::launch::DeviceView;

use crate::rank::{Rank, WorldSize};
use crate::runtime::{Error, Result};

/// Which chunks of a sequence the ranks have. The padded rows of each sequence are cut into chunks of equal size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partition {
    /// Of `2 N` chunks rank `r` of `N` has chunk `r`, its early one, and after it chunk `2 N - 1 - r`, its late one. With a causal mask all ranks then have
    /// the same work.
    #[default]
    Zigzag,
    /// Of `N` chunks rank `r` has chunk `r`, which counts as its early one.
    Contiguous,
}

impl Partition {
    /// Chunks of a sequence that each rank has.
    pub const fn chunks_of_rank(self) -> u32 {
        match self {
            Self::Zigzag => 2,
            Self::Contiguous => 1,
        }
    }

    /// Chunks of a sequence: its padded rows must be a multiple.
    pub const fn chunks(self, world: WorldSize) -> u64 {
        self.chunks_of_rank() as u64 * world.get() as u64
    }
}

/// The rank whose rows are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The ranks that share the rows.
    pub world: WorldSize,
    /// One of them.
    pub rank: Rank,
    /// Which chunks each has.
    pub partition: Partition,
}

impl Share {
    /// As the kernels take it.
    pub(super) fn checked(self, what: &'static str) -> Result<kernels::Share> {
        let (world, rank) = (self.world.get(), self.rank.index());
        let invalid = |why| Err(Error::Invalid { what, why });
        if rank >= world {
            return invalid(format!("{} of {}: give a rank of that world", self.rank, self.world));
        }
        if world > MOST_WORLD {
            return invalid(format!("{}, and at most {MOST_WORLD} share rows: split the sequences between smaller worlds", self.world));
        }
        Ok(kernels::Share { world, rank, is_zigzag: self.partition == Partition::Zigzag })
    }
}

/// Where the sequences of a packed tensor lie: running sums from 0, one more element than there are sequences. In device memory, `Packed<DeviceView<u32>>`,
/// or in the host's, `Packed<&[u32]>`.
#[derive(Clone, Copy, Debug)]
pub struct Packed<A> {
    /// Sums of the rows that are valid.
    pub cu_seqlens: A,
    /// Sums of all rows, with the padding after each sequence. The padded rows of a sequence are a multiple of the partition's chunks.
    pub cu_seqlens_padded: A,
}

impl<'a> Packed<DeviceView<'a, u32>> {
    /// As the kernels take it.
    pub(super) fn into_argument(self) -> PackedArgument<'a> {
        PackedArgument { cu_seqlens: self.cu_seqlens, cu_seqlens_padded: self.cu_seqlens_padded }
    }
}

impl Packed<&[u32]> {
    /// The rows of each sequence, of tensors that ranks share in so many chunks.
    pub(super) fn rows(&self, what: &'static str, chunks: u64) -> Result<Vec<Rows>> {
        let Self { cu_seqlens: ends, cu_seqlens_padded: offsets } = *self;
        let invalid = |why| Error::Invalid { what, why };
        if ends.len() != offsets.len() || ends.is_empty() {
            let (ends, offsets) = (ends.len(), offsets.len());
            return Err(invalid(format!(
                "cu_seqlens of {ends} elements and cu_seqlens_padded of {offsets}: give one more each than there are sequences"
            )));
        }
        if offsets[0] != 0 {
            return Err(invalid(format!("cu_seqlens_padded begins with {}: begin with 0", offsets[0])));
        }
        let sequence = |(number, (ends, offsets)): (usize, (&[u32], &[u32]))| {
            let (Some(length), Some(padded)) = (ends[1].checked_sub(ends[0]), offsets[1].checked_sub(offsets[0])) else {
                return Err(invalid(format!(
                    "sequence {number} ends before it begins, {ends:?} in cu_seqlens, {offsets:?} with padding: give running sums"
                )));
            };
            if length > padded || !u64::from(padded).is_multiple_of(chunks) {
                let why = format!(
                    "sequence {number} has {length} rows in {padded} padded ones: pad it to a multiple of {chunks}, the chunks of all ranks"
                );
                return Err(invalid(why));
            }
            if ends[1].max(offsets[1]) > MOST_ROWS {
                return Err(invalid(format!(
                    "sequence {number} ends at row {}, and tensors have at most {MOST_ROWS}: split the batch",
                    offsets[1]
                )));
            }
            Ok(Rows { length, offset: offsets[0], padded })
        };
        ends.windows(2).zip(offsets.windows(2)).enumerate().map(sequence).collect()
    }
}

/// The rows of a tensor as the kernels move them: `rows` rows of `width` elements.
pub(super) fn extent<T>(what: &'static str, rows: u64, width: u64) -> Result<Extent> {
    let bytes = width.saturating_mul(size_of::<T>() as u64);
    let invalid = |why| Error::Invalid { what, why };
    if !bytes.is_multiple_of(16) {
        return Err(invalid(format!("rows of {bytes} bytes: pad them to a multiple of 16")));
    }
    let words = u32::try_from(bytes / 4).map_err(|_| invalid(format!("rows of {bytes} bytes, and 2^34 are too many: split them")))?;
    Ok(Extent { rows: narrow(what, "rows", rows)?, words })
}

/// A number that kernels count in 32 bits.
pub(super) fn narrow(what: &'static str, name: &str, number: u64) -> Result<u32> {
    u32::try_from(number)
        .map_err(|_| Error::Invalid { what, why: format!("{number} {name}, and kernels count less than 2^32: split the tensor") })
}

/// Checks that a tensor begins where vectors may.
pub(super) fn check_start(what: &'static str, name: &str, address: u64) -> Result<()> {
    if address.is_multiple_of(16) {
        return Ok(());
    }
    Err(Error::Invalid { what, why: format!("{name} starts at {address:#x}: start the view at a multiple of 16 bytes") })
}
