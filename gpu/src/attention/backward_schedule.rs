//! Which block of keys a block of threads takes next in the backward pass, and which queries belong to it.

use oxtile_tile::prelude::*;

use super::backward_workspace::KEYS;

/// The order: heads of keys in sections whose tensors fit the L2 cache together; in a section the first keys of all heads
/// first, as most queries see them where a mask is causal.
///
/// Blocks of keys of one head come in ascending order, and a tile is given out only to who starts it next: so who adds
/// to gradients of queries in the order of keys waits for none but tiles that are under way or done.
#[derive(Clone, Copy)]
pub struct KeySchedule {
    /// Blocks of keys of a head.
    pub key_blocks: u32,
    /// Heads of keys of all batches.
    pub heads: u32,
    /// Heads of keys of a section.
    pub section: u32,
}

/// `KEYS` keys of one head of one batch.
#[derive(Clone, Copy)]
pub struct KeyTile {
    /// The number of the block of keys.
    pub block: u32,
    /// The head of keys, of those of all batches.
    pub head: u32,
}

impl KeyTile {
    /// The first key.
    #[inline(always)]
    pub fn key(&self) -> u32 {
        self.block * KEYS as u32
    }

    /// Its batch and the head in it, of `heads`.
    #[inline(always)]
    pub fn place(&self, heads: u32) -> [u32; 2] {
        // No divisor is zero, as there is a tile; saying so keeps the check out.
        [self.head / heads.max(1), self.head % heads.max(1)]
    }
}

impl KeySchedule {
    /// How many tiles there are.
    #[inline(always)]
    pub fn tiles(&self) -> u32 {
        self.key_blocks * self.heads
    }

    /// Tile `index` of the order.
    #[inline(always)]
    pub fn tile(&self, index: u32) -> Option<KeyTile> {
        if index >= self.tiles() {
            return None;
        }
        // No divisor is zero, as there is a tile; saying so keeps the check out.
        let section_tiles = (self.key_blocks * self.section).max(1);
        let (section, inside) = (index / section_tiles, index % section_tiles);
        let first_head = section * self.section;
        let width = (self.heads - first_head).min(self.section).max(1);
        Some(KeyTile { block: inside / width, head: first_head + inside % width })
    }
}

/// Hands out places in the order of tiles. The counter, one element, is zero before and after a launch.
#[derive(Clone, Copy)]
pub struct KeyQueue(pub GlobalMut<u32>);

impl KeyQueue {
    /// Takes a place. A block does so until it gets one behind the last tile.
    #[inline(always)]
    #[track_caller]
    pub fn take(&self) -> u32 {
        atomic::add_u32(&self.0, 0, 1)
    }

    /// To be told of a place behind the last of `tiles`: the last block to get one sets the counter back.
    #[inline(always)]
    #[track_caller]
    pub fn leave(&self, index: u32, tiles: u32) {
        let tickets = tiles + block::count()[0];
        if index == tickets - 1 {
            atomic::add_u32(&self.0, 0, tickets.wrapping_neg());
        }
    }
}
