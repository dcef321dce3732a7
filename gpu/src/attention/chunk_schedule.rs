//! Chunks of packed sequences that ranks share: where they lie, and in which order a rank's tiles of queries are taken.

use oxtile_tile::num::opaque;
use oxtile_tile::prelude::*;

use super::arriving::RANK_CHUNKS;
use super::schedule::{Schedule, Tile};
use super::sequence::{Sequences, SequencesArgument};
use super::shape::{Checked, Heads};

/// Blocks of keys of a sequence, with what pads its chunks: a mask's gaps count them in 16 bits.
pub const MOST_KEY_BLOCKS: u64 = u16::MAX as u64;

/// The sequences of a rank's launch. Each is there twice, first all late chunks of queries, then all early ones.
#[derive(Clone, Copy, Parameter)]
pub struct Chunks {
    /// The set of all keys in the order of the sequence (`Whole` of the kernel `step_sequences`), whose offsets of keys count the rows of all ranks; but `key_rows` are those of
    /// one rank's tensor.
    pub sequences: Sequences,
    /// Sequences.
    pub batches: u32,
    /// Ranks, of which each has two chunks of a sequence: chunk `i` and the one that is as far from the end.
    pub world: u32,
    /// The rank that has the queries.
    pub rank: u32,
}

/// Some rows of queries of a chunk, of one head, with what is known of its sequence.
#[derive(Clone, Copy)]
pub struct ChunkTile {
    /// The tile; its row counts from the chunk's first one.
    pub tile: Tile,
    /// Queries of the chunk that attend.
    pub queries: u32,
    /// Its rows that are written: the queries, and padding.
    pub rows: u32,
    /// Keys that any of them sees, counted as if all chunks before the last of them were padded to whole blocks.
    pub keys: u32,
    /// The row of the first query in the rank's tensor.
    pub query_offset: u32,
    /// The row of the sequence's first key in the tensor of each rank.
    pub key_offset: u32,
    /// Keys of a chunk, with padding.
    pub chunk: u32,
}

/// Words of a [`ChunkTile`].
pub const CHUNK_TILE_WORDS: usize = 9;

/// The batch of no tile.
const NOTHING: u32 = u32::MAX;

impl ChunkTile {
    /// Blocks of keys of a chunk.
    #[inline(always)]
    pub fn blocks_of_chunk<const KEYS: usize>(&self) -> u32 {
        self.chunk.div_ceil(KEYS as u32).max(1)
    }

    /// Writes it where another thread reads it; none says that there are no more.
    #[inline(always)]
    #[track_caller]
    pub fn store<const WORDS: usize>(tile: Option<Self>, words: SharedArray<u32, WORDS>, at: u32) {
        let Some(Self { tile, queries, rows, keys, query_offset, key_offset, chunk }) = tile else {
            return words.store(at, NOTHING);
        };
        let values = [tile.batch, tile.head, tile.row, queries, rows, keys, query_offset, key_offset, chunk];
        let mut i = 0;
        while i < CHUNK_TILE_WORDS {
            words.store(at + i as u32, values[i]);
            i += 1;
        }
    }

    /// Reads it. All lanes of a warp call it; the compiler sees that all have the same.
    #[inline(always)]
    #[track_caller]
    pub fn load<const WORDS: usize>(words: SharedArray<u32, WORDS>, at: u32) -> Option<Self> {
        // The other words of none are not written.
        if warp::shuffle(words.load(at), 0) == NOTHING { None } else { Some(Self::reload(words, at)) }
    }

    /// Reads one that is known to be there: registers need not hold it for long.
    #[inline(always)]
    #[track_caller]
    pub fn reload<const WORDS: usize>(words: SharedArray<u32, WORDS>, at: u32) -> Self {
        let [batch, head, row, queries, rows, keys, query_offset, key_offset, chunk] =
            core::array::from_fn::<u32, CHUNK_TILE_WORDS, _>(|i| warp::shuffle(words.load(at + i as u32), 0));
        Self { tile: Tile { row, head, batch }, queries, rows, keys, query_offset, key_offset, chunk }
    }
}

impl Chunks {
    /// Chunks of a sequence.
    #[inline(always)]
    pub fn of_sequence(&self) -> u32 {
        RANK_CHUNKS * self.world
    }

    /// Which rank has a chunk, and whether it is the second one of the rank's.
    #[inline(always)]
    pub fn owner(&self, chunk: u32) -> (u32, u32) {
        if chunk < self.world { (chunk, 0) } else { (self.of_sequence() - 1 - chunk, 1) }
    }

    /// The number of the chunk that piece `piece` of the rank's rows is.
    #[inline(always)]
    pub fn number(&self, piece: u32) -> u32 {
        if piece < self.batches { self.of_sequence() - 1 - self.rank } else { self.rank }
    }

    /// Pieces of the rank's rows: late chunks, early chunks, and what is after all sequences.
    #[inline(always)]
    pub(super) fn pieces(&self) -> u32 {
        RANK_CHUNKS * self.batches + 1
    }

    /// Rows of a piece, and the first of them. Those of a chunk are what lies between a sequence's early chunk and its late one.
    #[inline(always)]
    #[track_caller]
    pub(super) fn rows(&self, piece: u32) -> [u32; 2] {
        let Sequences { query_offsets, query_rows, .. } = self.sequences;
        let offset = |number: u32| query_offsets.load(number.into()).min(query_rows);
        if piece == RANK_CHUNKS * self.batches {
            let end = offset(piece);
            return [query_rows - end, end];
        }
        let sequence = if piece < self.batches { piece } else { piece - self.batches };
        let [early, late] = [offset(sequence + self.batches), offset(sequence)];
        let first = if piece < self.batches { late } else { early };
        [late.saturating_sub(early).min(query_rows - first), first]
    }

    /// Where the keys of a sequence begin in the tensor of each rank, and how many a chunk has, with padding.
    #[inline(always)]
    #[track_caller]
    pub(super) fn keys(&self, sequence: u32) -> [u32; 2] {
        let Sequences { key_offsets, key_rows, .. } = self.sequences;
        let next = if sequence + 1 < self.batches { sequence + 1 } else { RANK_CHUNKS * self.batches };
        let [begin, end] = [sequence, next].map(|number| key_offsets.load(number.into()) / self.world.max(1));
        let first = begin.min(key_rows);
        [first, end.saturating_sub(begin).min(key_rows - first) / RANK_CHUNKS]
    }

    /// The rows of keys after all sequences in the tensor of each rank.
    #[inline(always)]
    #[track_caller]
    pub(super) fn keys_after(&self) -> [u32; 2] {
        let Sequences { key_offsets, key_rows, .. } = self.sequences;
        let first = (key_offsets.load(u64::from(RANK_CHUNKS * self.batches)) / self.world.max(1)).min(key_rows);
        [first, key_rows - first]
    }

    /// Queries of a piece that attend.
    #[inline(always)]
    #[track_caller]
    pub(super) fn queries(&self, piece: u32) -> u32 {
        length(self.sequences.query_ends, piece)
    }

    /// Keys of its sequence, without padding, that a piece sees.
    #[inline(always)]
    #[track_caller]
    pub(super) fn seen(&self, piece: u32) -> u32 {
        length(self.sequences.key_ends, piece)
    }

    /// Piece `piece`, as a tile of its first row in a kernel of blocks of `KEYS` keys.
    #[inline(always)]
    #[track_caller]
    fn get<const KEYS: usize>(&self, piece: u32) -> ChunkTile {
        let ([rows, query_offset], tile) = (self.rows(piece), Tile { row: 0, head: 0, batch: piece });
        let nothing = ChunkTile { tile, queries: 0, rows, keys: 0, query_offset, key_offset: 0, chunk: 0 };
        if piece == RANK_CHUNKS * self.batches {
            return nothing;
        }
        let [key_offset, chunk] = self.keys(if piece < self.batches { piece } else { piece - self.batches });
        let seen = self.seen(piece).min(self.of_sequence() * chunk);
        let keys = match seen.checked_sub(1) {
            Some(last) => {
                let before = last / chunk.max(1);
                before * chunk.next_multiple_of(KEYS as u32) + seen - before * chunk
            }
            None => 0,
        };
        ChunkTile { queries: self.queries(piece).min(rows), keys, key_offset, chunk, ..nothing }
    }
}

#[inline(always)]
#[track_caller]
fn length(ends: Global<u32>, piece: u32) -> u32 {
    ends.load(u64::from(piece) + 1).saturating_sub(ends.load(piece.into()))
}

impl ChunksArgument<'_> {
    pub(super) fn check(&self, keys: usize) -> Checked {
        LaunchError::check_at_least("chunks.world", 1, self.world.into())?;
        LaunchError::check_limit("chunks.rank", self.rank.into(), u64::from(self.world) - 1)?;
        LaunchError::check_at_least("chunks.batches", 1, self.batches.into())?;
        self.sequences.check(RANK_CHUNKS.saturating_mul(self.batches))?;
        let SequencesArgument { key_rows, .. } = self.sequences;
        let blocks = (u64::from(key_rows) * u64::from(self.world)).div_ceil(keys as u64) + u64::from(RANK_CHUNKS * self.world);
        LaunchError::check_limit("chunks.sequences.key_rows, in blocks of all ranks", blocks, MOST_KEY_BLOCKS)
    }
}

/// The order: rounds of heads; in each the pieces of the rank's rows one after another, each as a schedule has a batch. One thread walks along it.
pub struct ChunkSchedule<const KEYS: usize> {
    /// Where the sequences lie.
    pub chunks: Chunks,
    heads: Heads,
    tile_rows: u32,
    /// Query heads of a round.
    round: u32,
    /// Keys, of a number of key heads, whose tiles are computed together.
    section_keys: u32,
    /// The first head of the round.
    first_head: u32,
    piece: ChunkTile,
    /// Tiles of the pieces before, in this round and those before.
    before: u32,
}

impl<const KEYS: usize> ChunkSchedule<KEYS> {
    /// At the first piece of the first round.
    #[inline(always)]
    #[track_caller]
    pub fn new(chunks: Chunks, heads: Heads, tile_rows: u32, [round, section_keys]: [u32; 2]) -> Self {
        Self { chunks, heads, tile_rows, round, section_keys, first_head: 0, piece: chunks.get::<KEYS>(0), before: 0 }
    }

    /// How many tiles there are, once there was none.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.before
    }

    /// Heads of the round.
    #[inline(always)]
    fn width(&self) -> u32 {
        self.round.min(self.heads.heads - self.first_head)
    }

    /// Tile `index`, which is not below that of the call before.
    #[inline(always)]
    #[track_caller]
    pub fn tile(&mut self, index: u32) -> Option<ChunkTile> {
        if self.first_head >= self.heads.heads {
            return None;
        }
        let (mut number, mut rows) = (self.piece.tile.batch, self.piece.rows);
        // Pieces that are passed over are asked for their rows alone.
        while index - self.before >= rows.div_ceil(self.tile_rows) * self.width() {
            self.before += rows.div_ceil(self.tile_rows) * self.width();
            number += 1;
            if number == self.chunks.pieces() {
                number = 0;
                self.first_head += self.width();
                if self.first_head >= self.heads.heads {
                    return None;
                }
            }
            [rows, _] = self.chunks.rows(opaque(number));
        }
        if number != self.piece.tile.batch {
            self.piece = self.chunks.get::<KEYS>(opaque(number));
        }
        let section = (self.section_keys / self.piece.keys.max(1)).max(1).saturating_mul(self.heads.group).min(self.width());
        let row_tiles = rows.div_ceil(self.tile_rows);
        let schedule = Schedule { tile_rows: self.tile_rows, row_tiles, heads: self.width(), batches: 1, section };
        let Tile { row, head, .. } = schedule.tile(index - self.before)?;
        Some(ChunkTile { tile: Tile { row, head: self.first_head + head, batch: number }, ..self.piece })
    }
}
