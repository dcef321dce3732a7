//! Attention, backward: the gradients of queries, keys and values.
//!
//! A block stays on its multiprocessor and takes 128 keys of one head after another. Their keys and values rest in shared
//! memory while one warp copies two stages of queries, gradients of the result, and two statistics a query, block by block of
//! all query heads that share the keys. Two warpgroups hold 64 keys each, and compute everything transposed, so
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
//! | `handoff` | both parts of `dQ'` are written; they were read; the adding warps know which comes first |
//! | warpgroup | its part of the result is written |
//!
//! Sums of `dQ` are `f32`, in fragments (`oxtile_tile::fragment_tile`), which [`AttentionBackwardConvert`] turns into rows. If
//! `ordered`, blocks of keys add to a block of queries one after the other, so that the bits are the same in every run and
//! under every grid; else in any order. The first stores, so nothing need be zero before.
//!
//! Query heads that share keys may be split among several tiles, which leave parts of the result in device memory
//! ([`AttentionBackwardReduce`]).
//!
//! What is computed, of which tensors, and where the result goes is a compile-time [`KeyProblem`].
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
use super::backward_dense::{DenseKeys, DenseProblem};
use super::backward_problem::{Common, KeyProblem, KeyTiles};
use super::backward_schedule::{KeyQueue, KeyTile, TILE_WORDS, next_tile};
use super::backward_tensors::KeyOrder;
use super::backward_walk::Walk;
use super::backward_workspace::{ADDERS, Keys, PANEL, Rows, Shared as Workspace, Statistics, UNCUT, WARPGROUP_KEYS, WarpgroupRoles};

type Shared<T, const D: usize, const QUERIES: usize, const SPAN: usize> = Workspace<T, D, QUERIES, SPAN, TILE_WORDS>;

/// Computes the gradients of keys and values, and sums of `dQ / scale`.
///
/// `QUERIES` are computed together; a warpgroup's part of `dQ'` is 64 by `SPAN`.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<T, D, QUERIES, SPAN>, requires = sm_90a)]
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
    differentiate::<_, T, D, QUERIES, SPAN, TILE_WORDS, MASKED>(DenseProblem::new(problem));
}

/// Computes the gradients of a problem's keys and values, and sums of `dQ`.
#[inline(always)]
#[track_caller]
pub(super) fn differentiate<P, T, const D: usize, const QUERIES: usize, const SPAN: usize, const WORDS: usize, const MASKED: bool>(
    problem: P,
) where
    P: KeyProblem<T, D, QUERIES, WORDS, MASKED>,
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(QUERIES * D == 2 * SPAN * PANEL, "the warpgroups' parts make dQ") };
    let shared = Workspace::<T, D, QUERIES, SPAN, WORDS>::claim();
    if thread::index() == 0 {
        shared.init();
    }
    block::sync();
    let Common { offsets, deltas, sums, order: KeyOrder { counter, ordered, .. }, group, scale } = problem.common();
    match WarpgroupRoles::role() {
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
                        let item = P::read_of(tile, number());
                        let (stage, full) = key_ring.acquire(Keys::<T, D>::SIZE);
                        problem.load_keys(&item, || P::read(number()), stage, full);
                        let item = P::read(number());
                        problem.mask(&item).order(P::tile(&item).block, ordered).visit(group, |member, block| {
                            // Known before the stage is empty: what waits for it then starts at once.
                            let item = P::read(number());
                            let mask = problem.mask(&item);
                            let cut = if mask.cuts(P::tile(&item).block, block) { mask.place(block) } else { UNCUT };
                            let statistics = shared.statistics.tile(ring.next_stage());
                            let bytes = Rows::<T, D, QUERIES>::SIZE + Statistics::<QUERIES>::COPIED;
                            let (stage, full) = ring.acquire_with(bytes, |_| statistics.cut.store(0, cut));
                            problem.load_rows(&item, || P::read(number()), [member, block], stage, full);
                            let row = u64::from(problem.query_block(&item, member, block)) * QUERIES as u64;
                            full.load(statistics.offsets, &offsets, row);
                            full.load(statistics.deltas, &deltas, row);
                        });
                    }
                    // Now the next tile is taken: the block that is done first takes the first.
                    stage.release();
                }
            }
            3 if thread::lane() == 0 => {
                let (mut numbers, mut tiles, queue) = (shared.tiles.producer(), problem.tiles(), KeyQueue(counter));
                let mut more = true;
                while more {
                    let parity = numbers.parity();
                    numbers.acquire_with(0, |numbers| {
                        let index = queue.take();
                        let item = tiles.tile(index);
                        more = item.is_some();
                        if !more {
                            queue.leave(index, tiles.tiles());
                        }
                        P::store_item(item, numbers.tile(parity));
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
                        let item = P::read(number());
                        problem.mask(&item).order(P::tile(&item).block, ordered).visit(group, |member, block| {
                            let at = problem.query_block(&P::read(number()), member, block);
                            let turn = || {
                                let item = P::read(number());
                                problem.mask(&item).earlier(P::tile(&item).block, block)
                            };
                            adder.add(at, step, ordered.then_some(turn));
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
                let seen = problem.mask(&P::read_together(tile, number())).blocks(tile.block);
                let found = walk.multiply(
                    held.memory(),
                    group * seen.length(),
                    scale,
                    |products, cut| {
                        problem.edit(products);
                        if let Some(block) = cut {
                            let key = KeyTile::load_alone(number()).key() + part * WARPGROUP_KEYS as u32;
                            problem.read_mask(number()).hide(products, key, block);
                        }
                    },
                    |gradients, weights, offsets| problem.bend(gradients, weights, offsets),
                );
                let item = P::read_result(number());
                // After this another tile's number may be there.
                held.release();
                problem.store(&walk, found, item, part);
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
    args.problem.grid(device)
}
