use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
#[instances(U = [f32])]
pub fn fill<T: Float>(output: GlobalMut<T>) {}

fn main() {}
