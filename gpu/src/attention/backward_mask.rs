//! Which queries see a block of keys: a [`Mask`] from the keys' side.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile};

use super::backward_schedule::BlockOrder;
use super::backward_workspace::BACKWARD_KEYS;
use super::mask::{FAR, Mask, Span};

/// Queries of the mask that are not there: blocks of queries are counted without them, and masked as if they were there.
pub trait Gap: Copy {
    /// Where a block is, counted with those that are not there.
    fn place(self, block: u32) -> u32;
    /// The first block at or after such a place.
    fn block(self, place: u32) -> u32;
}

/// All queries are there.
#[derive(Clone, Copy)]
pub struct NoGap;

/// Blocks that are not there, whole ones: those from place `begin` on.
#[derive(Clone, Copy, Parameter)]
pub struct Missing {
    /// The first.
    pub begin: u32,
    /// How many.
    pub count: u32,
}

impl Gap for NoGap {
    #[inline(always)]
    fn place(self, block: u32) -> u32 {
        block
    }

    #[inline(always)]
    fn block(self, place: u32) -> u32 {
        place
    }
}

impl Gap for Missing {
    #[inline(always)]
    fn place(self, block: u32) -> u32 {
        if block < self.begin { block } else { block + self.count }
    }

    #[inline(always)]
    fn block(self, place: u32) -> u32 {
        if place <= self.begin { place } else { self.begin + (place - self.begin).saturating_sub(self.count) }
    }
}

/// A mask, cut into blocks of `QUERIES` queries by `KEYS` keys; unless `MASKED`, every query sees all keys.
#[derive(Clone, Copy)]
pub struct BlockMask<const QUERIES: usize, const MASKED: bool, const KEYS: usize = BACKWARD_KEYS, G: Gap = NoGap> {
    mask: Mask,
    gap: G,
}

impl<const QUERIES: usize, const MASKED: bool, const KEYS: usize> BlockMask<QUERIES, MASKED, KEYS> {
    /// Of queries that are all there.
    #[inline(always)]
    pub const fn new(mask: Mask) -> Self {
        Self { mask, gap: NoGap }
    }
}

impl<const QUERIES: usize, const MASKED: bool, const KEYS: usize, G: Gap> BlockMask<QUERIES, MASKED, KEYS, G> {
    /// Of queries of which some are not there.
    #[inline(always)]
    pub const fn with(mask: Mask, gap: G) -> Self {
        Self { mask, gap }
    }

    /// Blocks of queries of which any sees a key of block `keys`.
    #[inline(always)]
    pub fn blocks(&self, keys: u32) -> Span {
        if !MASKED {
            return Span { begin: 0, end: self.gap.block(self.mask.queries.div_ceil(QUERIES as u32)) };
        }
        let begin = keys * KEYS as u32;
        let rows = self.mask.rows(Span { begin, end: begin + KEYS as u32 });
        Span { begin: self.gap.block(rows.begin / QUERIES as u32), end: self.gap.block(rows.end.div_ceil(QUERIES as u32)) }
    }

    /// The [`blocks`](Self::blocks) in the order in which block `keys` meets them. Without a mask it begins
    /// with another for each block of keys, so that blocks that compute together add to different sums. If they add in order of keys, the
    /// last comes first: a block of keys is never seen by queries before those that see the one before it, so it has queries
    /// of its own to begin with, or is one block late; the other way a causal mask would have it wait for all the queries before its own.
    #[inline(always)]
    pub fn order(&self, keys: u32, ordered: bool) -> BlockOrder {
        let blocks = self.blocks(keys);
        let first = if ordered {
            blocks.end.wrapping_sub(1)
        } else if MASKED && (self.mask.first > -FAR || self.mask.last < FAR) {
            blocks.begin
        } else {
            // The divisor is not zero where there are queries; `max(1)` saves its check.
            keys * KEYS as u32 / QUERIES as u32 % blocks.end.max(1)
        };
        BlockOrder { blocks, first, falling: ordered }
    }

    /// How many blocks of keys before block `keys` have the block of queries among their [`blocks`](Self::blocks).
    #[inline(always)]
    pub fn earlier(&self, keys: u32, block: u32) -> u32 {
        if !MASKED {
            return keys;
        }
        keys - self.mask.blocks::<KEYS>(self.queries(block)).begin
    }

    /// Whether a query of the block does not see all of block `keys`.
    #[inline(always)]
    pub fn cuts(&self, keys: u32, block: u32) -> bool {
        if !MASKED {
            return (keys + 1) * KEYS as u32 > self.mask.keys;
        }
        let whole = self.mask.whole_blocks::<KEYS>(self.queries(block));
        keys < whole.begin || keys >= whole.end
    }

    /// Where a block of queries is for [`hide`](Self::hide).
    #[inline(always)]
    pub fn place(&self, block: u32) -> u32 {
        self.gap.place(block)
    }

    /// Makes the scores of masked keys -inf, in a transposed tile of scores that begins at key `key` and at a block of queries, which is given by its
    /// [place](Self::place).
    #[inline(always)]
    pub fn hide(&self, scores: &mut RegisterTile<QUERIES>, key: u32, place: u32)
    where
        Columns<QUERIES>: MatrixColumns,
    {
        // Counted from the block's first query, so that nothing need be kept for the next block. Rows after the last query
        // are left: they count nothing anyway.
        let first = (place * QUERIES as u32 + register_tile::column(0)).cast_signed();
        let seen = [0, 1].map(|half| {
            let key = (key + register_tile::row(half)).cast_signed();
            let row = key - first;
            let [begin, last] = if MASKED { [row - self.mask.last, row - self.mask.first] } else { [i32::MIN, i32::MAX] };
            [if key < self.mask.keys.cast_signed() { begin } else { i32::MAX }, last]
        });
        scores.map_pairs(|half, pair, values| {
            let [begin, last] = seen[half];
            [0, 1].map(|i| {
                let row = (8 * pair + i) as i32;
                if row >= begin && row <= last { values[i] } else { f32::NEG_INFINITY }
            })
        });
    }

    /// The queries of a block.
    #[inline(always)]
    fn queries(&self, block: u32) -> Span {
        let begin = self.gap.place(block) * QUERIES as u32;
        Span { begin, end: (begin + QUERIES as u32).min(self.mask.queries) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of keys add to a block of queries in turn: their numbers follow each other without a gap, from 0 on.
    #[test]
    fn turns_follow_each_other() {
        for (queries, keys) in [(1, 1), (300, 500), (500, 300), (257, 384), (64, 1000)] {
            for first in [-FAR, -700, -300, -129, -1, 0, 200] {
                for last in [first, first + 63, first + 300, 0, 100, FAR].into_iter().filter(|&last| last >= first) {
                    let mask = BlockMask::<64, true>::new(Mask { queries, keys, first, last });
                    let mut turns = [0; 8];
                    for block in 0..keys.div_ceil(BACKWARD_KEYS as u32) {
                        for queries in mask.blocks(block).begin..mask.blocks(block).end {
                            assert_eq!(mask.earlier(block, queries), turns[queries as usize], "{first} {last}: {block} to {queries}");
                            turns[queries as usize] += 1;
                        }
                    }
                }
            }
        }
    }

    /// The blocks that are there see what those of all queries do, and take their turns as these, at the same places.
    #[test]
    fn missing_queries_leave_the_others_as_they_are() {
        let places = [(2, 4, 0), (2, 0, 128), (4, 6, 512), (4, 2, -256)];
        let windows = places.into_iter().flat_map(|place| [FAR, 0, 1, 100, 128, 300].map(|width| (place, width)));
        for ((begin, count, last), width) in windows {
            let first = if width == FAR { -FAR } else { last - width };
            let mask = Mask { queries: (2 * begin + count) * 64, keys: 2048, first, last };
            let (all, some) =
                (BlockMask::<64, true>::new(mask), BlockMask::<64, true, BACKWARD_KEYS, _>::with(mask, Missing { begin, count }));
            for keys in 0..16 {
                let is_there = |place: &u32| !(begin..begin + count).contains(place);
                let expected = (all.blocks(keys).begin..all.blocks(keys).end).filter(is_there);
                let found = (some.blocks(keys).begin..some.blocks(keys).end).map(|block| some.place(block));
                assert!(found.eq(expected), "{begin} {count} {first} {last}: keys {keys}");
                for block in some.blocks(keys).begin..some.blocks(keys).end {
                    let place = some.place(block);
                    assert_eq!((some.earlier(keys, block), some.cuts(keys, block)), (all.earlier(keys, place), all.cuts(keys, place)));
                }
            }
        }
    }
}
