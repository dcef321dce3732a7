//! How the rows of a weight are divided among ranks.

use std::marker::PhantomData;
use std::ops::Range;

use super::format::WeightFormat;
use crate::comm::{Rank, WorldSize};

/// The rows of a weight in the format `F`, divided into shards of equal length, one a rank: the last ones may be shorter, or empty. The length is a multiple of
/// [`WeightFormat::ALIGN`], so that the casts of shards are the cast of the whole. Shards of one format are no shards of another:
///
/// ```compile_fail,E0308
/// use oxtile::comm::WorldSize;
/// use oxtile::sharded::{Bf16, EqualShards, Mxfp8};
///
/// let shards: EqualShards<Mxfp8> = EqualShards::<Bf16>::new(100, WorldSize::new(3).unwrap());
/// ```
///
/// ```
/// use oxtile::comm::{Rank, WorldSize};
/// use oxtile::sharded::{Bf16, EqualShards, Mxfp8};
///
/// let world = WorldSize::new(3).unwrap();
/// let ranges = |of: &dyn Fn(Rank) -> std::ops::Range<u64>| world.ranks().map(of).collect::<Vec<_>>();
/// let (wide, narrow) = (EqualShards::<Bf16>::new(100, world), EqualShards::<Mxfp8>::new(100, world));
/// assert_eq!(ranges(&|rank| wide.range(rank)), [0..34, 34..68, 68..100]);
/// assert_eq!(ranges(&|rank| narrow.range(rank)), [0..64, 64..100, 100..100]);
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct EqualShards<F> {
    rows: u64,
    shard_rows: u64,
    format: PhantomData<fn() -> F>,
}

impl<F: WeightFormat> EqualShards<F> {
    /// Divides so many rows among the ranks.
    pub fn new(rows: u64, world: WorldSize) -> Self {
        Self { rows, shard_rows: rows.div_ceil(u64::from(world.get())).next_multiple_of(F::ALIGN), format: PhantomData }
    }

    /// The rows of the weight.
    pub fn rows(self) -> u64 {
        self.rows
    }

    /// The rows of the weight as the format keeps them: some formats need whole blocks, and fill the last one up with zeros.
    pub fn padded_rows(self) -> u64 {
        self.rows.next_multiple_of(F::PAD)
    }

    /// The rows of the longest shard, padding included.
    pub fn shard_rows(self) -> u64 {
        self.shard_rows
    }

    /// The rows of a rank.
    pub fn range(self, rank: Rank) -> Range<u64> {
        self.clamped(rank, self.rows)
    }

    /// The rows of a rank, and the padding where it has the last of them: what is cast, and travels.
    pub fn padded_range(self, rank: Rank) -> Range<u64> {
        self.clamped(rank, self.padded_rows())
    }

    fn clamped(self, rank: Rank, rows: u64) -> Range<u64> {
        let start = rows.min(u64::from(rank.index()).saturating_mul(self.shard_rows));
        start..rows.min(start.saturating_add(self.shard_rows))
    }
}

impl<F> Clone for EqualShards<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for EqualShards<F> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharded::{Bf16, Fp8, Mxfp8, Nvfp4, Nvfp4Squares};

    /// The shards of all ranks are all rows, once and in order, and every shard but the last with rows is of the same length, whole blocks of it.
    fn holds<F: WeightFormat>() {
        for (rows, ranks) in (0..300_u64).flat_map(|rows| (1..9).map(move |ranks| (rows, ranks))) {
            let world = WorldSize::new(ranks).unwrap();
            let shards = EqualShards::<F>::new(rows, world);
            let (mut end, mut padded_end) = (0, 0);
            for rank in world.ranks() {
                let (range, padded) = (shards.range(rank), shards.padded_range(rank));
                assert_eq!((range.start, padded.start), (end.min(rows), padded_end), "{rows} rows, {ranks} ranks, {rank}");
                assert!(
                    padded.end - padded.start <= shards.shard_rows()
                        && range.end <= padded.end
                        && padded.start.is_multiple_of(F::ALIGN.min(F::PAD.max(1)))
                );
                if padded.end < shards.padded_rows() {
                    assert_eq!(padded.end - padded.start, shards.shard_rows(), "a shard before the last with rows is whole");
                }
                (end, padded_end) = (range.end, padded.end);
            }
            assert_eq!((end, padded_end), (rows, rows.next_multiple_of(F::PAD)));
        }
    }

    #[test]
    fn shards_are_all_rows() {
        holds::<Bf16>();
        holds::<Fp8>();
        holds::<Mxfp8>();
        holds::<Nvfp4>();
        holds::<Nvfp4Squares>();
    }
}
