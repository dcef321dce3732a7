//! Which block of keys a block of threads takes next in the backward pass, and which queries belong to it.

use oxtile_tile::pipeline::Consumer;
use oxtile_tile::prelude::*;

use super::backward_workspace::{BACKWARD_KEYS, Numbers};
use super::mask::Span;
use super::shape::{Checked, MOST_BLOCKS};

/// The order: key heads in sections whose tensors fit the L2 cache together; in a section the first keys of all heads
/// first, as most queries see them where a mask is causal.
///
/// Blocks of keys of one head come in ascending order, and a tile is given out only to a block that starts it next: so a
/// block that adds to gradients of queries in the order of keys waits only for tiles that are under way or done.
#[derive(Clone, Copy)]
pub struct KeySchedule {
    /// Blocks of keys of a head.
    pub key_blocks: u32,
    /// Key heads of all batches.
    pub heads: u32,
    /// Key heads of a section.
    pub section: u32,
}

/// Heads of tiles.
#[derive(Clone, Copy, Parameter)]
pub struct KeyHeads {
    /// Batches, or sequences.
    pub batches: u32,
    /// Key heads of a batch, each `splits` times.
    pub heads: u32,
    /// Query heads of a tile: the next ones.
    pub group: u32,
    /// Tiles among which the query heads of a key head are split; a divisor of `heads`.
    pub splits: u32,
    /// The key heads from one sequence to the next if sequences share rows (sbhd); 0 if they share heads (bshd, thd), and for tensor maps that have
    /// batches.
    pub step: u32,
}

impl KeyHeads {
    /// Heads of tiles of all batches.
    pub(super) fn tile_heads(&self) -> u64 {
        u64::from(self.batches) * u64::from(self.heads)
    }

    /// Query heads of all batches.
    pub(super) fn query_heads(&self) -> u64 {
        self.tile_heads().saturating_mul(self.group.into())
    }

    pub(super) fn check(&self) -> Checked {
        LaunchError::check_limit("heads.splits", self.splits.into(), self.heads.into())?;
        LaunchError::check_multiple("heads.heads", self.splits.into(), self.heads.into())?;
        LaunchError::check_limit("heads.step", self.step.into(), self.heads.into())?;
        LaunchError::check_limit("heads.heads", self.query_heads(), MOST_BLOCKS)
    }
}

/// `BACKWARD_KEYS` keys of one head of one batch.
#[derive(Clone, Copy, Default)]
pub struct KeyTile {
    /// The number of the block of keys.
    pub block: u32,
    /// The batch, or the sequence.
    pub batch: u32,
    /// The key head in it.
    pub head: u32,
}

/// Words of a [`KeyTile`], which may be none.
pub const TILE_WORDS: usize = 4;

impl KeyTile {
    /// The first key.
    #[inline(always)]
    pub fn key(&self) -> u32 {
        self.block * BACKWARD_KEYS as u32
    }

    /// The same tile, where its head is one of those of all batches, of `heads` each.
    #[inline(always)]
    pub fn in_batch(self, heads: u32) -> Self {
        // No divisor is zero, as there is a tile; `max(1)` saves its check.
        Self { batch: self.head / heads.max(1), head: self.head % heads.max(1), ..self }
    }

    /// Writes it where other warps read it; none says that there are no more.
    #[inline(always)]
    #[track_caller]
    pub fn store<const WORDS: usize>(tile: Option<Self>, number: SharedArray<u32, WORDS>) {
        let Self { block, batch, head } = tile.unwrap_or_default();
        number.store_vector(0, Vector::from_words([tile.is_some().into(), block, batch, head]));
    }

    /// Reads it. All lanes of a warp call it; the compiler sees that all have the same.
    #[inline(always)]
    #[track_caller]
    pub fn load<const WORDS: usize>(number: SharedArray<u32, WORDS>) -> Option<Self> {
        let [is_there, block, batch, head] = number.load_vector(0).words().map(|word| warp::shuffle(word, 0));
        (is_there != 0).then_some(Self { block, batch, head })
    }

    /// One lane reads one that is there once more, rather than to hold it in registers.
    #[inline(always)]
    #[track_caller]
    pub fn load_alone<const WORDS: usize>(number: SharedArray<u32, WORDS>) -> Self {
        let [_, block, batch, head] = number.load_vector(0).words();
        Self { block, batch, head }
    }
}

impl KeySchedule {
    /// How many tiles there are.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.key_blocks * self.heads
    }

    /// Tile `index` of the order; its head is one of all.
    #[inline(always)]
    pub fn tile(&self, index: u32) -> Option<KeyTile> {
        if index >= self.tiles() {
            return None;
        }
        // No divisor is zero, as there is a tile; `max(1)` saves its check.
        let section_tiles = (self.key_blocks * self.section).max(1);
        let (section, inside) = (index / section_tiles, index % section_tiles);
        let first_head = section * self.section;
        let width = (self.heads - first_head).min(self.section).max(1);
        Some(KeyTile { block: inside / width, batch: 0, head: first_head + inside % width })
    }
}

/// The order in which a tile of keys meets the blocks of queries that see it.
#[derive(Clone, Copy)]
pub struct BlockOrder {
    /// The blocks.
    pub blocks: Span,
    /// The first to be met.
    pub first: u32,
    /// Whether lower blocks follow; else higher ones, and after the last the lowest.
    pub falling: bool,
}

impl BlockOrder {
    /// Calls `visit` with all of the blocks for each of `members` query heads, in their order. If it is falling, the heads take turns
    /// at a block: what one tile of keys visits is then the beginning of what the one before it visits, so that it waits for none of
    /// the blocks that it has not. Else one head follows the other, so that few tiles add to the same sums at a time.
    #[inline(always)]
    #[track_caller]
    pub fn visit(&self, members: u32, mut visit: impl FnMut(u32, u32)) {
        let Self { blocks: Span { begin, end }, first, falling } = *self;
        let (mut member, mut block) = (0, first);
        for _ in 0..self.blocks.length() * members {
            visit(member, block);
            if falling {
                member += 1;
                if member == members {
                    (member, block) = (0, block.wrapping_sub(1));
                }
            } else {
                block += 1;
                if block == end {
                    block = begin;
                }
                if block == first {
                    member += 1;
                }
            }
        }
    }
}

/// The next tile; other roles may take it too. All lanes of a warp call it.
#[inline(always)]
#[track_caller]
pub(super) fn next_tile<const WORDS: usize>(tiles: &mut Consumer<Numbers<WORDS>, 1>) -> Option<KeyTile> {
    let parity = tiles.parity();
    let stage = tiles.wait();
    let tile = KeyTile::load(stage.memory().tile(parity));
    stage.release();
    tile
}

/// Hands out places in the order of tiles. The counter, one element, is zero before and after a launch.
#[derive(Clone, Copy)]
pub struct KeyQueue(pub GlobalMut<u32>);

impl KeyQueue {
    /// Takes a place. A block does so until it gets one after the last tile.
    #[inline(always)]
    #[track_caller]
    pub fn take(&self) -> u32 {
        atomic::add_u32(&self.0, 0, 1)
    }

    /// To be told of a place after the last of `tiles`: the last block to get one sets the counter back.
    #[inline(always)]
    #[track_caller]
    pub fn leave(&self, index: u32, tiles: u32) {
        let tickets = tiles + block::count()[0];
        if index == tickets - 1 {
            atomic::add_u32(&self.0, 0, tickets.wrapping_neg());
        }
    }
}
