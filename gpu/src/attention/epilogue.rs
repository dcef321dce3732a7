//! The end of a tile: its result and statistics go to device memory.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile, Rows, StoredElement, THREAD_ROWS};
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup;

use super::warpgroup_roles::{Part, WARPGROUP_QUERIES, WarpgroupRoles};

/// Stores a warpgroup's part of the result through its staging tile, and leaves the store in flight. Results in place find the store
/// before waited for.
#[inline(always)]
#[track_caller]
pub fn store<G: WarpgroupRoles, T: StoredElement, const V: usize, const RANK: usize>(
    out: &TensorMapMut<T, WARPGROUP_QUERIES, V, Swizzle128, RANK>,
    result: &RegisterTile<V>,
    staging: Part<T, V>,
    part: u32,
    at: [u32; RANK],
) where
    Columns<V>: MatrixColumns,
{
    if !G::IN_PLACE && warpgroup::is_leader() {
        pipeline::wait_stores_read::<0>();
    }
    warpgroup::sync(part);
    result.store_columns(0, staging);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        out.store(at, staging);
        pipeline::commit_stores();
    }
}

/// Stores one value a row, of `rows` of a head that begins at element `head`, by the first of the four lanes that share it.
#[inline(always)]
#[track_caller]
pub fn store_rows(target: &GlobalMut<f32>, head: u64, row: u32, rows: u32, values: Rows) {
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        if row < rows && thread::lane().is_multiple_of(4) {
            target.store(head + u64::from(row), values[half]);
        }
        half += 1;
    }
}

/// Stores a warpgroup's results in `f32`, of the rows below `rows` of a head that begins at row `head` of all; rows have `size` elements.
#[inline(always)]
#[track_caller]
pub fn store_sums<const V: usize>(target: &GlobalMut<f32>, head: u64, row: u32, rows: u32, size: u32, result: &RegisterTile<V>)
where
    Columns<V>: MatrixColumns,
{
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        let start = (head + u64::from(row)) * u64::from(size);
        let mut pair = 0;
        while pair < RegisterTile::<V>::PAIRS {
            let column = register_tile::column(pair as u32);
            if row < rows && column < size {
                target.store_pair(start + u64::from(column), result.pair(half, pair).map(f32::to_bits));
            }
            pair += 1;
        }
        half += 1;
    }
}
