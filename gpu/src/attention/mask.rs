//! Which keys a query sees.

use oxtile_tile::register_tile::{self, RegisterTile};

use super::KEYS;

/// Each query sees the first keys up to a number that rises with its row, or all of them.
#[derive(Clone, Copy)]
pub struct Mask<const CAUSAL: bool> {
    /// Keys there are.
    pub keys: u32,
    /// The last key that query 0 sees, if `CAUSAL`; it may be negative.
    pub diagonal: i32,
}

impl<const CAUSAL: bool> Mask<CAUSAL> {
    /// How many keys the query at `row` sees.
    #[inline(always)]
    fn visible(&self, row: u32) -> u32 {
        if CAUSAL { (row.cast_signed() + 1 + self.diagonal).max(0).cast_unsigned().min(self.keys) } else { self.keys }
    }

    /// Blocks of keys of which the rows up to `last` see anything.
    #[inline(always)]
    pub fn blocks(&self, last: u32) -> u32 {
        self.visible(last).div_ceil(KEYS as u32)
    }

    /// Blocks of keys that all rows from `first` on see whole.
    #[inline(always)]
    pub fn whole_blocks(&self, first: u32) -> u32 {
        self.visible(first) / KEYS as u32
    }

    /// Makes the scores of hidden keys -inf, in a tile of scores that begins at query `row` and key `key`.
    #[inline(always)]
    pub fn apply(&self, scores: &mut RegisterTile<KEYS>, row: u32, key: u32) {
        let first = key + register_tile::column(0);
        let seen = [0, 1].map(|half| self.visible(row + register_tile::row(half)).cast_signed() - first.cast_signed());
        scores.map_pairs(|half, pair, values| {
            [0, 1].map(|i| if ((8 * pair + i) as i32) < seen[half] { values[i] } else { f32::NEG_INFINITY })
        });
    }
}
