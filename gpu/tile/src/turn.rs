//! Transposition of tiles of 8-bit elements in shared memory, which matrix instructions do for 16 bits only.

use crate::arch::{MatrixElement, MatrixMove, Target};
use crate::layout::Swizzle;
use crate::num::permute_bytes;
use crate::shared::SharedTile;
use crate::thread;

impl<T: MatrixElement, const ROWS: usize, const COLUMNS: usize, S: Swizzle> SharedTile<T, ROWS, COLUMNS, S> {
    /// The parts in which [`turn`](Self::turn) works: 32 rows by 16 columns each.
    pub const TURN_PARTS: u32 = (ROWS / 32 * (COLUMNS / 16)) as u32;

    /// Writes part `part` of the tile to its transpose, by one warp, all of whose lanes call it.
    ///
    /// The order of rows changes, as [`to_turned_operand`](crate::register_tile::RegisterTile::to_turned_operand) needs it: of
    /// 16 of them, row `8 j + 2 q + e` becomes column `4 q + 2 j + e`. Before a matrix instruction reads the transpose comes
    /// a [`fence_proxy_async`](crate::sync::fence_proxy_async).
    ///
    /// A lane loads two neighbours in a row by two neighbours in a column, transposed in units of 16 bits, from four matrices of
    /// 8 rows; pairs of those words are sorted into one of even and one of odd columns. Lanes of the lower half of a
    /// matrix swap the two, so that eight rows that are stored together meet all banks.
    #[inline(always)]
    #[track_caller]
    pub fn turn<S2: Swizzle>(self, target: SharedTile<T, COLUMNS, ROWS, S2>, part: u32) {
        const {
            assert!(size_of::<T>() == 1, "16 bits are transposed by the instructions that read them");
            assert!(ROWS.is_multiple_of(32) && COLUMNS.is_multiple_of(16), "a part has 32 rows and 16 columns");
        }
        let (rows, columns) = (part / (COLUMNS / 16) as u32 * 32, part % (COLUMNS / 16) as u32 * 16);
        let lane = thread::lane();
        // SAFETY: `address_of` gives the address of 16 elements, 16 bytes that lie together, inside the tile.
        let [a, b, c, d] = unsafe { Target::load_matrices_transposed(self.address_of(rows + lane, columns)) };
        let (first, second) = if lane < 16 { (0x6420, 0x7531) } else { (0x7531, 0x6420) };
        let words = [permute_bytes(a, b, first), permute_bytes(a, b, second), permute_bytes(c, d, first), permute_bytes(c, d, second)];
        let (matrix, pair) = (lane / 8, lane % 8);
        let column = columns + 2 * pair + (matrix % 2 ^ pair / 4);
        // SAFETY: as above.
        unsafe { Target::store_matrices(target.address_of(column, rows + matrix / 2 * 16), words) };
    }
}
