//! The layouts of the scales of a [group](crate::group) by one launch.
//!
//! A member's rows are its outer indices and its columns its blocks. All members' compact scales lie in one buffer, the interleaved ones in
//! another; word 3 of a member's record says where the compact ones start, 4 where the interleaved ones do.

use oxtile_tile::num::{e4m3, ue8m0};
use oxtile_tile::prelude::*;

use super::*;
use crate::group::{self, Grouped, Member, Members};

/// Blocks of the single kernels that a CUDA block does.
const PARTS: u32 = 4;

/// Interleaves scales that are compact as `[outer, blocks]`; the padding becomes 0.
#[kernel(threads = THREADS, grid = interleave_rows_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn interleave_rows_grouped<S: ScaleCode>(compact: Global<S>, interleaved: GlobalMut<S>, table: Members) {
    let (member, (number, r)) = (Member::of_block(&table), rows::place_of_thread());
    let [from, to] = starts(&member);
    let (compact, interleaved) = (compact.slice(from.0, from.1), interleaved.slice(to.0, to.1));
    group::for_each_part::<PARTS>(member.block, |part| rows::interleave(&compact, &interleaved, &tile(&member, part, number), r));
}

/// The inverse.
#[kernel(threads = THREADS, grid = deinterleave_rows_grid)]
#[instances(S = [ue8m0, e4m3])]
pub fn deinterleave_rows_grouped<S: ScaleCode>(interleaved: Global<S>, compact: GlobalMut<S>, table: Members) {
    let (member, (number, r)) = (Member::of_block(&table), rows::place_of_thread());
    let [to, from] = starts(&member);
    let (interleaved, compact) = (interleaved.slice(from.0, from.1), compact.slice(to.0, to.1));
    group::for_each_part::<PARTS>(member.block, |part| rows::deinterleave(&interleaved, &compact, &tile(&member, part, number), r));
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
