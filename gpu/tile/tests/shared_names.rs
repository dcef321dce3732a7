//! What the parts of a layout are called in reports.

use oxtile_tile::flag::FlagStorage;
use oxtile_tile::fragment_tile::FragmentTile;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline::{Mbarrier, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};

#[derive(SharedStorage, Clone, Copy)]
#[expect(dead_code, reason = "the layout alone is looked at")]
struct Stage {
    tile: SharedTile<u16, 8, 128, Swizzle128>,
    word: SharedArray<u32, 1>,
}

#[derive(SharedStorage)]
#[expect(dead_code, reason = "the layout alone is looked at")]
struct Shared {
    sums: SharedArray<f32, 5>,
    ring: Pipeline<Stage, 2>,
    either: Overlay<SharedArray<u8, 16>, Mbarrier>,
    pairs: [SharedArray<u16, 2>; 3],
    parts: Tiles<FragmentTile<8>, 2>,
    reached: FlagStorage,
}

fn name(offset: u32, bytes: u32) -> String {
    let mut name = String::new();
    Shared::name_part(offset, bytes, &mut name).unwrap();
    name
}

#[test]
fn every_piece_has_a_name() {
    assert_eq!([name(0, 4), name(7, 1), name(8, 8), name(0, 20)], [".sums[0]", ".sums[1]", ".sums", ".sums"]);
    // Up to the ring's alignment lies nothing.
    assert_eq!([name(20, 4), name(16, 8), name(1023, 1)], ["", "", ""]);
    // A tile of two panels, each 8 rows of 64 elements: chunk 0 of row 1 lies where chunk 1 would.
    let ring = 1024;
    assert_eq!([name(ring, 2), name(ring + 130, 1)], [".ring.stages[0].tile[0, 0]", ".ring.stages[0].tile[1, 9]"]);
    assert_eq!([name(ring + 128 + 16, 2), name(ring + 1024, 4)], [".ring.stages[0].tile[1, 0]", ".ring.stages[0].tile"]);
    assert_eq!([name(ring + 1024, 2), name(ring + 2048, 4)], [".ring.stages[0].tile[0, 64]", ".ring.stages[0].word[0]"]);
    // A stage ends before the next one begins.
    assert_eq!([name(ring + 2052, 4), name(ring + 3072 + 2, 2)], [".ring.stages[0]", ".ring.stages[1].tile[0, 1]"]);
    assert_eq!([name(ring + 6144, 8), name(ring + 6152, 8), name(ring + 6168, 8)], [".ring.full[0]", ".ring.full[1]", ".ring.empty[1]"]);
    let either = ring + 6176;
    assert_eq!([name(either, 1), name(either + 16, 4), name(either + 34, 2)], [".either", ".pairs[0]", ".pairs[1][1]"]);
}
