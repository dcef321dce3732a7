#![allow(unused_variables)]
use oxtile_tile::prelude::*;

#[derive(SharedStorage)]
struct Half {
    words: SharedArray<u32, 28_672>,
}

#[derive(SharedStorage)]
struct Both {
    one: Half,
    other: Half,
    more: SharedArray<u32, 1024>,
}

#[kernel(threads = 48, grid = grid)]
pub fn whole_warps(count: u32) {}

#[kernel(threads = 2048, grid = grid)]
pub fn too_many_threads(count: u32) {}

#[kernel(threads = 32, grid = grid, shared = Both)]
pub fn too_much_shared(count: u32) {}

#[kernel(threads = 32, grid = grid, cluster = 16)]
pub fn too_large_cluster(count: u32) {}

#[kernel(threads = 32, grid = grid, min_blocks = 0)]
pub fn no_block(count: u32) {}

#[kernel(threads = 1024, grid = grid, min_blocks = 3)]
pub fn too_many_resident(count: u32) {}

#[kernel(threads = 32, grid = grid, shared = Half, min_blocks = 3)]
pub fn too_much_shared_resident(count: u32) {}

fn grid<A>(_: &A, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

fn main() {}
