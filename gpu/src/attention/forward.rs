//! Attention, forward: dense tensors, full or causal.
//!
//! A block stays on its multiprocessor and computes the result for a tile of queries of one head after another. One thread
//! copies their queries, and keeps two stages of keys and two of values full, the last block of keys first ([`Rings`]). Two
//! warpgroups have 64 queries each and walk over the blocks of keys ([`walk`]). What is stored waits in a tile of the warpgroup, whose
//! barrier it passes before it writes there and behind.
//!
//! `Q` and the result are tensors of `[batches, heads, rows, size]`, `K` and `V` of `[batches, heads / group, keys, size]`, of any
//! strides. Sizes are any: what hangs over an edge is loaded as zero, masked, and not stored. A query that sees no key
//! gets zeros and a log-sum-exp of -inf. Scores, weights and sums are `f32`, weights are rounded to `T` for their
//! product. Scores below -1e30 count as hidden; NaN and +inf give NaN in their rows.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, StoredElement};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup;

use super::epilogue::{store, store_rows};
use super::limits;
use super::mask::{FAR, Mask, Span};
use super::rings::Rings;
use super::schedule::{Queue, Schedule, Tile};
use super::softmax::Softmax;
use super::team::{Narrow, PART, Pair, Part, Role, Team, Wide};
use super::walk::walk;

type Shared<T, const D: usize, const V: usize, const KEYS: usize, G> = Rings<T, D, V, KEYS, G, <G as Team>::Staging<Part<T, V>>, 1>;

/// Attends, with heads of up to `D` elements of queries and `V` of values. `diagonal` is the last key that query 0 sees, if
/// `CAUSAL`; `scale` has the factor `log2(e)`; `log_sum_exp` is `[batches, heads, rows]`; `counter` is one zero, and is zero again
/// afterwards. `section` heads are computed together.
#[kernel(threads = G::THREADS, grid = limits::forward, shared = Shared<T, D, V, KEYS, G>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow], CAUSAL = [false, true])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair], CAUSAL = [false, true])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide], CAUSAL = [false, true])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [80], G = [Wide], CAUSAL = [false, true])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_forward<T, const D: usize, const V: usize, const KEYS: usize, G, const CAUSAL: bool>(
    q: TensorMap<T, PART, D, Swizzle128, 4>,
    k: TensorMap<T, KEYS, D, Swizzle128, 4>,
    v: TensorMap<T, KEYS, V, Swizzle128, 4>,
    out: TensorMapMut<T, PART, V, Swizzle128, 4>,
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
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS, G>::begin();
    let schedule = Schedule { tile_rows: G::QUERIES, row_tiles: rows.div_ceil(G::QUERIES), heads, batches, section };
    let mask = Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(rows, keys) };
    let blocks_of = |tile: Tile| mask.blocks::<KEYS>(Span { begin: tile.row, end: tile.row + G::QUERIES });
    match G::role() {
        Role::Copies(role) => {
            if !G::begin_copies(role) {
                return;
            }
            let mut rings = shared.producers();
            let queue = Queue { counter, tiles: schedule.tiles() };
            let mut index = block::index()[0];
            while let Some(tile) = schedule.tile(index) {
                let ticket = queue.take();
                let part = |part: u32| [tile.batch, tile.head, tile.row + part * PART as u32, 0];
                rings.load_queries(&q, || shared.tile.store(0, index), part);
                for block in (0..blocks_of(tile).end).rev() {
                    rings.load_block(&k, &v, [tile.batch, tile.head / group.max(1), block * KEYS as u32, 0]);
                }
                index = queue.index(ticket);
            }
            rings.end(|| shared.tile.store(0, index));
        }
        Role::Multiplies(role) => {
            let part = G::begin_multiplies(role);
            let mut rings = shared.consumers();
            loop {
                let stage = rings.queries.wait();
                let index = warp::shuffle(shared.tile.load(0), 0);
                let query_part = G::part(stage.memory(), part);
                let query = G::query(query_part);
                let stage = stage.release_unless(G::IN_PLACE);
                let Some(tile) = schedule.tile(index) else { break };
                let row = tile.row + part * PART as u32;
                let (blocks, whole) = (blocks_of(tile), mask.whole_blocks::<KEYS>(Span { begin: row, end: row + PART as u32 }).end);
                let mut softmax = if G::SPARING { Softmax::sparing(scale) } else { Softmax::raising(scale, CAUSAL) };
                let mut sum = walk::<T, D, V, KEYS>(query, &mut rings.keys, &mut rings.values, &mut softmax, blocks, |scores, step| {
                    if step.first || (CAUSAL && step.block >= whole) {
                        mask.hide_after::<KEYS>(scores, row, step.block * KEYS as u32);
                    }
                });
                let finished = softmax.finish();
                sum.scale_rows(finished.factor);
                store::<G, _, _, _>(&out, &sum, G::staging(query_part, shared.staging, part), part, [tile.batch, tile.head, row, 0]);
                let head = u64::from(tile.batch * heads + tile.head) * u64::from(rows);
                store_rows(&log_sum_exp, head, row, rows, finished.log_sum_exp());
                if let Some(stage) = stage {
                    if warpgroup::is_leader() {
                        pipeline::wait_stores_read::<0>();
                    }
                    stage.release_after_wait();
                }
            }
            if !G::IN_PLACE && warpgroup::is_leader() {
                pipeline::wait_stores::<0>();
            }
        }
    }
}
