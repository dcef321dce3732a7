use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
pub fn fill(output: &mut [f32]) {
    output[0] = 1.0;
}

fn main() {}
