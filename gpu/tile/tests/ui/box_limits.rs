use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::shared::SharedTile;
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

fn rows_of_twelve_bytes(map: &TensorMap<u32, 8, 3>, tile: SharedTile<u32, 8, 3>, full: Mbarrier) {
    map.load(tile, [0, 0], full);
}

fn too_many_rows(map: &TensorMapMut<u32, 300, 4>, tile: SharedTile<u32, 300, 4>) {
    map.store([0, 0], tile);
}

fn main() {
    let _ = (rows_of_twelve_bytes as fn(&_, _, _), too_many_rows as fn(&_, _));
}
