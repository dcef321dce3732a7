use oxtile_tile::prelude::*;

#[kernel(grid = grid)]
pub fn fill(output: GlobalMut<f32>) {}

fn main() {}
