use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
pub fn fill<T: Float>(output: GlobalMut<T>) {}

fn main() {}
