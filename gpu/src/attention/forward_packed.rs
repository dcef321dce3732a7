//! Attention, forward: packed sequences, full or causal.
//!
//! The kernel of dense tensors ([`attention_forward`](super::attention_forward)) for sequences that lie anywhere in their tensors and
//! differ in length ([`Sequences`]): the thread that copies walks along them, and hands the others each tile with its sequence through
//! shared memory; the tensor maps end where the sequence ends ([`place`]). What more there is to attention is the
//! [general kernel's](super::attention_forward_general).
//!
//! Where the result is stored, the tile is read from shared memory again, so that no register holds it over the walk: there are two places for tiles,
//! by turns, as the next one comes meanwhile.
//!
//! Rows of padding are queries that see no key: they become zeros.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, StoredElement};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup;

use super::epilogue::{store, store_rows};
use super::limits;
use super::mask::{FAR, Mask, Span};
use super::rings::Rings;
use super::schedule::{ITEM_WORDS, Item, SequenceQueue, SequenceSchedule};
use super::sequence::{Sequence, Sequences, place};
use super::softmax::Softmax;
use super::team::{Narrow, PART, Pair, Part, Role, Team};
use super::walk::walk;

type Shared<T, const D: usize, const V: usize, const KEYS: usize, G> =
    Rings<T, D, V, KEYS, G, <G as Team>::Staging<Part<T, V>>, { 2 * ITEM_WORDS }>;

/// Attends, with heads of up to `D` elements of queries and `V` of values.
///
/// | parameter | |
/// |---|---|
/// | `q`, `k`, `v`, `out` | tensors of `[heads, rows, size]`, as [`place`] has them |
/// | `log_sum_exp` | row `r` of head `h` is `h * query_rows + r` |
/// | `query_ends` to `key_offsets`, `padded` | [`Sequences`] |
/// | `counter` | one zero, and zero again afterwards |
/// | `group` | heads of queries that share keys |
/// | `query_rows`, `key_rows` | rows of the tensors |
/// | `section_keys` | as many keys' heads are computed together |
/// | `top_left` | if `CAUSAL`: whether query 0 is aligned with key 0 or, if it is 0, the last query with the last key |
/// | `scale` | the factor of scores, which are then powers of 2 |
#[kernel(threads = G::THREADS, grid = limits::forward_packed, shared = Shared<T, D, V, KEYS, G>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow], CAUSAL = [false, true])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair], CAUSAL = [false, true])]
#[expect(clippy::too_many_arguments, reason = "tensors, sizes and options of attention")]
pub fn attention_forward_packed<T, const D: usize, const V: usize, const KEYS: usize, G, const CAUSAL: bool>(
    q: TensorMap<T, PART, D, Swizzle128, 5>,
    k: TensorMap<T, KEYS, D, Swizzle128, 5>,
    v: TensorMap<T, KEYS, V, Swizzle128, 5>,
    out: TensorMapMut<T, PART, V, Swizzle128, 5>,
    log_sum_exp: GlobalMut<f32>,
    query_ends: Global<u32>,
    key_ends: Global<u32>,
    query_offsets: Global<u32>,
    key_offsets: Global<u32>,
    counter: GlobalMut<u32>,
    batches: u32,
    heads: u32,
    group: u32,
    query_rows: u32,
    key_rows: u32,
    section_keys: u32,
    padded: u32,
    top_left: u32,
    scale: f32,
) where
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS, G>::begin();
    let mask_of = |sequence: &Sequence| {
        let Sequence { queries, keys, .. } = *sequence;
        let diagonal = if top_left != 0 { 0 } else { keys.cast_signed() - queries.cast_signed() };
        Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(queries, keys) }
    };
    let blocks_of = |item: &Item| mask_of(&item.sequence).blocks::<KEYS>(Span { begin: item.tile.row, end: item.tile.row + G::QUERIES });
    match G::role() {
        Role::Copies(role) => {
            if !G::begin_copies(role) {
                return;
            }
            let mut rings = shared.producers();
            let sequences =
                Sequences { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: padded != 0 };
            let mut schedule = SequenceSchedule::new(sequences, G::QUERIES, batches, heads, group, section_keys);
            let (queue, mut index, mut turn) = (SequenceQueue(counter), block::index()[0], 0);
            while let Some(item) = schedule.tile(index) {
                let ticket = queue.take();
                let Item { tile, sequence } = item;
                let part = |part: u32| place(sequence.query_offset, sequence.queries, tile.head, tile.row + part * PART as u32);
                rings.load_queries(&q, || Item::store(Some(item), shared.tile, turn), part);
                for block in (0..blocks_of(&item).end).rev() {
                    rings.load_block(&k, &v, place(sequence.key_offset, sequence.keys, tile.head / group.max(1), block * KEYS as u32));
                }
                (index, turn) = (ticket, turn ^ ITEM_WORDS as u32);
            }
            queue.leave(index, schedule.tiles());
            rings.end(|| Item::store(None, shared.tile, turn));
        }
        Role::Multiplies(role) => {
            let part = G::begin_multiplies(role);
            let (mut rings, mut turn) = (shared.consumers(), 0);
            loop {
                let stage = rings.queries.wait();
                let Some(item) = Item::load(shared.tile, turn) else { break };
                let query_part = G::part(stage.memory(), part);
                let query = G::query(query_part);
                let stage = stage.release_unless(G::IN_PLACE);
                let Item { tile, sequence } = item;
                let (row, mask) = (tile.row + part * PART as u32, mask_of(&sequence));
                let (blocks, whole) = (blocks_of(&item), mask.whole_blocks::<KEYS>(Span { begin: row, end: row + PART as u32 }).end);
                let mut softmax = if G::SPARING { Softmax::sparing(scale) } else { Softmax::raising(scale, CAUSAL) };
                let mut sum = walk::<T, D, V, KEYS>(query, &mut rings.keys, &mut rings.values, &mut softmax, blocks, |scores, step| {
                    if step.first || (CAUSAL && step.block >= whole) {
                        mask.hide_after::<KEYS>(scores, row, step.block * KEYS as u32);
                    }
                });
                let Item { tile, sequence } = Item::reload(shared.tile, turn);
                turn ^= ITEM_WORDS as u32;
                let row = tile.row + part * PART as u32;
                let finished = softmax.finish().of_rows(|half| row + register_tile::row(half) < sequence.queries);
                finished.divide(&mut sum);
                let at = place(sequence.query_offset, sequence.rows, tile.head, row);
                store::<G, _, _, _>(&out, &sum, G::staging(query_part, shared.staging, part), part, at);
                let statistics = u64::from(tile.head) * u64::from(query_rows) + u64::from(sequence.query_offset);
                store_rows(&log_sum_exp, statistics, row, sequence.rows, finished.log_sum_exp());
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
