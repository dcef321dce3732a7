//! The gradients of queries of wide heads.
//!
//! A tile is 128 queries of one head and their `dO`, which stay in shared memory, 64 of each warpgroup, while blocks of `KEYS` keys and of their
//! values pass, in two stages and in one: values are done with before the last product. For each block a warpgroup
//!
//! 1. multiplies scores `S = Q K'` and gradients of weights `dP = dO V'`;
//! 2. makes weights `P = exp2(scale S - lse)` while `dP` is multiplied, and gradients of scores `dS = P (dP - delta)`;
//! 3. adds `dQ += dS K` from registers.
//!
//! Warpgroups wait for nothing of each other but stages, so that one computes weights while the other multiplies. Floor: three products, `2 (2 D + V)`
//! FLOPs for each pair of a query and a key; of `D = V = 256` 3072 cycles a block of 64, for which shared memory is read 2560 cycles, and filled 512.
//!
//! | shared memory | `D` = 192, `V` = 128, 96 keys | 256, 64 keys |
//! |---|---|---|
//! | queries and `dO` | 80 KiB | 128 KiB |
//! | two stages of keys | 72 KiB | 64 KiB |
//! | one of values | 24 KiB | 32 KiB |
//!
//! Of 232 registers a thread the sum has `D / 2`, products have `KEYS / 2` each.
//!
//! | barrier | between |
//! |---|---|
//! | `tiles` | the tile's number is there; the warp that copies is done with it |
//! | `queries` | a tile's queries and `dO` are there, and its number; both warpgroups are done with them, and the result was read |
//! | `keys`, `values` | a stage is full; both warpgroups have multiplied by it |
//! | warpgroup | its part of the result is written |
//!
//! Results leave through the memory of the queries.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix;
use oxtile_tile::num::{Pod, exp2, fma};
use oxtile_tile::pipeline::{self, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::warpgroup::{self, Role};

use super::backward_schedule::KeyTile;
use super::backward_sequence::{SEQUENCE_TILE_WORDS, SequenceTile};
use super::backward_sequence_rows::QueryTarget;
use super::backward_sums::add_rows;
use super::backward_wide::{ROWS, TileNumbers, WIDE_ROWS, WarpgroupRoles, WideOrder, WideTensors};
use super::mask::Span;
use super::sequence::place;
use super::shape::check_one;

/// Warpgroups, each with a part of a tile.
const PARTS: usize = 2;
/// Queries of a tile.
pub const WIDE_QUERIES: usize = PARTS * WIDE_ROWS;
const QUERIES: u32 = WIDE_QUERIES as u32;

type Tile<T, const ROWS: usize, const SIZE: usize> = SharedTile<T, ROWS, SIZE, Swizzle128>;

/// What a tile multiplies by; at last its gradients.
#[derive(SharedStorage, Clone, Copy)]
struct Queries<T: Pod, const D: usize, const V: usize> {
    queries: Tiles<Tile<T, WIDE_ROWS, D>, PARTS>,
    gradients: Tiles<Tile<T, WIDE_ROWS, V>, PARTS>,
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const V: usize, const KEYS: usize> {
    queries: Pipeline<Queries<T, D, V>, 1>,
    keys: Pipeline<Tile<T, KEYS, D>, 2>,
    values: Pipeline<Tile<T, KEYS, V>, 1>,
    tiles: Pipeline<TileNumbers, 1>,
}

impl<T: Pod, const D: usize, const V: usize, const KEYS: usize> Shared<T, D, V, KEYS> {
    /// The number of the tile that a role has taken, by the parity of its round.
    #[inline(always)]
    fn number(&self, parity: u32) -> SharedArray<u32, SEQUENCE_TILE_WORDS> {
        self.tiles.memory::<0>().tile(parity)
    }

    /// Readies all barriers. One thread calls it, then the block meets.
    #[inline(always)]
    #[track_caller]
    fn init(&self) {
        self.queries.init(WarpgroupRoles::CONSUMER_WARPS);
        self.keys.init(WarpgroupRoles::CONSUMER_WARPS);
        self.values.init(WarpgroupRoles::CONSUMER_WARPS);
        self.tiles.init(1);
    }
}

/// Computes the gradients of queries.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<T, D, V, KEYS>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [96])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [64])]
pub fn attention_backward_wide_queries<T: RegisterElement + StoredElement, const D: usize, const V: usize, const KEYS: usize>(
    tensors: WideTensors<T, D, V, WIDE_ROWS, KEYS>,
    target: QueryTarget<T, D, WIDE_ROWS>,
    order: WideOrder,
) where
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS>::claim();
    if thread::index() == 0 {
        shared.init();
    }
    block::sync();
    let blocks_of = |item: &SequenceTile| {
        let begin = item.tile.block * QUERIES;
        item.mask.blocks::<KEYS>(Span { begin, end: begin + QUERIES })
    };
    match WarpgroupRoles::role() {
        Role::Producer(role) => match role.begin_warps() {
            0 => {
                let (mut tiles, mut keys, mut values) = (shared.tiles.consumer(), shared.keys.producer(), shared.values.producer());
                loop {
                    // A tile is a round of queries too.
                    let mut ring = shared.queries.producer_in_round(tiles.parity());
                    let stage = tiles.wait();
                    let number = shared.number(tiles.parity() ^ 1);
                    let Some(tile) = KeyTile::load(number) else {
                        if thread::lane() == 0 {
                            ring.acquire(0);
                        }
                        break;
                    };
                    if thread::lane() == 0 {
                        let item = SequenceTile { tile, ..SequenceTile::load_alone(number) };
                        let (stage, full) = ring.acquire(Queries::<T, D, V>::SIZE);
                        for part in 0..PARTS as u32 {
                            let at = tensors.query_place(&item, tile.head, tile.block * QUERIES + part * ROWS);
                            tensors.q.load(stage.queries.tile(part), at, full);
                            tensors.grad_out.load(stage.gradients.tile(part), at, full);
                        }
                        // The divisor is not zero, as there is a tile; `max(1)` saves its check.
                        let (head, blocks) = (tile.head / tensors.heads.group.max(1), blocks_of(&item));
                        for block in blocks.begin..blocks.end {
                            let at = tensors.key_place(&item, head, block * KEYS as u32);
                            let (stage, full) = keys.acquire(Tile::<T, KEYS, D>::SIZE);
                            tensors.k.load(stage, at, full);
                            let (stage, full) = values.acquire(Tile::<T, KEYS, V>::SIZE);
                            tensors.v.load(stage, at, full);
                        }
                    }
                    // Now the next tile is taken: the block that is done first takes the first.
                    stage.release();
                }
            }
            3 if thread::lane() == 0 => tensors.tiles::<false, QUERIES>(order.section_rows).hand_out(order.counter, shared.tiles),
            _ => {}
        },
        Role::Consumer(role) => {
            let part = role.begin();
            let (mut ring, mut keys, mut values) = (shared.queries.consumer(), shared.keys.consumer(), shared.values.consumer());
            loop {
                let held = ring.wait();
                let number = shared.number(ring.parity() ^ 1);
                let Some(tile) = KeyTile::load(number) else { break };
                let item = SequenceTile { tile, ..SequenceTile::load(number) };
                let row = tile.block * QUERIES + part * ROWS;
                let statistics = [0, 1].map(|half| tensors.statistics_of(&item, tile.head, row + register_tile::row(half)));
                // Seen to meet again, a warp's numbers that all lanes share stay in registers of the warp.
                warp::sync(); // for ptxas
                let (blocks, whole) = (blocks_of(&item), item.mask.whole_blocks::<KEYS>(Span { begin: row, end: row + ROWS }));
                let (query, gradient) = (held.memory().queries.tile(part), held.memory().gradients.tile(part));
                let mut sum = RegisterTile::<D>::zero();
                for block in blocks.begin..blocks.end {
                    let key = keys.wait();
                    let scores = matrix::multiply(query.k_major(), key.memory().k_major());
                    let value = values.wait();
                    let d_weights = matrix::multiply(gradient.k_major(), value.memory().k_major());
                    let mut weights = scores.wait_leaving::<1>();
                    if block < whole.begin || block >= whole.end {
                        item.mask.hide_after(&mut weights, row, block * KEYS as u32);
                        item.mask.hide_before(&mut weights, row, block * KEYS as u32);
                    }
                    weights.map_pairs(|half, _, values| values.map(|value| exp2(fma(value, tensors.scale, statistics[half][0]))));
                    key.wait_again();
                    let mut d_scores = d_weights.wait();
                    value.release_after_wait();
                    d_scores.map_pairs(|half, pair, values| {
                        let weights = weights.pair(half, pair);
                        [0, 1].map(|i| weights[i] * (values[i] - statistics[half][1]))
                    });
                    sum = sum.multiply_add(d_scores.to_operand::<T>(), key.memory().mn_major()).wait();
                    key.release_after_wait();
                }
                sum.map(|x| x * target.scale);
                let item = SequenceTile { tile, ..SequenceTile::load(number) };
                let head = tensors.heads.of(tile.batch, tile.head);
                if let Some(added) = &target.added {
                    let row_heads = u64::from(tensors.heads.in_row());
                    let first = u64::from(item.query_offset) * row_heads + u64::from(head);
                    add_rows(&sum, added, first, row_heads, [row, item.mask.queries], target.size);
                    warp::sync();
                } else if let Some(rounded) = &target.rounded {
                    // No warp multiplies by the queries any more.
                    warpgroup::sync(part);
                    sum.store_columns(0, query);
                    sync::fence_proxy_async();
                    warpgroup::sync(part);
                    if warpgroup::is_leader() {
                        rounded.store(place(item.query_offset, item.key_rows, head, row), query);
                        pipeline::commit_stores();
                        pipeline::wait_stores_read::<0>();
                    }
                }
                // After this another tile's number may be there. The lanes met after they read this one's.
                held.release_after_wait();
            }
        }
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const V: usize, const KEYS: usize>(
    args: &AttentionBackwardWideQueriesArgs<'_, T, D, V, KEYS>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let AttentionBackwardWideQueriesArgs { tensors, target, order } = args;
    let tiles = tensors.check(order, false, QUERIES.into())?;
    check_one("target.rounded", [target.rounded.is_some(), target.added.is_some()])?;
    LaunchError::check_multiple("target.size", 8, target.size.into())?;
    LaunchError::check_limit("target.size", target.size.into(), D as u64)?;
    if let Some(added) = &target.added {
        let rows = u64::from(tensors.sequences.query_rows).saturating_mul(tensors.heads.of_row()?);
        LaunchError::check_length("target.added", rows.saturating_mul(target.size.into()), added.len())?;
        LaunchError::check_alignment("target.added", 8, added.address())?;
    }
    Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
}
