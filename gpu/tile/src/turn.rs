//! Transposition of tiles of 8-bit elements in shared memory, which matrix instructions do for 16 bits only.

use crate::arch::{MatrixElement, MatrixMove, Target};
use crate::layout::Swizzle;
use crate::num::permute_bytes;
use crate::shared::SharedTile;
use crate::thread;

/// Chunks of 16 columns that are on their way at once.
const BATCH: usize = 1;

impl<T: MatrixElement, const ROWS: usize, const COLUMNS: usize, S: Swizzle> SharedTile<T, ROWS, COLUMNS, S> {
    /// Writes 32 rows from `row` on, a multiple of 32, to the transpose, by one warp, all of whose lanes call it.
    ///
    /// The order of rows changes, as [`to_turned_operand`](crate::register_tile::RegisterTile::to_turned_operand) needs it: of
    /// 16 of them, row `8 j + 2 q + e` becomes column `4 q + 2 j + e`. Before a matrix instruction reads the transpose comes
    /// a [`fence_proxy_async`](crate::sync::fence_proxy_async).
    #[inline(always)]
    #[track_caller]
    pub fn turn<S2: Swizzle>(self, target: SharedTile<T, COLUMNS, ROWS, S2>, row: u32) {
        const {
            assert!(size_of::<T>() == 1, "16 bits are transposed by the instructions that read them");
            assert!(ROWS.is_multiple_of(32) && COLUMNS.is_multiple_of(16 * BATCH), "32 rows and 32 columns are turned at once");
            assert!(Self::LAYOUT.panels() == 1 && matches!(COLUMNS, 64 | 128), "a row is one panel, of whole chunks");
        }
        let (matrix, pair) = (thread::lane() / 8, thread::lane() % 8);
        let source = self.address_of(row + thread::lane(), 0);
        let target = target.address_of(2 * pair + ((matrix % 2) ^ (pair / 4)), row + matrix / 2 * 16);
        let mut first = 0;
        while first < COLUMNS / 16 {
            // Everything is loaded before anything is stored, so that loads do not wait for stores.
            let mut words = [[0; 4]; BATCH];
            let mut i = 0;
            while i < BATCH {
                // SAFETY: swizzles permute the chunks of a row by an xor, so this is chunk `first + i` of the lane's row, inside
                // the tile.
                words[i] = unsafe { Target::load_matrices_transposed(source ^ ((first + i) as u32 * 16)) };
                i += 1;
            }
            let mut i = 0;
            while i < BATCH {
                let down = (first + i) as u32 * 16 * SharedTile::<T, COLUMNS, ROWS, S2>::LAYOUT.panel_row();
                // SAFETY: 16 rows are whole atoms, so this is the same chunk of a row further down, inside the tile.
                unsafe { Target::store_matrices(target + down, sorted(words[i])) };
                i += 1;
            }
            first += BATCH;
        }
    }
}

/// A lane has two neighbours in a row for each of two rows, of four matrices of eight rows. Of two matrices, the words of even columns
/// and of odd ones; lanes of a matrix's lower half swap the two, so that the eight rows that are stored together meet all banks.
#[inline(always)]
#[track_caller]
fn sorted([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (first, second) = if thread::lane() < 16 { (0x6420, 0x7531) } else { (0x7531, 0x6420) };
    [permute_bytes(a, b, first), permute_bytes(a, b, second), permute_bytes(c, d, first), permute_bytes(c, d, second)]
}
