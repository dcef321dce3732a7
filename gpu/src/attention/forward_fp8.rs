//! Attention, forward, of e4m3 tensors into a bf16 result.
//!
//! The structure is that of [`attention_forward`](fn@super::attention_forward), with one difference. The tensor cores take
//! 8-bit operands along the direction that is summed over alone, and values lie across it: so three warps of the producer's
//! warpgroup transpose each block of values on its way, from one ring to another. That is another pipeline, so it is a kernel of its own;
//! what it is computed of is a compile-time [`Fp8Problem`].
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
use oxtile_tile::shared::{SharedStorage, SharedTile, Tiles as SharedTiles};
use oxtile_tile::warpgroup::{self, Role, Roles};

use super::fp8_problem::{
    FP8_KEYS as KEYS, FP8_QUERIES as QUERIES, Fp8Key, Fp8Policy, Fp8Problem, Fp8Query, Fp8Seen, Fp8Step, PARTS, Phase,
};
use super::mask::Span;
use super::problem::{Causal, Full, Optioned, PackedCausal, PackedFull, ProblemTile, Tiles};
use super::softmax::Softmax;
use super::warpgroup_roles::{Part, WARPGROUP_QUERIES};

/// Keys whose values a warp transposes at once.
const TURNED: u32 = 32;
/// Warps that transpose.
const TURNERS: u32 = KEYS as u32 / TURNED;
/// Blocks in which maxima are looked for, before those in which weights tell: the first, and those that a mask may cut.
const fn thorough(masked: bool) -> u32 {
    if masked { 2 } else { 1 }
}

type WarpgroupRoles = Roles<{ PARTS as u32 }, 32, 160>;

type Turned<const D: usize> = SharedTile<e4m3, D, KEYS, Swizzle32>;

/// A tile and its queries.
#[derive(SharedStorage, Clone, Copy)]
struct Queries<const D: usize, S: Swizzle, TILE: SharedStorage + Copy> {
    parts: SharedTiles<Fp8Query<D, S>, PARTS>,
    tile: TILE,
}

/// A block of values on its way to be transposed, or none after the last.
#[derive(SharedStorage, Clone, Copy)]
struct Values<const D: usize, S: Swizzle> {
    block: Fp8Key<D, S>,
    ended: SharedArray<u32, 1>,
}

/// The memory of a block. It begins with the values: so the thread that copies has no address of theirs in a register.
#[derive(SharedStorage)]
struct Rings<const D: usize, S: Swizzle, TILE: SharedStorage + Copy> {
    values: Pipeline<Values<D, S>, 2>,
    queries: Pipeline<Queries<D, S, TILE>, 2>,
    keys: Pipeline<Fp8Key<D, S>, 2>,
    turned: Pipeline<Turned<D>, 2>,
    /// One for each warpgroup.
    staging: SharedTiles<Part<bf16, D>, PARTS>,
}

type Of<const D: usize, S, P> = <P as Fp8Policy>::Of<D, S>;
type Shared<const D: usize, S, P> = Rings<D, S, <Of<D, S, P> as Fp8Problem<D, S>>::Message>;

/// Attends, with heads of `D` elements in tiles of swizzle `S`.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<D, S, P>, requires = sm_90a)]
#[instances(D = [64], S = [Swizzle64], P = [Full, Causal, PackedFull, PackedCausal, Optioned])]
#[instances(D = [128], S = [Swizzle128], P = [Full, Causal, PackedFull, PackedCausal, Optioned])]
pub fn attention_forward_fp8<const D: usize, S: Swizzle, P: Fp8Policy>(problem: Of<D, S, P>)
where
    Columns<D>: MatrixColumns,
{
    const { assert!(thorough(true) as usize * KEYS >= WARPGROUP_QUERIES + KEYS, "after these blocks every row sees all keys") };
    let shared = Shared::<D, S, P>::claim();
    if thread::index() == 0 {
        shared.queries.init(WarpgroupRoles::CONSUMER_WARPS);
        shared.keys.init(WarpgroupRoles::CONSUMER_WARPS);
        shared.values.init(TURNERS);
        shared.turned.init_between(TURNERS, WarpgroupRoles::CONSUMER_WARPS);
    }
    block::sync();
    let (masked, windowed) = (Of::<D, S, P>::MASKED, Of::<D, S, P>::WINDOWED);
    match WarpgroupRoles::role() {
        Role::Producer(role) => {
            let copies = role.begin();
            let warp = thread::warp();
            if copies {
                let (mut queries, mut key_ring, mut value_ring) =
                    (shared.queries.producer(), shared.keys.producer(), shared.values.producer());
                let mut tiles = problem.tiles();
                while let Some(tile) = tiles.tile() {
                    tiles.ask();
                    let tell = |stage: &Queries<D, S, _>| Of::<D, S, P>::tell(Some(tile), stage.tile);
                    let (stage, full) = queries.acquire_with(PARTS as u32 * Fp8Query::<D, S>::SIZE, tell);
                    for part in 0..PARTS as u32 {
                        problem.load_queries(&tile, tile.row() + part * WARPGROUP_QUERIES as u32, stage.parts.tile(part), full);
                    }
                    let blocks = problem.mask(&tile).blocks::<KEYS>(Span { begin: tile.row(), end: tile.row() + QUERIES as u32 });
                    for block in (if windowed { blocks.begin } else { 0 }..blocks.end).rev() {
                        value_ring.at_place_of(&key_ring);
                        let (stage, full) = key_ring.acquire(Fp8Key::<D, S>::SIZE);
                        problem.load_keys(&tile, block * KEYS as u32, stage, full);
                        let (stage, full) = value_ring.acquire_with(Fp8Key::<D, S>::SIZE, |stage| stage.ended.store(0, 0));
                        problem.load_values(&tile, block * KEYS as u32, stage.block, full);
                    }
                    tiles.advance();
                }
                tiles.leave();
                queries.acquire_with(0, |stage| Of::<D, S, P>::tell(None, stage.tile));
                value_ring.at_place_of(&key_ring);
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
            // An opaque zero: by it registers are filled outside of loops, and weights are told apart from those that are made meanwhile.
            let zero = problem.heads() >> 31;
            loop {
                let stage = queries.wait();
                let query = stage.memory().parts.tile(part).k_major();
                let Some(tile) = Of::<D, S, P>::told(stage.memory().tile) else { break };
                let (mask, row) = (problem.mask(&tile), tile.row() + part * WARPGROUP_QUERIES as u32);
                let all = mask.blocks::<KEYS>(Span { begin: tile.row(), end: tile.row() + QUERIES as u32 });
                let rows = Span { begin: row, end: row + WARPGROUP_QUERIES as u32 };
                // Of blocks that none of its queries sees a warpgroup only follows the rings.
                let own = mask.blocks::<KEYS>(rows);
                let blocks = if windowed { own.within(all) } else { Span { begin: 0, ..own } };
                for _ in blocks.end..all.end {
                    key_ring.wait().release();
                    value_ring.wait().release();
                }
                let seen = Fp8Seen { mask, row, whole: mask.whole_blocks::<KEYS>(rows), worth: problem.worth(&tile) };
                let (mut softmax, mut sum) = (problem.softmax(seen.worth, zero), RegisterTile::<D>::zero());
                if blocks.begin < blocks.end {
                    let mut walk = Walk { query, keys: &mut key_ring, values: &mut value_ring };
                    let first = Fp8Step { block: blocks.end - 1, phase: Phase::First };
                    // The last block comes first. Of one that is cut, only as many keys are multiplied and weighed as there are.
                    let cut = if masked { 0 } else { mask.keys % KEYS as u32 };
                    let mut weights = match cut.div_ceil(TURNED) {
                        1 => walk.first::<32>(&mut softmax, |scores| problem.edit::<32>(scores, first, &seen)),
                        2 => walk.first::<64>(&mut softmax, |scores| problem.edit::<64>(scores, first, &seen)),
                        _ => walk.first::<KEYS>(&mut softmax, |scores| problem.edit::<KEYS>(scores, first, &seen)),
                    };
                    let settled = blocks.end.saturating_sub(thorough(masked) + u32::from(cut != 0)).max(blocks.begin);
                    for block in (settled..blocks.end - 1).rev() {
                        let (mut scores, product) = walk.scores(sum, weights);
                        problem.edit::<KEYS>(&mut scores, Fp8Step { block, phase: Phase::Thorough }, &seen);
                        let factors = softmax.update::<KEYS>(&mut scores);
                        sum = product.wait();
                        weights = scores.to_turned_operand::<KEYS>();
                        if let Some(factors) = factors {
                            sum.scale_rows(factors);
                        }
                    }
                    for block in (blocks.begin..settled).rev() {
                        let (mut scores, product) = walk.scores(sum, weights);
                        problem.edit::<KEYS>(&mut scores, Fp8Step { block, phase: Phase::Settled }, &seen);
                        let (followed, factors) = softmax.follow::<KEYS, _>(&scores, RegisterTile::<KEYS>::to_turned_operand::<KEYS>);
                        sum = product.wait();
                        weights = followed.apart(zero);
                        if let Some(factors) = factors {
                            sum.scale_rows(factors);
                        }
                    }
                    sum = walk.last(sum, weights);
                }
                if windowed {
                    for _ in all.begin..blocks.begin {
                        key_ring.wait().release();
                        value_ring.wait().release();
                    }
                }
                // Read again: no registers hold it meanwhile.
                let tile = Of::<D, S, P>::told_again(stage.memory().tile);
                stage.release();
                let row = tile.row() + part * WARPGROUP_QUERIES as u32;
                problem.store(&tile, row, sum, softmax.finish(), shared.staging.tile(part), part);
                // The lanes parted where they stored rows: else each holds what the warp shares, through the walk too.
                warp::sync();
            }
            if warpgroup::is_leader() {
                pipeline::wait_stores_read::<0>();
            }
        }
    }
}

/// A block for each multiprocessor, which takes tiles by a counter.
fn grid<const D: usize, S: Swizzle, P: Fp8Policy>(
    args: &AttentionForwardFp8Args<'_, D, S, P>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let tiles = Of::<D, S, P>::check(&args.problem)?;
    Ok(Grid::x(tiles.min(device.multiprocessors.into()) as u32))
}

/// What a warpgroup multiplies by: its queries, and the rings of keys and of transposed values.
struct Walk<'a, const D: usize, S: Swizzle> {
    query: Operand<e4m3, WARPGROUP_QUERIES, D, false>,
    keys: &'a mut Consumer<Fp8Key<D, S>, 2>,
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
