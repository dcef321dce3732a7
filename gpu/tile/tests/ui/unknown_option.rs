use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid, smem = 4096)]
pub fn fill(output: GlobalMut<f32>) {}

fn main() {}
