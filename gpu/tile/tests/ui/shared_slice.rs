use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
pub fn read(input: &[f32]) {}

fn main() {}
