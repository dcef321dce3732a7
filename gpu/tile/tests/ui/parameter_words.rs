#![allow(unused_variables)]
use oxtile_tile::prelude::*;

#[derive(Clone, Copy, Parameter)]
struct Twelve {
    a: Global<u32>,
    b: Global<u32>,
    c: Global<u32>,
    d: Global<u32>,
    e: Global<u32>,
    f: Global<u32>,
}

#[derive(Clone, Copy, Parameter)]
struct TwentyFive {
    a: Twelve,
    b: Twelve,
    c: u32,
}

#[kernel(threads = 32, grid = grid)]
pub fn too_many_in_a_struct(all: TwentyFive) {}

#[kernel(threads = 32, grid = grid)]
pub fn too_many(a: Twelve, b: Twelve, c: Twelve, d: Twelve, e: Twelve, f: Global<u32>, g: Global<u32>, h: bool) {}

fn grid<A>(_: &A, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

fn main() {}
