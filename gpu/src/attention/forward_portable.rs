//! Attention, forward, on any GPU from sm_80 on: matrix multiplication by warps, copies by `cp.async`.
//!
//! A block of four warps computes 64 queries of one head. Keys and values come in blocks of 64, the last first, in two stages: one is
//! copied while the other is multiplied. Queries, scores and the result stay in registers, in the same fragments as a
//! warpgroup's, so that masks and softmax are those of [`attention_forward`](fn@super::attention_forward).
//!
//! One barrier a step: behind it the next stage is there for all warps, and all have read this one, which is filled again.
//!
//! `Q` and the result are rows of `[heads, D]`, sequences of which lie as [`Sequences`] says; so do `K` and `V`. Rows start at
//! multiples of 16 bytes. Results are as [`attention_forward`](fn@super::attention_forward) has them, to rounding.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, OperandTile, RegisterElement, RegisterTile};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::warp_matrix::{self, KMajor, NMajor};

use super::limits;
use super::mask::{Span, Window};
use super::sequence::Sequences;
use super::softmax::Softmax;

const THREADS: u32 = 128;
/// Queries of a block.
pub const PORTABLE_QUERIES: usize = 64;
/// Keys of a step.
pub const PORTABLE_KEYS: usize = 64;
const ROWS: usize = PORTABLE_QUERIES;
const KEYS: usize = PORTABLE_KEYS;

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize> {
    queries: SharedTile<T, ROWS, D, Swizzle128>,
    keys: Tiles<SharedTile<T, KEYS, D, Swizzle128>, 2>,
    values: Tiles<SharedTile<T, KEYS, D, Swizzle128>, 2>,
}

/// Attends. The first six numbers after the offsets say where the sequences lie; `head_step` query heads, and the key heads that
/// share them, separate sequences that share rows. `log_rows` is 0 where the log-sum-exp is `[heads, query_rows]`, else it is
/// `[batches, heads, log_rows]`. `scale` has the factor `log2(e)`.
#[kernel(threads = THREADS, grid = limits::forward_portable, shared = Shared<T, D>)]
#[instances(T = [bf16, f16], D = [64, 128])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_forward_portable<T: RegisterElement, const D: usize>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    out: GlobalMut<T>,
    log_sum_exp: GlobalMut<f32>,
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
    head_step: u32,
    row_tiles: u32,
    log_rows: u32,
    left: i32,
    right: i32,
    top_left: u32,
    scale: f32,
) where
    Columns<D>: MatrixColumns,
{
    let Shared { queries, keys, values } = Shared::<T, D>::claim();
    // No divisor is zero, as there is a block; saying so keeps the check out. The last rows come first: they see the most keys.
    let (index, all_heads) = (block::index()[0], (heads * batches).max(1));
    let (head, batch) = (index % all_heads % heads.max(1), index % all_heads / heads.max(1));
    let row = (row_tiles - 1 - index / all_heads) * ROWS as u32;
    let sequences =
        Sequences { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: padded != 0 };
    let sequence = sequences.get(batch);
    if row >= sequence.rows {
        return;
    }
    let mask = Window { left, right, top_left: top_left != 0 }.of(&sequence);
    let tile = Span { begin: row, end: row + ROWS as u32 };
    let (blocks, whole) = (mask.blocks::<KEYS>(tile), mask.whole_blocks::<KEYS>(tile));

    let step = if head_step == 0 { heads } else { head_step * batches };
    let (query_head, query_stride) = (batch * head_step + head, u64::from(step));
    let (key_head, key_stride) = (query_head / group.max(1), u64::from(step / group.max(1)));
    let copy_keys = |block: u32, stage: u32| {
        let (first, left) = (block * KEYS as u32, sequence.keys - block * KEYS as u32);
        let origin = u64::from(sequence.key_offset + first) * key_stride + u64::from(key_head);
        copy_rows(keys.tile(stage), &k, origin, key_stride, left);
        copy_rows(values.tile(stage), &v, origin, key_stride, left);
    };
    let origin = u64::from(sequence.query_offset + row) * query_stride + u64::from(query_head);
    let (mut softmax, mut sum) = (Softmax::new(scale), [RegisterTile::<D>::zero()]);
    if blocks.begin < blocks.end {
        copy_rows(queries, &q, origin, query_stride, sequence.queries - row);
        copy_keys(blocks.end - 1, 0);
        pipeline::commit_copies();
        pipeline::wait_copies::<0>();
        block::sync();
        let query = [OperandTile::<T, D>::load(queries)];
        let mut stage = 0;
        for block in (blocks.begin..blocks.end).rev() {
            if block > blocks.begin {
                copy_keys(block - 1, 1 - stage);
                pipeline::commit_copies();
            }
            let mut scores = [RegisterTile::<KEYS>::zero()];
            warp_matrix::multiply_add::<T, KEYS, D, 1>(&mut scores, &query, KMajor(keys.tile(stage)));
            let [mut scores] = scores;
            if block >= whole.end {
                mask.hide_after::<KEYS>(&mut scores, row, block * KEYS as u32);
            }
            if block < whole.begin {
                mask.hide_before::<KEYS>(&mut scores, row, block * KEYS as u32);
            }
            if let Some(factors) = softmax.update::<KEYS>(&mut scores) {
                sum[0].scale_rows(factors);
            }
            warp_matrix::multiply_add::<T, D, KEYS, 1>(&mut sum, &[scores.to_operand::<T>()], NMajor(values.tile(stage)));
            pipeline::wait_copies::<0>();
            block::sync();
            stage = 1 - stage;
        }
    }
    let finished = softmax.finish().of_rows(|half| row + register_tile::row(half) < sequence.queries);
    finished.divide::<D>(&mut sum[0]);
    let log_sum_exp_of = finished.log_sum_exp();
    #[expect(clippy::needless_range_loop, reason = "an index that is known at compile time keeps the sums in registers")]
    for half in 0..2 {
        let row = row + register_tile::row(half as u32);
        if row >= sequence.rows {
            continue;
        }
        let first = (u64::from(sequence.query_offset + row) * query_stride + u64::from(query_head)) * D as u64;
        for pair in 0..RegisterTile::<D>::PAIRS {
            out.store_word(first + u64::from(register_tile::column(pair as u32)), T::pack(sum[0].pair(half, pair)));
        }
        if thread::lane().is_multiple_of(4) {
            let at = match log_rows {
                0 => u64::from(head) * u64::from(query_rows) + u64::from(sequence.query_offset + row),
                rows => u64::from(batch * heads + head) * u64::from(rows) + u64::from(row),
            };
            log_sum_exp.store(at, log_sum_exp_of[half]);
        }
    }
}

/// Starts to copy a tile of which the first row is the head `first`, and the next one `stride` heads further; rows from `count` on are
/// zero.
#[inline(always)]
fn copy_rows<T: Pod, const N: usize, const D: usize>(
    tile: SharedTile<T, N, D, Swizzle128>,
    source: &Global<T>,
    first: u64,
    stride: u64,
    count: u32,
) {
    let per_chunk = (16 / size_of::<T>()) as u32;
    let per_row = D as u32 / per_chunk;
    let (row, chunk) = (thread::index() / per_row, thread::index() % per_row);
    let mut at = 0;
    while at < N as u32 {
        let row = row + at;
        let start = (first + u64::from(row) * stride) * D as u64 + u64::from(chunk * per_chunk);
        pipeline::copy_async_to_tile(tile, [row, chunk * per_chunk], source, start, if row < count { 16 } else { 0 });
        at += THREADS / per_row;
    }
}
