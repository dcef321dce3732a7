//! How a result leaves: from registers through shared memory to device memory, by TMA.

use crate::layout::Swizzle;
use crate::register_tile::{ROWS, RegisterTile, StoredElement};
use crate::shared::{SharedTile, Tiles};
use crate::tensor_map::TensorMapMut;
use crate::{arch, pipeline, sync, warpgroup};

/// Starts to store a warpgroup's tile of which the first element belongs at `at`, `WIDTH` columns at a time, in turn
/// through two tiles of shared memory: one is written while the other is stored. Elements beyond the matrix's edge are
/// left out.
///
/// All threads of warpgroup `number`, as [`warpgroup::sync`] numbers it, call it. The stores are bulk groups of the
/// warpgroup's first thread, which waits for their reads before the block ends ([`finish`]).
#[inline(always)]
#[track_caller]
pub fn store<T: StoredElement, const WIDTH: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize>(
    map: &TensorMapMut<T, ROWS, WIDTH, S, RANK>,
    at: [u32; RANK],
    tile: &RegisterTile<COLUMNS>,
    staging: Tiles<SharedTile<T, ROWS, WIDTH, S>, 2>,
    number: u32,
) where
    arch::Columns<COLUMNS>: arch::MatrixColumns,
{
    const { assert!(COLUMNS.is_multiple_of(WIDTH), "the tile is stored in whole parts") };
    store_parts(map, at, tile, staging, number);
}

/// The same of as many parts of `WIDTH` columns as the tile has, whole. Returns the first column that is left.
#[inline(always)]
#[track_caller]
pub fn store_parts<T: StoredElement, const WIDTH: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize>(
    map: &TensorMapMut<T, ROWS, WIDTH, S, RANK>,
    at: [u32; RANK],
    tile: &RegisterTile<COLUMNS>,
    staging: Tiles<SharedTile<T, ROWS, WIDTH, S>, 2>,
    number: u32,
) -> usize
where
    arch::Columns<COLUMNS>: arch::MatrixColumns,
{
    let mut first = 0;
    while first + WIDTH <= COLUMNS {
        let target = staging.tile((first / WIDTH % 2) as u32);
        if warpgroup::is_leader() {
            // Tiles take turns, unless a result is an odd number of parts wide.
            if const { (COLUMNS / WIDTH).is_multiple_of(2) } {
                pipeline::wait_stores_read::<1>();
            } else {
                pipeline::wait_stores_read::<0>();
            }
        }
        warpgroup::sync(number);
        tile.store_columns(first, target);
        sync::fence_proxy_async();
        warpgroup::sync(number);
        if warpgroup::is_leader() {
            let mut place = at;
            place[RANK - 1] += first as u32;
            map.store(place, target);
            pipeline::commit_stores();
        }
        first += WIDTH;
    }
    first
}

/// Waits until the staging tiles of the calling warpgroup are read, as they must be before the block ends. What it stored lands before the launch ends, with no wait.
#[inline(always)]
#[track_caller]
pub fn finish() {
    if warpgroup::is_leader() {
        pipeline::wait_stores_read::<0>();
    }
}
