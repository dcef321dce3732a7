//! What is added to a product before anything else follows it: a compile-time policy of the warpgroups that multiply.

#![allow(clippy::needless_range_loop, reason = "an iterator leaves an array in local memory")]

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::Arrivals;
use oxtile_tile::num::opaque;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile, StoredElement, THREAD_ROWS};
use oxtile_tile::warpgroup;

use super::PART;
use super::arrival::Gathered;

/// Columns from a thread's pair to its next one.
pub(super) const PAIR: u32 = 8;
/// Pairs of columns whose loads are in flight together: the registers hold them beside the tile.
const TOGETHER: usize = 16;

/// Adds to tiles of products.
pub trait Addends {
    /// Adds to a tile of `COLUMNS` columns, of a product of `[rows, columns]`, whose first element is that at `at`. All threads of warpgroup `number` call it.
    fn add<O: StoredElement, const COLUMNS: usize>(
        &mut self,
        tile: &mut RegisterTile<COLUMNS>,
        old: &GlobalMut<O>,
        size: [u32; 2],
        at: [u32; 2],
        number: u32,
    ) where
        Columns<COLUMNS>: MatrixColumns;
}

/// Nothing is added.
pub struct Nothing;

impl Addends for Nothing {
    #[inline(always)]
    fn add<O: StoredElement, const COLUMNS: usize>(
        &mut self,
        _: &mut RegisterTile<COLUMNS>,
        _: &GlobalMut<O>,
        _: [u32; 2],
        _: [u32; 2],
        _: u32,
    ) where
        Columns<COLUMNS>: MatrixColumns,
    {
    }
}

/// The same product of other ranks, which comes while the kernel runs: a matrix a source, one after another, added in `f32` in their order. Each comes in panels of rows with a flag
/// each. A tile waits for the panels of which it has rows once its own product is there.
///
/// One thread of a warpgroup waits, and the warpgroup's barrier tells the others.
pub struct Parts {
    gathered: Gathered,
    arrivals: Arrivals,
}

impl Parts {
    /// Nothing was waited for yet.
    #[inline(always)]
    pub const fn new(gathered: Gathered) -> Self {
        Self { gathered, arrivals: Arrivals::new(gathered.waits) }
    }

    /// Waits for rows `row` and after, before `end`, of all sources.
    #[inline(always)]
    #[track_caller]
    fn wait(&mut self, row: u32, end: u32) {
        let Gathered { extent, sources, .. } = self.gathered;
        let (mut at, end) = (row / extent.max(1) * sources, end.div_ceil(extent.max(1)) * sources);
        while at < end {
            self.gathered.wait(&mut self.arrivals, at);
            at += 1;
        }
    }
}

impl Addends for Parts {
    #[inline(always)]
    fn add<O: StoredElement, const COLUMNS: usize>(
        &mut self,
        tile: &mut RegisterTile<COLUMNS>,
        old: &GlobalMut<O>,
        [rows, columns]: [u32; 2],
        [row, column]: [u32; 2],
        number: u32,
    ) where
        Columns<COLUMNS>: MatrixColumns,
    {
        if warpgroup::is_leader() {
            self.wait(row.min(rows - 1), rows.min(row + PART as u32));
        }
        warpgroup::sync(number);
        // A warpgroup's tile begins inside of the columns. What is outside is added too, from a place inside, and not stored: loads that depend on nothing are in flight together.
        let mut source = 0;
        while source < self.gathered.sources {
            let matrix = source * rows;
            let starts: [u64; THREAD_ROWS] = core::array::from_fn(|half| {
                // Opaque: the places of all sources' rows would stay in registers.
                let row = opaque((row + register_tile::row(half as u32)).min(rows - 1));
                u64::from(matrix + row) * u64::from(columns) + u64::from(column + register_tile::column(0))
            });
            let is_whole = column + COLUMNS as u32 <= columns;
            let mut first = 0;
            while first < RegisterTile::<COLUMNS>::PAIRS {
                let parts: [[[O; 2]; THREAD_ROWS]; TOGETHER] = core::array::from_fn(|i| {
                    let at = PAIR * (first + i) as u32;
                    let at = if is_whole || at < columns - column { at } else { 0 };
                    core::array::from_fn(|half| old.load_neighbours(starts[half] + u64::from(at)))
                });
                for i in 0..TOGETHER {
                    for half in 0..THREAD_ROWS {
                        let ([a, b], [x, y]) = (tile.pair(half, first + i), parts[i][half].map(O::to_f32));
                        tile.set_pair(half, first + i, [a + x, b + y]);
                    }
                }
                warp::sync();
                first += TOGETHER;
            }
            source += 1;
        }
    }
}
