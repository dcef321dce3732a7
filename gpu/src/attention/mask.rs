//! Which keys a query sees.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile};

use super::sequence::Sequence;
use super::shape::{Checked, check_rows};

/// No bound: further than any sequence is long.
pub const FAR: i32 = 1 << 30;

/// Bounds that hold for all sequences of a launch, which may differ in length.
#[derive(Clone, Copy, Parameter)]
pub struct Window {
    /// Keys seen before the diagonal, which is aligned bottom-right unless [given](super::Sequences::diagonals); at most [`FAR`].
    pub left: i32,
    /// Keys seen after it, at most [`FAR`].
    pub right: i32,
    /// Whether query `i` sees no key after key `i`.
    pub top_left: bool,
}

/// Query `i` of a sequence sees keys `i + first` to `i + last`, of the keys there are.
#[derive(Clone, Copy, Parameter)]
pub struct Mask {
    /// Queries there are.
    pub queries: u32,
    /// Keys there are.
    pub keys: u32,
    /// The first key that query 0 sees, from `-FAR` to `FAR`.
    pub first: i32,
    /// The last key that query 0 sees, from `-FAR` to `FAR`.
    pub last: i32,
}

/// What pads chunks of keys to whole blocks, where keys count with it.
#[derive(Clone, Copy, Debug)]
pub struct Gaps {
    /// Keys of the last block of a chunk.
    pub keys: u32,
    /// 2^32 over the blocks of a chunk, rounded up: times a number of blocks it is below itself where that is whole chunks.
    inverse: u32,
}

impl Gaps {
    /// None.
    pub const NONE: Self = Self { keys: 0, inverse: 0 };

    /// Those of chunks of so many keys, in blocks of `KEYS`. Blocks of a sequence, and of a chunk, are below 2^16.
    ///
    /// Source: Lemire, Kaser, Kurz, "Faster remainder by direct computation", 2019, section 3.2.
    #[inline(always)]
    pub fn of<const KEYS: usize>(chunk: u32) -> Self {
        let blocks = chunk.div_ceil(KEYS as u32).max(1);
        Self { keys: chunk - (blocks - 1) * KEYS as u32, inverse: (u32::MAX / blocks).wrapping_add(1) }
    }

    /// Whether a block is the last of its chunk.
    #[inline(always)]
    pub fn follow(self, block: u32) -> bool {
        // Of chunks of one block the inverse has wrapped to 0, and each is the last.
        (block + 1).wrapping_mul(self.inverse) <= self.inverse.wrapping_sub(1)
    }
}

/// Blocks or rows `begin` to `end`, which is not among them; none if `begin` is not below `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub begin: u32,
    /// One after the last.
    pub end: u32,
}

impl Span {
    /// How many there are.
    #[inline(always)]
    pub fn length(self) -> u32 {
        self.end.saturating_sub(self.begin)
    }

    /// What lies within another span; where nothing does, an empty span at its beginning.
    #[inline(always)]
    pub fn within(self, all: Self) -> Self {
        let end = self.end.min(all.end).max(all.begin);
        Self { begin: self.begin.max(all.begin).min(end), end }
    }

    /// Part `index` of `parts`, which are equal but for one and may be empty.
    #[inline(always)]
    pub fn part(self, index: u32, parts: u32) -> Self {
        let edge = |index: u32| self.begin + self.length() * index / parts.max(1);
        Self { begin: edge(index), end: edge(index + 1) }
    }
}

impl Window {
    /// The mask of one sequence.
    #[inline(always)]
    pub fn of(self, sequence: &Sequence) -> Mask {
        let Sequence { queries, keys, diagonal, .. } = *sequence;
        let last = (diagonal + self.right).min(if self.top_left { 0 } else { FAR });
        Mask { queries, keys, first: (diagonal - self.left).max(-FAR), last }
    }

    pub(super) fn check(&self) -> Checked {
        check_reach("window.left", self.left)?;
        check_reach("window.right", self.right)
    }
}

/// How far from a query its last or first key is.
pub(super) fn check_reach(name: &'static str, keys: i32) -> Checked {
    LaunchError::check_limit(name, keys.unsigned_abs().into(), FAR.unsigned_abs().into())
}

impl Mask {
    pub(super) fn check(&self) -> Checked {
        check_rows([("mask.queries", self.queries), ("mask.keys", self.keys)])?;
        check_reach("mask.first", self.first)?;
        check_reach("mask.last", self.last)
    }

    /// All of the keys.
    #[inline(always)]
    pub fn full(queries: u32, keys: u32) -> Self {
        Self { queries, keys, first: -FAR, last: FAR }
    }

    /// Before this key, the query at `row` sees none.
    #[inline(always)]
    fn begin(&self, row: u32) -> i32 {
        (row.cast_signed() + self.first).max(0)
    }

    /// From this key on, the query at `row` sees none.
    #[inline(always)]
    fn end(&self, row: u32) -> i32 {
        // One is added last, where nothing overflows.
        (row.cast_signed() + self.last).max(-1).min(self.keys.cast_signed() - 1) + 1
    }

    /// Blocks of `KEYS` keys of which any of the queries `rows` sees anything.
    #[inline(always)]
    pub fn blocks<const KEYS: usize>(&self, rows: Span) -> Span {
        let last = rows.end.min(self.queries);
        if rows.begin >= last {
            return Span { begin: 0, end: 0 };
        }
        let (begin, end) = (self.begin(rows.begin).cast_unsigned(), self.end(last - 1).cast_unsigned());
        Span { begin: begin / KEYS as u32, end: end.div_ceil(KEYS as u32) }
    }

    /// Blocks of `KEYS` keys of which each of the queries `rows` sees all.
    #[inline(always)]
    pub fn whole_blocks<const KEYS: usize>(&self, rows: Span) -> Span {
        let (begin, end) = (self.begin(rows.end - 1).cast_unsigned(), self.end(rows.begin).cast_unsigned());
        Span { begin: begin.div_ceil(KEYS as u32), end: end / KEYS as u32 }
    }

    /// Queries that see any of the keys `keys`.
    #[inline(always)]
    pub fn rows(&self, keys: Span) -> Span {
        let last = keys.end.min(self.keys);
        if keys.begin >= last {
            return Span { begin: 0, end: 0 };
        }
        // Key `j` is seen by queries from `j - last` to `j - first`.
        let begin = (keys.begin.cast_signed() - self.last).max(0);
        let end = (last.cast_signed() - 1 - self.first).max(-1).min(self.queries.cast_signed() - 1) + 1;
        Span { begin: begin.cast_unsigned(), end: end.cast_unsigned() }
    }

    /// Whether the query at `row` sees `key`.
    #[inline(always)]
    pub fn sees(&self, row: u32, key: u32) -> bool {
        row < self.queries && key.cast_signed() >= self.begin(row) && key.cast_signed() < self.end(row)
    }

    /// Makes the scores of keys after those seen -inf, in a tile of scores that begins at query `row` and key `key`.
    #[inline(always)]
    pub fn hide_after<const KEYS: usize>(&self, scores: &mut RegisterTile<KEYS>, row: u32, key: u32)
    where
        Columns<KEYS>: MatrixColumns,
    {
        let end = columns_of(row, key, |row| self.end(row));
        scores.map_pairs(|half, pair, values| {
            [0, 1].map(|i| if ((8 * pair + i) as i32) < end[half] { values[i] } else { f32::NEG_INFINITY })
        });
    }

    /// The same for keys before those seen.
    #[inline(always)]
    pub fn hide_before<const KEYS: usize>(&self, scores: &mut RegisterTile<KEYS>, row: u32, key: u32)
    where
        Columns<KEYS>: MatrixColumns,
    {
        let begin = columns_of(row, key, |row| self.begin(row));
        scores.map_pairs(|half, pair, values| {
            [0, 1].map(|i| if ((8 * pair + i) as i32) >= begin[half] { values[i] } else { f32::NEG_INFINITY })
        });
    }
}

/// Makes the scores of columns from `end` on -inf, of every row of a tile.
#[inline(always)]
pub(super) fn hide_from<const KEYS: usize>(scores: &mut RegisterTile<KEYS>, end: u32)
where
    Columns<KEYS>: MatrixColumns,
{
    let end = end.cast_signed() - register_tile::column(0).cast_signed();
    scores.map_pairs(|_, pair, values| [0, 1].map(|i| if ((8 * pair + i) as i32) < end { values[i] } else { f32::NEG_INFINITY }));
}

/// A bound of each of the thread's rows, counted from the thread's first column.
#[inline(always)]
fn columns_of(row: u32, key: u32, bound: impl Fn(u32) -> i32) -> [i32; 2] {
    let first = (key + register_tile::column(0)).cast_signed();
    [0, 1].map(|half| bound(row + register_tile::row(half)) - first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of blocks that a sequence may have, in chunks of few blocks, of many, and of powers of two.
    #[test]
    fn gaps_follow_the_last_block_of_a_chunk() {
        const KEYS: usize = 128;
        for blocks in (1..50).chain([64, 255, 256, 257, 4095, 32767, 32768, 65535]) {
            for keys in [1, 77, 128] {
                let gaps = Gaps::of::<KEYS>((blocks - 1) * KEYS as u32 + keys);
                assert_eq!(gaps.keys, keys);
                assert!((0..65535).all(|block| gaps.follow(block) == (block + 1_u32).is_multiple_of(blocks)), "{blocks}");
            }
        }
    }

    /// Spans against what single queries see, for every mask of a small sequence.
    #[test]
    fn spans_cover_what_is_seen() {
        const KEYS: usize = 4;
        for (queries, keys) in [(1, 1), (5, 9), (9, 5), (8, 8), (3, 0)] {
            for (first, last) in
                (-12..12).flat_map(|first| (-12..12).map(move |last| (first, last))).chain([(-FAR, FAR), (-FAR, 0), (0, FAR)])
            {
                let mask = Mask { queries, keys, first, last };
                for begin in 0..queries {
                    let rows = Span { begin, end: begin + 3 };
                    let (some, whole) = (mask.blocks::<KEYS>(rows), mask.whole_blocks::<KEYS>(rows));
                    for block in 0..4 {
                        let sees = |row: u32| (0..KEYS as u32).filter(|i| mask.sees(row, block * KEYS as u32 + i)).count();
                        let any = (begin..(begin + 3).min(queries)).any(|row| sees(row) > 0);
                        assert!(!any || (some.begin <= block && block < some.end), "{first} {last}: {rows:?} sees of block {block}");
                        let inside = whole.begin <= block && block < whole.end;
                        let all = (begin..(begin + 3).min(queries)).all(|row| sees(row) == KEYS);
                        assert!(!inside || all, "{first} {last}: {rows:?} does not see all of block {block}");
                    }
                }
                for key in 0..keys {
                    let rows = mask.rows(Span { begin: key, end: key + 1 });
                    let seen: [bool; 9] = core::array::from_fn(|row| mask.sees(row as u32, key));
                    let expected: [bool; 9] = core::array::from_fn(|row| rows.begin <= row as u32 && (row as u32) < rows.end);
                    assert_eq!(seen, expected, "{first} {last}: key {key} of {queries} by {keys}");
                }
            }
        }
    }
}
