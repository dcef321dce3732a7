use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
#[instances(T = [f32])]
pub fn fill<T: Float, const N: usize>(output: GlobalMut<T>) {}

fn main() {}
