use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
pub fn fill(output: *mut f32) {}

fn main() {}
