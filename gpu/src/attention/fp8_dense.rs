//! Dense tensors of 8 bits, full or causal: `Q` and the result are tensors of `[batches, heads, rows, size]`, `K` and `V` of `[batches, heads / group,
//! keys, size]`, of any strides.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterTile;

use super::dense::DenseTiles;
use super::fp8_problem::{FP8_QUERIES, Fp8Inputs, Fp8Key, Fp8Policy, Fp8Problem, Fp8Query, Fp8Results, Fp8Scales, LIFT};
use super::mask::{FAR, Mask, check_reach};
use super::problem::{Causal, Full};
use super::schedule::{Schedule, TILE_WORDS, Tile, TileOrder};
use super::shape::{MOST_BLOCKS, Shape};
use super::softmax::{Finished, Softmax};
use super::target::Spot;
use super::warpgroup_roles::Part;

impl Fp8Policy for Full {
    type Of<const D: usize, S: Swizzle>
        = Fp8Dense<D, S, false>
    where
        Columns<D>: MatrixColumns;
}

impl Fp8Policy for Causal {
    type Of<const D: usize, S: Swizzle>
        = Fp8Dense<D, S, true>
    where
        Columns<D>: MatrixColumns;
}

/// Attention of dense tensors to all keys or, if `CAUSAL`, to those up to a diagonal.
#[derive(Parameter)]
pub struct Fp8Dense<const D: usize, S: Swizzle, const CAUSAL: bool> {
    /// Queries, keys and values.
    pub inputs: Fp8Inputs<D, S, 4>,
    /// What their elements are worth.
    pub scales: Fp8Scales,
    /// Where the result goes; its log-sum-exp is `[batches, heads, queries]`.
    pub results: Fp8Results<D, 4>,
    /// The sizes.
    pub shape: Shape,
    /// The order of tiles.
    pub order: TileOrder,
    /// The last key that query 0 sees, if `CAUSAL`.
    pub diagonal: i32,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

impl<const D: usize, S: Swizzle, const CAUSAL: bool> Fp8Dense<D, S, CAUSAL> {
    /// The key head of a tile.
    #[inline(always)]
    fn key_head(&self, tile: &Tile) -> u32 {
        tile.head / self.shape.group.max(1)
    }
}

impl<const D: usize, S: Swizzle, const CAUSAL: bool> Fp8Problem<D, S> for Fp8Dense<D, S, CAUSAL>
where
    Columns<D>: MatrixColumns,
{
    type Tile = Tile;
    type Tiles = DenseTiles;
    type Message = SharedArray<u32, TILE_WORDS>;
    const MASKED: bool = CAUSAL;
    const WINDOWED: bool = false;

    #[inline(always)]
    fn tiles(&self) -> DenseTiles {
        let Shape { batches, heads, queries, .. } = self.shape;
        let row_tiles = queries.div_ceil(FP8_QUERIES as u32);
        let schedule = Schedule { tile_rows: FP8_QUERIES as u32, row_tiles, heads, batches, section: self.order.section };
        DenseTiles::new(schedule, self.order)
    }

    #[inline(always)]
    #[track_caller]
    fn tell(tile: Option<Tile>, words: Self::Message) {
        Tile::store(tile, words);
    }

    #[inline(always)]
    #[track_caller]
    fn told(words: Self::Message) -> Option<Tile> {
        Tile::load(words)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(words: Self::Message) -> Tile {
        Tile::reload(words)
    }

    #[inline(always)]
    fn heads(&self) -> u32 {
        self.shape.heads
    }

    #[inline(always)]
    fn mask(&self, _: &Tile) -> Mask {
        Mask { last: if CAUSAL { self.diagonal } else { FAR }, ..Mask::full(self.shape.queries, self.shape.keys) }
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries(&self, tile: &Tile, row: u32, target: Fp8Query<D, S>, full: Mbarrier) {
        self.inputs.q.load(target, [tile.batch, tile.head, row, 0], full);
    }

    #[inline(always)]
    #[track_caller]
    fn load_keys(&self, tile: &Tile, key: u32, target: Fp8Key<D, S>, full: Mbarrier) {
        self.inputs.k.load(target, [tile.batch, self.key_head(tile), key, 0], full);
    }

    #[inline(always)]
    #[track_caller]
    fn load_values(&self, tile: &Tile, key: u32, target: Fp8Key<D, S>, full: Mbarrier) {
        self.inputs.v.load(target, [tile.batch, self.key_head(tile), key, 0], full);
    }

    #[inline(always)]
    #[track_caller]
    fn worth(&self, tile: &Tile) -> f32 {
        self.scales.of_scores(tile.head, self.key_head(tile))
    }

    #[inline(always)]
    #[track_caller]
    fn softmax(&self, worth: f32, zero: u32) -> Softmax {
        Softmax::lifted(self.scale * worth, LIFT).with_zero(zero)
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, tile: &Tile, row: u32, mut sum: RegisterTile<D>, finished: Finished, staging: Part<bf16, D>, part: u32) {
        let (Tile { batch, head, .. }, Shape { heads, queries, .. }) = (*tile, self.shape);
        let worth = self.scales.of_values(self.key_head(tile));
        finished.divide_times(&mut sum, worth);
        let statistics = u64::from(batch * heads + head) * u64::from(queries);
        let spot = Spot { at: [batch, head, row, 0], batch, head, first: 0, row, rows: queries, statistics };
        self.results.store(&sum, &finished, &spot, staging, part);
    }

    fn check(argument: &Self::Argument<'_>) -> Result<u64, LaunchError> {
        let Fp8DenseArgument { scales, results, shape, order, diagonal, .. } = argument;
        shape.check()?;
        scales.check(shape.heads, shape.group)?;
        check_reach("diagonal", *diagonal)?;
        let row_tiles = u64::from(shape.queries.div_ceil(FP8_QUERIES as u32));
        let tiles = shape.many_heads().saturating_mul(row_tiles);
        LaunchError::check_limit("shape.queries", tiles, MOST_BLOCKS)?;
        order.check(row_tiles)?;
        let rows = shape.many_heads().saturating_mul(shape.queries.into());
        LaunchError::check_length("results.log_sum_exp", rows, results.log_sum_exp.len())?;
        Ok(tiles)
    }
}
