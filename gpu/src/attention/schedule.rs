//! Which tile a block computes next: a block that is free takes the next in a fixed order.

use oxtile_tile::num::opaque;
use oxtile_tile::prelude::*;
use oxtile_tile::shared::SharedStorage;

use super::sequence::{Sequence, Sequences};
use super::shape::{Checked, Heads, MOST_BLOCKS};

/// The order: heads in sections whose keys and values fit the L2 cache together; in a section the last rows of all heads
/// first, as they see the most keys where a mask is causal.
#[derive(Clone, Copy)]
pub struct Schedule {
    /// Rows of a tile.
    pub tile_rows: u32,
    /// Tiles of a head.
    pub row_tiles: u32,
    /// Heads of a batch.
    pub heads: u32,
    /// Batches.
    pub batches: u32,
    /// Heads of a section.
    pub section: u32,
}

/// Some rows of one head of one batch.
#[derive(Clone, Copy)]
pub struct Tile {
    /// The first row.
    pub row: u32,
    /// The head.
    pub head: u32,
    /// The batch.
    pub batch: u32,
}

/// Words of a [`Tile`].
pub const TILE_WORDS: usize = 3;

/// The batch of no tile.
const NOTHING: u32 = u32::MAX;

impl Tile {
    /// Writes it where another thread reads it; none says that there are no more.
    #[inline(always)]
    #[track_caller]
    pub fn store(tile: Option<Self>, words: SharedArray<u32, TILE_WORDS>) {
        let Self { row, head, batch } = tile.unwrap_or(Self { row: 0, head: 0, batch: NOTHING });
        words.store(0, row);
        words.store(1, head);
        words.store(2, batch);
    }

    /// Reads it. All lanes of a warp call it; the compiler sees that all have the same.
    #[inline(always)]
    #[track_caller]
    pub fn load(words: SharedArray<u32, TILE_WORDS>) -> Option<Self> {
        let tile = Self::reload(words);
        (tile.batch != NOTHING).then_some(tile)
    }

    /// Reads one that is known to be there: registers need not hold it for long.
    #[inline(always)]
    #[track_caller]
    pub fn reload(words: SharedArray<u32, TILE_WORDS>) -> Self {
        let [row, head, batch] = [0, 1, 2].map(|i| warp::shuffle(words.load(i), 0));
        Self { row, head, batch }
    }
}

impl Schedule {
    /// How many tiles there are.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.row_tiles * self.heads * self.batches
    }

    /// Tile `index` of the order.
    #[inline(always)]
    pub fn tile(&self, index: u32) -> Option<Tile> {
        if index >= self.tiles() {
            return None;
        }
        // No divisor is zero, as there is a tile; `max(1)` saves its check.
        let section_tiles = (self.row_tiles * self.section).max(1);
        let (section, inside) = (index / section_tiles, index % section_tiles);
        let first_head = section * self.section;
        let width = (self.heads * self.batches - first_head).min(self.section).max(1);
        let (head, heads) = (first_head + inside % width, self.heads.max(1));
        Some(Tile { row: (self.row_tiles - 1 - inside / width) * self.tile_rows, head: head % heads, batch: head / heads })
    }
}

/// The shared words by which the thread that copies tells the others a tile of dense tensors.
pub trait ToldTile: SharedStorage + Copy {
    /// Words from one tile's place to the next one's, which take turns; 0 where there is one place.
    const TURN: u32;
    /// Writes tile `index`, or that there are no more.
    fn tell(self, index: u32, tile: Option<Tile>, turn: u32);
    /// Reads it. All lanes of a warp call it; the compiler sees that all have the same.
    fn told(self, schedule: Schedule, turn: u32) -> Option<Tile>;
    /// The tile again, where registers need not hold it meanwhile.
    fn told_again(self, tile: Tile, turn: u32) -> Tile;
}

/// The index: each warp computes the tile, and keeps it.
impl ToldTile for SharedArray<u32, 1> {
    const TURN: u32 = 0;

    #[inline(always)]
    #[track_caller]
    fn tell(self, index: u32, _: Option<Tile>, _: u32) {
        self.store(0, index);
    }

    #[inline(always)]
    #[track_caller]
    fn told(self, schedule: Schedule, _: u32) -> Option<Tile> {
        schedule.tile(warp::shuffle(self.load(0), 0))
    }

    #[inline(always)]
    fn told_again(self, tile: Tile, _: u32) -> Tile {
        tile
    }
}

/// Two tiles, which take turns.
impl ToldTile for SharedArray<u32, { 2 * TILE_WORDS }> {
    const TURN: u32 = TILE_WORDS as u32;

    #[inline(always)]
    #[track_caller]
    fn tell(self, _: u32, tile: Option<Tile>, turn: u32) {
        let Tile { row, head, batch } = tile.unwrap_or(Tile { row: 0, head: 0, batch: NOTHING });
        self.store(turn, row);
        self.store(turn + 1, head);
        self.store(turn + 2, batch);
    }

    #[inline(always)]
    #[track_caller]
    fn told(self, _: Schedule, turn: u32) -> Option<Tile> {
        let [row, head, batch] = [0, 1, 2].map(|i| warp::shuffle(self.load(turn + i), 0));
        (batch != NOTHING).then_some(Tile { row, head, batch })
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(self, _: Tile, turn: u32) -> Tile {
        let [row, head, batch] = [0, 1, 2].map(|i| warp::shuffle(self.load(turn + i), 0));
        Tile { row, head, batch }
    }
}

/// The order in which tiles of dense tensors are taken.
#[derive(Clone, Copy, Parameter)]
pub struct TileOrder {
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// Heads that are computed together: their keys and values fit the L2 cache.
    pub section: u32,
}

impl TileOrderArgument<'_> {
    /// Of heads of so many tiles.
    pub(super) fn check(&self, row_tiles: u64) -> Checked {
        LaunchError::check_at_least("order.section", 1, self.section.into())?;
        LaunchError::check_limit("order.section", row_tiles * u64::from(self.section), MOST_BLOCKS)?;
        LaunchError::check_length("order.counter", 1, self.counter.len())
    }
}

/// Hands out the tiles after the first one of each block. The counter is zero before and after a launch.
#[derive(Clone, Copy)]
pub struct Queue {
    /// One element.
    pub counter: GlobalMut<u32>,
    /// Tiles there are, at least as many as blocks.
    pub tiles: u32,
}

/// A place in the queue; asked for early, as the answer takes its time.
#[derive(Clone, Copy)]
pub struct Ticket(u32);

impl Queue {
    /// Takes a place. A block does so once for each tile that it computes.
    #[inline(always)]
    #[track_caller]
    pub fn take(&self) -> Ticket {
        Ticket(atomic::add_u32(&self.counter, 0, 1))
    }

    /// The index of the tile that a ticket stands for; the last ticket sets the counter back.
    #[inline(always)]
    #[track_caller]
    pub fn index(&self, ticket: Ticket) -> u32 {
        if ticket.0 == self.tiles - 1 {
            atomic::add_u32(&self.counter, 0, self.tiles.wrapping_neg());
        }
        block::count()[0] + ticket.0
    }
}

/// A tile, with its sequence.
#[derive(Clone, Copy)]
pub struct Item {
    /// The tile; its row counts from the sequence's first query.
    pub tile: Tile,
    /// The sequence.
    pub sequence: Sequence,
}

/// Words of an [`Item`] whose sequence is aligned bottom-right.
pub const ITEM_WORDS: usize = 8;

/// Words of one whose diagonal is [given](Sequences::diagonals).
pub const DIAGONAL_ITEM_WORDS: usize = ITEM_WORDS + 1;

impl Item {
    /// Writes it where another thread reads it; none says that there are no more.
    #[inline(always)]
    #[track_caller]
    pub fn store<const DIAGONAL: bool, const WORDS: usize>(item: Option<Self>, words: SharedArray<u32, WORDS>, at: u32) {
        let Some(Self { tile, sequence }) = item else { return words.store(at + 2, NOTHING) };
        let Sequence { queries, rows, keys, query_offset, key_offset, diagonal } = sequence;
        let values = [tile.row, tile.head, tile.batch, queries, rows, keys, query_offset, key_offset, diagonal.cast_unsigned()];
        let mut i = 0;
        while i < if DIAGONAL { DIAGONAL_ITEM_WORDS } else { ITEM_WORDS } {
            words.store(at + i as u32, values[i]);
            i += 1;
        }
    }

    /// Reads it. All lanes of a warp call it; the compiler sees that all have the same.
    #[inline(always)]
    #[track_caller]
    pub fn load<const DIAGONAL: bool, const WORDS: usize>(words: SharedArray<u32, WORDS>, at: u32) -> Option<Self> {
        let batch = warp::shuffle(words.load(at + 2), 0);
        if batch == NOTHING { None } else { Some(Self::of_batch::<DIAGONAL, WORDS>(batch, words, at)) }
    }

    /// Reads one that is known to be there: registers need not hold it for long.
    #[inline(always)]
    #[track_caller]
    pub fn reload<const DIAGONAL: bool, const WORDS: usize>(words: SharedArray<u32, WORDS>, at: u32) -> Self {
        Self::of_batch::<DIAGONAL, WORDS>(warp::shuffle(words.load(at + 2), 0), words, at)
    }

    /// All words but the batch.
    #[inline(always)]
    #[track_caller]
    fn of_batch<const DIAGONAL: bool, const WORDS: usize>(batch: u32, words: SharedArray<u32, WORDS>, at: u32) -> Self {
        let [row, head, queries, rows, keys, query_offset, key_offset] =
            [0, 1, 3, 4, 5, 6, 7].map(|i| warp::shuffle(words.load(at + i), 0));
        let diagonal = match DIAGONAL {
            true => warp::shuffle(words.load(at + ITEM_WORDS as u32), 0).cast_signed(),
            false => keys.cast_signed() - queries.cast_signed(),
        };
        Self { tile: Tile { row, head, batch }, sequence: Sequence { queries, rows, keys, query_offset, key_offset, diagonal } }
    }
}

/// The order of tiles of sequences that differ in length: one sequence after the other, each as [`Schedule`] has a batch. One
/// thread walks along it.
///
/// It is a walk, not a bisection, as no array holds the sums of tiles: each sequence rounds its own rows up to tiles, and its padding counts. Room for
/// tiles by the sums of lengths ([`QueryBlocks`](super::backward_sequence::QueryBlocks)) has no tile for long padding, and one too many for most sequences.
/// A block passes all sequences once, whatever the number of its tiles. So of sequences of one tile it passes, for each tile, the number of blocks over
/// the number of heads: 8 where 132 blocks share 16 heads, fewer than the 11 steps of a bisection of 2048 sequences. With one head it is 132. What a walk
/// along 2048 sequences of 16 rows costs is in docs/performance/attention.md: 0.922 of the dense rate.
pub struct SequenceSchedule {
    sequences: Sequences,
    tile_rows: u32,
    batches: u32,
    heads: u32,
    group: u32,
    /// Keys, of a number of key heads, whose tiles are computed together.
    section_keys: u32,
    batch: u32,
    sequence: Sequence,
    /// Tiles of the sequences before.
    before: u32,
}

impl SequenceSchedule {
    /// At the first of the sequences, of which there is one.
    #[inline(always)]
    #[track_caller]
    pub fn new(sequences: Sequences, Heads { batches, heads, group, .. }: Heads, tile_rows: u32, section_keys: u32) -> Self {
        Self { sequences, tile_rows, batches, heads, group, section_keys, batch: 0, sequence: sequences.get(0), before: 0 }
    }

    /// How many tiles there are, once there was none.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.before
    }

    /// Tile `index`, which is not below that of the call before.
    #[inline(always)]
    #[track_caller]
    pub fn tile(&mut self, index: u32) -> Option<Item> {
        let (batch, mut rows) = (self.batch, self.sequence.rows);
        // Sequences that are passed over are asked for their rows alone.
        while index - self.before >= self.tiles_of(rows) {
            self.before += self.tiles_of(rows);
            self.batch += 1;
            if self.batch >= self.batches {
                return None;
            }
            [_, rows, _] = self.sequences.queries(opaque(self.batch));
        }
        if self.batch != batch {
            // Else the compiler holds a pointer into each of the arrays.
            self.sequence = self.sequences.get(opaque(self.batch));
        }
        let section = (self.section_keys / self.sequence.keys.max(1)).max(1).saturating_mul(self.group);
        let row_tiles = rows.div_ceil(self.tile_rows);
        // Each head as a batch of one, as no quotient is to be computed of one.
        let schedule = Schedule { tile_rows: self.tile_rows, row_tiles, heads: 1, batches: self.heads, section: section.min(self.heads) };
        let tile = schedule.tile(index - self.before)?;
        Some(Item { tile: Tile { head: tile.batch, batch: self.batch, ..tile }, sequence: self.sequence })
    }

    #[inline(always)]
    fn tiles_of(&self, rows: u32) -> u32 {
        rows.div_ceil(self.tile_rows) * self.heads
    }
}

/// Hands out tiles of sequences after the first one of each block. The counter, one element, is zero before and after a launch.
#[derive(Clone, Copy)]
pub struct SequenceQueue(pub GlobalMut<u32>);

impl SequenceQueue {
    /// Takes the index of a tile. A block does so once for each tile that it computes; asked for early, as the answer takes its time.
    #[inline(always)]
    #[track_caller]
    pub fn take(&self) -> u32 {
        block::count()[0] + atomic::add_u32(&self.0, 0, 1)
    }

    /// There is no tile `index`, of `tiles` in all: the block that took the last one sets the counter back.
    #[inline(always)]
    #[track_caller]
    pub fn leave(&self, index: u32, tiles: u32) {
        if index == block::count()[0] + tiles - 1 {
            atomic::add_u32(&self.0, 0, tiles.wrapping_neg());
        }
    }
}
