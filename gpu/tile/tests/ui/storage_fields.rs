use oxtile_tile::prelude::*;

#[derive(SharedStorage)]
struct Tuple(SharedArray<f32, 4>);

fn main() {}
