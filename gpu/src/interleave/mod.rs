//! Block scales in the order that block-scaled matrix multiplication reads, and back.
//!
//! Scales are compact, row-major, unpadded, or interleaved: tiles of 128 outer indices `i` (rows of the operand) by 4
//! blocks `j` along the summed dimension, 512 bytes each, padded with zeros,
//!
//! ```text
//! offset(i, j) = (i / 128 * T + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4,    T = ceil(blocks / 4)
//! ```
//!
//! (cuBLAS, "1D block scaling factors layout"; TransformerEngine `common/cast/mxfp8/swizzle.cuh`). Rowwise scales are compact as
//! `[i, j]`; so are NVFP4's columnwise ones, whose data is transposed. MXFP8's columnwise scales are `[j, i]`, and
//! the interleave transposes them.
//!
//! Memory-bound: a byte read and a byte written a scale. Nothing beyond the compact extent is read or, by the inverse,
//! written. Interleaved scales of shards are not those of the whole: exchange compact ones.

mod columns;
mod grouped;
mod rows;

pub(crate) use columns::transpose_bytes;
pub use columns::{DEINTERLEAVE_COLUMNS, DeinterleaveColumns, DeinterleaveColumnsArgs};
pub use columns::{INTERLEAVE_COLUMNS, InterleaveColumns, InterleaveColumnsArgs};
pub use grouped::*;
pub use rows::{DEINTERLEAVE_ROWS, DeinterleaveRows, DeinterleaveRowsArgs};
pub use rows::{INTERLEAVE_ROWS, InterleaveRows, InterleaveRowsArgs};

use oxtile_tile::num::{Pod, e4m3, ue8m0};
use oxtile_tile::prelude::*;

/// Outer indices of a tile.
pub const TILE_OUTER: u64 = 128;
/// Blocks of a tile.
pub const TILE_BLOCKS: u64 = 4;
/// Bytes of a tile.
pub const TILE_BYTES: u64 = TILE_OUTER * TILE_BLOCKS;

/// Tiles that a CUDA block makes, side by side along the blocks.
const TILES: u32 = 8;
const THREADS: u32 = TILES * warp::LANES;
/// The last two dimensions of a grid are at most this.
const GRID_LIMIT: u64 = 65_535;

/// A scale of one byte.
pub trait ScaleCode: Pod {
    /// From its code.
    fn from_code(code: u8) -> Self;
    /// Its code.
    fn code(self) -> u8;
}

macro_rules! scale_codes {
    ($($scale:ident)*) => { $(
        impl ScaleCode for $scale {
            #[inline(always)]
            fn from_code(code: u8) -> Self {
                Self::from_bits(code)
            }

            #[inline(always)]
            fn code(self) -> u8 {
                self.to_bits()
            }
        }
    )* };
}
scale_codes!(ue8m0 e4m3);

/// Bytes of the interleaved scales of `outer` by `blocks`: both padded to whole tiles.
pub const fn interleaved_len(outer: u64, blocks: u64) -> u64 {
    outer.div_ceil(TILE_OUTER) * blocks.div_ceil(TILE_BLOCKS) * TILE_BYTES
}

/// Where the scale of outer index `i` and block `j` of `blocks` is in interleaved scales.
#[inline(always)]
pub const fn offset(i: u64, j: u64, blocks: u64) -> u64 {
    let tile = i / TILE_OUTER * blocks.div_ceil(TILE_BLOCKS) + j / TILE_BLOCKS;
    tile * TILE_BYTES + i % 32 * 16 + i % TILE_OUTER / 32 * 4 + j % TILE_BLOCKS
}

/// A tile of the scales of `outer` by `blocks`.
struct Tile {
    /// Its first outer index.
    i: u64,
    /// Its first block.
    j: u64,
    outer: u64,
    blocks: u64,
}

impl Tile {
    /// Tile `number` of the CUDA block's: grid x walks along the blocks, y and z along the outer index.
    #[inline(always)]
    fn of_block(number: u32, outer: u64, blocks: u64) -> Self {
        Self::at(Self::place_of_block(), number, outer, blocks)
    }

    /// The CUDA block's group of tiles and its strip.
    #[inline(always)]
    fn place_of_block() -> [u64; 2] {
        let [group, y, z] = block::index();
        [u64::from(group), u64::from(z) * u64::from(block::count()[1]) + u64::from(y)]
    }

    /// CUDA blocks side by side along the blocks.
    #[inline(always)]
    const fn groups(blocks: u64) -> u64 {
        blocks.div_ceil(TILE_BLOCKS * TILES as u64)
    }

    /// Tile `number` of a group in a strip of outer indices.
    #[inline(always)]
    fn at([group, strip]: [u64; 2], number: u32, outer: u64, blocks: u64) -> Self {
        Self { i: strip * TILE_OUTER, j: u64::from(group as u32 * TILES + number) * TILE_BLOCKS, outer, blocks }
    }

    /// Whether there is such a tile: a CUDA block may reach beyond the last.
    #[inline(always)]
    fn exists(&self) -> bool {
        self.i < self.outer && self.j < self.blocks
    }

    /// Where its 16 bytes of outer indices `r`, `r + 32`, `r + 64` and `r + 96` start in the interleaved scales.
    #[inline(always)]
    fn vector(&self, r: u32) -> u64 {
        offset(self.i, self.j, self.blocks) + u64::from(r) * 16
    }
}

/// Four scales of a row of `width` compact scales from `column` on, of which those beyond it are 0.
#[inline(always)]
fn load_four<S: ScaleCode>(compact: &Global<S>, row: u64, column: u64, width: u64) -> u32 {
    let start = row * width + column;
    if width.is_multiple_of(4) && compact.start().is_multiple_of(4) {
        return if column < width { compact.load_word(start) } else { 0 };
    }
    let byte = |i: u64| if column + i < width { u32::from(compact.load(start + i).code()) << (8 * i) } else { 0 };
    byte(0) | byte(1) | byte(2) | byte(3)
}

/// The inverse: stores those that are not beyond the row.
#[inline(always)]
fn store_four<S: ScaleCode>(compact: &GlobalMut<S>, row: u64, column: u64, width: u64, word: u32) {
    let start = row * width + column;
    if width.is_multiple_of(4) && compact.start().is_multiple_of(4) {
        if column < width {
            compact.store_word(start, word);
        }
        return;
    }
    for i in 0..4 {
        if column + i < width {
            compact.store(start + i, S::from_code((word >> (8 * i)) as u8));
        }
    }
}

/// The grid for compact scales of `outer` by `blocks` and their interleaved form, lengths checked.
fn grid(compact: (&'static str, u64), interleaved: (&'static str, u64, u64), outer: u64, blocks: u64) -> Result<Grid, LaunchError> {
    LaunchError::check_limit("outer", outer, GRID_LIMIT * GRID_LIMIT * TILE_OUTER)?;
    LaunchError::check_limit("blocks", blocks, i32::MAX as u64 * TILE_BLOCKS)?;
    LaunchError::check_length(compact.0, outer.saturating_mul(blocks), compact.1)?;
    LaunchError::check_length(interleaved.0, interleaved_len(outer, blocks), interleaved.1)?;
    LaunchError::check_alignment(interleaved.0, 16, interleaved.2)?;
    if outer == 0 || blocks == 0 { Ok(Grid::x(0)) } else { Grid::down(Tile::groups(blocks) as u32, "outer", outer, TILE_OUTER) }
}
