//! What the queries of a chunk see of the keys of a set: the rule of [`step_sequences`](fn@super::step_sequences), for the device and the host alike.

use oxtile_tile::prelude::*;

use super::share::{Rows, Share};
use crate::attention::FAR;

/// Which keys each set of sequences has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StepKeys {
    /// Set `o` has the keys of rank `o`, as they lie there: both chunks of a sequence as one run.
    ///
    /// If causal (`right` is 0) these are the keys that the whole chunk of queries sees, but for the rank's own set (`o` is `rank`), of which the
    /// diagonal is that of a bottom-right mask. That is exact where a sequence has the same number of queries and keys; windows do not cut it.
    ///
    /// A valid query that sees any key is in the set of each owner of which its half sees keys, also where the sequence has none there: so the first launch on its half begins its
    /// result, and the last one rounds it.
    Owners,
    /// Each set has one chunk of keys: of a zigzag partition set `2 o` the late chunk of rank `o` and set `2 o + 1` its early one, of a contiguous
    /// partition set `o` the chunk of rank `o`. Diagonals are exact for any numbers of queries and keys, and any window. A chunk that sees no key of
    /// the set has no queries.
    Chunks,
    /// One set, of the keys of all ranks in the order of the sequence. Keys after those that the last row of a chunk sees are cut. All valid queries
    /// are there, those that see nothing too.
    Whole,
}

impl StepKeys {
    /// The kind with this number.
    #[inline(always)]
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Owners,
            1 => Self::Chunks,
            _ => Self::Whole,
        }
    }
}

/// The keys that a query sees around its diagonal, which is aligned bottom-right in each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Parameter)]
pub struct Bounds {
    /// Keys before the diagonal; [`FAR`] is no bound.
    pub left: i32,
    /// Keys after it: 0 is causal, [`FAR`] is no bound.
    pub right: i32,
}

/// The sets of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Which keys each set has.
    pub keys: StepKeys,
    /// The rank that has the queries.
    pub share: Share,
    /// What a query sees.
    pub bounds: Bounds,
}

/// Which chunk of the rank a sequence's queries are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The late one.
    Late,
    /// The early one.
    Early,
}

/// A sequence of a launch, in the words of attention's `Sequences`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Queries.
    pub queries: u32,
    /// Keys.
    pub keys: u32,
    /// The row of the first query in the rank's tensor.
    pub query_offset: u32,
    /// The row of the first key in the tensor of its set.
    pub key_offset: u32,
    /// The key that query 0 is aligned with.
    pub diagonal: i32,
}

impl Steps {
    /// How many sets there are.
    #[inline(always)]
    pub const fn sets(&self) -> u32 {
        match self.keys {
            StepKeys::Owners => self.share.world,
            StepKeys::Chunks => self.share.chunks_of_rank() * self.share.world,
            StepKeys::Whole => 1,
        }
    }

    /// The keys of a set, and the queries of a chunk that see some of them, of the sequence that has these rows.
    #[inline(always)]
    pub fn sequence(&self, set: u32, half: Half, queries: Rows, keys: Rows) -> Sequence {
        let share = self.share;
        let is_late = matches!(half, Half::Late);
        let chunk = if is_late { share.late() } else { share.early() };
        let rows = queries.of_chunk(share);
        let query_offset = queries.local_offset(share) + if is_late && share.is_zigzag { rows } else { 0 };
        // A contiguous partition has no late chunk.
        let valid = queries.valid(share, chunk);
        let first = if chunk < share.chunks() { (chunk * rows).cast_signed() } else { 0 };
        // Where the first query is aligned, in the keys of the whole sequence.
        let aligned = keys.length.cast_signed() - queries.length.cast_signed() + first;
        let entry = match self.keys {
            StepKeys::Owners => self.of_owner(share.of(set), is_late, valid, keys),
            StepKeys::Chunks => self.of_chunk(set, valid, aligned, keys),
            StepKeys::Whole => {
                let end = i64::from(aligned) + i64::from(rows) + i64::from(self.bounds.right);
                let seen = if self.bounds.right >= FAR { i64::from(keys.length) } else { end.clamp(0, keys.length.into()) };
                Sequence { queries: valid, keys: seen as u32, key_offset: keys.offset, diagonal: aligned, query_offset: 0 }
            }
        };
        let keys = if is_late && !share.is_zigzag { 0 } else { entry.keys };
        Sequence { keys, query_offset, ..entry }
    }

    /// All keys of a rank that a chunk sees.
    #[inline(always)]
    fn of_owner(&self, owner: Share, is_late: bool, valid: u32, keys: Rows) -> Sequence {
        let (owned_by, rank, is_causal) = (owner.rank, self.share.rank, self.bounds.right == 0);
        let early = if !is_causal || is_late || owned_by <= rank { keys.valid(owner, owner.early()) } else { 0 };
        let late = if !is_causal || (is_late && owned_by >= rank) { keys.valid(owner, owner.late()) } else { 0 };
        let (seen, key_offset) = (early + late, keys.local_offset(owner));
        // With a full mask a query that sees no key of this owner sees one of another, if there is any: it is there in every set, so that the first and the last step know it.
        let sees = seen > 0 || (!is_causal && keys.length > 0);
        let queries = if sees { valid } else { 0 };
        Sequence { queries, keys: seen, key_offset, diagonal: seen.cast_signed() - queries.cast_signed(), query_offset: 0 }
    }

    /// One chunk of keys.
    #[inline(always)]
    fn of_chunk(&self, set: u32, valid: u32, aligned: i32, keys: Rows) -> Sequence {
        let per_rank = self.share.chunks_of_rank();
        let owner = self.share.of(set / per_rank);
        let is_late = self.share.is_zigzag && set.is_multiple_of(2);
        let (chunk, rows) = (if is_late { owner.late() } else { owner.early() }, keys.of_chunk(owner));
        let (seen, key_offset) = (keys.valid(owner, chunk), keys.local_offset(owner) + if is_late { rows } else { 0 });
        let diagonal = aligned - (chunk * rows).cast_signed();
        let (first, last) = (i64::from(diagonal), i64::from(diagonal) + i64::from(valid) - 1);
        let is_after = self.bounds.right < FAR && last + i64::from(self.bounds.right) < 0;
        let is_before = self.bounds.left < FAR && i64::from(seen) - 1 < first - i64::from(self.bounds.left);
        let queries = if seen == 0 || is_after || is_before { 0 } else { valid };
        Sequence { queries, keys: seen, key_offset, diagonal, query_offset: 0 }
    }
}
