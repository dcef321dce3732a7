//! Which tile a block computes next: whoever is free takes the next in a fixed order.

use oxtile_tile::prelude::*;

use super::QUERIES;

/// The order: heads in sections whose keys and values fit the L2 cache together; in a section the last rows of all heads
/// first, as they see the most keys where a mask is causal.
#[derive(Clone, Copy)]
pub struct Schedule {
    /// Tiles of a head.
    pub row_tiles: u32,
    /// Heads of a batch.
    pub heads: u32,
    /// Batches.
    pub batches: u32,
    /// Heads of a section.
    pub section: u32,
}

/// `QUERIES` rows of one head of one batch.
#[derive(Clone, Copy)]
pub struct Tile {
    /// The first row.
    pub row: u32,
    /// The head.
    pub head: u32,
    /// The batch.
    pub batch: u32,
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
        // No divisor is zero, as there is a tile; saying so keeps the check out.
        let section_tiles = (self.row_tiles * self.section).max(1);
        let (section, inside) = (index / section_tiles, index % section_tiles);
        let first_head = section * self.section;
        let width = (self.heads * self.batches - first_head).min(self.section).max(1);
        let (head, heads) = (first_head + inside % width, self.heads.max(1));
        Some(Tile { row: (self.row_tiles - 1 - inside / width) * QUERIES as u32, head: head % heads, batch: head / heads })
    }
}

/// Hands out what is behind the first tile of each block. The counter is zero before and after a launch.
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

    /// The index of the tile behind the ticket; the last ticket sets the counter back.
    #[inline(always)]
    #[track_caller]
    pub fn index(&self, ticket: Ticket) -> u32 {
        if ticket.0 == self.tiles - 1 {
            atomic::add_u32(&self.counter, 0, self.tiles.wrapping_neg());
        }
        block::count()[0] + ticket.0
    }
}
