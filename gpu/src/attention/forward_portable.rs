//! Attention, forward, on any GPU from sm_80 on: matrix multiplication by warps, copies by `cp.async`.
//!
//! A block of four warps computes 64 queries of one head. Keys and values come in blocks of 64, the last first, in two stages: one is
//! copied while the other is multiplied. Queries, scores and the result stay in registers, in the same fragments as a
//! warpgroup's, so that masks and softmax are those of [`attention_forward`](fn@super::attention_forward).
//!
//! Another algorithm than [`attention_forward`](fn@super::attention_forward)'s, without roles, so a kernel of its own; what a common policy
//! would cost was not measured.
//!
//! One barrier a step: after it the next stage is there for all warps, and all have read this one, which is filled again.
//!
//! `Q`, `K`, `V` and the result are rows of `[heads, D]`, sequences of which lie as [`Sequences`] says. Rows start at
//! multiples of 16 bytes. Results are as [`attention_forward`](fn@super::attention_forward) has them, to rounding.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, OperandTile, RegisterElement, RegisterTile};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::warp_matrix::{self, KMajor, NMajor};

use super::mask::{Span, Window};
use super::portable::{self, HeadRows, Inputs, LogSumExp, tile_of_block};
use super::sequence::Sequences;
use super::shape::Heads;
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

/// The result, rows of heads as the queries are, and its log-sum-exp.
#[derive(Clone, Copy, Parameter)]
pub struct PortableResults<T: Pod> {
    /// The result.
    pub out: GlobalMut<T>,
    /// Its log-sum-exp.
    pub log_sum_exp: LogSumExp,
}

/// Attends. `row_tiles` blocks of 64 queries are as many as the longest sequence may have; `scale` is the factor of scores, with `log2(e)`.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, D>)]
#[instances(T = [bf16, f16], D = [64, 128])]
pub fn attention_forward_portable<T: RegisterElement, const D: usize>(
    inputs: Inputs<T>,
    results: PortableResults<T>,
    sequences: Sequences,
    heads: Heads,
    row_tiles: u32,
    window: Window,
    scale: f32,
) where
    Columns<D>: MatrixColumns,
{
    let Shared { queries, keys, values } = Shared::<T, D>::claim();
    let tile = tile_of_block(&heads, row_tiles, ROWS);
    let (row, sequence) = (tile.row, sequences.get(tile.batch).cut(results.log_sum_exp.rows));
    if row >= sequence.rows {
        return;
    }
    let mask = window.of(&sequence);
    let rows = Span { begin: row, end: row + ROWS as u32 };
    let (blocks, whole) = (mask.blocks::<KEYS>(rows), mask.whole_blocks::<KEYS>(rows));

    let (query_head, row_heads, group) = (heads.of(tile.batch, tile.head), heads.in_row(), heads.group.max(1));
    let (query_stride, key_head, key_stride) = (u64::from(row_heads), query_head / group, u64::from(row_heads / group));
    let copy_keys = |block: u32, stage: u32| {
        let (first, left) = (block * KEYS as u32, sequence.keys - block * KEYS as u32);
        let origin = u64::from(sequence.key_offset + first) * key_stride + u64::from(key_head);
        copy_rows(keys.tile(stage), &inputs.k, origin, key_stride, left);
        copy_rows(values.tile(stage), &inputs.v, origin, key_stride, left);
    };
    let origin = u64::from(sequence.query_offset + row) * query_stride + u64::from(query_head);
    let (mut softmax, mut sum) = (Softmax::new(scale), [RegisterTile::<D>::zero()]);
    if blocks.begin < blocks.end {
        copy_rows(queries, &inputs.q, origin, query_stride, sequence.queries - row);
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
    let (log_sum_exp, statistics) = (finished.log_sum_exp(), results.log_sum_exp.start(&tile, &heads, &sequence, sequences.query_rows));
    #[expect(clippy::needless_range_loop, reason = "an index that is known at compile time keeps the sums in registers")]
    for half in 0..2 {
        let row = row + register_tile::row(half as u32);
        if row >= sequence.rows {
            continue;
        }
        let first = (u64::from(sequence.query_offset + row) * query_stride + u64::from(query_head)) * D as u64;
        for pair in 0..RegisterTile::<D>::PAIRS {
            results.out.store_word(first + u64::from(register_tile::column(pair as u32)), T::pack(sum[0].pair(half, pair)));
        }
        if thread::lane().is_multiple_of(4) {
            results.log_sum_exp.values.store(statistics + u64::from(row), log_sum_exp[half]);
        }
    }
}

fn grid<T: RegisterElement, const D: usize>(args: &AttentionForwardPortableArgs<'_, T, D>, _: &DeviceLimits) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let AttentionForwardPortableArgs { inputs, results, sequences, heads, row_tiles, window, .. } = args;
    let grid = portable::grid(sequences, heads, *row_tiles, ROWS)?;
    window.check()?;
    let rows = HeadRows::of(sequences, heads)?;
    inputs.check(rows, D)?;
    LaunchError::check_length("results.out", rows.queries.saturating_mul(D as u64), results.out.len())?;
    LaunchError::check_alignment("results.out", 4, results.out.address())?;
    results.log_sum_exp.check(heads, sequences.query_rows)?;
    Ok(grid)
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
