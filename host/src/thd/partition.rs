//! Which tokens a rank has: pure functions.

use std::fmt;

use oxtile_kernels::thd::Half;
use oxtile_tile::num::Pod;

use super::share::{Partition, Share};
use crate::rank::{Rank, WorldSize};
use crate::runtime::{Buffer, Error, Result, Stream};
use crate::symmetric::{Pitched, Rows};
use crate::tensor::shape::numel;

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zigzag => "zigzag",
            Self::Contiguous => "contiguous",
        })
    }
}

impl Partition {
    /// The chunk of a rank that comes first in its tensors, or second.
    pub fn chunk(self, rank: Rank, world: WorldSize, half: Half) -> Option<u64> {
        let rank = u64::from(rank.index());
        match (self, half) {
            (_, Half::Early) => Some(rank),
            (Self::Zigzag, Half::Late) => Some(2 * u64::from(world.get()) - 1 - rank),
            (Self::Contiguous, Half::Late) => None,
        }
    }

    /// Which rank has a chunk, and where in its tensors: of the first chunk 0, of the second 1.
    pub fn owner(self, chunk: u64, world: WorldSize) -> (Rank, u64) {
        let ranks = u64::from(world.get());
        let (rank, at) = if chunk < ranks { (chunk, 0) } else { (2 * ranks - 1 - chunk, 1) };
        let rank = u32::try_from(rank).ok().and_then(|rank| Rank::new(rank, world));
        (rank.unwrap_or_else(|| panic!("chunk {chunk} of {}", self.chunks(world))), at)
    }

    /// The token of the whole sequence of `tokens` at a row of a rank's part.
    pub fn token(self, rank: Rank, world: WorldSize, tokens: u64, row: u64) -> u64 {
        let chunk = tokens / self.chunks(world);
        let half = if row < chunk { Half::Early } else { Half::Late };
        let at = self.chunk(rank, world, half).unwrap_or_else(|| panic!("row {row} of a part of {}", tokens / u64::from(world.get())));
        at * chunk + row % chunk
    }

    /// The rank that has a token of a sequence of `tokens`, and the row of its part.
    pub fn row(self, world: WorldSize, tokens: u64, token: u64) -> (Rank, u64) {
        let chunk = tokens / self.chunks(world);
        let (rank, at) = self.owner(token / chunk, world);
        (rank, at * chunk + token % chunk)
    }
}

impl Share {
    /// The chunks of the part as they lie in whole sequences (`from`) and in the part (`to`): `[sequences, tokens, width]` are those of the whole, with `width`
    /// elements a token.
    pub(crate) fn copies(self, [sequences, tokens, width]: [u64; 3]) -> Vec<Rows> {
        let Self { partition, rank, world } = self;
        let chunk = tokens / partition.chunks(world);
        let pitch = chunk * u64::from(partition.chunks_of_rank()) * width;
        let copy = |(half, first): (Half, u64)| {
            let from = Pitched { start: partition.chunk(rank, world, half)? * chunk * width, pitch: tokens * width };
            let to = Pitched { start: first * chunk * width, pitch };
            Some(Rows { count: sequences, width: chunk * width, from, to })
        };
        [(Half::Early, 0), (Half::Late, 1)].into_iter().filter_map(copy).collect()
    }

    /// Copies the part of whole sequences, in stream order. `[sequences, tokens, width]` are those of the whole, which lies as that says: a tensor of layout
    /// bshd has `heads * size` elements a token; one of sbhd is one sequence of `batches * heads * size`.
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Invalid`] for tokens that the chunks do not divide; as [`Buffer::copy_from`].
    pub fn split<T: Pod>(self, stream: &Stream, shape: [u64; 3], whole: &Buffer<T>, part: &mut Buffer<T>) -> Result<()> {
        self.check(shape, whole.len(), part.len())?;
        Rows::copy_all(stream, "Share::split", whole.view(), part.view_mut(), &self.copies(shape))
    }

    /// Copies the part into whole sequences: the other way.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn join<T: Pod>(self, stream: &Stream, shape: [u64; 3], part: &Buffer<T>, whole: &mut Buffer<T>) -> Result<()> {
        self.check(shape, whole.len(), part.len())?;
        let copies: Vec<_> = self.copies(shape).into_iter().map(Rows::turned).collect();
        Rows::copy_all(stream, "Share::join", part.view(), whole.view_mut(), &copies)
    }

    fn check(self, [sequences, tokens, width]: [u64; 3], whole: u64, part: u64) -> Result<()> {
        self.checked("Share")?;
        let chunks = self.partition.chunks(self.world);
        if !tokens.is_multiple_of(chunks) {
            let why = format!("{tokens} tokens in {chunks} chunks: pad the sequence to {}", tokens.next_multiple_of(chunks));
            return Err(Error::Invalid { what: "Share", why });
        }
        Error::check_length("Share, the whole", numel(&[sequences, tokens, width])?, whole)?;
        Error::check_length("Share, the part", whole / u64::from(self.world.get()), part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every world of up to 9 ranks, both ways.
    fn all() -> impl Iterator<Item = (Partition, WorldSize)> {
        let worlds = (1..10).filter_map(WorldSize::new);
        worlds.flat_map(|world| [Partition::Zigzag, Partition::Contiguous].map(|partition| (partition, world)))
    }

    #[test]
    fn every_token_has_one_place() {
        for (partition, world) in all() {
            let tokens = 3 * partition.chunks(world);
            let mut seen = vec![false; tokens as usize];
            for rank in world.ranks() {
                let rows = tokens / u64::from(world.get());
                let of_rank: Vec<_> = (0..rows).map(|row| partition.token(rank, world, tokens, row)).collect();
                // A rank's rows are in the order of tokens, so that a mask of rows is one of tokens.
                assert!(of_rank.is_sorted(), "{partition} of {world}");
                for (row, token) in of_rank.into_iter().enumerate() {
                    assert_eq!(partition.row(world, tokens, token), (rank, row as u64), "{partition} of {world}");
                    assert!(!std::mem::replace(&mut seen[token as usize], true));
                }
            }
            assert!(seen.into_iter().all(|seen| seen));
        }
    }

    /// The chunks of rank `r` of `n` are `r` and `2n - 1 - r`.
    #[test]
    fn chunks_are_those_of_their_owner() {
        let world = WorldSize::new(4).unwrap();
        let chunks = world.ranks().map(|rank| [Half::Early, Half::Late].map(|half| Partition::Zigzag.chunk(rank, world, half).unwrap()));
        assert_eq!(chunks.collect::<Vec<_>>(), [[0, 7], [1, 6], [2, 5], [3, 4]]);
        for (partition, world) in all() {
            for chunk in 0..partition.chunks(world) {
                let (rank, at) = partition.owner(chunk, world);
                let half = if at == 0 { Half::Early } else { Half::Late };
                assert_eq!(partition.chunk(rank, world, half), Some(chunk));
            }
        }
    }

    /// With a causal mask all ranks see as many pairs of chunks, but for the diagonal.
    #[test]
    fn zigzag_parts_are_equal_work() {
        for (_, world) in all() {
            let work = |rank| -> u64 {
                [Half::Early, Half::Late].map(|half| 2 * Partition::Zigzag.chunk(rank, world, half).unwrap() + 1).iter().sum()
            };
            assert!(world.ranks().all(|rank| work(rank) == work(Rank::ZERO)));
        }
    }

    #[test]
    fn a_rank_of_another_world_is_refused() {
        let [two, four] = [2, 4].map(|ranks| WorldSize::new(ranks).unwrap());
        for partition in [Partition::Zigzag, Partition::Contiguous] {
            let share = Share { partition, rank: Rank::new(2, four).unwrap(), world: two };
            assert!(share.check([1, 4, 1], 4, 2).unwrap_err().to_string().contains("give a rank of that world"));
            let share = Share { rank: Rank::ZERO, ..share };
            assert!(share.check([1 << 62, 4, 1], 0, 0).is_err());
        }
    }

    #[test]
    fn copies_name_each_token() {
        for (partition, world) in all() {
            let shape @ [sequences, tokens, width] = [2, 2 * partition.chunks(world), 3];
            for rank in world.ranks() {
                for Rows { count, width: bytes, from, to } in (Share { partition, rank, world }).copies(shape) {
                    assert_eq!(count, sequences);
                    for (sequence, i) in (0..count).flat_map(|sequence| (0..bytes).map(move |i| (sequence, i))) {
                        let [whole, part] = [from, to].map(|place| place.start + sequence * place.pitch + i);
                        let rows = tokens / u64::from(world.get());
                        let row = part / width - sequence * rows;
                        assert_eq!(whole / width, sequence * tokens + partition.token(rank, world, tokens, row));
                        assert_eq!(whole % width, part % width);
                    }
                }
            }
        }
    }
}
