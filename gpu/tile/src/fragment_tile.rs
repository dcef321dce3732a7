//! Register tiles in memory, as the registers hold them: for sums that are added up elsewhere and come back,
//! in no order of rows and columns.
//!
//! The 4 numbers of a thread's pair `j` of both its rows lie together; the 128 threads' lie one after the other; the
//! pairs follow. So every access is one of 16 bytes, free of bank conflicts, and the tile is one contiguous piece.

use core::fmt::{self, Write};

use crate::arch::{BulkCopy, Columns, MatrixColumns, SharedMemory, Target};
use crate::global::GlobalMut;
use crate::register_tile::{ROWS, RegisterTile};
use crate::shared::{SharedStorage, Tiles, name_element};
use crate::{thread, warpgroup};

/// A 64 by `COLUMNS` register tile in shared memory.
pub struct FragmentTile<const COLUMNS: usize> {
    address: u32,
}

impl<const COLUMNS: usize> Clone for FragmentTile<COLUMNS> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<const COLUMNS: usize> Copy for FragmentTile<COLUMNS> {}

impl<const COLUMNS: usize> SharedStorage for FragmentTile<COLUMNS> {
    const SIZE: u32 = 4 * Self::ELEMENTS;
    const ALIGN: u32 = 16;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address }
    }

    /// `[element]`, in the order of the memory.
    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        name_element(4, offset, bytes, name)
    }
}

/// Numbers of the first pair of all threads.
const PAIR: u32 = 4 * warpgroup::THREADS;

/// Where the thread's numbers of pair `pair` begin.
#[inline(always)]
#[track_caller]
fn place(pair: usize) -> u32 {
    pair as u32 * PAIR + 4 * (thread::index() % warpgroup::THREADS)
}

impl<const COLUMNS: usize> FragmentTile<COLUMNS> {
    /// Numbers of the tile.
    pub const ELEMENTS: u32 = (ROWS * COLUMNS) as u32;
}

impl<const COLUMNS: usize, const COUNT: usize> Tiles<FragmentTile<COLUMNS>, COUNT> {
    const ELEMENTS: u32 = COUNT as u32 * FragmentTile::<COLUMNS>::ELEMENTS;

    /// Starts to add the tiles to as many elements of `target` from `start` on, each by itself, in no order; sums and addends
    /// below the normal numbers are taken for zero. One thread calls it, in its bulk group. The tiles were written before a
    /// [`fence_proxy_async`](crate::sync::fence_proxy_async) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub fn add_to(self, target: &GlobalMut<f32>, start: u64) {
        let global = target.range(start, Self::ELEMENTS.into());
        // SAFETY: `range` checked that side where this build checks; the derive laid the tiles inside the arena, without gaps.
        unsafe { Target::add_f32(global, self.address(), 4 * Self::ELEMENTS) };
    }

    /// Starts to store the tiles; otherwise as [`add_to`](Self::add_to).
    #[inline(always)]
    #[track_caller]
    pub fn store_to(self, target: &GlobalMut<f32>, start: u64) {
        let global = target.range(start, Self::ELEMENTS.into());
        // SAFETY: as `add_to`.
        unsafe { <Target as BulkCopy>::store(global, self.address(), 4 * Self::ELEMENTS) };
    }
}

impl<const COLUMNS: usize> RegisterTile<COLUMNS>
where
    Columns<COLUMNS>: MatrixColumns,
{
    /// Writes the tile to shared memory as it is. All threads of the warpgroup call it; it does not wait.
    #[inline(always)]
    #[track_caller]
    pub fn store_fragments(&self, target: FragmentTile<COLUMNS>) {
        let mut pair = 0;
        while pair < Self::PAIRS {
            let ([a, b], [c, d]) = (self.pair(0, pair), self.pair(1, pair));
            // SAFETY: 16 bytes of this thread at a multiple of 16, inside the tile.
            unsafe { <Target as SharedMemory>::store_vector(target.address + 4 * place(pair), [a, b, c, d].map(f32::to_bits)) };
            pair += 1;
        }
    }

    /// The tile that [`add_to`](Tiles::add_to) or [`store_to`](Tiles::store_to) brought to `source` from `start` on,
    /// a multiple of 4. All threads of the warpgroup call it.
    #[inline(always)]
    #[track_caller]
    pub fn load_fragments(source: &GlobalMut<f32>, start: u64) -> Self {
        let mut tile = Self::zero();
        let mut pair = 0;
        while pair < Self::PAIRS {
            let values = source.load_vector(start + u64::from(place(pair)));
            tile.set_pair(0, pair, [values.lane(0), values.lane(1)]);
            tile.set_pair(1, pair, [values.lane(2), values.lane(3)]);
            pair += 1;
        }
        tile
    }
}
