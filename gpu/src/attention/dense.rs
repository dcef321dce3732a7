//! Dense tensors, full or causal: `Q` and the result are tensors of `[batches, heads, rows, size]`, `K` and `V` of `[batches, heads / group,
//! keys, size]`, of any strides.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::tensor_map::TensorMap;

use super::mask::{FAR, Mask, check_reach};
use super::problem::{Problem, ProblemTile, Seen, Staging, Tiles};
use super::rings::Producers;
use super::schedule::{Queue, Schedule, Ticket, Tile, TileOrder, ToldTile};
use super::shape::{MOST_BLOCKS, Shape};
use super::softmax::{Finished, Softmax};
use super::target::{Spot, Target};
use super::walk::Step;
use super::warpgroup_roles::{WARPGROUP_QUERIES, WarpgroupRoles};

/// Attention of dense tensors to all keys or, if `CAUSAL`, to those up to a diagonal.
#[derive(Parameter)]
pub struct Dense<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, R: Target<T, V, 4>, const CAUSAL: bool>
where
    Columns<V>: MatrixColumns,
{
    /// Queries.
    pub q: TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, 4>,
    /// Keys.
    pub k: TensorMap<T, KEYS, D, Swizzle128, 4>,
    /// Values.
    pub v: TensorMap<T, KEYS, V, Swizzle128, 4>,
    /// Where the result goes; its log-sum-exp is `[batches, heads, queries]`.
    pub target: R,
    /// The sizes.
    pub shape: Shape,
    /// The last key that query 0 sees, if `CAUSAL`.
    pub diagonal: i32,
    /// The order of tiles.
    pub order: TileOrder,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// The walk of a block along the tiles of dense tensors.
pub struct DenseTiles {
    schedule: Schedule,
    queue: Queue,
    index: u32,
    next: Option<Ticket>,
}

impl DenseTiles {
    /// From the first tile of this block on.
    #[inline(always)]
    pub fn new(schedule: Schedule, order: TileOrder) -> Self {
        let queue = Queue { counter: order.counter, tiles: schedule.tiles() };
        Self { schedule, queue, index: block::index()[0], next: None }
    }

    /// The number of the tile.
    #[inline(always)]
    pub fn index(&self) -> u32 {
        self.index
    }
}

impl ProblemTile for Tile {
    #[inline(always)]
    fn row(&self) -> u32 {
        self.row
    }
}

impl Tiles<Tile> for DenseTiles {
    #[inline(always)]
    fn tile(&mut self) -> Option<Tile> {
        self.schedule.tile(self.index)
    }

    #[inline(always)]
    #[track_caller]
    fn ask(&mut self) {
        self.next = Some(self.queue.take());
    }

    #[inline(always)]
    #[track_caller]
    fn advance(&mut self) {
        if let Some(ticket) = self.next {
            self.index = self.queue.index(ticket);
        }
    }

    #[inline(always)]
    fn leave(&mut self) {}
}

impl<T, const D: usize, const V: usize, const KEYS: usize, R, const CAUSAL: bool> Dense<T, D, V, KEYS, R, CAUSAL>
where
    T: RegisterElement,
    R: Target<T, V, 4>,
    Columns<V>: MatrixColumns,
{
    #[inline(always)]
    fn schedule(&self, tile_rows: u32) -> Schedule {
        let Shape { batches, heads, queries, .. } = self.shape;
        Schedule { tile_rows, row_tiles: queries.div_ceil(tile_rows), heads, batches, section: self.order.section }
    }

    /// The place of a warpgroup's rows.
    #[inline(always)]
    fn spot(&self, tile: &Tile, row: u32) -> Spot<4> {
        let (Tile { batch, head, .. }, Shape { heads, queries, .. }) = (*tile, self.shape);
        let statistics = u64::from(batch * heads + head) * u64::from(queries);
        Spot { at: [batch, head, row, 0], batch, head, first: 0, row, rows: queries, statistics }
    }
}

impl<T, const D: usize, const V: usize, const KEYS: usize, R, const CAUSAL: bool> Problem<T, D, V, KEYS> for Dense<T, D, V, KEYS, R, CAUSAL>
where
    T: RegisterElement + StoredElement,
    R: Target<T, V, 4>,
    Columns<V>: MatrixColumns,
{
    type Tile = Tile;
    type Tiles = DenseTiles;
    type Message = R::Told;
    type Staging<G: WarpgroupRoles> = R::Staging<G>;
    const TURN: u32 = R::Told::TURN;
    const STORES_BY_TMA: bool = R::BY_TMA;
    const WINDOWED: bool = false;

    #[inline(always)]
    fn tiles(&self, tile_rows: u32) -> DenseTiles {
        DenseTiles::new(self.schedule(tile_rows), self.order)
    }

    #[inline(always)]
    #[track_caller]
    fn tell(tiles: &DenseTiles, tile: Option<Tile>, words: R::Told, turn: u32) {
        words.tell(tiles.index, tile, turn);
    }

    #[inline(always)]
    #[track_caller]
    fn told(&self, tile_rows: u32, words: R::Told, turn: u32) -> Option<Tile> {
        words.told(self.schedule(tile_rows), turn)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(&self, tile: Tile, words: R::Told, turn: u32) -> Tile {
        words.told_again(tile, turn)
    }

    #[inline(always)]
    fn mask(&self, _: &Tile) -> Mask {
        Mask { last: if CAUSAL { self.diagonal } else { FAR }, ..Mask::full(self.shape.queries, self.shape.keys) }
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Tile, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns,
    {
        rings.load_queries(&self.q, tell, |part| [tile.batch, tile.head, tile.row + part * WARPGROUP_QUERIES as u32, 0]);
    }

    #[inline(always)]
    #[track_caller]
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Tile, block: u32)
    where
        Columns<D>: MatrixColumns,
    {
        rings.load_block(&self.k, &self.v, [tile.batch, tile.head / self.shape.group.max(1), block * KEYS as u32, 0]);
    }

    #[inline(always)]
    #[track_caller]
    fn fetch<G: WarpgroupRoles>(&self, tile: &Tile, row: u32, staging: R::Staging<G>, part: u32) {
        self.target.fetch::<G>(&self.spot(tile, row), staging, part);
    }

    #[inline(always)]
    #[track_caller]
    fn logs(&self, tile: &Tile, row: u32) -> Rows {
        self.target.logs(&self.spot(tile, row))
    }

    #[inline(always)]
    fn softmax<G: WarpgroupRoles>(&self, _: &Tile) -> Softmax {
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
        tile: &Tile,
        row: u32,
        sum: RegisterTile<V>,
        finished: Finished,
        staging: Staging<T, D, R::Staging<G>>,
    ) {
        self.target.store::<G, D>(sum, finished, self.spot(tile, row), staging);
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
        let DenseArgument { target, shape, diagonal, order, .. } = argument;
        shape.check()?;
        check_reach("diagonal", *diagonal)?;
        let row_tiles = u64::from(shape.queries.div_ceil(tile_rows));
        let tiles = shape.many_heads().saturating_mul(row_tiles);
        LaunchError::check_limit("shape.queries", tiles, MOST_BLOCKS)?;
        order.check(row_tiles)?;
        let rows = shape.many_heads().saturating_mul(shape.queries.into());
        R::check(target, rows, [shape.batches, shape.heads, shape.queries].map(u64::from))?;
        Ok(tiles)
    }
}
