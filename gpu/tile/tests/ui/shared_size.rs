#![allow(unused_variables)]
use oxtile_tile::prelude::*;

#[derive(SharedStorage)]
struct Shared {
    window: SharedArray<f32, 65_536>,
    total: SharedArray<f32, 1>,
}

#[kernel(threads = 32, grid = grid, shared = Shared)]
#[instances(K = [3, 5])]
pub fn conv<const K: usize>(count: u32) {}

fn grid<const K: usize>(_: &ConvArgs<'_, K>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

fn main() {}
