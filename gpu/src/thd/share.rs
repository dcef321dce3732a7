//! Which rows of a sequence a rank has.
//!
//! The padded rows of each sequence are cut into chunks of equal size. Of a world of `N` ranks rank `r` has these, one after the other:
//!
//! | partition | chunks | early | late |
//! |---|---|---|---|
//! | zigzag | `2 N` | `r` | `2 N - 1 - r` |
//! | contiguous | `N` | `r` | none |
//!
//! Sequence `b`, whose padded rows begin at `cu_seqlens_padded[b]`, begins at `cu_seqlens_padded[b] / N` in the tensor of each rank.
//!
//! The arrays come from device memory and are not checked. Numbers of rows are cut at [`MOST_ROWS`], and rows beyond the last whole chunk at that
//! chunk's end: no sum or product of them wraps.

use oxtile_tile::prelude::*;

/// The most rows of a tensor.
pub const MOST_ROWS: u32 = (1 << 30) - 1;
/// The most ranks.
pub const MOST_WORLD: u32 = 1 << 16;

/// The rank whose rows are meant, and the partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parameter)]
pub struct Share {
    /// Ranks, at least one.
    pub world: u32,
    /// The rank, below `world`.
    pub rank: u32,
    /// Whether a rank has two chunks of each sequence, one from either end.
    pub is_zigzag: bool,
}

/// The ranks that share a tensor, one of `count` teams, each of whose tensors has an equal part of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parameter)]
pub struct Team {
    /// Ranks of the team, at least one.
    pub world: u32,
    /// Whether a rank has two chunks of each of the team's sequences, one from either end.
    pub is_zigzag: bool,
    /// Teams, at least one.
    pub count: u32,
}

impl Team {
    /// The share of a rank.
    #[inline(always)]
    pub const fn share(self, rank: u32) -> Share {
        Share { world: self.world, rank, is_zigzag: self.is_zigzag }
    }

    /// As [`Share::natural_row`], where `cu_seqlens_padded` are those of whole sequences: the row of the team's tensor of `rows` rows that is row `local` of a rank's.
    #[inline(always)]
    #[track_caller]
    pub fn natural_row(self, rank: u32, local: u32, cu_seqlens_padded: Global<u32>, rows: u32) -> u32 {
        self.share(rank).natural_row_of(local, Starts { cu_seqlens_padded, divisor: self.world * self.count }, rows)
    }
}

impl Share {
    /// The share of another rank.
    #[inline(always)]
    #[must_use]
    pub const fn of(self, rank: u32) -> Self {
        Self { rank, ..self }
    }

    /// The row of the whole tensor, of `rows` rows, that is row `local` in the tensor of the rank. Rows after the last sequence are cut into a chunk a rank.
    ///
    /// It is not below `rows` only where `cu_seqlens_padded` are not what they should be.
    #[inline(always)]
    #[track_caller]
    pub fn natural_row(self, local: u32, cu_seqlens_padded: Global<u32>, rows: u32) -> u32 {
        self.natural_row_of(local, Starts { cu_seqlens_padded, divisor: self.world }, rows)
    }

    #[inline(always)]
    #[track_caller]
    fn natural_row_of(self, local: u32, starts: Starts, rows: u32) -> u32 {
        let world = self.world.max(1);
        let Some(sequence) = starts.find(local) else {
            let end = starts.end();
            return end * world + self.rank * (rows / world).saturating_sub(end) + local.saturating_sub(end);
        };
        let (within, of_chunk) = (local - sequence.start, (sequence.end - sequence.start) / self.chunks_of_rank());
        let (chunk, within) = if within >= of_chunk { (self.late(), within - of_chunk) } else { (self.early(), within) };
        sequence.start * world + chunk * of_chunk + within
    }

    /// Chunks of a sequence that each rank has.
    #[inline(always)]
    pub const fn chunks_of_rank(self) -> u32 {
        if self.is_zigzag { 2 } else { 1 }
    }

    /// Chunks of a sequence.
    #[inline(always)]
    pub fn chunks(self) -> u32 {
        (self.chunks_of_rank() * self.world).max(1)
    }

    /// The early chunk of the rank.
    #[inline(always)]
    pub const fn early(self) -> u32 {
        self.rank
    }

    /// The late chunk of the rank; of a contiguous partition, a chunk after the last one, which has no row.
    #[inline(always)]
    pub const fn late(self) -> u32 {
        if self.is_zigzag { 2 * self.world - 1 - self.rank } else { self.world }
    }
}

/// Running sums of the sequences' rows, one more element than there are sequences.
#[derive(Clone, Copy, Parameter)]
pub struct Packed {
    /// Of the rows that are valid.
    pub cu_seqlens: Global<u32>,
    /// Of all rows, with the padding after each sequence: where each sequence begins.
    pub cu_seqlens_padded: Global<u32>,
}

impl Packed {
    /// The rows of sequence `batch`.
    #[inline(always)]
    #[track_caller]
    pub fn rows(&self, batch: u32) -> Rows {
        let pair = |array: Global<u32>| [array.load(batch.into()), array.load(u64::from(batch) + 1)];
        Rows::new(pair(self.cu_seqlens), pair(self.cu_seqlens_padded))
    }

    /// Rows of all sequences, with their padding.
    #[inline(always)]
    #[track_caller]
    pub fn end(&self) -> u32 {
        self.cu_seqlens_padded.load(self.cu_seqlens_padded.len() - 1).min(MOST_ROWS)
    }
}

/// The rows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Valid rows.
    pub length: u32,
    /// The first row.
    pub offset: u32,
    /// Rows with the padding.
    pub padded: u32,
}

impl Rows {
    /// The rows between neighbours of `cu_seqlens` and of `cu_seqlens_padded`.
    #[inline(always)]
    pub fn new(ends: [u32; 2], offsets: [u32; 2]) -> Self {
        let (ends, offsets) = (ends.map(|end| end.min(MOST_ROWS)), offsets.map(|offset| offset.min(MOST_ROWS)));
        let length = |[start, end]: [u32; 2]| end.saturating_sub(start);
        Self { length: length(ends), offset: offsets[0], padded: length(offsets) }
    }

    /// Rows of a chunk.
    #[inline(always)]
    pub fn of_chunk(&self, share: Share) -> u32 {
        self.padded / share.chunks()
    }

    /// Valid rows of a chunk.
    #[inline(always)]
    pub fn valid(&self, share: Share, chunk: u32) -> u32 {
        let rows = self.of_chunk(share);
        if chunk < share.chunks() { self.length.saturating_sub(chunk * rows).min(rows) } else { 0 }
    }

    /// Where the sequence begins in the tensor of a rank.
    #[inline(always)]
    pub fn local_offset(&self, share: Share) -> u32 {
        self.offset / share.world.max(1)
    }
}

/// Where sequences begin in a tensor that has a part of their rows.
#[derive(Clone, Copy)]
pub struct Starts {
    /// Where they begin in the whole tensor, in rising order; one more element than there are sequences.
    pub cu_seqlens_padded: Global<u32>,
    /// Of so many rows the tensor has one.
    pub divisor: u32,
}

/// The sequence that has a row.
#[derive(Clone, Copy)]
pub struct Located {
    /// Its number.
    pub number: u32,
    /// Its first row.
    pub start: u32,
    /// The row after its last one.
    pub end: u32,
}

impl Starts {
    /// Where sequence `number` begins.
    #[inline(always)]
    #[track_caller]
    pub fn start(&self, number: u32) -> u32 {
        self.cu_seqlens_padded.load(number.into()).min(MOST_ROWS) / self.divisor.max(1)
    }

    /// How many sequences there are.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        (self.cu_seqlens_padded.len() - 1) as u32
    }

    /// The row after all sequences.
    #[inline(always)]
    #[track_caller]
    pub fn end(&self) -> u32 {
        self.start(self.count())
    }

    /// The last sequence that begins at a row or before it, if one of them has the row: `start <= row < end`.
    #[inline(always)]
    #[track_caller]
    pub fn find(&self, row: u32) -> Option<Located> {
        if row >= self.end() || self.count() == 0 {
            return None;
        }
        let number = last_not_after(row, self.count(), |number| self.start(number));
        let (start, end) = (self.start(number), self.start(number + 1));
        if start <= row && row < end { Some(Located { number, start, end }) } else { None }
    }
}

/// The last of `count` rising starts that is not after `row`, or the first.
#[inline(always)]
pub(super) fn last_not_after(row: u32, count: u32, start: impl Fn(u32) -> u32) -> u32 {
    let (mut low, mut high) = (0, count);
    while high.saturating_sub(low) > 1 {
        let middle = low + (high - low) / 2;
        if start(middle) <= row {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
