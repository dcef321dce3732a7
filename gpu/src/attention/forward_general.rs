//! Attention, forward: what the kernel of dense full and causal attention does not do.
//!
//! Sequences lie anywhere in their tensors and differ in length ([`Sequences`]), queries see windows of keys, scores are capped,
//! the softmax has a sink, the result is merged into a running one, each head's largest score is found. All of it is chosen at
//! run time, outside the loop over blocks of keys or by a branch that all threads take together. The structure is that of
//! [`attention_forward`](super::attention_forward), with two differences: the thread that copies tells the others which tile comes
//! and where its sequence lies; and the tensor maps end where the sequence ends ([`place`]).
//!
//! Rows of padding are queries that see no key: they become zeros.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, StoredElement};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};
use oxtile_tile::warpgroup;

use super::epilogue::{Head, Running, store, store_rows};
use super::limits;
use super::mask::{Span, Window};
use super::rings::Rings;
use super::schedule::{ITEM_WORDS, Item, SequenceSchedule};
use super::sequence::{Sequences, place};
use super::softmax::{Softmax, cap};
use super::team::{PART, Pair, Part, Role, Team, Wide};
use super::walk::walk;
use super::workspace::Workspace;

type Shared<T, const D: usize, const V: usize, const KEYS: usize, G> =
    Rings<T, D, V, KEYS, G, <G as Team>::Staging<Part<T, V>>, ITEM_WORDS>;

/// Attends, with heads of up to `D` elements of queries and `V` of values.
///
/// | parameter | |
/// |---|---|
/// | `q`, `k`, `v`, `out` | tensors of `[heads, rows, size]`, as [`place`] has them; `out` is not used if there is a running result |
/// | `running` | the running result in `f32`, or empty; then `log_sum_exp` is running too |
/// | `log_sum_exp` | row `r` of head `h` of sequence `b` is `b * statistics_batch + h * statistics_head + r`, from the sequence's first row on, or, if `packed`, from the tensor's |
/// | `max_logit` | each head's largest scaled score, `[heads]`; or empty |
/// | `sink` | a score for each head, one for all, or empty |
/// | `query_ends` to `key_offsets` | [`Sequences`] |
/// | `workspace` | [`Workspace`] |
/// | `sequence_heads` | `heads` if each sequence has heads of its own in the tensors (sbhd), else 0 |
/// | `section_keys` | as many keys' heads are computed together |
/// | `row_stride`, `value_size` | of `running`, in elements |
/// | `left`, `right`, `top_left` | [`Window`] |
/// | `scale` | the factor of scores, which are then powers of 2 |
/// | `cap`, `cap_factor` | `cap` of scores, if not 0 |
#[kernel(threads = G::THREADS, grid = limits::forward_general, shared = Shared<T, D, V, KEYS, G>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Pair])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Wide])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [64], G = [Wide])]
#[expect(clippy::too_many_arguments, reason = "tensors, sizes and options of attention")]
pub fn attention_forward_general<T, const D: usize, const V: usize, const KEYS: usize, G>(
    q: TensorMap<T, PART, D, Swizzle128, 5>,
    k: TensorMap<T, KEYS, D, Swizzle128, 5>,
    v: TensorMap<T, KEYS, V, Swizzle128, 5>,
    out: TensorMapMut<T, PART, V, Swizzle128, 5>,
    running: GlobalMut<f32>,
    log_sum_exp: GlobalMut<f32>,
    max_logit: GlobalMut<f32>,
    sink: Global<f32>,
    query_ends: Global<u32>,
    key_ends: Global<u32>,
    query_offsets: Global<u32>,
    key_offsets: Global<u32>,
    workspace: GlobalMut<u32>,
    batches: u32,
    heads: u32,
    group: u32,
    sequence_heads: u32,
    query_rows: u32,
    key_rows: u32,
    section_keys: u32,
    row_stride: u64,
    value_size: u32,
    statistics_batch: u64,
    statistics_head: u64,
    packed: u32,
    padded: u32,
    left: i32,
    right: i32,
    top_left: u32,
    scale: f32,
    cap_limit: f32,
    cap_factor: f32,
) where
    T: RegisterElement + StoredElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS, G>::begin();
    let window = Window { left, right, top_left: top_left != 0 };
    let workspace = Workspace { words: workspace };
    let blocks_of = |item: &Item| window.of(&item.sequence).blocks::<KEYS>(Span { begin: item.tile.row, end: item.tile.row + G::QUERIES });
    match G::role() {
        Role::Copies(role) => {
            if !G::begin_copies(role) {
                return;
            }
            let mut rings = shared.producers();
            let sequences =
                Sequences { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: padded != 0 };
            let mut schedule = SequenceSchedule::new(sequences, G::QUERIES, batches, heads, group, section_keys);
            let mut index = block::index()[0];
            while let Some(item) = schedule.tile(index) {
                let ticket = workspace.take();
                let (Item { tile, sequence }, head) = (item, item.tile.head + item.tile.batch * sequence_heads);
                let part = move |part: u32| place(sequence.query_offset, sequence.queries, head, tile.row + part * PART as u32);
                rings.load_queries(&q, || Item::store(Some(item), shared.tile, 0), part);
                let blocks = blocks_of(&item);
                for block in (blocks.begin..blocks.end).rev() {
                    rings.load_block(&k, &v, place(sequence.key_offset, sequence.keys, head / group.max(1), block * KEYS as u32));
                }
                index = ticket;
            }
            rings.end(|| Item::store(None, shared.tile, 0));
        }
        Role::Multiplies(role) => {
            let part = G::begin_multiplies(role);
            let mut rings = shared.consumers();
            let running = Running { out: running, log_sum_exp, row_stride, value_size };
            loop {
                let stage = rings.queries.wait();
                let Some(item) = Item::load(shared.tile, 0) else { break };
                let query_part = G::part(stage.memory(), part);
                let query = G::query(query_part);
                let stage = stage.release_unless(G::IN_PLACE);
                let Item { tile, sequence } = item;
                let (row, mask) = (tile.row + part * PART as u32, window.of(&sequence));
                let (blocks, whole) = (blocks_of(&item), mask.whole_blocks::<KEYS>(Span { begin: row, end: row + PART as u32 }));
                let of_head = if sink.len() > 1 { u64::from(tile.head) } else { 0 };
                let sunk = if sink.is_empty() { f32::NEG_INFINITY } else { sink.load(of_head) * LOG2_E };
                let mut softmax = Softmax::with_sink(scale, sunk);
                let mut sum = walk::<T, D, V, KEYS>(query, &mut rings.keys, &mut rings.values, &mut softmax, blocks, |scores, step| {
                    let key = step.block * KEYS as u32;
                    if cap_limit != 0.0 {
                        cap::<KEYS>(scores, cap_factor, cap_limit);
                    }
                    if step.first || step.block >= whole.end {
                        mask.hide_after::<KEYS>(scores, row, key);
                    }
                    if step.block < whole.begin {
                        mask.hide_before::<KEYS>(scores, row, key);
                    }
                });
                let finished = softmax.finish().of_rows(|half| row + register_tile::row(half) < sequence.queries);
                let head = tile.head + tile.batch * sequence_heads;
                let first = if packed != 0 { u64::from(sequence.query_offset) } else { 0 };
                let statistics = u64::from(tile.batch) * statistics_batch + u64::from(tile.head) * statistics_head + first;
                if running.out.is_empty() {
                    finished.divide(&mut sum);
                    let at = place(sequence.query_offset, sequence.rows, head, row);
                    store::<G, _, _, _>(&out, &sum, G::staging(query_part, shared.staging, part), part, at);
                    store_rows(&log_sum_exp, statistics, row, sequence.rows, finished.log_sum_exp());
                } else {
                    let start = u64::from(sequence.query_offset) * row_stride + u64::from(head) * u64::from(value_size);
                    running.merge(&sum, &finished, Head { out: start, statistics, rows: sequence.queries }, row);
                }
                if !max_logit.is_empty() {
                    workspace.raise(tile.head, finished.largest_of_warp());
                }
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
            workspace.leave(G::CONSUMER_WARPS, &max_logit);
        }
    }
}
