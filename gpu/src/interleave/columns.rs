//! Scales that are compact as `[blocks, outer]`: MXFP8's columnwise ones. The interleave transposes them.
//!
//! One warp a tile: a lane loads four neighbours of each of four rows, 128 bytes a row and warp, transposes their bytes, and then
//! the four lanes, 8 apart, that hold the same outer indices modulo 32 exchange words, so that each stores 16 bytes.
//! Both steps are their own inverse. Where rows allow it, a warp of `interleave_columns` makes four tiles below each other, from 16
//! neighbours a lane.

use oxtile_tile::num::{permute_bytes, ue8m0};
use oxtile_tile::prelude::*;

use super::*;

/// Tiles below each other that a warp makes.
const DOWN: u64 = 4;

/// Interleaves compact scales `[blocks, outer]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_grid)]
#[instances(S = [ue8m0])]
pub fn interleave_columns<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, outer: u64, blocks: u64) {
    let [group, strip] = Tile::place_of_block();
    let tile = |i: u64| Tile::at([group, strip * DOWN + i], thread::warp(), outer, blocks);
    let first = tile(0);
    let is_aligned = outer.is_multiple_of(16) && compact.start().is_multiple_of(16);
    if warp::all(is_aligned && first.i + DOWN * TILE_OUTER <= outer && first.j + TILE_BLOCKS <= blocks) {
        interleave_four(&compact, &interleaved, &first);
    } else {
        let tiles = outer.saturating_sub(first.i).div_ceil(TILE_OUTER).min(DOWN);
        (0..tiles).for_each(|i| interleave(&compact, &interleaved, &tile(i)));
    }
}

/// A warp's work on whole tiles below each other, of which this is the first: lane `8 t + 2 q + h` loads quarter `q` of tile `t`, half
/// `h` of it, and stores the vectors `q`, `q + 4`, `q + 8` and `q + 12` of the half.
#[inline(always)]
fn interleave_four<S: ScaleCode>(compact: &Global<S>, interleaved: &GlobalMut<S>, first: &Tile) {
    let Tile { i, j, outer, blocks } = *first;
    let [tile, quarter, half] = [thread::lane() / 8, thread::lane() % 8 / 2, thread::lane() % 2];
    let start = j * outer + i + u64::from(thread::lane() * 16);
    let [a, b, c, d] = core::array::from_fn(|row| compact.lasting().load_vector(start + row as u64 * outer).words());
    let to = Tile { i: i + u64::from(tile) * TILE_OUTER, j, outer, blocks }.vector(half * 16 + quarter);
    (0..4).for_each(|word| {
        let words = exchange(transpose_bytes([a[word], b[word], c[word], d[word]]), 2);
        interleaved.store_vector(to + 64 * word as u64, Vector::from_words(words));
    });
}

/// What a warp does with its tile.
#[inline(always)]
pub(super) fn interleave<S: ScaleCode>(compact: &Global<S>, interleaved: &GlobalMut<S>, tile: &Tile) {
    let Tile { outer, blocks, .. } = *tile;
    if warp::all(tile.exists()) {
        let i = tile.i + u64::from(thread::lane() * 4);
        let rows = [0, 1, 2, 3].map(|row| if tile.j + row < blocks { load_four(compact, tile.j + row, i, outer) } else { 0 });
        let words = exchange(transpose_bytes(rows), 8);
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
        let rows = transpose_bytes(exchange(words, 8));
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
pub(crate) fn transpose_bytes([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (ab, cd) = (permute_bytes(a, b, 0x5140), permute_bytes(c, d, 0x5140));
    let (ab_high, cd_high) = (permute_bytes(a, b, 0x7362), permute_bytes(c, d, 0x7362));
    [
        permute_bytes(ab, cd, 0x5410),
        permute_bytes(ab, cd, 0x7632),
        permute_bytes(ab_high, cd_high, 0x5410),
        permute_bytes(ab_high, cd_high, 0x7632),
    ]
}

/// Transposes 4x4 words of four lanes, `apart` lanes from one to the next: word `w` of lane `g` of them and word `g` of lane `w` change
/// places.
#[inline(always)]
fn exchange(words: [u32; 4], apart: u32) -> [u32; 4] {
    let [a, b, c, d] = words;
    let ([a, b], [c, d]) = (swap(a, b, apart), swap(c, d, apart));
    let ([a, c], [b, d]) = (swap(a, c, 2 * apart), swap(b, d, 2 * apart));
    [a, b, c, d]
}

/// Exchange between two lanes `flip` apart: the lower keeps its first word and gets the upper's first as its second; the upper keeps its
/// second and gets the lower's second as its first.
#[inline(always)]
fn swap(first: u32, second: u32, flip: u32) -> [u32; 2] {
    let upper = thread::lane() & flip != 0;
    let received = warp::shuffle_xor(if upper { first } else { second }, flip);
    if upper { [received, second] } else { [first, received] }
}

fn interleave_grid<S: ScaleCode>(args: &InterleaveColumnsArgs<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let interleaved = ("interleaved", args.interleaved.len(), args.interleaved.address());
    let grid = grid(("compact", args.compact.len()), interleaved, args.outer, args.blocks)?;
    // Strips of tiles are as many times fewer.
    Ok(Grid { y: grid.y.div_ceil(DOWN as u32), ..grid })
}

fn deinterleave_grid<S: ScaleCode>(args: &DeinterleaveColumnsArgs<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let interleaved = ("interleaved", args.interleaved.len(), args.interleaved.address());
    grid(("compact", args.compact.len()), interleaved, args.outer, args.blocks)
}
