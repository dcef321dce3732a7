//! Transposition of tiles of 8-bit elements in shared memory, which matrix instructions do for 16 bits only.

use crate::arch::{MatrixElement, MatrixMove, Target};
use crate::layout::Swizzle;
use crate::num::permute_bytes;
use crate::shared::SharedTile;
use crate::thread;

impl<T: MatrixElement, const ROWS: usize, const COLUMNS: usize, S: Swizzle> SharedTile<T, ROWS, COLUMNS, S> {
    /// The parts in which [`turn`](Self::turn) works: 32 rows by 16 columns each.
    pub const TURN_PARTS: u32 = (ROWS / 32 * (COLUMNS / 16)) as u32;

    /// Writes `COUNT` parts of the tile, `first`, `first + stride`, ..., to its transpose, by one warp, all of whose lanes call it.
    ///
    /// The order of rows changes, as [`to_turned_operand`](crate::register_tile::RegisterTile::to_turned_operand) needs it: of
    /// 16 of them, row `8 j + 2 q + e` becomes column `4 q + 2 j + e`. Before a matrix instruction reads the transpose comes
    /// a [`fence_proxy_async`](crate::sync::fence_proxy_async).
    ///
    /// Everything is loaded before anything is stored, so that loads do not wait for stores.
    #[inline(always)]
    #[track_caller]
    pub fn turn<S2: Swizzle, const COUNT: usize>(self, target: SharedTile<T, COLUMNS, ROWS, S2>, first: u32, stride: u32) {
        const {
            assert!(size_of::<T>() == 1, "16 bits are transposed by the instructions that read them");
            assert!(ROWS.is_multiple_of(32) && COLUMNS.is_multiple_of(16), "a part has 32 rows and 16 columns");
        }
        let origin = |i: usize| {
            let part = first + i as u32 * stride;
            [part / (COLUMNS / 16) as u32 * 32, part % (COLUMNS / 16) as u32 * 16]
        };
        let mut words = [[0; 4]; COUNT];
        let mut i = 0;
        while i < COUNT {
            let [row, column] = origin(i);
            // SAFETY: `address_of` gives the address of 16 elements, 16 bytes that lie together, inside the tile.
            words[i] = unsafe { Target::load_matrices_transposed(self.address_of(row + thread::lane(), column)) };
            i += 1;
        }
        let mut i = 0;
        while i < COUNT {
            let [row, column] = origin(i);
            let (matrix, pair) = (thread::lane() / 8, thread::lane() % 8);
            let at = target.address_of(column + 2 * pair + ((matrix % 2) ^ (pair / 4)), row + matrix / 2 * 16);
            // SAFETY: as above.
            unsafe { Target::store_matrices(at, sorted(words[i])) };
            i += 1;
        }
    }
}

/// A lane has two neighbours in a row for each of two rows, of four matrices. Of two matrices, the words of even columns and of odd
/// ones; lanes of a matrix's lower half swap the two, so that the eight rows that are stored together meet all banks.
#[inline(always)]
#[track_caller]
fn sorted([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (first, second) = if thread::lane() < 16 { (0x6420, 0x7531) } else { (0x7531, 0x6420) };
    [permute_bytes(a, b, first), permute_bytes(a, b, second), permute_bytes(c, d, first), permute_bytes(c, d, second)]
}
