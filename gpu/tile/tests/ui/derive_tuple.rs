use oxtile_tile::prelude::*;

#[derive(Clone, Copy, Parameter)]
struct Pair(u32, u32);

fn main() {}
