//! Attention, forward, of e4m3 tensors into a bf16 result.
//!
//! The structure is that of [`attention_forward`](fn@super::attention_forward), with one difference. The tensor cores take
//! 8-bit operands along the direction that is summed over alone, and values lie across it: so three warps of the producer's
//! warpgroup transpose each block of values on its way, from one ring to another. That is another pipeline, so it is a kernel of its own;
//! what a policy of that kernel would cost was not measured.
//!
//! | warp of the producer's warpgroup | does |
//! |---|---|
//! | 0 | one thread copies queries, keys and values in |
//! | 1 to 3 | transpose values |
//!
//! | barrier | between |
//! |---|---|
//! | `queries` | the tile and its queries are there; all warpgroups are done with them |
//! | `keys` | a stage is full; all warpgroups have multiplied by it |
//! | `values` | a stage is full, or there are no more; it was transposed |
//! | `turned` | values are transposed; all warpgroups have multiplied by them |
//! | warpgroup | its staging tile was stored and may be written again; it is written |
//!
//! Weights are rounded to e4m3 for their product, 16 times as large as softmax has them, so that few are subnormal; their sum is
//! of the unrounded ones. A scale is what an element is worth: one for a tensor, or one for each of its heads, positive.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::{Swizzle, Swizzle32, Swizzle64, Swizzle128};
use oxtile_tile::matrix::{self, InFlight, Operand};
use oxtile_tile::num::e4m3;
use oxtile_tile::pipeline::{self, Consumer, Pipeline, Stage};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{OperandTile, RegisterTile};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{self, Role, Roles};

use super::epilogue::{store, store_rows};
use super::mask::{FAR, Mask, Span, check_reach};
use super::schedule::{Queue, Schedule, TILE_WORDS, Tile, TileOrder};
use super::shape::{Checked, MOST_BLOCKS, Shape};
use super::softmax::Softmax;
use super::warpgroup_roles::{Pair, WARPGROUP_QUERIES};

/// Keys of a block.
pub const FP8_KEYS: usize = 96;
const KEYS: usize = FP8_KEYS;
/// Warpgroups that multiply, each for a part of a tile.
const PARTS: usize = 3;
/// Queries of a tile.
pub const FP8_QUERIES: usize = PARTS * WARPGROUP_QUERIES;
const QUERIES: usize = FP8_QUERIES;
/// Keys whose values a warp transposes at once.
const TURNED: u32 = 32;
/// Warps that transpose.
const TURNERS: u32 = KEYS as u32 / TURNED;
/// Blocks in which maxima are looked for, before those in which weights tell: the first, and those that a causal mask may cut.
const fn thorough(causal: bool) -> u32 {
    if causal { 3 } else { 1 }
}

/// Weights are 2^4 times as large as they are worth, up to 2^8.
const LIFT: f32 = 4.0;

type WarpgroupRoles = Roles<{ PARTS as u32 }, 32, 160>;

type Query<const D: usize, S> = SharedTile<e4m3, WARPGROUP_QUERIES, D, S>;
type Key<const D: usize, S> = SharedTile<e4m3, KEYS, D, S>;
type Turned<const D: usize> = SharedTile<e4m3, D, KEYS, Swizzle32>;

/// A tile and its queries.
#[derive(SharedStorage, Clone, Copy)]
struct Queries<const D: usize, S: Swizzle> {
    parts: Tiles<Query<D, S>, PARTS>,
    tile: SharedArray<u32, TILE_WORDS>,
}

/// A block of values on its way to be transposed, or none after the last.
#[derive(SharedStorage, Clone, Copy)]
struct Values<const D: usize, S: Swizzle> {
    block: Key<D, S>,
    ended: SharedArray<u32, 1>,
}

#[derive(SharedStorage)]
struct Shared<const D: usize, S: Swizzle> {
    queries: Pipeline<Queries<D, S>, 2>,
    keys: Pipeline<Key<D, S>, 2>,
    values: Pipeline<Values<D, S>, 2>,
    turned: Pipeline<Turned<D>, 2>,
    /// One for each warpgroup.
    staging: Tiles<SharedTile<bf16, WARPGROUP_QUERIES, D, Swizzle128>, PARTS>,
}

/// Queries, keys and values as [`attention_forward`](fn@super::attention_forward) has them; `S` is the swizzle of rows of `D` bytes.
#[derive(Clone, Copy, Parameter)]
pub struct Fp8Inputs<const D: usize, S: Swizzle> {
    /// Queries.
    pub q: TensorMap<e4m3, WARPGROUP_QUERIES, D, S, 4>,
    /// Keys.
    pub k: TensorMap<e4m3, KEYS, D, S, 4>,
    /// Values.
    pub v: TensorMap<e4m3, KEYS, D, S, 4>,
}

/// What an element of each input is worth: one number for the tensor, or one for each of its heads.
#[derive(Clone, Copy, Parameter)]
pub struct Fp8Scales {
    /// Of queries.
    pub q: Global<f32>,
    /// Of keys.
    pub k: Global<f32>,
    /// Of values.
    pub v: Global<f32>,
}

/// The result and its log-sum-exp, `[batches, heads, queries]`.
#[derive(Clone, Copy, Parameter)]
pub struct Fp8Results<const D: usize> {
    /// The result.
    pub out: TensorMapMut<bf16, WARPGROUP_QUERIES, D, Swizzle128, 4>,
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: GlobalMut<f32>,
}

/// Attends. `diagonal` is the last key that query 0 sees, if `CAUSAL`; `scale` is the factor of scores, with `log2(e)`.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<D, S>, requires = sm_90a)]
#[instances(D = [64], S = [Swizzle64], CAUSAL = [false, true])]
#[instances(D = [128], S = [Swizzle128], CAUSAL = [false, true])]
pub fn attention_forward_fp8<const D: usize, S: Swizzle, const CAUSAL: bool>(
    inputs: Fp8Inputs<D, S>,
    scales: Fp8Scales,
    results: Fp8Results<D>,
    shape: Shape,
    order: TileOrder,
    diagonal: i32,
    scale: f32,
) where
    Columns<D>: MatrixColumns,
{
    const { assert!(thorough(true) as usize * KEYS >= QUERIES + KEYS, "after these blocks every row sees all keys") };
    let shared = Shared::<D, S>::claim();
    if thread::index() == 0 {
        shared.queries.init(WarpgroupRoles::CONSUMER_WARPS);
        shared.keys.init(WarpgroupRoles::CONSUMER_WARPS);
        shared.values.init(TURNERS);
        shared.turned.init_between(TURNERS, WarpgroupRoles::CONSUMER_WARPS);
    }
    block::sync();
    let Shape { batches, heads, group, queries: rows, keys } = shape;
    let schedule = Schedule { tile_rows: QUERIES as u32, row_tiles: rows.div_ceil(QUERIES as u32), heads, batches, section: order.section };
    let mask = Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(rows, keys) };
    let blocks_of = |tile: Tile| mask.blocks::<KEYS>(Span { begin: tile.row, end: tile.row + QUERIES as u32 }).end;
    match WarpgroupRoles::role() {
        Role::Producer(role) => {
            let copies = role.begin();
            let warp = thread::warp();
            if copies {
                let (mut queries, mut key_ring, mut value_ring) =
                    (shared.queries.producer(), shared.keys.producer(), shared.values.producer());
                let queue = Queue { counter: order.counter, tiles: schedule.tiles() };
                let mut index = block::index()[0];
                while let Some(tile) = schedule.tile(index) {
                    let ticket = queue.take();
                    let (stage, full) =
                        queries.acquire_with(PARTS as u32 * Query::<D, S>::SIZE, |stage| Tile::store(Some(tile), stage.tile));
                    for part in 0..PARTS as u32 {
                        inputs.q.load(stage.parts.tile(part), [tile.batch, tile.head, tile.row + part * WARPGROUP_QUERIES as u32, 0], full);
                    }
                    let head = tile.head / group.max(1);
                    for block in (0..blocks_of(tile)).rev() {
                        let (stage, full) = key_ring.acquire(Key::<D, S>::SIZE);
                        inputs.k.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
                        let (stage, full) = value_ring.acquire_with(Key::<D, S>::SIZE, |stage| stage.ended.store(0, 0));
                        inputs.v.load(stage.block, [tile.batch, head, block * KEYS as u32, 0], full);
                    }
                    index = queue.index(ticket);
                }
                queries.acquire_with(0, |stage| Tile::store(None, stage.tile));
                value_ring.acquire_with(0, |stage| stage.ended.store(0, 1));
            } else if (1..=TURNERS).contains(&warp) {
                let (mut value_ring, mut turned) = (shared.values.consumer(), shared.turned.producer());
                loop {
                    let value = value_ring.wait();
                    if warp::shuffle(value.memory().ended.load(0), 0) != 0 {
                        break;
                    }
                    let target = turned.wait();
                    value.memory().block.turn(target.memory(), TURNED * (warp - 1));
                    target.publish();
                    // The lanes met in `publish`, after their loads.
                    value.release_after_wait();
                }
            }
        }
        Role::Consumer(role) => {
            let part = role.begin();
            let (mut queries, mut key_ring, mut value_ring) = (shared.queries.consumer(), shared.keys.consumer(), shared.turned.consumer());
            // The compiler does not know.
            let zero = heads >> 31;
            loop {
                let stage = queries.wait();
                let query = stage.memory().parts.tile(part).k_major();
                let Some(tile) = Tile::load(stage.memory().tile) else { break };
                let row = tile.row + part * WARPGROUP_QUERIES as u32;
                let all = blocks_of(tile);
                // After the last query a warpgroup only follows the rings. Where a causal tile sees keys that a warpgroup's queries do not, it
                // computes all the same: following there spills registers.
                let blocks = if CAUSAL || row < rows { all } else { 0 };
                for _ in blocks..all {
                    key_ring.wait().release();
                    value_ring.wait().release();
                }
                let seen = Span { begin: row, end: row + WARPGROUP_QUERIES as u32 };
                let whole = mask.whole_blocks::<KEYS>(seen).end;
                let key_head = tile.head / group.max(1);
                let worth = of_head(&scales.q, tile.head) * of_head(&scales.k, key_head);
                let (mut softmax, mut sum) = (Softmax::lifted(scale * worth, LIFT).with_zero(zero), RegisterTile::<D>::zero());
                if blocks > 0 {
                    let mut walk = Walk { query, keys: &mut key_ring, values: &mut value_ring };
                    // The last block comes first. Of one that is cut, only as many keys are multiplied and weighed as there are.
                    let cut = if CAUSAL || !keys.is_multiple_of(TURNED) { 0 } else { keys / TURNED % (KEYS as u32 / TURNED) };
                    let mut weights = match cut {
                        1 => walk.first::<32>(&mut softmax, |_| {}),
                        2 => walk.first::<64>(&mut softmax, |_| {}),
                        _ => walk.first::<KEYS>(&mut softmax, |scores| {
                            if blocks > whole {
                                mask.hide_after::<KEYS>(scores, row, (blocks - 1) * KEYS as u32);
                            }
                        }),
                    };
                    let settled = blocks.saturating_sub(thorough(CAUSAL) + u32::from(cut != 0));
                    for block in (settled..blocks - 1).rev() {
                        let (mut scores, product) = walk.scores(sum, weights);
                        if CAUSAL && block >= whole {
                            mask.hide_after::<KEYS>(&mut scores, row, block * KEYS as u32);
                        }
                        let factors = softmax.update::<KEYS>(&mut scores);
                        sum = product.wait();
                        weights = scores.to_turned_operand::<KEYS>();
                        if let Some(factors) = factors {
                            sum.scale_rows(factors);
                        }
                    }
                    for _ in 0..settled {
                        let (scores, product) = walk.scores(sum, weights);
                        let (followed, factors) = softmax.follow::<KEYS, _>(&scores, RegisterTile::<KEYS>::to_turned_operand::<KEYS>);
                        sum = product.wait();
                        weights = followed.apart(zero);
                        if let Some(factors) = factors {
                            sum.scale_rows(factors);
                        }
                    }
                    sum = walk.last(sum, weights);
                }
                // Read again: no registers hold it meanwhile.
                let tile = Tile::reload(stage.memory().tile);
                stage.release();
                let row = tile.row + part * WARPGROUP_QUERIES as u32;
                let finished = softmax.finish();
                let worth = of_head(&scales.v, tile.head / group.max(1));
                sum.scale_rows(finished.factor.map(|factor| factor * worth));
                store::<Pair, _, _, _>(&results.out, &sum, shared.staging.tile(part), part, [tile.batch, tile.head, row, 0]);
                let head = u64::from(tile.batch * heads + tile.head) * u64::from(rows);
                store_rows(&results.log_sum_exp, head, row, rows, finished.log_sum_exp());
            }
            if warpgroup::is_leader() {
                pipeline::wait_stores::<0>();
            }
        }
    }
}

/// A block for each multiprocessor, which takes tiles by a counter.
fn grid<const D: usize, S: Swizzle, const CAUSAL: bool>(
    args: &AttentionForwardFp8Args<'_, D, S, CAUSAL>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let AttentionForwardFp8Args { scales, results, shape, order, diagonal, .. } = args;
    shape.check()?;
    scales.check(shape)?;
    check_reach("diagonal", *diagonal)?;
    let row_tiles = u64::from(shape.queries.div_ceil(QUERIES as u32));
    let tiles = shape.many_heads().saturating_mul(row_tiles);
    LaunchError::check_limit("shape.queries", tiles, MOST_BLOCKS)?;
    order.check(row_tiles)?;
    LaunchError::check_length("results.log_sum_exp", shape.many_heads().saturating_mul(shape.queries.into()), results.log_sum_exp.len())?;
    Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
}

impl Fp8ScalesArgument<'_> {
    /// One, or one for each head; the sizes were checked.
    fn check(&self, shape: &Shape) -> Checked {
        let key_heads = shape.heads.checked_div(shape.group).unwrap_or_default();
        for (name, scales, heads) in [("scales.q", self.q, shape.heads), ("scales.k", self.k, key_heads), ("scales.v", self.v, key_heads)] {
            if scales.len() != 1 {
                LaunchError::check_length(name, heads.into(), scales.len())?;
            }
        }
        Ok(())
    }
}

/// What a warpgroup multiplies by: its queries, and the rings of keys and of transposed values.
struct Walk<'a, const D: usize, S: Swizzle> {
    query: Operand<e4m3, WARPGROUP_QUERIES, D, false>,
    keys: &'a mut Consumer<Key<D, S>, 2>,
    values: &'a mut Consumer<Turned<D>, 2>,
}

impl<const D: usize, S: Swizzle> Walk<'_, D, S>
where
    Columns<D>: MatrixColumns,
{
    /// The weights of the block that comes first, of which the first `N` keys are there; `hide` hides what a mask does of them.
    #[inline(always)]
    #[track_caller]
    fn first<const N: usize>(&mut self, softmax: &mut Softmax, hide: impl FnOnce(&mut RegisterTile<N>)) -> OperandTile<e4m3, KEYS>
    where
        Columns<N>: MatrixColumns,
    {
        let key = self.keys.wait();
        let mut scores = matrix::multiply::<e4m3, N, D, false>(self.query, key.memory().k_major_rows(0)).wait();
        key.release_after_wait();
        hide(&mut scores);
        softmax.update::<N>(&mut scores);
        scores.to_turned_operand::<KEYS>()
    }

    /// One step: scores of a block start, then the values of the block before. Gives the scores, and the sum in flight.
    #[inline(always)]
    #[track_caller]
    fn scores(&mut self, sum: RegisterTile<D>, weights: OperandTile<e4m3, KEYS>) -> (RegisterTile<KEYS>, Product<D>) {
        let key = self.keys.wait();
        let scores = matrix::multiply::<e4m3, KEYS, D, false>(self.query, key.memory().k_major());
        let value = self.values.wait();
        let sum = sum.multiply_add(weights, value.memory().k_major());
        let scores = scores.wait_leaving::<1>();
        key.release_after_wait();
        (scores, Product { sum, value })
    }

    /// The sum with the last block.
    #[inline(always)]
    #[track_caller]
    fn last(&mut self, sum: RegisterTile<D>, weights: OperandTile<e4m3, KEYS>) -> RegisterTile<D> {
        let value = self.values.wait();
        let sum = sum.multiply_add(weights, value.memory().k_major());
        Product { sum, value }.wait()
    }
}

/// The sum while a block's values are multiplied.
struct Product<const D: usize>
where
    Columns<D>: MatrixColumns,
{
    sum: InFlight<D>,
    value: Stage<Turned<D>>,
}

impl<const D: usize> Product<D>
where
    Columns<D>: MatrixColumns,
{
    /// The sum, after all multiplications of the warpgroup; the values go back.
    #[inline(always)]
    #[track_caller]
    fn wait(self) -> RegisterTile<D> {
        let sum = self.sum.wait();
        self.value.release_after_wait();
        sum
    }
}

/// The scale of a head, or of all.
#[inline(always)]
fn of_head(scales: &Global<f32>, head: u32) -> f32 {
    scales.load(if scales.len() == 1 { 0 } else { head.into() })
}
