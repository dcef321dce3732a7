//! Scales that are compact as `[blocks, outer]`: MXFP8's columnwise ones. The interleave transposes them.
//!
//! One warp a tile: a lane loads four neighbours of each of four rows, 128 bytes a row and warp, transposes their bytes, and then
//! the four lanes, 8 apart, that hold the same outer indices modulo 32 exchange words, so that each stores 16 bytes.
//! Both steps are their own inverse.

use oxtile_tile::num::{permute_bytes, ue8m0};
use oxtile_tile::prelude::*;

use super::*;

/// Interleaves compact scales `[blocks, outer]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_grid)]
#[instances(S = [ue8m0])]
pub fn interleave_columns<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, outer: u64, blocks: u64) {
    interleave(&compact, &interleaved, &Tile::of_block(thread::warp(), outer, blocks));
}

/// What a warp does with its tile.
#[inline(always)]
pub(super) fn interleave<S: ScaleCode>(compact: &Global<S>, interleaved: &GlobalMut<S>, tile: &Tile) {
    let Tile { outer, blocks, .. } = *tile;
    if warp::all(tile.exists()) {
        let i = tile.i + u64::from(thread::lane() * 4);
        let rows = [0, 1, 2, 3].map(|row| if tile.j + row < blocks { load_four(compact, tile.j + row, i, outer) } else { 0 });
        let words = exchange(transpose_bytes(rows));
        interleaved.store_vector(tile.vector(remainder()), Vector::from_words(words));
    }
}

/// The inverse: compact scales `[blocks, outer]` from interleaved ones.
#[kernel(threads = THREADS, grid = deinterleave_grid)]
#[instances(S = [ue8m0])]
pub fn deinterleave_columns<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, outer: u64, blocks: u64) {
    deinterleave(&interleaved, &compact, &Tile::of_block(thread::warp(), outer, blocks));
}

/// What a warp does with its tile.
#[inline(always)]
pub(super) fn deinterleave<S: ScaleCode>(interleaved: &Global<S>, compact: &GlobalMut<S>, tile: &Tile) {
    let Tile { outer, blocks, .. } = *tile;
    if warp::all(tile.exists()) {
        let words = interleaved.load_vector(tile.vector(remainder())).words();
        let rows = transpose_bytes(exchange(words));
        let i = tile.i + u64::from(thread::lane() * 4);
        for (row, word) in rows.iter().enumerate() {
            if tile.j + (row as u64) < blocks {
                store_four(compact, tile.j + row as u64, i, outer, *word);
            }
        }
    }
}

/// The outer index modulo 32 whose 16 bytes this lane holds after the exchange.
#[inline(always)]
fn remainder() -> u32 {
    thread::lane() % 8 * 4 + thread::lane() / 8
}

/// Transposes a 4x4 matrix of bytes, one row a word.
#[inline(always)]
fn transpose_bytes([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (ab, cd) = (permute_bytes(a, b, 0x5140), permute_bytes(c, d, 0x5140));
    let (ab_high, cd_high) = (permute_bytes(a, b, 0x7362), permute_bytes(c, d, 0x7362));
    [
        permute_bytes(ab, cd, 0x5410),
        permute_bytes(ab, cd, 0x7632),
        permute_bytes(ab_high, cd_high, 0x5410),
        permute_bytes(ab_high, cd_high, 0x7632),
    ]
}

/// Transposes 4x4 words of four lanes, 8 apart: word `w` of lane `8 g + l` and word `g` of lane `8 w + l` change places.
#[inline(always)]
fn exchange(words: [u32; 4]) -> [u32; 4] {
    let [a, b, c, d] = words;
    let ([a, b], [c, d]) = (swap(a, b, 8), swap(c, d, 8));
    let ([a, c], [b, d]) = (swap(a, c, 16), swap(b, d, 16));
    [a, b, c, d]
}

/// Of two lanes `flip` apart the lower keeps its first word and gets the upper's first as its second; the upper keeps its
/// second and gets the lower's second as its first.
#[inline(always)]
fn swap(first: u32, second: u32, flip: u32) -> [u32; 2] {
    let upper = thread::lane() & flip != 0;
    let received = warp::shuffle_xor(if upper { first } else { second }, flip);
    if upper { [received, second] } else { [first, received] }
}

fn interleave_grid<S: ScaleCode>(args: &InterleaveColumnsArgs<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let interleaved = ("interleaved", args.interleaved.len(), args.interleaved.address());
    grid(("compact", args.compact.len()), interleaved, args.outer, args.blocks)
}

fn deinterleave_grid<S: ScaleCode>(args: &DeinterleaveColumnsArgs<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let interleaved = ("interleaved", args.interleaved.len(), args.interleaved.address());
    grid(("compact", args.compact.len()), interleaved, args.outer, args.blocks)
}
