//! Attention, backward: the gradients of queries, keys and values.
//!
//! A block stays on its multiprocessor and takes 128 keys of one head after another. Their keys and values rest in shared
//! memory while one warp copies two stages of queries, gradients of the result, and two statistics a query, block by block of
//! all heads of queries that share the keys. Two warpgroups hold 64 keys each, and compute everything transposed, so
//! that weights come out as the tensor cores take them in; for each block of queries
//!
//! 1. scores `S = K Q'` and the gradients of weights `dP = V dO'`;
//! 2. weights `P = exp2(scale S - lse)`, while `dP` is multiplied; gradients of scores `dS = P (dP - delta)`, written to
//!    shared memory in 16 bits;
//! 3. `dV += P dO` from registers; both warpgroups meet;
//! 4. `dQ' = K' dS`, each warpgroup a part, and `dK += dS Q` from registers, under which `dQ'` goes to shared memory, from
//!    where other warps have it added up in device memory.
//!
//! | barrier | between |
//! |---|---|
//! | `tiles` | the tile's number is there; the adding warps have it, and its last copies are under way |
//! | `keys` | a tile's keys and values are there, and its number; both warpgroups have multiplied by them and know where the result goes |
//! | `rows` | a stage of queries and their statistics is full; both warpgroups have multiplied by it |
//! | `EXCHANGE` | gradients of scores of both warpgroups are written; both have stored their result |
//! | `handoff` | both parts of `dQ'` are written; they were read; the adding warps know who comes first |
//! | warpgroup | its part of the result is written |
//!
//! Sums of `dQ` are `f32`, in fragments (`oxtile_tile::fragment_tile`), which [`AttentionBackwardConvert`] turns into rows. If
//! `ordered`, blocks of keys add to a block of queries one after the other, so that the bits are the same in every run and
//! under every grid; else in any order. The first stores, so nothing need be zero before.
//!
//! Heads of queries that share keys may be split among several tiles, which leave parts of the result in device memory
//! ([`AttentionBackwardReduce`]).
//!
//! Sizes are any: what hangs over an edge is loaded as zero, masked, and not stored.
//!
//! Sources: Dao, "FlashAttention-2", 2023, algorithm 2; Shah et al., "FlashAttention-3", 2024.
//!
//! [`AttentionBackwardConvert`]: super::AttentionBackwardConvert
//! [`AttentionBackwardReduce`]: super::AttentionBackwardReduce

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};
use oxtile_tile::warpgroup::Role;

use super::backward_adder::Adder;
use super::backward_mask::BlockMask;
use super::backward_reduce::{partial_elements, partial_start, store_fragments};
use super::backward_schedule::{KeyHeads, KeyQueue, KeySchedule, KeyTile, TILE_WORDS, next_tile};
use super::backward_tensors::{BackwardTensors, KeyGradients, KeyOrder, QuerySums};
use super::backward_walk::Walk;
use super::backward_workspace::{ADDERS, KEYS, Keys, MOST_KEYS, PANEL, PART, Rows, Shared as Workspace, Statistics, Team, UNCUT};
use super::mask::Mask;
use super::shape::MOST_BLOCKS;

type Shared<T, const D: usize, const QUERIES: usize, const SPAN: usize> = Workspace<T, D, QUERIES, SPAN, TILE_WORDS>;

/// Dense tensors: `Q`, `dO` and `dQ` are `[batches, heads group, queries, D]`, the others `[batches, heads / splits, keys, D]`, of any strides.
#[derive(Clone, Copy, Parameter)]
pub struct DenseKeys<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> {
    /// What is read; statistics are `[batches, heads group, blocks QUERIES]`.
    pub tensors: BackwardTensors<T, D, QUERIES, 4>,
    /// Sums of `dQ / scale`.
    pub sums: QuerySums,
    /// The gradients; none if tiles are [parts](Self::partials).
    pub gradients: Option<KeyGradients<T, D, 4>>,
    /// Room for [`partial_elements`] of each tile, `[batches, heads, blocks of keys]`: [`AttentionBackwardReduce`](super::AttentionBackwardReduce)
    /// adds them up.
    pub partials: Option<GlobalMut<f32>>,
    /// Heads of tiles.
    pub heads: KeyHeads,
    /// If `MASKED`, which keys a query sees; else how many there are, of which it sees all.
    pub mask: Mask,
    /// The order of tiles.
    pub order: KeyOrder,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// Computes the gradients of keys and values, and sums of `dQ / scale`.
///
/// `QUERIES` are computed together; a warpgroup's part of `dQ'` is 64 by `SPAN`.
#[kernel(threads = Team::THREADS, grid = grid, shared = Shared<T, D, QUERIES, SPAN>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [128], QUERIES = [80], SPAN = [80], MASKED = [false])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64], MASKED = [true])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64], MASKED = [true])]
pub fn attention_backward<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool>(
    problem: DenseKeys<T, D, QUERIES, MASKED>,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    let DenseKeys { tensors, sums, gradients, partials, heads, mask, order, scale } = problem;
    let BackwardTensors { q, grad_out, k, v, offsets, deltas } = tensors;
    let (KeyHeads { batches, heads, group, splits, .. }, KeyOrder { counter, section, ordered }) = (heads, order);
    let shared = Shared::<T, D, QUERIES, SPAN>::claim();
    if thread::index() == 0 {
        shared.init();
    }
    block::sync();
    let schedule = KeySchedule { key_blocks: mask.keys.div_ceil(KEYS as u32), heads: heads * batches, section };
    let mask = BlockMask::<QUERIES, MASKED>(mask);
    // Where the blocks of queries of a head begin: that of keys, and which of those that share it.
    let first_block = |tile: KeyTile, member: u32| ((tile.batch * heads + tile.head) * group + member) * sums.blocks;
    match Team::role() {
        Role::Producer(role) => match role.begin_warps() {
            0 => {
                let (mut tiles, mut ring) = (shared.tiles.consumer(), shared.rows.producer());
                loop {
                    // A tile is a round of keys too.
                    let mut key_ring = shared.keys.producer_in_round(tiles.parity());
                    let stage = tiles.wait();
                    // Read where they are needed: registers are few.
                    let number = || shared.number(tiles.parity() ^ 1);
                    let Some(tile) = KeyTile::load(number()) else {
                        if thread::lane() == 0 {
                            key_ring.acquire(0);
                        }
                        break;
                    };
                    if thread::lane() == 0 {
                        let (stage, full) = key_ring.acquire(Keys::<T, D>::SIZE);
                        // The divisor is not zero; saying so keeps the check out.
                        let at = [tile.batch, tile.head / splits.max(1), tile.key(), 0];
                        k.load(stage.keys, at, full);
                        v.load(stage.values, at, full);
                        mask.order(KeyTile::load_alone(number()).block, ordered).visit(group, |member, block| {
                            // Known before the stage is empty: what waits for it then starts at once.
                            let tile = KeyTile::load_alone(number());
                            let cut = if mask.cuts(tile.block, block) { block } else { UNCUT };
                            let statistics = shared.statistics.tile(ring.next_stage());
                            let bytes = Rows::<T, D, QUERIES>::SIZE + Statistics::<QUERIES>::COPIED;
                            let (stage, full) = ring.acquire_with(bytes, |_| statistics.cut.store(0, cut));
                            let at = [tile.batch, tile.head * group + member, block * QUERIES as u32, 0];
                            q.load(stage.queries, at, full);
                            grad_out.load(stage.gradients, at, full);
                            let row = u64::from(first_block(tile, member) + block) * QUERIES as u64;
                            full.load(statistics.offsets, &offsets, row);
                            full.load(statistics.deltas, &deltas, row);
                        });
                    }
                    // Now the next tile is taken: whoever is done first takes the first.
                    stage.release();
                }
            }
            3 if thread::lane() == 0 => {
                let mut tiles = shared.tiles.producer();
                let queue = KeyQueue(counter);
                let mut more = true;
                while more {
                    let parity = tiles.parity();
                    tiles.acquire_with(0, |numbers| {
                        let index = queue.take();
                        let tile = schedule.tile(index).map(|tile| tile.in_batch(heads));
                        more = tile.is_some();
                        if !more {
                            queue.leave(index, schedule.tiles());
                        }
                        KeyTile::store(tile, numbers.tile(parity));
                    });
                }
            }
            warp @ 1..=ADDERS => {
                let mut tiles = shared.tiles.consumer();
                let adder = Adder::<SPAN> { number: warp - 1, parts: shared.outgoing.first(), handoff: shared.handoff, sums };
                let mut step = 0;
                while next_tile(&mut tiles).is_some() {
                    if thread::lane() == 0 {
                        let number = || shared.number(tiles.parity() ^ 1);
                        mask.order(KeyTile::load_alone(number()).block, ordered).visit(group, |member, block| {
                            let first = first_block(KeyTile::load_alone(number()), member);
                            let turn = || mask.earlier(KeyTile::load_alone(number()).block, block);
                            adder.add(first + block, step, ordered.then_some(turn));
                            step += 1;
                        });
                    }
                }
            }
            _ => {}
        },
        Role::Consumer(role) => {
            let part = role.begin();
            let (mut ring, mut walk) = (shared.keys.consumer(), Walk::new(part, &shared));
            loop {
                let held = ring.wait();
                // Read where they are needed: registers are full.
                let number = || shared.number(ring.parity() ^ 1);
                let Some(tile) = KeyTile::load(number()) else { break };
                let mut found = walk.multiply(
                    held.memory(),
                    group * mask.blocks(tile.block).length(),
                    scale,
                    |scores, cut| {
                        if let Some(block) = cut {
                            mask.hide(scores, KeyTile::load_alone(number()).key() + part * PART as u32, block);
                        }
                    },
                    |_, _, _| (),
                );
                let tile = KeyTile::load_alone(number());
                // Behind this another tile's number may be there.
                held.release();
                found.keys.map(|x| x * core::f32::consts::LN_2 * scale);
                if let Some(partials) = partials {
                    let place = (tile.batch * heads + tile.head) * schedule.key_blocks + tile.block;
                    store_fragments(&found.keys, &partials, partial_start::<D>(place, false, part));
                    store_fragments(&found.values, &partials, partial_start::<D>(place, true, part));
                } else if let Some(gradients) = &gradients {
                    walk.store(&found, gradients, [tile.batch, tile.head, tile.key() + part * PART as u32, 0]);
                }
            }
        }
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool>(
    args: &AttentionBackwardArgs<'_, T, D, QUERIES, SPAN, MASKED>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(QUERIES * D == 2 * SPAN * PANEL, "the warpgroups' parts make dQ") };
    let DenseKeysArgument { tensors, sums, partials, heads, mask, order, .. } = &args.problem;
    heads.check()?;
    mask.check()?;
    let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], heads.query_heads(), QUERIES * D)?;
    LaunchError::check_limit("problem.mask.queries", mask.queries.into(), u64::from(sums.blocks) * QUERIES as u64)?;
    LaunchError::check_length("problem.tensors.offsets", blocks * QUERIES as u64, tensors.offsets.len())?;
    LaunchError::check_length("problem.tensors.deltas", blocks * QUERIES as u64, tensors.deltas.len())?;
    LaunchError::check_length("problem.order.counter", 1, order.counter.len())?;
    let tiles = heads.tile_heads().saturating_mul(mask.keys.div_ceil(KEYS as u32).into());
    LaunchError::check_limit("problem.mask.keys", mask.keys.into(), MOST_KEYS)?;
    LaunchError::check_limit("problem.mask.keys", tiles, MOST_BLOCKS)?;
    if let Some(partials) = partials {
        LaunchError::check_length("problem.partials", tiles * partial_elements(D as u64), partials.len())?;
    }
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
