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
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::{fma, log2, reciprocal};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, StoredElement, THREAD_ROWS};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup::Role;

use super::backward_adder::Adder;
use super::backward_mask::BlockMask;
use super::backward_schedule::{KeyQueue, KeyTile, next_tile};
use super::backward_sequence::{QueryBlocks, SEQUENCE_TILE_WORDS, SequenceKeySchedule, SequenceTile};
use super::backward_walk::Walk;
use super::backward_workspace::{ADDERS, KEYS, Keys, PANEL, PART, Rows, Shared as Workspace, Statistics, Team, UNCUT};
use super::limits::check_sequences;
use super::mask::{Mask, Window};
use super::sequence::{Sequences, place};
use super::softmax::cap;

type Shared<T, const D: usize, const QUERIES: usize, const SPAN: usize> = Workspace<T, D, QUERIES, SPAN, SEQUENCE_TILE_WORDS>;

/// Computes `grad_k`, `grad_v` and the sums of `dQ` but for its factor, of heads of up to `D` elements.
///
/// `QUERIES` are computed together; a warpgroup's part of `dQ'` is 64 by `SPAN`.
///
/// | parameter | |
/// |---|---|
/// | `q` to `grad_v` | tensors of `[heads, rows, size]`, as [`place`] has them; `grad_k` and `grad_v` are not used if there are sums |
/// | `grad_k_sum`, `grad_v_sum` | `f32` tensors that the gradients are added to, or empty |
/// | `offsets`, `deltas` | of [`attention_backward_blocks`](fn@super::attention_backward_blocks) |
/// | `sums`, `turns` | `[heads group, blocks]` blocks of `QUERIES` by `D`; a zero for each, which counts who has added to it |
/// | `counter` | one zero, and zero again afterwards |
/// | `query_ends` to `padded` | [`Sequences`]; rows of padding become zeros |
/// | `heads`, `group` | heads of keys of a sequence, and heads of queries that share one |
/// | `sequence_heads` | `heads` if each sequence has heads of its own in the tensors (sbhd), else 0 |
/// | `blocks` | [`QueryBlocks`] |
/// | `section_keys` | as many keys' heads are computed together |
/// | `size`, `value_size` | of a row of a head: multiples of 8 |
/// | `left`, `right`, `top_left` | [`Window`] |
/// | `scale`, `cap_limit`, `cap_factor` | as [`Scores`](super::Scores) has them, if `CAPPED` |
/// | `grad_scale` | the factor of scores: that of the gradients of keys |
/// | `ordered` | whether blocks of keys add to a block of queries one after the other |
#[kernel(threads = Team::THREADS, grid = grid, shared = Shared<T, D, QUERIES, SPAN>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64], CAPPED = [false])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [96], SPAN = [48], CAPPED = [true])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64], CAPPED = [false, true])]
#[expect(clippy::too_many_arguments, reason = "tensors, sizes and options of attention")]
pub fn attention_backward_general<
    T: RegisterElement + StoredElement,
    const D: usize,
    const QUERIES: usize,
    const SPAN: usize,
    const CAPPED: bool,
>(
    q: TensorMap<T, QUERIES, D, Swizzle128, 5>,
    grad_out: TensorMap<T, QUERIES, D, Swizzle128, 5>,
    k: TensorMap<T, KEYS, D, Swizzle128, 5>,
    v: TensorMap<T, KEYS, D, Swizzle128, 5>,
    grad_k: TensorMapMut<T, PART, D, Swizzle128, 5>,
    grad_v: TensorMapMut<T, PART, D, Swizzle128, 5>,
    grad_k_sum: GlobalMut<f32>,
    grad_v_sum: GlobalMut<f32>,
    offsets: Global<f32>,
    deltas: Global<f32>,
    sums: GlobalMut<f32>,
    turns: GlobalMut<u32>,
    counter: GlobalMut<u32>,
    query_ends: Global<u32>,
    key_ends: Global<u32>,
    query_offsets: Global<u32>,
    key_offsets: Global<u32>,
    query_rows: u32,
    key_rows: u32,
    padded: u32,
    batches: u32,
    heads: u32,
    group: u32,
    sequence_heads: u32,
    blocks: u32,
    section_keys: u32,
    size: u32,
    value_size: u32,
    left: i32,
    right: i32,
    top_left: u32,
    scale: f32,
    cap_limit: f32,
    cap_factor: f32,
    grad_scale: f32,
    ordered: u32,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    let shared = Shared::<T, D, QUERIES, SPAN>::claim();
    if thread::index() == 0 {
        shared.init();
    }
    block::sync();
    let window = Window { left, right, top_left: top_left != 0 };
    let mask_of = |mask: Mask| BlockMask::<QUERIES, true>(mask);
    let query_blocks = QueryBlocks { query_ends, batches, size: QUERIES as u32, blocks };
    // The tensors' head of keys.
    let head_of = |tile: KeyTile| tile.head + tile.batch * sequence_heads;
    // Where the blocks of queries of a sequence's head begin.
    let first_block = |item: &SequenceTile, member: u32| (item.tile.head * group + member) * blocks + item.first_block;
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
                        mask_of(item.mask).order(item.tile.block, ordered != 0).visit(group, |member, block| {
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
                let sequences = Sequences {
                    query_ends,
                    key_ends,
                    query_offsets,
                    key_offsets,
                    diagonals: None,
                    query_rows,
                    key_rows,
                    padded: padded != 0,
                };
                let mut schedule = SequenceKeySchedule::new(sequences, window, query_blocks, heads, section_keys);
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
                let adder = Adder::<SPAN> { number: warp - 1, parts: shared.outgoing.first(), handoff: shared.handoff, sums, turns };
                let mut step = 0;
                while next_tile(&mut tiles).is_some() {
                    if thread::lane() == 0 {
                        let number = || shared.number(tiles.parity() ^ 1);
                        let item = SequenceTile::load_alone(number());
                        mask_of(item.mask).order(item.tile.block, ordered != 0).visit(group, |member, block| {
                            let first = first_block(&SequenceTile::load_alone(number()), member);
                            let turn = || {
                                let item = SequenceTile::load_alone(number());
                                mask_of(item.mask).earlier(item.tile.block, block)
                            };
                            adder.add(first + block, step, (ordered != 0).then_some(turn));
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
                    scale,
                    |scores, cut| {
                        if CAPPED {
                            cap(scores, cap_factor, cap_limit);
                        }
                        if let Some(block) = cut {
                            let key = KeyTile::load_alone(number()).key() + part * PART as u32;
                            mask_of(SequenceTile::load_mask(number())).hide(scores, key, block);
                        }
                    },
                    |gradients, weights, offsets| {
                        if CAPPED {
                            bend(gradients, weights, offsets, reciprocal(cap_limit));
                        }
                    },
                );
                let SequenceTile { tile, mask, key_offset, key_rows, .. } = SequenceTile::load(number());
                // Behind this another tile's number may be there.
                held.release();
                found.keys.map(|x| x * grad_scale);
                let (head, key) = (head_of(tile), tile.key() + part * PART as u32);
                if grad_k_sum.is_empty() {
                    walk.store(&found, |of_keys, of_values| {
                        let at = place(key_offset, key_rows, head, key);
                        grad_v.store(at, of_values);
                        grad_k.store(at, of_keys);
                    });
                } else {
                    let row_heads = heads * if sequence_heads == 0 { 1 } else { batches };
                    let first = u64::from(key_offset) * u64::from(row_heads) + u64::from(head);
                    let (stride, rows) = (u64::from(row_heads), [key, mask.keys]);
                    add_rows(&found.keys, &grad_k_sum, first, stride, rows, size);
                    add_rows(&found.values, &grad_v_sum, first, stride, rows, value_size);
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
            // No weight, no gradient: its logarithm says nothing. A weight that is no number makes the gradient none.
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
    let (batches, heads) = (u64::from(args.batches), u64::from(args.heads));
    check_sequences(args.batches, &args.query_ends, &args.key_ends, &args.query_offsets, &args.key_offsets)?;
    let blocks = u64::from(args.blocks) * heads * u64::from(args.group);
    LaunchError::check_length("offsets", blocks * QUERIES as u64, args.offsets.len())?;
    LaunchError::check_length("deltas", blocks * QUERIES as u64, args.deltas.len())?;
    LaunchError::check_length("sums", blocks * (QUERIES * D) as u64, args.sums.len())?;
    LaunchError::check_length("turns", blocks, args.turns.len())?;
    LaunchError::check_length("counter", 1, args.counter.len())?;
    LaunchError::check_limit("blocks", blocks, (1 << 31) - 1)?;
    LaunchError::check_limit("size", args.size.into(), D as u64)?;
    LaunchError::check_limit("value_size", args.value_size.into(), D as u64)?;
    LaunchError::check_alignment("grad_k_sum", 8, args.grad_k_sum.address())?;
    LaunchError::check_alignment("grad_v_sum", 8, args.grad_v_sum.address())?;
    LaunchError::check_limit("key_rows", args.key_rows.into(), (1 << 30) - KEYS as u64)?;
    // Each sequence may end in a tile of its own.
    let row_tiles = u64::from(args.key_rows.div_ceil(KEYS as u32));
    let tiles = heads * if args.sequence_heads == 0 { row_tiles + batches } else { row_tiles * batches };
    LaunchError::check_limit("key_rows", tiles, (1 << 31) - 1)?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
