//! Chunks of packed sequences that ranks share, from the keys' side: a rank's tiles of keys, their order, and where their gradients are stored.

use oxtile_tile::num::opaque;
use oxtile_tile::prelude::*;

use super::arriving::RANK_CHUNKS;
use super::backward_mask::Missing;
use super::backward_schedule::{KeySchedule, KeyTile};
use super::backward_workspace::BACKWARD_KEYS;
use super::chunk_schedule::Chunks;
use super::mask::{FAR, Mask};

/// A tile of keys of one chunk of a sequence, and where the rank's queries of the sequence are.
#[derive(Clone, Copy)]
pub struct ChunkKeyTile {
    /// The tile; its block is counted as if each chunk were padded to whole blocks.
    pub tile: KeyTile,
    /// The chunk.
    pub number: u32,
    /// Keys of the chunk that attend.
    pub keys: u32,
    /// Keys of a chunk, with padding.
    pub chunk: u32,
    /// The row of the sequence's first key in the tensor of each rank.
    pub key_offset: u32,
    /// Queries of the rank's early and late chunk that attend.
    pub queries: [u32; 2],
    /// The rows of the first of them.
    pub query_offsets: [u32; 2],
    /// Their first blocks in sums and statistics.
    pub first_blocks: [u32; 2],
}

/// Words of a [`ChunkKeyTile`], which may be none.
pub const CHUNK_KEY_WORDS: usize = 16;

type Number = SharedArray<u32, CHUNK_KEY_WORDS>;

impl ChunkKeyTile {
    /// Keys of a chunk in whole blocks.
    #[inline(always)]
    fn padded(&self) -> u32 {
        self.chunk.next_multiple_of(BACKWARD_KEYS as u32)
    }

    /// The tile's first row in its chunk.
    #[inline(always)]
    pub fn row(&self) -> u32 {
        self.tile.key() - self.number * self.padded()
    }

    /// Which keys the queries see that are from the first one of the early chunk on, in the padded sequence, with the keys up to the last one of the tile's chunk; and the blocks
    /// of `QUERIES` queries between the two chunks.
    #[inline(always)]
    pub fn mask<const QUERIES: usize>(&self, chunks: &Chunks, is_causal: bool) -> (Mask, Missing) {
        let [first, second] = [chunks.rank, chunks.of_sequence() - 1 - chunks.rank];
        let ([early, late], begin) = (self.queries, self.early_blocks::<QUERIES>());
        // Under a causal mask both chunks have as many queries as keys. Without one places do not matter, and the late chunk is right after the early one.
        let between = if is_causal { (second - first) * self.padded() } else { begin * QUERIES as u32 };
        let queries = if late > 0 { between + late } else { early };
        let last = if is_causal { (first * self.padded()).cast_signed() } else { FAR };
        let mask = Mask { queries, keys: self.number * self.padded() + self.keys, first: -FAR, last };
        (mask, Missing { begin, count: between / QUERIES as u32 - begin })
    }

    /// Blocks of queries of the early chunk.
    #[inline(always)]
    fn early_blocks<const QUERIES: usize>(&self) -> u32 {
        self.queries[0].div_ceil(QUERIES as u32)
    }

    /// Of a block of queries, its chunk, early or late, and its number there.
    #[inline(always)]
    pub fn query_block<const QUERIES: usize>(&self, block: u32) -> (bool, u32) {
        let early = self.early_blocks::<QUERIES>();
        if block < early { (false, block) } else { (true, block - early) }
    }

    /// Writes it where other warps read it; none says that there are no more.
    #[inline(always)]
    #[track_caller]
    pub fn store(item: Option<Self>, words: Number) {
        KeyTile::store(item.map(|item| item.tile), words);
        let Some(Self { number, keys, chunk, key_offset, queries, query_offsets, first_blocks, .. }) = item else { return };
        words.store_vector(4, Vector::from_words([number, keys, chunk, key_offset]));
        words.store_vector(8, Vector::from_words([queries[0], queries[1], query_offsets[0], query_offsets[1]]));
        words.store_vector(12, Vector::from_words([first_blocks[0], first_blocks[1], 0, 0]));
    }

    /// Reads one that is there. All lanes of a warp call it; the compiler sees that all have the same.
    #[inline(always)]
    #[track_caller]
    pub fn load(words: Number) -> Self {
        Self::read(words, |word| warp::shuffle(word, 0))
    }

    /// The same for one lane.
    #[inline(always)]
    #[track_caller]
    pub fn load_alone(words: Number) -> Self {
        Self::read(words, |word| word)
    }

    #[inline(always)]
    #[track_caller]
    fn read(words: Number, word: impl Fn(u32) -> u32) -> Self {
        let vector = |first: u32| words.load_vector(first).words().map(&word);
        let ([_, block, batch, head], [number, keys, chunk, key_offset]) = (vector(0), vector(4));
        let ([of_early, of_late, early_offset, late_offset], [early, late, ..]) = (vector(8), vector(12));
        Self {
            tile: KeyTile { block, batch, head },
            number,
            keys,
            chunk,
            key_offset,
            queries: [of_early, of_late],
            query_offsets: [early_offset, late_offset],
            first_blocks: [early, late],
        }
    }
}

impl Chunks {
    /// Tiles of keys of a head in a rank's slot, of so many rows of keys: each chunk has tiles of its own.
    pub const fn slot_tiles(key_rows: u64, sequences: u64) -> u64 {
        key_rows / BACKWARD_KEYS as u64 + RANK_CHUNKS as u64 * sequences
    }

    /// The same of these.
    #[inline(always)]
    pub fn tiles_of_slot(&self) -> u32 {
        self.sequences.key_rows / BACKWARD_KEYS as u32 + RANK_CHUNKS * self.batches
    }

    /// The first tile of a chunk in its owner's slots, where it begins at row `first` of the owner's keys: after the whole blocks of the rows before, and one more for each chunk before.
    #[inline(always)]
    pub fn slot_tile(&self, sequence: u32, half: u32, first: u32) -> u32 {
        first / BACKWARD_KEYS as u32 + RANK_CHUNKS * sequence + half
    }

    /// Of a tile of a slot, 0 if it is of an early chunk, 1 of a late one, and 2 of the rows after all sequences; the first row there, the tile's number, and how many rows there are.
    /// None where there is room alone.
    #[inline(always)]
    #[track_caller]
    pub fn of_slot(&self, tile: u32) -> Option<[u32; 4]> {
        let place = |number: u32| {
            let (sequence, half) = (number / RANK_CHUNKS, number % RANK_CHUNKS);
            let [first, rows] = if sequence < self.batches { self.keys(sequence) } else { self.keys_after() };
            let (first, half) = (first + half * rows, if sequence < self.batches { half } else { 2 });
            [half, first, self.slot_tile(sequence, half % RANK_CHUNKS, first), rows]
        };
        // The last chunk that does not begin after it.
        let (mut low, mut high) = (0, RANK_CHUNKS * self.batches + 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if place(middle)[2] <= tile { low = middle } else { high = middle }
        }
        let [half, first, begin, rows] = place(low);
        let index = tile.wrapping_sub(begin);
        (tile >= begin && index < rows.div_ceil(BACKWARD_KEYS as u32)).then_some([half, first, index, rows])
    }

    /// The first query block of piece `piece`, of `size` queries, in a head's `blocks`: as [`QueryBlocks`](super::QueryBlocks) has them.
    #[inline(always)]
    #[track_caller]
    fn first_block(&self, piece: u32, size: u32, blocks: u32) -> u32 {
        (self.sequences.query_ends.load(piece.into()) / size + piece).min(blocks)
    }
}

/// The order: rounds of key heads; in each one sequence after the other, each as [`KeySchedule`] has it. One thread walks along it.
pub struct ChunkKeySchedule<const QUERIES: usize> {
    chunks: Chunks,
    is_causal: bool,
    /// Blocks of queries of a head in sums and statistics.
    blocks: u32,
    heads: u32,
    /// Key heads of a round.
    round: u32,
    /// Keys, of a number of heads, whose tiles are computed together.
    section_keys: u32,
    first_head: u32,
    sequence: u32,
    /// Tiles of the sequences before, in this round and those before.
    before: u32,
}

impl<const QUERIES: usize> ChunkKeySchedule<QUERIES> {
    /// At the first of the sequences, of which there is one.
    #[inline(always)]
    pub fn new(chunks: Chunks, is_causal: bool, blocks: u32, [heads, round, section_keys]: [u32; 3]) -> Self {
        Self { chunks, is_causal, blocks, heads, round, section_keys, first_head: 0, sequence: 0, before: 0 }
    }

    /// How many tiles there are, once there are no more.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.before
    }

    /// Tile `index`, which is not below that of the call before.
    #[inline(always)]
    #[track_caller]
    pub fn tile(&mut self, index: u32) -> Option<ChunkKeyTile> {
        while self.first_head < self.heads {
            // Opaque, here and below: else the compiler holds a pointer into each of the arrays.
            let [_, chunk] = self.chunks.keys(opaque(self.sequence));
            let width = self.round.min(self.heads - self.first_head);
            // Blocks of the chunks that any query of the rank may see, whatever the lengths: all of their gradients are stored.
            let seen = if self.is_causal { self.chunks.number(self.sequence) + 1 } else { self.chunks.of_sequence() };
            let key_blocks = seen * chunk.div_ceil(BACKWARD_KEYS as u32);
            let section = (self.section_keys / (key_blocks * BACKWARD_KEYS as u32).max(1)).max(1).min(width);
            let schedule = KeySchedule { key_blocks, heads: width, section };
            if let Some(tile) = schedule.tile(index - self.before) {
                return Some(self.item(KeyTile { batch: self.sequence, head: self.first_head + tile.head, ..tile }));
            }
            self.before += schedule.tiles();
            self.sequence += 1;
            if self.sequence == self.chunks.batches {
                self.sequence = 0;
                self.first_head += width;
            }
        }
        None
    }

    /// A tile of the sequence, with its queries.
    #[inline(always)]
    #[track_caller]
    fn item(&self, tile: KeyTile) -> ChunkKeyTile {
        let (chunks, pieces) = (&self.chunks, || {
            let sequence = opaque(self.sequence);
            [sequence + self.chunks.batches, sequence]
        });
        let [key_offset, chunk] = chunks.keys(opaque(self.sequence));
        let number = tile.block / chunk.div_ceil(BACKWARD_KEYS as u32).max(1);
        // The late chunk sees the keys of all chunks that have tiles.
        let keys = chunks.seen(opaque(self.sequence)).saturating_sub(number * chunk).min(chunk);
        let rows = pieces().map(|piece| chunks.rows(piece));
        let [early, late] = pieces().map(|piece| chunks.queries(piece));
        let queries = [early.min(rows[0][0]), late.min(rows[1][0])];
        let first_blocks = pieces().map(|piece| chunks.first_block(piece, QUERIES as u32, self.blocks));
        ChunkKeyTile { tile, number, keys, chunk, key_offset, queries, query_offsets: rows.map(|[_, first]| first), first_blocks }
    }
}
