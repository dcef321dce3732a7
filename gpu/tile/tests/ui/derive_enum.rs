use oxtile_tile::prelude::*;

#[derive(Clone, Copy, Parameter)]
enum Side {
    Left,
    Right,
}

fn main() {}
