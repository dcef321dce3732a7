use oxtile_tile::prelude::*;

#[derive(Clone, Copy, Parameter)]
struct Sizes {
    rows: Option<u32>,
}

fn main() {}
