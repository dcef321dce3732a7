//! Where the sequences of a batch lie.
//!
//! A tensor is rows of heads, `[rows, heads, size]` of any strides. A sequence is some rows that follow each other: where they
//! begin and how many attend are separate arrays, so that there may be padding between sequences, offsets may begin anywhere, and
//! two sequences may share rows. The same holds for keys.
//!
//! | layout | offset of sequence `b` | heads of sequence `b` |
//! |---|---|---|
//! | bshd | `b * length` | all |
//! | sbhd, seen as `[length, batches * heads, size]` | 0 | from `b * heads` on |
//! | thd | given | all |

use oxtile_tile::prelude::*;

pub use oxtile_tile::tensor_map::MAP_ROWS;

/// The sequences of a launch: four arrays of one more element than there are sequences.
#[derive(Clone, Copy)]
pub struct Sequences {
    /// Sums of the queries of the sequences before; how many queries a sequence has is the difference of neighbours.
    pub query_ends: Global<u32>,
    /// The same for keys.
    pub key_ends: Global<u32>,
    /// Where the queries of each begin, and in the last element where their rows end.
    pub query_offsets: Global<u32>,
    /// Where the keys of each begin.
    pub key_offsets: Global<u32>,
    /// Rows of the tensors of queries and of keys: what is beyond is cut, whatever the arrays say.
    pub rows: [u32; 2],
    /// Whether rows behind the queries of a sequence, up to the next offset, belong to it and are written as zeros.
    pub padded: bool,
}

/// One sequence.
#[derive(Clone, Copy)]
pub struct Sequence {
    /// Queries that attend.
    pub queries: u32,
    /// Rows that are written: the queries, and padding.
    pub rows: u32,
    /// Keys.
    pub keys: u32,
    /// The row of the first query.
    pub query_offset: u32,
    /// The row of the first key.
    pub key_offset: u32,
}

impl Sequences {
    /// Sequence `batch`.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, batch: u32) -> Sequence {
        let batch = u64::from(batch);
        let length = |ends: &Global<u32>| ends.load(batch + 1).saturating_sub(ends.load(batch));
        let query_offset = self.query_offsets.load(batch).min(self.rows[0]);
        let key_offset = self.key_offsets.load(batch).min(self.rows[1]);
        let queries = length(&self.query_ends).min(self.rows[0] - query_offset);
        let next = if self.padded { self.query_offsets.load(batch + 1).min(self.rows[0]) } else { 0 };
        Sequence {
            queries,
            rows: next.saturating_sub(query_offset).max(queries),
            keys: length(&self.key_ends).min(self.rows[1] - key_offset),
            query_offset,
            key_offset,
        }
    }

    /// Rows of a sequence's keys, with the padding up to the next offset if it belongs to the sequence.
    #[inline(always)]
    #[track_caller]
    pub fn key_rows(&self, batch: u32, sequence: &Sequence) -> u32 {
        let next = if self.padded { self.key_offsets.load(u64::from(batch) + 1).min(self.rows[1]) } else { 0 };
        next.saturating_sub(sequence.key_offset).max(sequence.keys)
    }
}

/// Coordinates in a tensor map whose edge is moved to the end of a sequence: `row` of `count` rows from `offset` on, of `head`.
/// What is behind the last of them is loaded as zero and not stored.
///
/// The map has the dimensions `[huge, huge, heads, MAP_ROWS, size]` with strides of `[2^34 - row, row, head, row, 1]` elements,
/// if `row` is the tensor's stride of rows: the last of `count` rows has the last index that the map allows, the second coordinate takes
/// that back, and the first makes the sum a multiple of 2^64 bytes (the ragged descriptors of Triton's
/// `triton/tools/ragged_tma.py`).
#[inline(always)]
pub fn place(offset: u32, count: u32, head: u32, row: u32) -> [u32; 5] {
    [MAP_ROWS, offset + count, head, MAP_ROWS - count + row, 0]
}
