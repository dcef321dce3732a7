use oxtile_tile::prelude::*;

#[derive(Clone, Copy, Parameter)]
#[parameter(absent)]
struct Sizes {
    rows: u32,
}

fn main() {}
