//! Scales that are compact as `[outer, blocks]`.
//!
//! A thread makes 16 bytes of a tile from four words, one of each quarter of its rows: eight threads read a whole sector of
//! a row, and the threads of a tile write it without a gap.

use oxtile_tile::num::{e4m3, ue8m0};
use oxtile_tile::prelude::*;

use super::*;

/// Interleaves compact scales `[outer, blocks]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn interleave_rows<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, outer: u64, blocks: u64) {
    let (number, r) = place_of_thread();
    interleave(&compact, &interleaved, &Tile::of_block(number, outer, blocks), r);
}

/// What a thread does with its place in a tile.
#[inline(always)]
fn interleave<S: ScaleCode>(compact: &Global<S>, interleaved: &GlobalMut<S>, tile: &Tile, r: u32) {
    if tile.exists() {
        interleaved.store_vector(tile.vector(r), Vector::from_words(load_quarters(compact, tile, r)));
    }
}

/// The words of a thread's four rows of a tile, 0 beyond the last.
#[inline(always)]
pub(super) fn load_quarters<S: ScaleCode>(compact: &Global<S>, tile: &Tile, r: u32) -> [u32; 4] {
    [0, 1, 2, 3].map(|quarter| {
        let i = tile.i + 32 * quarter + u64::from(r);
        if i < tile.outer { load_four(compact, i, tile.j, tile.blocks) } else { 0 }
    })
}

/// The inverse: compact scales `[outer, blocks]` from interleaved ones.
#[kernel(threads = THREADS, grid = deinterleave_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn deinterleave_rows<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, outer: u64, blocks: u64) {
    let (number, r) = place_of_thread();
    deinterleave(&interleaved, &compact, &Tile::of_block(number, outer, blocks), r);
}

/// What a thread does with its place in a tile.
#[inline(always)]
fn deinterleave<S: ScaleCode>(interleaved: &Global<S>, compact: &GlobalMut<S>, tile: &Tile, r: u32) {
    if tile.exists() {
        store_quarters(compact, tile, r, interleaved.load_vector(tile.vector(r)).words());
    }
}

/// Writes the words of a thread's four rows of a tile.
#[inline(always)]
pub(super) fn store_quarters<S: ScaleCode>(compact: &GlobalMut<S>, tile: &Tile, r: u32, words: [u32; 4]) {
    for (quarter, word) in words.iter().enumerate() {
        let i = tile.i + 32 * quarter as u64 + u64::from(r);
        if i < tile.outer {
            store_four(compact, i, tile.j, tile.blocks, *word);
        }
    }
}

/// The tile among the CUDA block's and the row of it: neighbouring threads take the same row of neighbouring tiles.
#[inline(always)]
pub(super) fn place_of_thread() -> (u32, u32) {
    (thread::index() % TILES, thread::index() / TILES)
}

fn interleave_grid<S: ScaleCode>(args: &InterleaveRowsArgs<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let interleaved = ("interleaved", args.interleaved.len(), args.interleaved.address());
    grid(("compact", args.compact.len()), interleaved, args.outer, args.blocks)
}

fn deinterleave_grid<S: ScaleCode>(args: &DeinterleaveRowsArgs<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let interleaved = ("interleaved", args.interleaved.len(), args.interleaved.address());
    grid(("compact", args.compact.len()), interleaved, args.outer, args.blocks)
}
