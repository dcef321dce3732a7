//! Where the row scales of a CUDA block meet: the warps of a [tile](super::column_tile) have two bytes of each row.

use oxtile_tile::num::{bf16, ue8m0};
use oxtile_tile::prelude::*;

use super::column_tile::{ColumnTile, ROWS, columns_a_block};
use super::*;

/// The row scales of a CUDA block, `[32, scales_a_row]`; `f32` needs half of it.
pub(super) type RowScales = SharedArray<ue8m0, { BLOCK as usize * scales_a_row::<bf16>() as usize }>;

/// Scales of a row in a CUDA block.
pub(super) const fn scales_a_row<T>() -> u32 {
    columns_a_block::<T>() / BLOCK as u32
}

/// Puts the scale of the lane's block of one row where the CUDA block's meet.
#[inline(always)]
pub(super) fn put_scale<T>(staged: RowScales, tile: &ColumnTile<T>, step: u32, code: ue8m0) {
    if thread::lane().is_multiple_of(lanes_a_block::<T>()) {
        staged.store((step * ROWS + tile.row) * scales_a_row::<T>() + tile.vector / lanes_a_block::<T>(), code);
    }
}
