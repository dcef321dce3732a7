//! The gradients of keys and values of wide heads.
//!
//! A tile is 64 keys of one head and their values, which stay in shared memory, while blocks of `QUERIES` queries and of their `dO` pass in two stages, of
//! all query heads that share the keys. Everything is computed transposed, as in [`attention_backward`](fn@super::attention_backward). The two warpgroups
//! have the same keys, and one gradient each, as both would not fit the registers of one:
//!
//! | warpgroup | computes | registers of its sum |
//! |---|---|---|
//! | 0 | `S = K Q'`, weights `P = exp2(scale S - lse)`, `dV += P dO` | `V / 2` |
//! | 1 | `dP = V dO'`, gradients of scores `dS = P (dP - delta)`, `dK += dS Q` | `D / 2` |
//!
//! Weights go from one to the other through shared memory in `f32`, as registers hold them: each thread reads what the thread of its number wrote.
//! So one warpgroup's exponentials run under the other's products.
//!
//! Floor: four products, `2 (2 D + 2 V)` FLOPs for each pair of a query and a key; of `D = V = 256` 2048 cycles a block of 64, for which shared memory is
//! read or written 1792 cycles, and filled 512.
//!
//! | shared memory | `D` = 192, `V` = 128, 96 queries | 256, 64 queries |
//! |---|---|---|
//! | keys and values | 40 KiB | 64 KiB |
//! | two stages of queries and `dO` | 120 KiB | 128 KiB |
//! | weights of two blocks | 48 KiB | 32 KiB |
//!
//! | registers a thread, of 232 | warpgroup 0 | warpgroup 1 |
//! |---|---|---|
//! | sum, of heads of 256 | 128 | 128 |
//! | products, and the operand made of them | 32 + 16 | 32 + 16 |
//! | statistics | 16 | 16 |
//!
//! | barrier | between |
//! |---|---|
//! | `tiles` | the tile's number is there; both warps that copy are done with it |
//! | `keys` | a tile's keys and values are there, and its number; both warpgroups are done with them, and the result was read |
//! | `rows` | a stage of queries and `dO` is full; both warpgroups have multiplied by it |
//! | `statistics` | those of a block are there; both warpgroups have read them |
//! | `weights` | weights of a block are written; they were read |
//! | [`both_done`](super::backward_wide::both_done) | neither warpgroup multiplies by the tile's keys and values any more |
//!
//! Results leave through the memory of the keys and of the values.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::matrix;
use oxtile_tile::num::{Pod, exp2, fma};
use oxtile_tile::pipeline::{self, Consumer, Mbarrier, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup::{self, Role};

use super::backward_mask::BlockMask;
use super::backward_schedule::{BlockOrder, KeyTile};
use super::backward_sequence::{SEQUENCE_TILE_WORDS, SequenceTile};
use super::backward_sums::{KeySums, KeySumsArgument, add_rows};
use super::backward_walk::ByColumn;
use super::backward_wide::{ROWS, TileNumbers, WIDE_ROWS, WarpgroupRoles, WideOrder, WideTensors, both_done};
use super::backward_workspace::{Statistics, UNCUT};
use super::mask::Mask;
use super::sequence;
use super::shape::check_one;

/// What a tile multiplies by; at last its gradients.
#[derive(SharedStorage, Clone, Copy)]
struct Keys<T: Pod, const D: usize, const V: usize> {
    keys: SharedTile<T, WIDE_ROWS, D, Swizzle128>,
    values: SharedTile<T, WIDE_ROWS, V, Swizzle128>,
}

/// A block of queries.
#[derive(SharedStorage, Clone, Copy)]
struct Rows<T: Pod, const D: usize, const V: usize, const QUERIES: usize> {
    queries: SharedTile<T, QUERIES, D, Swizzle128>,
    gradients: SharedTile<T, QUERIES, V, Swizzle128>,
}

/// Statistics that a lane reads at a time, at most.
const MOST_LANE_ROWS: usize = 3;
/// Stages of queries, of statistics and of weights.
const STAGES: usize = 2;

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize> {
    keys: Pipeline<Keys<T, D, V>, 1>,
    rows: Pipeline<Rows<T, D, V, QUERIES>, STAGES>,
    weights: Weights<PAIRS>,
    statistics: Pipeline<Statistics<QUERIES>, STAGES>,
    tiles: Pipeline<TileNumbers, 1>,
}

/// Numbers of a pair of all threads.
const PAIR: usize = 4 * warpgroup::THREADS as usize;

/// Weights of blocks in turn, on their way from one warpgroup to the other: `PAIRS` pairs of each row of a thread.
#[derive(SharedStorage, Clone, Copy)]
struct Weights<const PAIRS: usize> {
    values: Tiles<Tiles<SharedArray<f32, PAIR>, PAIRS>, STAGES>,
    full: Tiles<Mbarrier, STAGES>,
    empty: Tiles<Mbarrier, STAGES>,
}

/// Warps of a warpgroup.
const WARPS: u32 = warpgroup::THREADS / warp::LANES;

impl<const PAIRS: usize> Weights<PAIRS> {
    /// Hands over the weights of block `step`, counted over all tiles.
    #[inline(always)]
    #[track_caller]
    fn put<const QUERIES: usize>(&self, step: u32, weights: &RegisterTile<QUERIES>)
    where
        Columns<QUERIES>: MatrixColumns,
    {
        let (turn, parity) = (step % STAGES as u32, step / STAGES as u32 % 2);
        self.empty.tile(turn).wait(parity ^ 1);
        let mut pair = 0;
        while pair < PAIRS {
            let ([a, b], [c, d]) = (weights.pair(0, pair), weights.pair(1, pair));
            self.values.tile(turn).tile(pair as u32).store_vector(place(), Vector::from_words([a, b, c, d].map(f32::to_bits)));
            pair += 1;
        }
        warp::sync();
        self.full.tile(turn).arrive_if(thread::lane() == 0);
    }

    /// Turns gradients of weights of block `step` into those of its scores.
    #[inline(always)]
    #[track_caller]
    fn differentiate<const QUERIES: usize>(&self, step: u32, gradients: &mut RegisterTile<QUERIES>, deltas: &ByColumn<QUERIES>)
    where
        Columns<QUERIES>: MatrixColumns,
    {
        let (turn, parity) = (step % STAGES as u32, step / STAGES as u32 % 2);
        self.full.tile(turn).wait(parity);
        let mut pair = 0;
        while pair < PAIRS {
            let weights = self.values.tile(turn).tile(pair as u32).load_vector(place()).words().map(f32::from_bits);
            let mut half = 0;
            while half < 2 {
                let of_weights = gradients.pair(half, pair);
                gradients.set_pair(half, pair, [0, 1].map(|i| weights[2 * half + i] * (of_weights[i] - deltas.pair(pair)[i])));
                half += 1;
            }
            pair += 1;
        }
        warp::sync();
        self.empty.tile(turn).arrive_if(thread::lane() == 0);
    }
}

/// The mask from the side of tiles.
#[inline(always)]
const fn key_mask<const QUERIES: usize>(mask: Mask) -> BlockMask<QUERIES, true, WIDE_ROWS> {
    BlockMask::new(mask)
}

/// Where the thread's numbers of a pair are.
#[inline(always)]
#[track_caller]
fn place() -> u32 {
    4 * (thread::index() % warpgroup::THREADS)
}

impl<T: Pod, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize> Shared<T, D, V, QUERIES, PAIRS> {
    /// The number of the tile that a role has taken, by the parity of its round.
    #[inline(always)]
    fn number(&self, parity: u32) -> SharedArray<u32, SEQUENCE_TILE_WORDS> {
        self.tiles.memory::<0>().tile(parity)
    }

    /// Readies all barriers. One thread calls it, then the block meets.
    #[inline(always)]
    #[track_caller]
    fn init(&self) {
        self.keys.init(WarpgroupRoles::CONSUMER_WARPS);
        self.rows.init(WarpgroupRoles::CONSUMER_WARPS);
        self.statistics.init(WarpgroupRoles::CONSUMER_WARPS);
        for stage in 0..STAGES as u32 {
            self.weights.full.tile(stage).init(WARPS);
            self.weights.empty.tile(stage).init(WARPS);
        }
        self.tiles.init(2);
    }
}

/// The gradients of keys and of values.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct WideKeyGradients<T: RegisterElement, const D: usize, const V: usize> {
    /// Of the keys.
    pub k: TensorMapMut<T, WIDE_ROWS, D, Swizzle128, 5>,
    /// Of the values.
    pub v: TensorMapMut<T, WIDE_ROWS, V, Swizzle128, 5>,
}

/// Where they go.
#[derive(Clone, Copy, Parameter)]
pub struct WideKeyTarget<T: RegisterElement, const D: usize, const V: usize> {
    /// Rounded; rows of padding become zeros.
    pub rounded: Option<WideKeyGradients<T, D, V>>,
    /// The tensors that they are added to instead.
    pub added: Option<KeySums>,
    /// The factor of scores, and so of their gradients.
    pub scale: f32,
}

/// Computes the gradients of keys and values; a thread has `PAIRS` pairs of a row of `QUERIES` weights.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<T, D, V, QUERIES, PAIRS>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [192], V = [128], QUERIES = [96], PAIRS = [12])]
#[instances(T = [bf16, f16], D = [256], V = [256], QUERIES = [64], PAIRS = [8])]
pub fn attention_backward_wide_keys<
    T: RegisterElement + StoredElement,
    const D: usize,
    const V: usize,
    const QUERIES: usize,
    const PAIRS: usize,
>(
    tensors: WideTensors<T, D, V, QUERIES, WIDE_ROWS>,
    target: WideKeyTarget<T, D, V>,
    order: WideOrder,
) where
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    const { assert!(QUERIES == 8 * PAIRS && QUERIES.is_multiple_of(warp::LANES as usize) && QUERIES <= MOST_LANE_ROWS * warp::LANES as usize) };
    let shared = Shared::<T, D, V, QUERIES, PAIRS>::claim();
    if thread::index() == 0 {
        shared.init();
    }
    block::sync();
    let group = tensors.heads.group;
    let blocks_of = |item: &SequenceTile| {
        let blocks = key_mask::<QUERIES>(item.mask).blocks(item.tile.block);
        BlockOrder { blocks, first: blocks.begin, falling: false }
    };
    match WarpgroupRoles::role() {
        Role::Producer(role) => match role.begin_warps() {
            0 => {
                let (mut tiles, mut ring) = (shared.tiles.consumer(), shared.rows.producer());
                loop {
                    // A tile is a round of keys too.
                    let mut key_ring = shared.keys.producer_in_round(tiles.parity());
                    let stage = tiles.wait();
                    let number = shared.number(tiles.parity() ^ 1);
                    let Some(tile) = KeyTile::load(number) else {
                        if thread::lane() == 0 {
                            key_ring.acquire(0);
                        }
                        break;
                    };
                    if thread::lane() == 0 {
                        let item = SequenceTile { tile, ..SequenceTile::load_alone(number) };
                        let (stage, full) = key_ring.acquire(Keys::<T, D, V>::SIZE);
                        let at = tensors.key_place(&item, tile.head, tile.block * ROWS);
                        tensors.k.load(stage.keys, at, full);
                        tensors.v.load(stage.values, at, full);
                        blocks_of(&item).visit(group, |member, block| {
                            let (stage, full) = ring.acquire(Rows::<T, D, V, QUERIES>::SIZE);
                            let at = tensors.query_place(&item, tile.head * group + member, block * QUERIES as u32);
                            tensors.q.load(stage.queries, at, full);
                            tensors.grad_out.load(stage.gradients, at, full);
                        });
                    }
                    // Now the next tile is taken: the block that is done first takes the first.
                    stage.release();
                }
            }
            1 => {
                let (mut tiles, mut ring) = (shared.tiles.consumer(), shared.statistics.producer());
                loop {
                    let stage = tiles.wait();
                    let number = shared.number(tiles.parity() ^ 1);
                    let Some(tile) = KeyTile::load(number) else { break };
                    let item = SequenceTile { tile, ..SequenceTile::load(number) };
                    blocks_of(&item).visit(group, |member, block| {
                        let head = tile.head * group + member;
                        let row_of = |i: usize| i as u32 * warp::LANES + thread::lane();
                        // Loaded before the stage is empty.
                        let found: [[f32; 2]; MOST_LANE_ROWS] = core::array::from_fn(|i| match i < QUERIES / warp::LANES as usize {
                            true => tensors.statistics_of(&item, head, block * QUERIES as u32 + row_of(i)),
                            false => [0.0; 2],
                        });
                        let stage = ring.wait();
                        let Statistics { offsets, deltas, cut } = stage.memory();
                        let mut i = 0;
                        while i < QUERIES / warp::LANES as usize {
                            offsets.store(row_of(i), found[i][0]);
                            deltas.store(row_of(i), found[i][1]);
                            i += 1;
                        }
                        if thread::lane() == 0 {
                            cut.store(0, if key_mask::<QUERIES>(item.mask).cuts(tile.block, block) { block } else { UNCUT });
                        }
                        stage.publish();
                    });
                    stage.release();
                }
            }
            3 if thread::lane() == 0 => tensors.tiles::<true, ROWS>(order.section_rows).hand_out(order.counter, shared.tiles),
            _ => {}
        },
        Role::Consumer(role) => {
            let part = role.begin();
            let mut ring = shared.keys.consumer();
            let mut walk =
                Walk { rows: shared.rows.consumer(), statistics: shared.statistics.consumer(), weights: shared.weights, step: 0 };
            let WideKeyTarget { rounded, added, scale } = target;
            // A loop of each warpgroup's own: what a warp's lanes share stays in registers of the warp.
            if part == 0 {
                loop {
                    let held = ring.wait();
                    let number = shared.number(ring.parity() ^ 1);
                    let Some(tile) = KeyTile::load(number) else { break };
                    let item = SequenceTile { tile, ..SequenceTile::load(number) };
                    let (Keys { keys, values }, row) = (held.memory(), tile.block * ROWS);
                    let sum = walk.of_values(keys, group * blocks_of(&item).blocks.length(), tensors.scale, |scores, block| {
                        key_mask(SequenceTile::load_mask(number)).hide(scores, row, block);
                    });
                    let out = Out { item: SequenceTile::load(number), row, part };
                    out.store(&tensors, &sum, values, &rounded.map(|rounded| rounded.v), &added.map(|added| (added.v, added.value_size)));
                    // After this another tile's number may be there. The lanes met after they read this one's.
                    held.release_after_wait();
                }
            } else {
                loop {
                    let held = ring.wait();
                    let number = shared.number(ring.parity() ^ 1);
                    let Some(tile) = KeyTile::load(number) else { break };
                    let item = SequenceTile { tile, ..SequenceTile::load(number) };
                    let (Keys { keys, values }, row) = (held.memory(), tile.block * ROWS);
                    let mut sum = walk.of_keys(values, group * blocks_of(&item).blocks.length());
                    sum.map(|x| x * scale);
                    let out = Out { item: SequenceTile::load(number), row, part };
                    out.store(&tensors, &sum, keys, &rounded.map(|rounded| rounded.k), &added.map(|added| (added.k, added.size)));
                    held.release_after_wait();
                }
            }
        }
    }
}

/// A warpgroup's way along the blocks of queries.
struct Walk<T: Pod, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize> {
    rows: Consumer<Rows<T, D, V, QUERIES>, STAGES>,
    statistics: Consumer<Statistics<QUERIES>, STAGES>,
    weights: Weights<PAIRS>,
    /// Blocks of all tiles before.
    step: u32,
}

impl<T, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize> Walk<T, D, V, QUERIES, PAIRS>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    /// The gradients of a tile's values, of the next `steps` blocks. `hide` hides what the mask cuts of the scores of a block.
    #[inline(always)]
    #[track_caller]
    fn of_values(
        &mut self,
        keys: SharedTile<T, WIDE_ROWS, D, Swizzle128>,
        steps: u32,
        scale: f32,
        hide: impl Fn(&mut RegisterTile<QUERIES>, u32),
    ) -> RegisterTile<V> {
        let mut sum = RegisterTile::<V>::zero();
        for _ in 0..steps {
            let (statistics, stage) = (self.statistics.wait(), self.rows.wait());
            let Rows { queries, gradients } = stage.memory();
            // Read before multiplications are issued: after them a read of shared memory waits for theirs.
            let offsets = ByColumn::load(statistics.memory().offsets);
            // The compiler sees that all lanes have the same, and so keeps what they share in registers of the warp.
            let cut = warp::shuffle(statistics.memory().cut.load(0), 0);
            let mut weights = matrix::multiply(keys.k_major(), queries.k_major()).wait();
            if cut != UNCUT {
                hide(&mut weights, cut);
            }
            weights.map_pairs(|_, pair, values| [0, 1].map(|i| exp2(fma(values[i], scale, offsets.pair(pair)[i]))));
            self.weights.put(self.step, &weights);
            self.step += 1;
            sum = sum.multiply_add(weights.to_operand::<T>(), gradients.mn_major()).wait();
            statistics.release_after_wait();
            stage.release_after_wait();
        }
        sum
    }

    /// The gradients of a tile's keys, but for their factor.
    #[inline(always)]
    #[track_caller]
    fn of_keys(&mut self, values: SharedTile<T, WIDE_ROWS, V, Swizzle128>, steps: u32) -> RegisterTile<D> {
        let mut sum = RegisterTile::<D>::zero();
        for _ in 0..steps {
            let (statistics, stage) = (self.statistics.wait(), self.rows.wait());
            let Rows { queries, gradients } = stage.memory();
            let deltas = ByColumn::load(statistics.memory().deltas);
            let mut d_scores = matrix::multiply(values.k_major(), gradients.k_major()).wait();
            self.weights.differentiate(self.step, &mut d_scores, &deltas);
            self.step += 1;
            sum = sum.multiply_add(d_scores.to_operand::<T>(), queries.mn_major()).wait();
            statistics.release_after_wait();
            stage.release_after_wait();
        }
        sum
    }
}

/// Where a tile's gradients go.
struct Out {
    item: SequenceTile,
    /// The tile's first key.
    row: u32,
    /// The warpgroup that has them.
    part: u32,
}

impl Out {
    /// Stores a warpgroup's gradients, or adds them. Both warpgroups call it.
    #[inline(always)]
    #[track_caller]
    fn store<T: RegisterElement + StoredElement, const D: usize, const V: usize, const QUERIES: usize, const SIZE: usize>(
        &self,
        tensors: &WideTensors<T, D, V, QUERIES, WIDE_ROWS>,
        sum: &RegisterTile<SIZE>,
        staging: SharedTile<T, WIDE_ROWS, SIZE, Swizzle128>,
        rounded: &Option<TensorMapMut<T, WIDE_ROWS, SIZE, Swizzle128, 5>>,
        added: &Option<(GlobalMut<f32>, u32)>,
    ) where
        Columns<SIZE>: MatrixColumns,
    {
        let Self { item, row, part } = self;
        let head = tensors.key_head_of(item.tile.batch, item.tile.head);
        // Neither warpgroup multiplies by what becomes staging.
        both_done(*part);
        if let Some((added, size)) = added {
            let row_heads = u64::from(tensors.heads.in_row() / tensors.heads.group.max(1));
            let first = u64::from(item.key_offset) * row_heads + u64::from(head);
            add_rows(sum, added, first, row_heads, [*row, item.mask.keys], *size);
            // Seen to meet again, a warp's numbers that all lanes share stay in registers of the warp.
            warp::sync();
        } else if let Some(rounded) = rounded {
            sum.store_columns(0, staging);
            sync::fence_proxy_async();
            warpgroup::sync(*part);
            if warpgroup::is_leader() {
                rounded.store(sequence::place(item.key_offset, item.key_rows, head, *row), staging);
                pipeline::commit_stores();
                pipeline::wait_stores_read::<0>();
            }
        }
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const V: usize, const QUERIES: usize, const PAIRS: usize>(
    args: &AttentionBackwardWideKeysArgs<'_, T, D, V, QUERIES, PAIRS>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    let AttentionBackwardWideKeysArgs { tensors, target, order } = args;
    let tiles = tensors.check(order, true, ROWS.into())?;
    check_one("target.rounded", [target.rounded.is_some(), target.added.is_some()])?;
    if let Some(KeySumsArgument { k, v, size, value_size }) = &target.added {
        let rows = u64::from(tensors.sequences.key_rows) * (tensors.heads.of_row()? / u64::from(tensors.heads.group).max(1));
        for (name, sum, size, most) in [("target.added.k", k, *size, D), ("target.added.v", v, *value_size, V)] {
            LaunchError::check_multiple(name, 8, size.into())?;
            LaunchError::check_limit(name, size.into(), most as u64)?;
            LaunchError::check_length(name, rows.saturating_mul(size.into()), sum.len())?;
            LaunchError::check_alignment(name, 8, sum.address())?;
        }
    }
    Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
}
