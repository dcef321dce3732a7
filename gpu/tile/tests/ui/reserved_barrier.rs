use oxtile_tile::sync::NamedBarrier;

const TAKEN: NamedBarrier = NamedBarrier::new(0, 128);

fn main() {
    let _ = TAKEN;
}
