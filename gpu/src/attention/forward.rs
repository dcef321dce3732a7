//! Attention, forward.
//!
//! A block stays on its multiprocessor and computes the result for 128 queries of one head after another. One thread
//! copies their queries, and keeps two stages of keys and two of values full, 128 rows each, the last block of keys first.
//! Two warpgroups hold 64 queries each in registers, and for each block of keys
//!
//! 1. start the product of queries and keys;
//! 2. start the product of the block before: its weights, from registers, and its values;
//! 3. wait for the scores alone and turn them into weights, while the tensor cores multiply the values;
//! 4. wait for that product, and scale it if a row's maximum has risen.
//!
//! | barrier | between |
//! |---|---|
//! | `queries` | the tile's number and queries are there; both warpgroups have them in registers |
//! | `keys`, `values` | a stage is full; both warpgroups have multiplied by it |
//! | warpgroup | its staging tile was stored and may be written again; it is written |
//!
//! `Q` and the result are tensors of `[batches, heads, rows, D]`, `K` and `V` of `[batches, heads / group, keys, D]`, of any
//! strides. Sizes are any: what hangs over an edge is loaded as zero, masked, and not stored. A query that sees no key
//! gets zeros and a log-sum-exp of -inf. Scores, weights and sums are `f32`, weights are rounded to `T` for their
//! product. Scores below -1e30 count as hidden; NaN and +inf give NaN in their rows.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::{self, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, OperandTile, RegisterElement, RegisterTile, Rows, StoredElement, THREAD_ROWS};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::{self, Role, Roles};

use super::mask::{FAR, Mask, Span};
use super::schedule::{Queue, Schedule, Tile};
use super::softmax::Softmax;

/// Queries of a warpgroup.
pub(super) const PART: usize = 64;
/// Queries of a tile.
pub const QUERIES: usize = 2 * PART;
/// Keys of a block.
pub const KEYS: usize = 128;

type Team = Roles<2, 40, 232>;

type Query<T, const D: usize> = SharedTile<T, PART, D, Swizzle128>;
type Key<T, const D: usize> = SharedTile<T, KEYS, D, Swizzle128>;

/// A tile's queries, and its number.
#[derive(SharedStorage, Clone, Copy)]
struct Queries<T: Pod, const D: usize> {
    parts: Tiles<Query<T, D>, { QUERIES / PART }>,
    index: SharedArray<u32, 1>,
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize> {
    queries: Pipeline<Queries<T, D>, 1>,
    keys: Pipeline<Key<T, D>, 2>,
    values: Pipeline<Key<T, D>, 2>,
    /// One for each warpgroup.
    staging: Tiles<Query<T, D>, { QUERIES / PART }>,
}

/// Attends. `diagonal` is the last key that query 0 sees, if `CAUSAL`; `scale` has the factor `log2(e)`;
/// `log_sum_exp` is `[batches, heads, rows]`; `counter` is one zero, and is zero again afterwards. `section` heads are
/// computed together.
#[kernel(threads = Team::THREADS, grid = grid, shared = Shared<T, D>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64, 128], CAUSAL = [false, true])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_forward<T: RegisterElement + StoredElement, const D: usize, const CAUSAL: bool>(
    q: TensorMap<T, PART, D, Swizzle128, 4>,
    k: TensorMap<T, KEYS, D, Swizzle128, 4>,
    v: TensorMap<T, KEYS, D, Swizzle128, 4>,
    out: TensorMapMut<T, PART, D, Swizzle128, 4>,
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
    let shared = Shared::<T, D>::claim();
    if thread::index() == 0 {
        shared.queries.init(Team::CONSUMER_WARPS);
        shared.keys.init(Team::CONSUMER_WARPS);
        shared.values.init(Team::CONSUMER_WARPS);
    }
    block::sync();
    let schedule = Schedule { row_tiles: rows.div_ceil(QUERIES as u32), heads, batches, section };
    let mask = Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(rows, keys) };
    let blocks_of = |tile: Tile| mask.blocks::<KEYS>(Span { begin: tile.row, end: tile.row + QUERIES as u32 }).end;
    match Team::role() {
        Role::Producer(role) => {
            if !role.begin() {
                return;
            }
            let (mut queries, mut key_ring, mut value_ring) = (shared.queries.producer(), shared.keys.producer(), shared.values.producer());
            let queue = Queue { counter, tiles: schedule.tiles() };
            let mut index = block::index()[0];
            while let Some(tile) = schedule.tile(index) {
                let ticket = queue.take();
                let (stage, full) = queries.acquire_with(2 * Query::<T, D>::SIZE, |stage| stage.index.store(0, index));
                for part in 0..(QUERIES / PART) as u32 {
                    q.load(stage.parts.tile(part), [tile.batch, tile.head, tile.row + part * PART as u32, 0], full);
                }
                let head = tile.head / group.max(1);
                for block in (0..blocks_of(tile)).rev() {
                    let (stage, full) = key_ring.acquire(Key::<T, D>::SIZE);
                    k.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
                    let (stage, full) = value_ring.acquire(Key::<T, D>::SIZE);
                    v.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
                }
                index = queue.index(ticket);
            }
            queries.acquire_with(0, |stage| stage.index.store(0, index));
        }
        Role::Consumer(role) => {
            let part = role.begin();
            let (mut queries, mut key_ring, mut value_ring) = (shared.queries.consumer(), shared.keys.consumer(), shared.values.consumer());
            loop {
                let stage = queries.wait();
                let query = OperandTile::<T, D>::load(stage.memory().parts.tile(part));
                let index = warp::shuffle(stage.memory().index.load(0), 0);
                stage.release();
                let Some(tile) = schedule.tile(index) else { break };
                let row = tile.row + part * PART as u32;
                let (blocks, whole) = (blocks_of(tile), mask.whole_blocks::<KEYS>(Span { begin: row, end: row + PART as u32 }).end);
                let (mut softmax, mut sum) = (Softmax::new(scale), RegisterTile::<D>::zero());
                if blocks > 0 {
                    let key = key_ring.wait();
                    let mut scores = matrix::multiply::<T, KEYS, D, false>(query, key.memory().k_major()).wait();
                    key.release_after_wait();
                    mask.hide_after::<KEYS>(&mut scores, row, (blocks - 1) * KEYS as u32);
                    softmax.update::<KEYS>(&mut scores);
                    let mut weights = scores.to_operand::<T>();
                    for block in (0..blocks - 1).rev() {
                        let key = key_ring.wait();
                        let scores = matrix::multiply::<T, KEYS, D, false>(query, key.memory().k_major());
                        let value = value_ring.wait();
                        let product = sum.multiply_add(weights, value.memory().mn_major());
                        let mut scores = scores.wait_leaving::<1>();
                        key.release_after_wait();
                        if CAUSAL && block >= whole {
                            mask.hide_after::<KEYS>(&mut scores, row, block * KEYS as u32);
                        }
                        let factors = softmax.update::<KEYS>(&mut scores);
                        sum = product.wait();
                        value.release_after_wait();
                        weights = scores.to_operand();
                        if let Some(factors) = factors {
                            sum.scale_rows(factors);
                        }
                    }
                    let value = value_ring.wait();
                    sum = sum.multiply_add(weights, value.memory().mn_major()).wait();
                    value.release_after_wait();
                }
                let finished = softmax.finish();
                sum.scale_rows(finished.factor);
                store(&out, &sum, shared.staging.tile(part), part, Tile { row, ..tile });
                let head = u64::from(tile.batch * heads + tile.head) * u64::from(rows);
                store_rows(&log_sum_exp, head, row, rows, finished.log_sum_exp);
            }
            if warpgroup::is_leader() {
                pipeline::wait_stores::<0>();
            }
        }
    }
}

/// Stores a warpgroup's part of the result through its staging tile.
#[inline(always)]
pub(super) fn store<T: StoredElement, const D: usize>(
    out: &TensorMapMut<T, PART, D, Swizzle128, 4>,
    result: &RegisterTile<D>,
    staging: Query<T, D>,
    part: u32,
    at: Tile,
) where
    Columns<D>: MatrixColumns,
{
    if warpgroup::is_leader() {
        pipeline::wait_stores_read::<0>();
    }
    warpgroup::sync(part);
    result.store_columns(0, staging);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        out.store([at.batch, at.head, at.row, 0], staging);
        pipeline::commit_stores();
    }
}

/// Stores one value a row, by the first of the four lanes that share it; `head` is where the head's rows begin.
#[inline(always)]
pub(super) fn store_rows(target: &GlobalMut<f32>, head: u64, row: u32, rows: u32, values: Rows) {
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        if row < rows && thread::lane().is_multiple_of(4) {
            target.store(head + u64::from(row), values[half]);
        }
        half += 1;
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const CAUSAL: bool>(
    args: &AttentionForwardArgs<'_, T, D, CAUSAL>,
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
    let tiles = heads * u64::from(args.rows.div_ceil(QUERIES as u32));
    LaunchError::check_limit("rows", tiles, (1 << 31) - 1)?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
