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

use super::mask::FAR;
use super::shape::{Checked, check_rows};

/// The sequences of a launch: arrays of one more element than there are sequences.
#[derive(Clone, Copy, Parameter)]
pub struct Sequences {
    /// Sums of the queries of the sequences before; how many queries a sequence has is the difference of neighbours.
    pub query_ends: Global<u32>,
    /// The same for keys.
    pub key_ends: Global<u32>,
    /// Where the queries of each begin, and in the last element where their rows end.
    pub query_offsets: Global<u32>,
    /// Where the keys of each begin.
    pub key_offsets: Global<u32>,
    /// The key that query 0 of each is aligned with, from which windows and bottom-right masks count, one for each sequence: where keys or queries
    /// at an end of the sequence are not in these tensors. Without it the last query is aligned with the last key.
    pub diagonals: Option<Global<i32>>,
    /// Rows of the tensor of queries: what is beyond is cut, whatever the arrays say.
    pub query_rows: u32,
    /// The same for keys.
    pub key_rows: u32,
    /// Whether rows after the queries of a sequence, up to the next offset, belong to it and are written as zeros.
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
    /// The key that query 0 is aligned with.
    pub diagonal: i32,
}

impl Sequence {
    /// A sequence alone in its tensors, whose last query is aligned with the last key.
    #[inline(always)]
    pub fn alone(queries: u32, keys: u32) -> Self {
        let diagonal = keys.cast_signed() - queries.cast_signed();
        Self { queries, rows: queries, keys, query_offset: 0, key_offset: 0, diagonal }
    }

    /// The same where statistics have `rows` rows for each sequence, if that is not 0: what is beyond is cut, whatever the arrays say.
    #[inline(always)]
    #[must_use]
    pub fn cut(self, rows: u32) -> Self {
        let most = if rows == 0 { u32::MAX } else { rows };
        Self { queries: self.queries.min(most), rows: self.rows.min(most), ..self }
    }
}

impl Sequences {
    /// The same where nothing is asked of what queries see.
    #[inline(always)]
    #[must_use]
    pub fn without_diagonals(self) -> Self {
        Self { diagonals: None, ..self }
    }

    /// Sequence `batch`.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, batch: u32) -> Sequence {
        let [queries, rows, query_offset] = self.queries(batch);
        let index = u64::from(batch);
        let key_offset = self.key_offsets.load(index).min(self.key_rows);
        let keys = length(&self.key_ends, index).min(self.key_rows - key_offset);
        Sequence { queries, rows, keys, query_offset, key_offset, diagonal: self.diagonal(batch, queries, keys) }
    }

    /// The key that query 0 of sequence `batch` is aligned with, if it has so many queries and keys.
    #[inline(always)]
    #[track_caller]
    pub fn diagonal(&self, batch: u32, queries: u32, keys: u32) -> i32 {
        match self.diagonals {
            Some(diagonals) => diagonals.load(batch.into()).clamp(1 - FAR, FAR - 1),
            None => keys.cast_signed() - queries.cast_signed(),
        }
    }

    /// Of sequence `batch`, the queries, the rows that are written, and the row of the first query.
    #[inline(always)]
    #[track_caller]
    pub fn queries(&self, batch: u32) -> [u32; 3] {
        let batch = u64::from(batch);
        let offset = self.query_offsets.load(batch).min(self.query_rows);
        let queries = length(&self.query_ends, batch).min(self.query_rows - offset);
        let next = if self.padded { self.query_offsets.load(batch + 1).min(self.query_rows) } else { 0 };
        [queries, next.saturating_sub(offset).max(queries), offset]
    }

    /// Rows of a sequence's keys, with the padding up to the next offset if it belongs to the sequence.
    #[inline(always)]
    #[track_caller]
    pub fn key_rows(&self, batch: u32, sequence: &Sequence) -> u32 {
        let next = if self.padded { self.key_offsets.load(u64::from(batch) + 1).min(self.key_rows) } else { 0 };
        next.saturating_sub(sequence.key_offset).max(sequence.keys)
    }
}

#[inline(always)]
#[track_caller]
fn length(ends: &Global<u32>, batch: u64) -> u32 {
    ends.load(batch + 1).saturating_sub(ends.load(batch))
}

impl SequencesArgument<'_> {
    /// One more element than `batches` in each array, one for each in `diagonals`.
    pub(super) fn check(&self, batches: u32) -> Checked {
        let arrays = [
            ("sequences.query_ends", &self.query_ends),
            ("sequences.key_ends", &self.key_ends),
            ("sequences.query_offsets", &self.query_offsets),
            ("sequences.key_offsets", &self.key_offsets),
        ];
        arrays.into_iter().try_for_each(|(name, array)| LaunchError::check_length(name, u64::from(batches) + 1, array.len()))?;
        if let Some(diagonals) = &self.diagonals {
            LaunchError::check_length("sequences.diagonals", batches.into(), diagonals.len())?;
        }
        check_rows([("sequences.query_rows", self.query_rows), ("sequences.key_rows", self.key_rows)])
    }
}

/// Coordinates in a tensor map whose edge is moved to the end of a sequence: `row` of `count` rows from `offset` on, of `head`.
/// What is after the last of them is loaded as zero and not stored.
///
/// The map has the dimensions `[huge, huge, heads, MAP_ROWS, size]` with strides of `[2^34 - row, row, head, row, 1]` elements,
/// if `row` is the tensor's stride of rows: the last of `count` rows has the last index that the map allows, the second coordinate takes
/// that back, and the first makes the sum a multiple of 2^64 bytes (the ragged descriptors of Triton's
/// `triton/tools/ragged_tma.py`).
#[inline(always)]
pub fn place(offset: u32, count: u32, head: u32, row: u32) -> [u32; 5] {
    [MAP_ROWS, offset + count, head, MAP_ROWS - count + row, 0]
}
