use oxtile_tile::prelude::*;

fn main() {
    let _: SharedArray<u32, 4> = SharedArray::at(1 << 20);
}
