//! Where the sequences of a batch lie in the backward pass: their tiles of keys, and their blocks of queries in arrays of its own.

use oxtile_tile::prelude::*;

use super::backward_schedule::{KeySchedule, KeyTile};
use super::backward_workspace::BACKWARD_KEYS;
use super::mask::{Mask, Window};
use super::sequence::{Sequence, Sequences};

/// Where a head's blocks of `size` queries lie in arrays of so many blocks a head, in which each sequence begins with a block of its
/// own: after as many whole blocks as the queries before would fill, and one more for each sequence before. So a sequence's place
/// needs nothing but the sums of lengths, and no sequence is without a block.
#[derive(Clone, Copy)]
pub struct QueryBlocks {
    /// Sums of the queries of the sequences before, one more than there are sequences.
    pub query_ends: Global<u32>,
    /// Sequences, at least one.
    pub batches: u32,
    /// Queries of a block.
    pub size: u32,
    /// Blocks of a head, at least [`QueryBlocks::of`] all queries.
    pub blocks: u32,
}

/// A block of queries of a sequence.
#[derive(Clone, Copy)]
pub struct QueryBlock {
    /// The sequence.
    pub batch: u32,
    /// Which of the sequence's blocks.
    pub index: u32,
    /// Whether it is the last that the sequence has room for.
    pub is_last: bool,
}

impl QueryBlocks {
    /// How many blocks of `size` have room for `queries` in `batches` sequences.
    pub const fn of(queries: u64, batches: u64, size: u64) -> u64 {
        queries / size + batches
    }

    /// The first block of sequence `batch`; for their number, the end of the last. Sums may begin at any number. A block that would be after the array's end is
    /// not, whatever the sums say.
    #[inline(always)]
    #[track_caller]
    pub fn first(&self, batch: u32) -> u32 {
        let queries = self.query_ends.load(batch.into()).saturating_sub(self.query_ends.load(0));
        (queries / self.size.max(1) + batch).min(self.blocks)
    }

    /// The sequence, with no more queries than its blocks have room for: where the sums of lengths rise, as many as it has.
    #[inline(always)]
    #[track_caller]
    pub fn limit(&self, batch: u32, sequence: Sequence) -> Sequence {
        let room = self.first(batch + 1).saturating_sub(self.first(batch)).saturating_mul(self.size);
        Sequence { queries: sequence.queries.min(room), ..sequence }
    }

    /// The sequence of a block; none before the first sequence and after the last.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, block: u32) -> Option<QueryBlock> {
        // The last sequence that does not begin after it.
        let (mut batch, mut end) = (0, self.batches);
        while end - batch > 1 {
            let middle = batch + (end - batch) / 2;
            if self.first(middle) <= block { batch = middle } else { end = middle }
        }
        let (first, next) = (self.first(batch), self.first(batch + 1));
        (first <= block && block < next).then(|| QueryBlock { batch, index: block - first, is_last: block + 1 == next })
    }
}

/// A tile of keys of a sequence, and what the sequence's queries see.
#[derive(Clone, Copy)]
pub struct SequenceTile {
    /// The tile.
    pub tile: KeyTile,
    /// The mask, with the sequence's lengths.
    pub mask: Mask,
    /// The row of the sequence's first query.
    pub query_offset: u32,
    /// The row of its first key.
    pub key_offset: u32,
    /// Rows of gradients of keys that are written: the keys, and padding.
    pub key_rows: u32,
    /// The sequence's first block of queries.
    pub first_block: u32,
}

/// Words of a [`SequenceTile`], which may be none.
pub const SEQUENCE_TILE_WORDS: usize = 12;

type Number = SharedArray<u32, SEQUENCE_TILE_WORDS>;

impl SequenceTile {
    /// Writes it where other warps read it; none says that there are no more.
    #[inline(always)]
    #[track_caller]
    pub fn store(item: Option<Self>, number: Number) {
        KeyTile::store(item.map(|item| item.tile), number);
        let Some(Self { mask: Mask { queries, keys, first, last }, query_offset, key_offset, key_rows, first_block, .. }) = item else {
            return;
        };
        number.store_vector(4, Vector::from_words([queries, keys, first.cast_unsigned(), last.cast_unsigned()]));
        number.store_vector(8, Vector::from_words([query_offset, key_offset, key_rows, first_block]));
    }

    /// Reads one that is there. All lanes of a warp call it; the compiler sees that all have the same.
    #[inline(always)]
    #[track_caller]
    pub fn load(number: Number) -> Self {
        Self::read(number, |word| warp::shuffle(word, 0))
    }

    /// The same for one lane.
    #[inline(always)]
    #[track_caller]
    pub fn load_alone(number: Number) -> Self {
        Self::read(number, |word| word)
    }

    /// The mask alone, for where registers are full.
    #[inline(always)]
    #[track_caller]
    pub fn load_mask(number: Number) -> Mask {
        Self::mask(number.load_vector(4).words())
    }

    #[inline(always)]
    #[track_caller]
    fn read(number: Number, word: impl Fn(u32) -> u32) -> Self {
        let vector = |first: u32| number.load_vector(first).words().map(&word);
        let [_, block, batch, head] = vector(0);
        let (mask, [query_offset, key_offset, key_rows, first_block]) = (Self::mask(vector(4)), vector(8));
        Self { tile: KeyTile { block, batch, head }, mask, query_offset, key_offset, key_rows, first_block }
    }

    #[inline(always)]
    fn mask([queries, keys, first, last]: [u32; 4]) -> Mask {
        Mask { queries, keys, first: first.cast_signed(), last: last.cast_signed() }
    }
}

/// The order of tiles of sequences that differ in length: one sequence after the other, each as [`KeySchedule`] has it. One thread walks
/// along it.
pub struct SequenceKeySchedule {
    sequences: Sequences,
    window: Window,
    blocks: QueryBlocks,
    /// Key heads of a sequence.
    heads: u32,
    /// Keys, of a number of heads, whose tiles are computed together.
    section_keys: u32,
    batch: u32,
    /// Tiles of the sequences before.
    before: u32,
}

impl SequenceKeySchedule {
    /// At the first of the sequences, of which there is one.
    #[inline(always)]
    pub fn new(sequences: Sequences, window: Window, blocks: QueryBlocks, heads: u32, section_keys: u32) -> Self {
        Self { sequences, window, blocks, heads, section_keys, batch: 0, before: 0 }
    }

    /// Tile `index`, which is not below that of the call before.
    #[inline(always)]
    #[track_caller]
    pub fn tile(&mut self, index: u32) -> Option<SequenceTile> {
        while self.batch < self.blocks.batches {
            let batch = self.batch;
            let sequence = self.blocks.limit(batch, self.sequences.get(batch));
            let key_rows = self.sequences.key_rows(batch, &sequence);
            let section = (self.section_keys / sequence.keys.max(1)).clamp(1, self.heads.max(1));
            let schedule = KeySchedule { key_blocks: key_rows.div_ceil(BACKWARD_KEYS as u32), heads: self.heads, section };
            if let Some(tile) = schedule.tile(index - self.before) {
                let Sequence { query_offset, key_offset, .. } = sequence;
                return Some(SequenceTile {
                    tile: KeyTile { batch, ..tile },
                    mask: self.window.of(&sequence),
                    query_offset,
                    key_offset,
                    key_rows,
                    first_block: self.blocks.first(batch),
                });
            }
            self.before += schedule.tiles();
            self.batch += 1;
        }
        None
    }

    /// How many tiles there are, once there are no more.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.before
    }
}
