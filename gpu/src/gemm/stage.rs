//! What one stage of the ring holds.

use oxtile_tile::arch::{Columns, MatrixColumns, MatrixElement};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix::Operand;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterTile, StoredElement};
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMap;
use oxtile_tile::vector::Vector;

use super::place::Place;
use super::{FEW, PART};

/// A part of an operand: 64 rows of 128 bytes, in either direction.
type Part<T, const DEPTH: usize> = SharedTile<T, PART, DEPTH, Swizzle128>;

/// The boxes of a part with few rows: 16 rows each, which lie as those of the part.
type Boxes<T, const DEPTH: usize> = Tiles<SharedTile<T, FEW, DEPTH, Swizzle128>, { PART / FEW }>;

/// Words of a row of a part, which is 128 bytes.
const ROW_WORDS: u32 = 32;

/// Words of a part.
pub(super) const PART_WORDS: usize = PART * ROW_WORDS as usize;

/// A part of `A`, its boxes, and its words, which are zeroed, or hold sums.
type LeftPart<T, const DEPTH: usize> = Overlay<Part<T, DEPTH>, Overlay<Boxes<T, DEPTH>, SharedArray<u32, PART_WORDS>>>;

/// The operands of `DEPTH` elements of the sum, which are 128 bytes: `ROW_PARTS` parts of `A`, and of `B` `COLUMN_PARTS` of `PANELS` boxes of `BOX` columns each.
#[derive(SharedStorage, Clone, Copy)]
pub struct Stage<
    A: Pod,
    B: Pod,
    const DEPTH: usize,
    const ROW_PARTS: usize,
    const COLUMN_PARTS: usize,
    const PANELS: usize,
    const BOX: usize = PART,
> {
    a: Tiles<LeftPart<A, DEPTH>, ROW_PARTS>,
    b: Tiles<Tiles<SharedTile<B, BOX, DEPTH, Swizzle128>, PANELS>, COLUMN_PARTS>,
}

/// What is loaded of a block's rows of `A`.
#[derive(Clone, Copy)]
pub enum Rows<A: Pod, const DEPTH: usize, const RANK: usize> {
    /// All parts, with zeros beyond the edge.
    Parts(TensorMap<A, PART, DEPTH, Swizzle128, RANK>),
    /// Of the only part so many boxes of 16 rows: those that have rows of the matrix.
    Boxes(TensorMap<A, FEW, DEPTH, Swizzle128, RANK>, u32),
}

impl<A, B, const DEPTH: usize, const ROW_PARTS: usize, const COLUMN_PARTS: usize, const PANELS: usize, const BOX: usize>
    Stage<A, B, DEPTH, ROW_PARTS, COLUMN_PARTS, PANELS, BOX>
where
    A: MatrixElement,
    B: MatrixElement,
{
    /// Bytes that are loaded into a stage.
    #[inline(always)]
    pub fn bytes<const RANK: usize>(rows: Rows<A, DEPTH, RANK>) -> u32 {
        match rows {
            Rows::Parts(_) => Self::SIZE,
            Rows::Boxes(_, count) => Self::SIZE - 4 * ROW_WORDS * (PART as u32 - count * FEW as u32),
        }
    }

    /// Bytes of the parts that are loaded into a stage: as many as columns of `B` take.
    pub const PART_BYTES: u32 = (COLUMN_PARTS * PANELS * BOX) as u32 * 4 * ROW_WORDS;
    /// Columns of these.
    pub const PART_COLUMNS: u32 = (COLUMN_PARTS * PANELS / ROW_PARTS * BOX) as u32;

    /// Starts to load a source's part of the block's tile from `row`, `column` on, of so many columns, in place of columns of `B`: those of one warpgroup's rows after those of the other.
    #[inline(always)]
    pub fn load_part<O: Pod, const WIDTH: usize>(
        self,
        parts: &TensorMap<O, PART, WIDTH, Swizzle128, 3>,
        [source, row, column]: [u32; 3],
        full: Mbarrier,
    ) {
        for row_part in 0..ROW_PARTS as u32 {
            for panel in 0..const { (PANELS / ROW_PARTS) as u32 } {
                let at = [source, row + row_part * PART as u32, column + panel * WIDTH as u32];
                parts.load(self.panel(row_part, panel), at, full);
            }
        }
    }

    /// Adds what was loaded of a warpgroup's rows to the columns of its tile from number `first` of such on. All threads of the warpgroup call it.
    #[inline(always)]
    pub fn add_part<O: StoredElement, const WIDTH: usize, const COLUMNS: usize>(
        self,
        tile: &mut RegisterTile<COLUMNS>,
        row_part: u32,
        first: usize,
    ) where
        Columns<COLUMNS>: MatrixColumns,
    {
        let mut panel = 0;
        while panel < PANELS / ROW_PARTS {
            tile.add_columns((first * (PANELS / ROW_PARTS) + panel) * WIDTH, self.panel::<O, WIDTH>(row_part, panel as u32));
            panel += 1;
        }
    }

    /// A panel of a part.
    #[inline(always)]
    fn panel<O: Pod, const WIDTH: usize>(self, row_part: u32, panel: u32) -> SharedTile<O, PART, WIDTH, Swizzle128> {
        self.b.tile(0).tile(row_part * const { (PANELS / ROW_PARTS) as u32 } + panel).cast().rows(0)
    }

    /// Starts to load the block's rows of `A` from `m` on into its own stage, and its share of the columns of `B` from `n` on
    /// into that of every block of the cluster.
    #[inline(always)]
    pub fn load<const CLUSTER: u32, const RANK: usize, const M_MAJOR: bool, const N_MAJOR: bool>(
        self,
        (rows, b): (Rows<A, DEPTH, RANK>, &TensorMap<B, BOX, DEPTH, Swizzle128, RANK>),
        place: impl Place<RANK>,
        [m, n, k]: [u32; 3],
        rank: u32,
        full: Mbarrier,
    ) {
        match rows {
            Rows::Parts(a) => {
                for part in 0..ROW_PARTS as u32 {
                    let m = m + part * PART as u32;
                    a.load(self.a.tile(part).first(), place.a(if M_MAJOR { [k, m] } else { [m, k] }), full);
                }
            }
            Rows::Boxes(a, count) => {
                for number in 0..count {
                    a.load(self.a.tile(0).second().first().tile(number), place.a([m + number * FEW as u32, k]), full);
                }
            }
        }
        let share = const { PANELS as u32 / CLUSTER };
        for part in 0..COLUMN_PARTS as u32 {
            for panel in rank * share..(rank + 1) * share {
                let (target, n) = (self.b.tile(part).tile(panel), n + (part * PANELS as u32 + panel) * BOX as u32);
                let at = place.b(if N_MAJOR { [k, n] } else { [n, k] });
                if CLUSTER == 1 {
                    b.load(target, at, full);
                } else {
                    b.load_multicast(target, at, full, const { (1 << CLUSTER) - 1 });
                }
            }
        }
    }

    /// The memory of a part of `A`, for other use while no operand is there.
    #[inline(always)]
    pub fn words(self, part: u32) -> SharedArray<u32, PART_WORDS> {
        self.a.tile(part).second().second()
    }

    /// Zeros the rows of the only part of `A` from `first` on, which no box fills. Threads share them, each by its number of so many; a fence of the async
    /// proxy and a barrier come after it.
    #[inline(always)]
    #[track_caller]
    pub fn clear(self, first: u32, [thread, threads]: [u32; 2]) {
        let words = self.words(0);
        let mut at = ROW_WORDS * first + 4 * thread;
        while at < const { PART_WORDS as u32 } {
            words.store_vector(at, Vector::from_words([0; 4]));
            at += 4 * threads;
        }
    }

    /// Rows of `A` and `COLUMNS` columns of `B`: what the warpgroup of these parts multiplies.
    #[inline(always)]
    pub fn operands<const COLUMNS: usize, const M_MAJOR: bool, const N_MAJOR: bool>(
        self,
        [row_part, column_part]: [u32; 2],
    ) -> (Operand<A, PART, DEPTH, M_MAJOR>, Operand<B, COLUMNS, DEPTH, N_MAJOR>) {
        (Operand::of(self.a.tile(row_part).first()), Operand::stacked(self.b.tile(column_part)))
    }
}
