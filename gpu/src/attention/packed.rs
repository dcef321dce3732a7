//! Packed sequences, full or causal: they lie anywhere in their tensors and differ in length ([`Sequences`]). The thread that copies walks
//! along them, and tells the others each tile with its sequence; the tensor maps end where the sequence ends ([`place`]).
//!
//! Where the result is stored, the tile is read from shared memory again, so that no register holds it over the walk: there are two places for tiles,
//! by turns, as the next one comes meanwhile.
//!
//! Rows of padding are queries that see no key: they become zeros.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::tensor_map::TensorMap;

use super::mask::{FAR, Mask};
use super::problem::{Problem, ProblemTile, Seen, Staging, Tiles};
use super::rings::Producers;
use super::schedule::{ITEM_WORDS, Item, SequenceQueue, SequenceSchedule};
use super::sequence::{Sequence, Sequences, place};
use super::shape::Heads;
use super::softmax::{Finished, Softmax};
use super::target::{Spot, Target};
use super::walk::Step;
use super::warpgroup_roles::{WARPGROUP_QUERIES, WarpgroupRoles};

/// Attention of packed sequences to all keys or, if `CAUSAL`, to those up to the diagonal.
#[derive(Parameter)]
pub struct Packed<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, R: Target<T, V, 5>, const CAUSAL: bool>
where
    Columns<V>: MatrixColumns,
{
    /// Queries: a tensor of `[heads, rows, size]`, as [`place`] has it.
    pub q: TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, 5>,
    /// Keys.
    pub k: TensorMap<T, KEYS, D, Swizzle128, 5>,
    /// Values.
    pub v: TensorMap<T, KEYS, V, Swizzle128, 5>,
    /// Where the result goes; its log-sum-exp is `[heads, query_rows]`.
    pub target: R,
    /// Where the sequences lie; without diagonals.
    pub sequences: Sequences,
    /// How many heads there are; the step is 0.
    pub heads: Heads,
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// Keys whose heads are computed together.
    pub section_keys: u32,
    /// If `CAUSAL`: whether query 0 is aligned with key 0, or the last query with the last key.
    pub top_left: bool,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// The walk of a block along the tiles of packed sequences.
pub struct PackedTiles {
    schedule: SequenceSchedule,
    queue: SequenceQueue,
    index: u32,
    next: u32,
}

impl PackedTiles {
    /// From the first tile of this block on, of tiles of `tile_rows` queries, which the counter hands out.
    #[inline(always)]
    #[track_caller]
    pub fn new(sequences: Sequences, heads: Heads, tile_rows: u32, section_keys: u32, counter: GlobalMut<u32>) -> Self {
        let schedule = SequenceSchedule::new(sequences, heads, tile_rows, section_keys);
        Self { schedule, queue: SequenceQueue(counter), index: block::index()[0], next: 0 }
    }
}

impl ProblemTile for Item {
    #[inline(always)]
    fn row(&self) -> u32 {
        self.tile.row
    }
}

impl Tiles<Item> for PackedTiles {
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self) -> Option<Item> {
        self.schedule.tile(self.index)
    }

    #[inline(always)]
    #[track_caller]
    fn ask(&mut self) {
        self.next = self.queue.take();
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.index = self.next;
    }

    #[inline(always)]
    #[track_caller]
    fn leave(&mut self) {
        self.queue.leave(self.index, self.schedule.tiles());
    }
}

impl<T, const D: usize, const V: usize, const KEYS: usize, R, const CAUSAL: bool> Packed<T, D, V, KEYS, R, CAUSAL>
where
    T: RegisterElement,
    R: Target<T, V, 5>,
    Columns<V>: MatrixColumns,
{
    /// The place of a warpgroup's rows.
    #[inline(always)]
    fn spot(&self, item: &Item, row: u32) -> Spot<5> {
        let (head, Sequence { rows, query_offset: first, .. }) = (item.tile.head, item.sequence);
        let statistics = u64::from(head) * u64::from(self.sequences.query_rows) + u64::from(first);
        Spot { at: place(first, rows, head, row), batch: 0, head, first, row, rows, statistics }
    }
}

impl<T, const D: usize, const V: usize, const KEYS: usize, R, const CAUSAL: bool> Problem<T, D, V, KEYS>
    for Packed<T, D, V, KEYS, R, CAUSAL>
where
    T: RegisterElement + StoredElement,
    R: Target<T, V, 5>,
    Columns<V>: MatrixColumns,
{
    type Tile = Item;
    type Tiles = PackedTiles;
    type Message = SharedArray<u32, { 2 * ITEM_WORDS }>;
    type Staging<G: WarpgroupRoles> = R::Staging<G>;
    const TURN: u32 = ITEM_WORDS as u32;
    const STORES_BY_TMA: bool = R::BY_TMA;
    const WINDOWED: bool = false;

    #[inline(always)]
    #[track_caller]
    fn tiles(&self, tile_rows: u32) -> PackedTiles {
        PackedTiles::new(self.sequences.without_diagonals(), self.heads, tile_rows, self.section_keys, self.counter)
    }

    #[inline(always)]
    #[track_caller]
    fn tell(_: &PackedTiles, tile: Option<Item>, words: Self::Message, turn: u32) {
        Item::store::<false, _>(tile, words, turn);
    }

    #[inline(always)]
    #[track_caller]
    fn told(&self, _: u32, words: Self::Message, turn: u32) -> Option<Item> {
        Item::load::<false, _>(words, turn)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(&self, _: Item, words: Self::Message, turn: u32) -> Item {
        Item::reload::<false, _>(words, turn)
    }

    #[inline(always)]
    fn mask(&self, tile: &Item) -> Mask {
        let Sequence { queries, keys, diagonal, .. } = tile.sequence;
        let diagonal = if self.top_left { 0 } else { diagonal };
        Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(queries, keys) }
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, item: &Item, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns,
    {
        let Item { tile, sequence } = *item;
        rings.load_queries(&self.q, tell, |part| {
            place(sequence.query_offset, sequence.queries, tile.head, tile.row + part * WARPGROUP_QUERIES as u32)
        });
    }

    #[inline(always)]
    #[track_caller]
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, item: &Item, block: u32)
    where
        Columns<D>: MatrixColumns,
    {
        let Item { tile, sequence } = *item;
        let key_head = tile.head / self.heads.group.max(1);
        rings.load_block(&self.k, &self.v, place(sequence.key_offset, sequence.keys, key_head, block * KEYS as u32));
    }

    #[inline(always)]
    #[track_caller]
    fn fetch<G: WarpgroupRoles>(&self, item: &Item, row: u32, staging: R::Staging<G>, part: u32) {
        self.target.fetch::<G>(&self.spot(item, row), staging, part);
    }

    #[inline(always)]
    #[track_caller]
    fn logs(&self, item: &Item, row: u32) -> Rows {
        self.target.logs(&self.spot(item, row))
    }

    #[inline(always)]
    fn softmax<G: WarpgroupRoles>(&self, _: &Item) -> Softmax {
        if G::SPARING { Softmax::sparing(self.scale) } else { Softmax::raising(self.scale, CAUSAL) }
    }

    #[inline(always)]
    fn edit(&self, scores: &mut RegisterTile<KEYS>, step: Step, seen: &Seen)
    where
        Columns<KEYS>: MatrixColumns,
    {
        if step.first || (CAUSAL && step.block >= seen.whole.end) {
            seen.mask.hide_after::<KEYS>(scores, seen.row, step.block * KEYS as u32);
        }
    }

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles>(
        &self,
        item: &Item,
        row: u32,
        sum: RegisterTile<V>,
        finished: Finished,
        staging: Staging<T, D, R::Staging<G>>,
    ) {
        let finished = finished.of_rows(|half| row + register_tile::row(half) < item.sequence.queries);
        self.target.store::<G, D>(sum, finished, self.spot(item, row), staging);
    }

    #[inline(always)]
    #[track_caller]
    fn begin<G: WarpgroupRoles>(staging: R::Staging<G>, part: u32) {
        R::begin::<G>(staging, part);
    }

    #[inline(always)]
    #[track_caller]
    fn end<G: WarpgroupRoles>(&self, staging: R::Staging<G>) {
        R::end::<G>(staging);
    }

    fn check(argument: &Self::Argument<'_>, tile_rows: u32) -> Result<u64, LaunchError> {
        let PackedArgument { target, sequences, heads, counter, .. } = argument;
        sequences.check(heads.batches)?;
        heads.check()?;
        LaunchError::check_limit("heads.step", heads.step.into(), 0)?;
        LaunchError::check_length("sequences.diagonals", 0, sequences.diagonals.map_or(0, |diagonals| diagonals.len()))?;
        LaunchError::check_length("counter", 1, counter.len())?;
        let (of_row, rows) = (u64::from(heads.heads), u64::from(sequences.query_rows));
        R::check(target, of_row.saturating_mul(rows), [1, of_row, rows])?;
        Ok(heads.most_tiles(rows, tile_rows))
    }
}
