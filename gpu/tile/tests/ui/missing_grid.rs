use oxtile_tile::prelude::*;

#[kernel(threads = 256)]
pub fn fill(output: GlobalMut<f32>) {}

fn main() {}
