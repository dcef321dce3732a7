//! What the backward pass computes of keys, as a compile-time policy of its [kernel](fn@super::attention_backward): where tiles come from, where rows
//! lie, what is masked, where results go.
//!
//! | problem | takes |
//! |---|---|
//! | [`DenseKeys`](super::DenseKeys) | dense tensors, full or causal |
//! | [`ArrivingRows`](super::ArrivingRows) | dense tensors of one rank, whose keys arrive meanwhile and belong to other ranks |
//! | [`ArrivingChunks`](super::ArrivingChunks) | packed sequences of one rank, whose keys arrive meanwhile and belong to other ranks |
//! | [`SequenceKeys`](super::SequenceKeys) | sequences, windows, caps, `f32` tensors that gradients are added to |

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};

use super::backward_mask::{BlockMask, Gap};
use super::backward_schedule::KeyTile;
use super::backward_tensors::{KeyOrder, QuerySums};
use super::backward_walk::{Sums, Walk};
use super::backward_workspace::{BACKWARD_KEYS, Keys, Rows};

/// What problems have in common.
#[derive(Clone, Copy)]
pub(super) struct Common {
    /// Of blocks of queries.
    pub offsets: Global<f32>,
    /// Of blocks of queries.
    pub deltas: Global<f32>,
    pub sums: QuerySums,
    pub order: KeyOrder,
    /// Query heads of a tile.
    pub group: u32,
    /// The factor of (capped) scores, with `log2(e)`.
    pub scale: f32,
}

/// The order of tiles. One thread walks along it.
pub(super) trait KeyTiles<Item> {
    /// Tile `index`, which is not below that of the call before.
    fn tile(&mut self, index: u32) -> Option<Item>;
    /// How many tiles there are, once there are no more.
    fn tiles(&self) -> u32;
}

/// A tile's number in shared memory, of `WORDS` words. What is known of a tile is read where it is needed: registers are full.
pub(super) type Number<const WORDS: usize> = SharedArray<u32, WORDS>;

/// What is computed, in blocks of `QUERIES` queries; every query sees all keys unless `MASKED`.
pub(super) trait KeyProblem<T, const D: usize, const QUERIES: usize, const WORDS: usize, const MASKED: bool>: Copy
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    /// A tile, with what is known of its sequence.
    type Item: Copy;
    type Tiles: KeyTiles<Self::Item>;
    /// The queries of the mask that are not there.
    type Gap: Gap;

    fn common(&self) -> Common;
    /// The tiles, at the first.
    fn tiles(&self) -> Self::Tiles;

    /// Writes a tile where other warps read it; none says that there are no more.
    fn store_item(item: Option<Self::Item>, number: Number<WORDS>);
    /// Reads one that is there, by one lane.
    fn read(number: Number<WORDS>) -> Self::Item;
    /// The same, where the tile alone was read before.
    fn read_of(tile: KeyTile, number: Number<WORDS>) -> Self::Item;
    /// The same; all lanes of a warp call it, and the compiler sees that all have the same.
    fn read_together(tile: KeyTile, number: Number<WORDS>) -> Self::Item;
    /// The mask of one that is there, where registers are fullest.
    fn read_mask(&self, number: Number<WORDS>) -> BlockMask<QUERIES, MASKED, BACKWARD_KEYS, Self::Gap>;
    /// All of one that is there, before its result is stored. All lanes of a warp call it.
    fn read_result(number: Number<WORDS>) -> Self::Item;

    fn tile(item: &Self::Item) -> KeyTile;
    fn mask(&self, item: &Self::Item) -> BlockMask<QUERIES, MASKED, BACKWARD_KEYS, Self::Gap>;
    /// Where a block of queries of a query head of the tile is in sums and statistics.
    fn query_block(&self, item: &Self::Item, member: u32, block: u32) -> u32;
    /// Starts to copy a tile's keys and values; `again` reads the item again.
    fn load_keys(&self, item: &Self::Item, again: impl Fn() -> Self::Item, stage: Keys<T, D>, full: Mbarrier);
    /// Starts to copy a block of queries of a query head, `at`, and the gradients of their result; `again` reads the item again.
    fn load_rows(&self, item: &Self::Item, again: impl Fn() -> Self::Item, at: [u32; 2], stage: Rows<T, D, QUERIES>, full: Mbarrier);

    /// Changes the products of queries and keys before they count as scores.
    fn edit(&self, products: &mut RegisterTile<QUERIES>);
    /// Changes the gradients of scores, given weights and the [offsets](super::backward_workspace::Statistics::offsets), as `edit` did the scores.
    fn bend(&self, gradients: &mut RegisterTile<QUERIES>, weights: &RegisterTile<QUERIES>, offsets: SharedArray<f32, QUERIES>);
    /// Stores the result of warpgroup `part`. Both call it.
    fn store<const SPAN: usize>(&self, walk: &Walk<T, D, QUERIES, SPAN>, sums: Sums<D>, item: Self::Item, part: u32)
    where
        Columns<SPAN>: MatrixColumns;
}
