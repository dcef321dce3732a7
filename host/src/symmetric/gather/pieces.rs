//! Where the pieces of a shard lie, and where those of all members.

use crate::comm::Rank;
use crate::runtime::{Error, Result};

/// The alignment of a piece, in bytes.
const ALIGNMENT: u64 = 256;

/// The pieces that travel together. In a shard they follow each other. What is gathered has, for each piece, that of every member one after another. A
/// chunk is the same part of each piece.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    lens: Vec<u64>,
    in_shard: Vec<u64>,
    shard_len: u64,
}

impl Pieces {
    /// Pieces of so many elements of `T`.
    pub fn new<T>(what: &'static str, lens: &[u64]) -> Result<Self> {
        if lens.is_empty() {
            return Err(Error::Invalid { what, why: "a shard has no pieces: name the length of one at least".to_owned() });
        }
        let (in_shard, shard_len) = starts::<T>(what, lens)?;
        Ok(Self { lens: lens.to_vec(), in_shard, shard_len })
    }

    /// How many pieces.
    pub fn count(&self) -> usize {
        self.lens.len()
    }

    /// Elements of each piece of a shard.
    pub fn lens(&self) -> &[u64] {
        &self.lens
    }

    /// Elements of a shard, with the gaps between its pieces.
    pub fn shard_len(&self) -> u64 {
        self.shard_len
    }

    /// Where a piece begins in a shard.
    pub fn in_shard(&self, piece: usize) -> u64 {
        self.in_shard[piece]
    }

    /// Where the pieces of so many members begin, and where they end.
    pub fn gathered<T>(&self, what: &'static str, members: u32) -> Result<Gathered> {
        let of_all = |len: &u64| len.checked_mul(members.into());
        let too_large = || Error::TooLarge { what, count: self.shard_len, element_bytes: size_of::<T>() as u64 };
        let lens: Vec<u64> = self.lens.iter().map(of_all).collect::<Option<_>>().ok_or_else(too_large)?;
        let (starts, len) = starts::<T>(what, &lens)?;
        Ok(Gathered { pieces: self.clone(), members, starts, len })
    }
}

/// The pieces of all members.
#[derive(Clone, Debug)]
pub(super) struct Gathered {
    pub pieces: Pieces,
    pub members: u32,
    /// Where each piece of all members begins.
    starts: Vec<u64>,
    /// Elements in all, with the gaps between pieces.
    pub len: u64,
}

impl Gathered {
    /// Where a piece of all members begins, and how many elements it has.
    pub fn whole(&self, piece: usize) -> (u64, u64) {
        (self.starts[piece], self.pieces.lens[piece] * u64::from(self.members))
    }

    /// Where a member's piece begins.
    pub fn place(&self, piece: usize, member: Rank) -> u64 {
        self.starts[piece] + u64::from(member.index()) * self.pieces.lens[piece]
    }
}

/// Where pieces begin that follow each other, and where the last ends.
fn starts<T>(what: &'static str, lens: &[u64]) -> Result<(Vec<u64>, u64)> {
    let size = size_of::<T>() as u64;
    let unit = if size > 0 && ALIGNMENT.is_multiple_of(size) { ALIGNMENT / size } else { ALIGNMENT };
    let (mut starts, mut end) = (Vec::new(), 0_u64);
    for len in lens {
        let next = end.checked_next_multiple_of(unit).and_then(|start| Some((start, start.checked_add(*len)?)));
        let (start, after) = next.ok_or(Error::TooLarge { what, count: *len, element_bytes: size })?;
        starts.push(start);
        end = after;
    }
    Ok((starts, end))
}

/// Where a chunk of so many elements begins and ends; the last may be shorter.
pub(super) fn bounds(len: u64, chunks: u64, chunk: u64) -> (u64, u64) {
    let length = len.div_ceil(chunks);
    ((chunk * length).min(len), ((chunk + 1) * length).min(len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::WorldSize;

    #[test]
    fn pieces_are_aligned_and_one_piece_has_no_padding() {
        let one = Pieces::new::<u32>("test", &[5]).unwrap();
        assert_eq!((one.shard_len(), one.gathered::<u32>("test", 3).unwrap().len), (5, 15));
        let two = Pieces::new::<u32>("test", &[5, 70]).unwrap();
        assert_eq!((two.in_shard(1), two.shard_len()), (64, 134));
        let gathered = two.gathered::<u32>("test", 3).unwrap();
        let last = WorldSize::new(3).and_then(|world| Rank::new(2, world)).unwrap();
        assert_eq!((gathered.whole(0), gathered.whole(1), gathered.len), ((0, 15), (64, 210), 274));
        assert_eq!([gathered.place(0, last), gathered.place(1, last)], [10, 204]);
        assert!(Pieces::new::<u32>("test", &[]).is_err());
        assert!(Pieces::new::<u32>("test", &[1, u64::MAX]).is_err());
        assert!(two.gathered::<u8>("test", 1).is_ok() && Pieces::new::<u8>("test", &[1 << 62]).unwrap().gathered::<u8>("test", 4).is_err());
    }
}
