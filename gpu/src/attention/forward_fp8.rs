//! Attention, forward, of e4m3 tensors into a bf16 result.
//!
//! The structure is that of [`attention_forward`](fn@super::attention_forward), with one difference. The tensor cores take
//! 8-bit operands along the direction that is summed over alone, and values lie across it: so three warps of the producer's
//! warpgroup transpose each block of values on its way, from one ring to another.
//!
//! | warp of the producer's warpgroup | does |
//! |---|---|
//! | 0 | one thread copies queries, keys and values in |
//! | 1 to 3 | transpose values |
//!
//! | barrier | between |
//! |---|---|
//! | `queries` | the tile's number and queries are there; consumers and transposers have what they need of them |
//! | `keys` | a stage is full; both warpgroups have multiplied by it |
//! | `values` | a stage is full; it was transposed |
//! | `turned` | values are transposed; both warpgroups have multiplied by them |
//! | warpgroup | its staging tile was stored and may be written again; it is written |
//!
//! Weights are rounded to e4m3 for their product, 16 times as large as softmax has them, so that few are subnormal; their sum is of the unrounded ones. A scale is what an element is worth: one for a tensor, or one for each of
//! its heads, positive.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::{Swizzle, Swizzle64, Swizzle128};
use oxtile_tile::matrix;
use oxtile_tile::num::e4m3;
use oxtile_tile::pipeline::{self, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterTile;
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{self, Role, Roles};

use super::epilogue::{store, store_rows};
use super::mask::{FAR, Mask, Span};
use super::schedule::{Queue, Schedule, Tile};
use super::softmax::Softmax;
use super::team::{PART, Pair, QUERIES};

/// Keys of a block.
pub const FP8_KEYS: usize = 192;
const KEYS: usize = FP8_KEYS;
/// Warps that transpose.
const TURNERS: u32 = 3;
/// Weights are 2^4 times as large as they are worth, up to 2^8.
const LIFT: f32 = 4.0;

type Team = Roles<2, 72, 216>;

type Query<const D: usize, S> = SharedTile<e4m3, PART, D, S>;
type Key<const D: usize, S> = SharedTile<e4m3, KEYS, D, S>;
type Turned<const D: usize> = SharedTile<e4m3, D, KEYS, Swizzle64>;

/// A tile's queries, and its number.
#[derive(SharedStorage, Clone, Copy)]
struct Queries<const D: usize, S: Swizzle> {
    parts: Tiles<Query<D, S>, { QUERIES / PART }>,
    index: SharedArray<u32, 1>,
}

#[derive(SharedStorage)]
struct Shared<const D: usize, S: Swizzle> {
    queries: Pipeline<Queries<D, S>, 2>,
    keys: Pipeline<Key<D, S>, 2>,
    values: Pipeline<Key<D, S>, 2>,
    turned: Pipeline<Turned<D>, 2>,
    /// One for each warpgroup.
    staging: Tiles<SharedTile<bf16, PART, D, Swizzle128>, { QUERIES / PART }>,
}

/// Attends, as [`attention_forward`](fn@super::attention_forward) does; `S` is the swizzle of rows of `D` bytes.
#[kernel(threads = Team::THREADS, grid = grid, shared = Shared<D, S>, requires = sm_90a)]
#[instances(D = [64], S = [Swizzle64], CAUSAL = [false, true])]
#[instances(D = [128], S = [Swizzle128], CAUSAL = [false, true])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_forward_fp8<const D: usize, S: Swizzle, const CAUSAL: bool>(
    q: TensorMap<e4m3, PART, D, S, 4>,
    k: TensorMap<e4m3, KEYS, D, S, 4>,
    v: TensorMap<e4m3, KEYS, D, S, 4>,
    q_scale: Global<f32>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    out: TensorMapMut<bf16, PART, D, Swizzle128, 4>,
    log_sum_exp: GlobalMut<f32>,
    counter: GlobalMut<u32>,
    batches: u32,
    heads: u32,
    group: u32,
    rows: u32,
    keys: u32,
    diagonal: i32,
    section: u32,
    scale: f32,
) where
    Columns<D>: MatrixColumns,
{
    let shared = Shared::<D, S>::claim();
    if thread::index() == 0 {
        shared.queries.init(Team::CONSUMER_WARPS + TURNERS);
        shared.keys.init(Team::CONSUMER_WARPS);
        shared.values.init(TURNERS);
        shared.turned.init_between(TURNERS, Team::CONSUMER_WARPS);
    }
    block::sync();
    let schedule = Schedule { tile_rows: QUERIES as u32, row_tiles: rows.div_ceil(QUERIES as u32), heads, batches, section };
    let mask = Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(rows, keys) };
    let blocks_of = |tile: Tile| mask.blocks::<KEYS>(Span { begin: tile.row, end: tile.row + QUERIES as u32 }).end;
    match Team::role() {
        Role::Producer(role) => {
            let copies = role.begin();
            let warp = thread::warp();
            if copies {
                let (mut queries, mut key_ring, mut value_ring) =
                    (shared.queries.producer(), shared.keys.producer(), shared.values.producer());
                let queue = Queue { counter, tiles: schedule.tiles() };
                let mut index = block::index()[0];
                while let Some(tile) = schedule.tile(index) {
                    let ticket = queue.take();
                    let (stage, full) = queries.acquire_with(2 * Query::<D, S>::SIZE, |stage| stage.index.store(0, index));
                    for part in 0..(QUERIES / PART) as u32 {
                        q.load(stage.parts.tile(part), [tile.batch, tile.head, tile.row + part * PART as u32, 0], full);
                    }
                    let head = tile.head / group.max(1);
                    for block in (0..blocks_of(tile)).rev() {
                        let (stage, full) = key_ring.acquire(Key::<D, S>::SIZE);
                        k.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
                        let (stage, full) = value_ring.acquire(Key::<D, S>::SIZE);
                        v.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
                    }
                    index = queue.index(ticket);
                }
                queries.acquire_with(0, |stage| stage.index.store(0, index));
            } else if (1..=TURNERS).contains(&warp) {
                let (mut queries, mut value_ring, mut turned) =
                    (shared.queries.consumer(), shared.values.consumer(), shared.turned.producer());
                loop {
                    let stage = queries.wait();
                    let index = warp::shuffle(stage.memory().index.load(0), 0);
                    // The lanes met in the shuffle, after their loads.
                    stage.release_after_wait();
                    let Some(tile) = schedule.tile(index) else { break };
                    for _ in 0..blocks_of(tile) {
                        let value = value_ring.wait();
                        let target = turned.wait();
                        let mut row = 32 * (warp - 1);
                        while row < KEYS as u32 {
                            value.memory().turn(target.memory(), row);
                            row += 32 * TURNERS;
                        }
                        target.publish();
                        // The lanes met in `publish`, after their loads.
                        value.release_after_wait();
                    }
                }
            }
        }
        Role::Consumer(role) => {
            let part = role.begin();
            let (mut queries, mut key_ring, mut value_ring) = (shared.queries.consumer(), shared.keys.consumer(), shared.turned.consumer());
            loop {
                let stage = queries.wait();
                let query = stage.memory().parts.tile(part).k_major();
                let index = warp::shuffle(stage.memory().index.load(0), 0);
                let Some(tile) = schedule.tile(index) else { break };
                let row = tile.row + part * PART as u32;
                let (blocks, whole) = (blocks_of(tile), mask.whole_blocks::<KEYS>(Span { begin: row, end: row + PART as u32 }).end);
                let key_head = tile.head / group.max(1);
                let worth = of_head(&q_scale, tile.head) * of_head(&k_scale, key_head);
                let (mut softmax, mut sum) = (Softmax::lifted(scale * worth, LIFT), RegisterTile::<D>::zero());
                if blocks > 0 {
                    let key = key_ring.wait();
                    let mut scores = matrix::multiply::<e4m3, KEYS, D, false>(query, key.memory().k_major()).wait();
                    key.release_after_wait();
                    mask.hide_after::<KEYS>(&mut scores, row, (blocks - 1) * KEYS as u32);
                    softmax.update::<KEYS>(&mut scores);
                    let mut weights = scores.to_turned_operand();
                    for block in (0..blocks - 1).rev() {
                        let key = key_ring.wait();
                        let scores = matrix::multiply::<e4m3, KEYS, D, false>(query, key.memory().k_major());
                        let value = value_ring.wait();
                        let product = sum.multiply_add(weights, value.memory().k_major());
                        let mut scores = scores.wait_leaving::<1>();
                        key.release_after_wait();
                        if CAUSAL && block >= whole {
                            mask.hide_after::<KEYS>(&mut scores, row, block * KEYS as u32);
                        }
                        let factors = softmax.update::<KEYS>(&mut scores);
                        sum = product.wait();
                        value.release_after_wait();
                        weights = scores.to_turned_operand();
                        if let Some(factors) = factors {
                            sum.scale_rows(factors);
                        }
                    }
                    let value = value_ring.wait();
                    sum = sum.multiply_add(weights, value.memory().k_major()).wait();
                    value.release_after_wait();
                }
                stage.release();
                let finished = softmax.finish();
                let worth = of_head(&v_scale, key_head);
                sum.scale_rows(finished.factor.map(|factor| factor * worth));
                store::<Pair, _, _, _>(&out, &sum, shared.staging.tile(part), part, [tile.batch, tile.head, row, 0]);
                let head = u64::from(tile.batch * heads + tile.head) * u64::from(rows);
                store_rows(&log_sum_exp, head, row, rows, finished.log_sum_exp());
            }
            if warpgroup::is_leader() {
                pipeline::wait_stores::<0>();
            }
        }
    }
}

/// The scale of a head, or of all.
#[inline(always)]
fn of_head(scales: &Global<f32>, head: u32) -> f32 {
    scales.load(if scales.len() == 1 { 0 } else { head.into() })
}

fn grid<const D: usize, S: Swizzle, const CAUSAL: bool>(
    args: &AttentionForwardFp8Args<'_, D, S, CAUSAL>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let heads = u64::from(args.batches) * u64::from(args.heads);
    LaunchError::check_length("log_sum_exp", heads * u64::from(args.rows), args.log_sum_exp.len())?;
    LaunchError::check_length("counter", 1, args.counter.len())?;
    LaunchError::check_limit("group", u64::from(args.group), u64::from(args.heads))?;
    LaunchError::check_limit("keys", u64::from(args.keys), (1 << 30) - 1)?;
    let key_heads = args.heads.checked_div(args.group).unwrap_or_default();
    for (name, scales, heads) in
        [("q_scale", args.q_scale, args.heads), ("k_scale", args.k_scale, key_heads), ("v_scale", args.v_scale, key_heads)]
    {
        if scales.len() != 1 {
            LaunchError::check_length(name, heads.into(), scales.len())?;
        }
    }
    let tiles = heads * u64::from(args.rows.div_ceil(QUERIES as u32));
    LaunchError::check_limit("rows", tiles, (1 << 31) - 1)?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
