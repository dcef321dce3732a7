//! Attention, backward: what the kernel of dense tensors does not do.
//!
//! Sequences lie anywhere in their tensors and differ in length ([`Sequences`]), queries see windows of keys, scores are capped,
//! gradients are added to `f32` tensors, heads are smaller than tiles. All of it but caps is chosen at run time, outside the loop over
//! blocks of queries or by a branch that all threads take together. The structure is that of
//! [`attention_backward`](super::attention_backward), with two differences: a tile comes with its sequence; and the tensor maps end
//! where the sequence ends ([`place`]). Caps take registers: with heads of up to 64 a block then has three quarters of the queries.
//!
//! Rows of padding are keys that no query sees: their gradients become zeros.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{fma, log2, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, StoredElement, THREAD_ROWS};
use oxtile_tile::warpgroup::Role;

use super::backward_adder::Adder;
use super::backward_mask::BlockMask;
use super::backward_schedule::{KeyHeads, KeyQueue, KeyTile, next_tile};
use super::backward_sequence::{QueryBlocks, SEQUENCE_TILE_WORDS, SequenceKeySchedule, SequenceTile};
use super::backward_tensors::{BackwardTensors, KeyGradients, KeyOrder, QuerySums};
use super::backward_walk::Walk;
use super::backward_workspace::{ADDERS, KEYS, Keys, MOST_KEYS, PANEL, PART, Rows, Shared as Workspace, Statistics, Team, UNCUT};
use super::mask::{Mask, Window};
use super::scores::Scores;
use super::sequence::{Sequences, place};
use super::shape::MOST_BLOCKS;

type Shared<T, const D: usize, const QUERIES: usize, const SPAN: usize> = Workspace<T, D, QUERIES, SPAN, SEQUENCE_TILE_WORDS>;

/// Where the gradients of keys and values of sequences go.
#[derive(Clone, Copy, Parameter)]
pub struct KeyTarget<T: RegisterElement, const D: usize> {
    /// Tensors of `[heads, rows, size]`, as [`place`] has them.
    pub rounded: Option<KeyGradients<T, D, 5>>,
    /// The tensors, in `f32`, that they are added to if there are no others.
    pub added: Option<KeySums>,
    /// The factor of scores, and so of their gradients.
    pub scale: f32,
}

/// Tensors, in `f32`, that gradients of keys and values are added to.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct KeySums {
    /// Of the keys.
    pub k: GlobalMut<f32>,
    /// Of the values.
    pub v: GlobalMut<f32>,
    /// Elements of a row of a head of `K`: a multiple of 8.
    pub size: u32,
    /// The same of `V`.
    pub value_size: u32,
}

/// Sequences, and options. Tensors are `[heads, rows, size]`, as [`place`] has them, of heads of up to `D` elements.
#[derive(Clone, Copy, Parameter)]
pub struct SequenceKeys<T: RegisterElement, const D: usize, const QUERIES: usize> {
    /// What is read; statistics are `[heads group, blocks QUERIES]`, laid out as [`QueryBlocks`].
    pub tensors: BackwardTensors<T, D, QUERIES, 5>,
    /// Sums of `dQ` but for its factor.
    pub sums: QuerySums,
    /// Where the gradients go.
    pub target: KeyTarget<T, D>,
    /// The sequences; rows of padding become zeros.
    pub sequences: Sequences,
    /// Heads of tiles.
    pub heads: KeyHeads,
    /// Which keys a query sees.
    pub window: Window,
    /// How scores are made.
    pub scores: Scores,
    /// The order of tiles.
    pub order: KeyOrder,
}

/// Computes the gradients of keys and values, and sums of `dQ` but for its factor. Scores are capped if `CAPPED`.
///
/// `QUERIES` are computed together; a warpgroup's part of `dQ'` is 64 by `SPAN`.
#[kernel(threads = Team::THREADS, grid = grid, shared = Shared<T, D, QUERIES, SPAN>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64], CAPPED = [false])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [96], SPAN = [48], CAPPED = [true])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64], CAPPED = [false, true])]
pub fn attention_backward_general<
    T: RegisterElement + StoredElement,
    const D: usize,
    const QUERIES: usize,
    const SPAN: usize,
    const CAPPED: bool,
>(
    problem: SequenceKeys<T, D, QUERIES>,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    let SequenceKeys { tensors, sums, target, sequences, heads, window, scores, order } = problem;
    let BackwardTensors { q, grad_out, k, v, offsets, deltas } = tensors;
    let (KeyHeads { batches, heads, group, step, .. }, KeyOrder { counter, section, ordered }) = (heads, order);
    let shared = Shared::<T, D, QUERIES, SPAN>::claim();
    if thread::index() == 0 {
        shared.init();
    }
    block::sync();
    let mask_of = |mask: Mask| BlockMask::<QUERIES, true>(mask);
    let query_blocks = QueryBlocks { query_ends: sequences.query_ends, batches, size: QUERIES as u32, blocks: sums.blocks };
    // The tensors' key head.
    let head_of = |tile: KeyTile| tile.head + tile.batch * step;
    // Where the blocks of queries of a sequence's head begin.
    let first_block = |item: &SequenceTile, member: u32| (item.tile.head * group + member) * sums.blocks + item.first_block;
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
                        let SequenceTile { mask, key_offset, .. } = SequenceTile::load_alone(number());
                        let (stage, full) = key_ring.acquire(Keys::<T, D>::SIZE);
                        let at = place(key_offset, mask.keys, head_of(tile), tile.key());
                        k.load(stage.keys, at, full);
                        v.load(stage.values, at, full);
                        let item = SequenceTile::load_alone(number());
                        mask_of(item.mask).order(item.tile.block, ordered).visit(group, |member, block| {
                            // Known before the stage is empty: what waits for it then starts at once.
                            let item = SequenceTile::load_alone(number());
                            let cut = if mask_of(item.mask).cuts(item.tile.block, block) { block } else { UNCUT };
                            let statistics = shared.statistics.tile(ring.next_stage());
                            let bytes = Rows::<T, D, QUERIES>::SIZE + Statistics::<QUERIES>::COPIED;
                            let (stage, full) = ring.acquire_with(bytes, |_| statistics.cut.store(0, cut));
                            let head = head_of(item.tile) * group + member;
                            let at = place(item.query_offset, item.mask.queries, head, block * QUERIES as u32);
                            q.load(stage.queries, at, full);
                            grad_out.load(stage.gradients, at, full);
                            let row = u64::from(first_block(&item, member) + block) * QUERIES as u64;
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
                let mut schedule = SequenceKeySchedule::new(sequences, window, query_blocks, heads, section);
                let queue = KeyQueue(counter);
                let mut more = true;
                while more {
                    let parity = tiles.parity();
                    tiles.acquire_with(0, |numbers| {
                        let index = queue.take();
                        let item = schedule.tile(index);
                        more = item.is_some();
                        if !more {
                            queue.leave(index, schedule.tiles());
                        }
                        SequenceTile::store(item, numbers.tile(parity));
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
                        let item = SequenceTile::load_alone(number());
                        mask_of(item.mask).order(item.tile.block, ordered).visit(group, |member, block| {
                            let first = first_block(&SequenceTile::load_alone(number()), member);
                            let turn = || {
                                let item = SequenceTile::load_alone(number());
                                mask_of(item.mask).earlier(item.tile.block, block)
                            };
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
                let seen = mask_of(SequenceTile::load(number()).mask).blocks(tile.block);
                let mut found = walk.multiply(
                    held.memory(),
                    group * seen.length(),
                    scores.scale,
                    |products, cut| {
                        if CAPPED {
                            scores.cap(products);
                        }
                        if let Some(block) = cut {
                            let key = KeyTile::load_alone(number()).key() + part * PART as u32;
                            mask_of(SequenceTile::load_mask(number())).hide(products, key, block);
                        }
                    },
                    |gradients, weights, offsets| {
                        if CAPPED {
                            bend(gradients, weights, offsets, reciprocal(scores.cap_limit));
                        }
                    },
                );
                let SequenceTile { tile, mask, key_offset, key_rows, .. } = SequenceTile::load(number());
                // After this another tile's number may be there.
                held.release();
                found.keys.map(|x| x * target.scale);
                let (head, key) = (head_of(tile), tile.key() + part * PART as u32);
                if let Some(gradients) = &target.rounded {
                    walk.store(&found, gradients, place(key_offset, key_rows, head, key));
                } else if let Some(KeySums { k, v, size, value_size }) = target.added {
                    let row_heads = heads * if step == 0 { 1 } else { batches };
                    let first = u64::from(key_offset) * u64::from(row_heads) + u64::from(head);
                    let (stride, rows) = (u64::from(row_heads), [key, mask.keys]);
                    add_rows(&found.keys, &k, first, stride, rows, size);
                    add_rows(&found.values, &v, first, stride, rows, value_size);
                    // Seen to meet again, a warp's numbers that all lanes share stay in registers of the warp.
                    warp::sync();
                }
            }
        }
    }
}

/// Gradients of capped scores become those of the scores before: times `1 - t^2`, where the hyperbolic tangent `t` is what the
/// weight's logarithm says of the capped score, times `slope`. So nothing need be kept of the scores.
#[inline(always)]
#[track_caller]
fn bend<const QUERIES: usize>(
    gradients: &mut RegisterTile<QUERIES>,
    weights: &RegisterTile<QUERIES>,
    offsets: SharedArray<f32, QUERIES>,
    slope: f32,
) where
    Columns<QUERIES>: MatrixColumns,
{
    gradients.map_pairs(|half, pair, values| {
        // Read where they are used: registers are full.
        let (weights, offsets) = (weights.pair(half, pair), offsets.load_pair(register_tile::column(pair as u32)));
        [0, 1].map(|i| {
            let tangent = (log2(weights[i]) - offsets[i]) * slope;
            // No weight, no gradient: its logarithm says nothing. A weight that is NaN makes the gradient NaN.
            if weights[i] == 0.0 { 0.0 } else { values[i] * fma(-tangent, tangent, 1.0) }
        })
    });
}

/// Adds a warpgroup's tile, whose first row is `row` of `rows`, to those of a tensor of heads of `size` elements: the first row's head is
/// `first`, the next row's `stride` further.
#[inline(always)]
#[track_caller]
fn add_rows<const D: usize>(tile: &RegisterTile<D>, target: &GlobalMut<f32>, first: u64, stride: u64, [row, rows]: [u32; 2], size: u32)
where
    Columns<D>: MatrixColumns,
{
    let mut half = 0;
    while half < THREAD_ROWS {
        let row = row + register_tile::row(half as u32);
        let mut pair = 0;
        while pair < RegisterTile::<D>::PAIRS {
            let column = register_tile::column(pair as u32);
            if row < rows && column < size {
                let at = (first + u64::from(row) * stride) * u64::from(size) + u64::from(column);
                let (old, new) = (target.load_pair(at).map(f32::from_bits), tile.pair(half, pair));
                target.store_pair(at, [0, 1].map(|i| (old[i] + new[i]).to_bits()));
            }
            pair += 1;
        }
        half += 1;
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool>(
    args: &AttentionBackwardGeneralArgs<'_, T, D, QUERIES, SPAN, CAPPED>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(QUERIES * D == 2 * SPAN * PANEL, "the warpgroups' parts make dQ") };
    let SequenceKeysArgument { tensors, sums, target, sequences, heads, window, order, .. } = &args.problem;
    heads.check()?;
    sequences.check(heads.batches)?;
    window.check()?;
    let query_heads = u64::from(heads.heads) * u64::from(heads.group);
    let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], query_heads, QUERIES * D)?;
    LaunchError::check_length("problem.tensors.offsets", blocks * QUERIES as u64, tensors.offsets.len())?;
    LaunchError::check_length("problem.tensors.deltas", blocks * QUERIES as u64, tensors.deltas.len())?;
    LaunchError::check_length("problem.order.counter", 1, order.counter.len())?;
    let key_rows = u64::from(sequences.key_rows);
    LaunchError::check_limit("problem.sequences.key_rows", key_rows, MOST_KEYS)?;
    if let Some(KeySumsArgument { k, v, size, value_size }) = &target.added {
        let row_heads = if heads.step == 0 { heads.heads.into() } else { heads.tile_heads() };
        for (name, sum, size) in [("problem.target.added.k", k, *size), ("problem.target.added.v", v, *value_size)] {
            LaunchError::check_limit(name, size.into(), D as u64)?;
            LaunchError::check_length(name, (key_rows * row_heads).saturating_mul(size.into()), sum.len())?;
            LaunchError::check_alignment(name, 8, sum.address())?;
        }
    }
    // Each sequence may end in a tile of its own.
    let (row_tiles, batches) = (key_rows.div_ceil(KEYS as u64), u64::from(heads.batches));
    let tiles = u64::from(heads.heads) * if heads.step == 0 { row_tiles + batches } else { row_tiles * batches };
    LaunchError::check_limit("problem.sequences.key_rows", tiles, MOST_BLOCKS)?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
