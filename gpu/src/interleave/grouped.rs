//! The layouts of the scales of a [group](crate::group) by one launch.
//!
//! A member's rows are its outer indices and its columns its blocks. All members' compact scales lie in one buffer, the interleaved ones in
//! another; word 3 of a member's record says where the compact ones start, 4 where the interleaved ones do.

use oxtile_tile::num::{e4m3, ue8m0};
use oxtile_tile::prelude::*;

use super::*;
use crate::group::{self, Grouped, Member};

/// Interleaves scales that are compact as `[outer, blocks]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_rows_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn interleave_rows_grouped<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, table: Global<u64>, blocks: u64) {
    let (member, (number, r)) = (Member::of_block(&table, blocks), rows::place_of_thread());
    let [from, to] = starts(&member);
    rows::interleave(&compact.slice(from.0, from.1), &interleaved.slice(to.0, to.1), &tile(&member, number), r);
}

/// The inverse.
#[kernel(threads = THREADS, grid = deinterleave_rows_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn deinterleave_rows_grouped<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, table: Global<u64>, blocks: u64) {
    let (member, (number, r)) = (Member::of_block(&table, blocks), rows::place_of_thread());
    let [to, from] = starts(&member);
    rows::deinterleave(&interleaved.slice(from.0, from.1), &compact.slice(to.0, to.1), &tile(&member, number), r);
}

/// Interleaves scales that are compact as `[blocks, outer]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_columns_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn interleave_columns_grouped<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, table: Global<u64>, blocks: u64) {
    let member = Member::of_block(&table, blocks);
    let [from, to] = starts(&member);
    columns::interleave(&compact.slice(from.0, from.1), &interleaved.slice(to.0, to.1), &tile(&member, thread::warp()));
}

/// The inverse.
#[kernel(threads = THREADS, grid = deinterleave_columns_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn deinterleave_columns_grouped<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, table: Global<u64>, blocks: u64) {
    let member = Member::of_block(&table, blocks);
    let [to, from] = starts(&member);
    columns::deinterleave(&interleaved.slice(from.0, from.1), &compact.slice(to.0, to.1), &tile(&member, thread::warp()));
}

/// Start and length of the member's compact scales, and of its interleaved ones.
#[inline(always)]
fn starts(member: &Member) -> [(u64, u64); 2] {
    let [compact, interleaved, _] = member.starts;
    [(compact, member.elements()), (interleaved, interleaved_len(member.rows, member.columns))]
}

/// Tile `number` of the CUDA block's.
#[inline(always)]
fn tile(member: &Member, number: u32) -> Tile {
    Tile::at(member.place(Tile::groups(member.columns)), number, member.rows, member.columns)
}

macro_rules! grids {
    ($($grid:ident: $kernel:ident, $args:ident;)*) => { $(
        fn $grid<S: ScaleCode>(args: &$args<'_, S>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
            group::grid(&args.table, args.blocks)
        }

        impl<S: ScaleCode> Grouped for $kernel<S> {
            fn blocks(outer: u64, blocks: u64) -> u64 {
                outer.div_ceil(TILE_OUTER) * Tile::groups(blocks)
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
