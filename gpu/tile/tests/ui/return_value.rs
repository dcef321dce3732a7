use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
pub fn sum(input: Global<f32>) -> f32 {
    input.load(0)
}

fn main() {}
