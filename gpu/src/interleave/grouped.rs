//! The layouts of the scales of a [group](crate::group) by one launch.
//!
//! A member's rows are its outer indices and its columns its blocks. All members' compact scales lie in one buffer, the interleaved ones in
//! another; word 3 of a member's record says where the compact ones start, 4 where the interleaved ones do.

use oxtile_tile::num::{e4m3, ue8m0};
use oxtile_tile::prelude::*;

use super::*;
use crate::group::{self, Grouped, Member, Members};

/// Blocks of the single kernels that a CUDA block does: of rows, with all loads under way at once, of columns one after the other.
const PARTS: u32 = 4;
/// CUDA blocks a multiprocessor of the kernels of rows: 1280 threads of 48 registers.
const RESIDENT: u32 = 5;

/// Interleaves scales that are compact as `[outer, blocks]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_rows_grid, min_blocks = RESIDENT)]
#[instances(S = [ue8m0, e4m3])]
pub fn interleave_rows_grouped<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, table: Members) {
    let (member, (number, r)) = (Member::of_block(&table), rows::place_of_thread());
    let [from, to] = starts(&member);
    let (compact, interleaved) = (compact.slice(from.0, from.1), interleaved.slice(to.0, to.1));
    let tiles = tiles(&member, number);
    let words = tiles.each_ref().map(|tile| if tile.exists() { rows::load_quarters(&compact, tile, r) } else { [0; 4] });
    for (tile, words) in tiles.iter().zip(&words) {
        if tile.exists() {
            interleaved.store_vector(tile.vector(r), Vector::from_words(*words));
        }
    }
}

/// The inverse.
#[kernel(threads = THREADS, grid = deinterleave_rows_grid, min_blocks = RESIDENT)]
#[instances(S = [ue8m0, e4m3])]
pub fn deinterleave_rows_grouped<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, table: Members) {
    let (member, (number, r)) = (Member::of_block(&table), rows::place_of_thread());
    let [to, from] = starts(&member);
    let (interleaved, compact) = (interleaved.slice(from.0, from.1), compact.slice(to.0, to.1));
    let tiles = tiles(&member, number);
    let words = tiles.each_ref().map(|tile| if tile.exists() { interleaved.load_vector(tile.vector(r)).words() } else { [0; 4] });
    for (tile, words) in tiles.iter().zip(&words) {
        if tile.exists() {
            rows::store_quarters(&compact, tile, r, *words);
        }
    }
}

/// Interleaves scales that are compact as `[blocks, outer]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_columns_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn interleave_columns_grouped<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, table: Members) {
    let member = Member::of_block(&table);
    let [from, to] = starts(&member);
    let (compact, interleaved) = (compact.slice(from.0, from.1), interleaved.slice(to.0, to.1));
    group::for_each_part::<PARTS>(member.block, |part| columns::interleave(&compact, &interleaved, &tile(&member, part, thread::warp())));
}

/// The inverse.
#[kernel(threads = THREADS, grid = deinterleave_columns_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn deinterleave_columns_grouped<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, table: Members) {
    let member = Member::of_block(&table);
    let [to, from] = starts(&member);
    let (interleaved, compact) = (interleaved.slice(from.0, from.1), compact.slice(to.0, to.1));
    group::for_each_part::<PARTS>(member.block, |part| columns::deinterleave(&interleaved, &compact, &tile(&member, part, thread::warp())));
}

/// Start and length of the member's compact scales, and of its interleaved ones.
#[inline(always)]
fn starts(member: &Member) -> [(u64, u64); 2] {
    let [compact, interleaved, _] = member.starts;
    [(compact, member.elements()), (interleaved, interleaved_len(member.rows, member.columns))]
}

/// Tile `number` of each of the CUDA block's parts, so that their loads are under way together.
#[inline(always)]
fn tiles(member: &Member, number: u32) -> [Tile; PARTS as usize] {
    let across = Tile::groups(member.columns);
    let [mut x, mut y] = Member::place_of(member.block * u64::from(PARTS), across);
    core::array::from_fn(|_| {
        let tile = Tile::at([x, y], number, member.rows, member.columns);
        (x, y) = if x + 1 == across { (0, y + 1) } else { (x + 1, y) };
        tile
    })
}

/// Tile `number` of a part of the CUDA block's.
#[inline(always)]
fn tile(member: &Member, part: u64, number: u32) -> Tile {
    Tile::at(Member::place_of(part, Tile::groups(member.columns)), number, member.rows, member.columns)
}

macro_rules! grids {
    ($($grid:ident: $kernel:ident, $args:ident;)*) => { $(
        fn $grid<S: ScaleCode>(args: &$args<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
            args.table.grid()
        }

        impl<S: ScaleCode> Grouped for $kernel<S> {
            fn blocks(outer: u64, blocks: u64) -> u64 {
                (outer.div_ceil(TILE_OUTER) * Tile::groups(blocks)).div_ceil(u64::from(PARTS))
            }
        }
    )* };
}
grids! {
    interleave_rows_grid: InterleaveRowsGrouped, InterleaveRowsGroupedArgs;
    deinterleave_rows_grid: DeinterleaveRowsGrouped, DeinterleaveRowsGroupedArgs;
    interleave_columns_grid: InterleaveColumnsGrouped, InterleaveColumnsGroupedArgs;
    deinterleave_columns_grid: DeinterleaveColumnsGrouped, DeinterleaveColumnsGroupedArgs;
}
