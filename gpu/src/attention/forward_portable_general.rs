//! Attention, forward, on any GPU from sm_80 on: what [`attention_forward_portable`](fn@super::attention_forward_portable) does not do.
//!
//! Heads have any size, scores are capped, the softmax has a sink, the result is merged into a running one, each head's largest score is
//! found. All of it is chosen at run time, outside the loop over blocks of keys or by a branch that all threads take together. The structure
//! is that kernel's, with two differences: heads are panels of 64 elements, of which what hangs over is zero and those that a head lacks are
//! left out; and queries stay in shared memory, from which each step reads them again, so that the registers hold the result alone.
//!
//! Shared memory stays below the 99 KiB of sm_86, sm_89 and sm_120.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile};
use oxtile_tile::shared::Tiles;

use super::epilogue::{Head, Running, store_rows};
use super::limits;
use super::mask::{Span, Window};
use super::panels::{
    PANEL, Panels, Place, RESTING, Rows, Side, THREADS, accumulate, copy_panels, copy_side, portable_general_keys, product,
};
use super::sequence::Sequences;
use super::softmax::{Softmax, cap};
use super::workspace::Workspace;

const WARPS: u32 = THREADS / warp::LANES;

#[derive(SharedStorage)]
struct Shared<T: Pod, const PANELS: usize, const KEYS: usize> {
    queries: Panels<T, RESTING, PANELS>,
    stages: Tiles<Side<T, KEYS, PANELS>, 2>,
}

/// Attends, with heads of up to `64 * PANELS` elements.
///
/// | parameter | |
/// |---|---|
/// | `running` | the running result in `f32`, or empty; then `log_sum_exp` is running too and `out` is not used |
/// | `log_sum_exp` | `[heads, query_rows]` if `log_rows` is 0, else `[batches, heads, log_rows]` |
/// | `max_logit` | each head's largest scaled score, `[heads]`; or empty |
/// | `sink` | a score for each head, one for all, or empty |
/// | `query_ends` to `padded` | [`Sequences`]; rows of padding become zeros |
/// | `workspace` | [`Workspace`], or empty if `max_logit` is |
/// | `head_step` | 0, or so many query heads, and the key heads that they share, separate sequences that share rows (sbhd) |
/// | `row_tiles` | blocks of 64 queries that the longest sequence may have |
/// | `size`, `value_size` | of a row of a head: multiples of 8 |
/// | `left`, `right`, `top_left` | [`Window`] |
/// | `scale` | the factor of scores, which are then powers of 2 |
/// | `cap_limit`, `cap_factor` | `cap` of scores, if `cap_limit` is not 0 |
#[kernel(threads = THREADS, grid = limits::forward_portable_general, shared = Shared<T, PANELS, KEYS>)]
#[instances(T = [bf16, f16], PANELS = [1, 2], KEYS = [64])]
#[instances(T = [bf16, f16], PANELS = [4], KEYS = [32])]
#[expect(clippy::too_many_arguments, reason = "tensors, sizes and options of attention")]
pub fn attention_forward_portable_general<T: RegisterElement, const PANELS: usize, const KEYS: usize>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    out: GlobalMut<T>,
    running: GlobalMut<f32>,
    log_sum_exp: GlobalMut<f32>,
    max_logit: GlobalMut<f32>,
    sink: Global<f32>,
    query_ends: Global<u32>,
    key_ends: Global<u32>,
    query_offsets: Global<u32>,
    key_offsets: Global<u32>,
    workspace: GlobalMut<u32>,
    query_rows: u32,
    key_rows: u32,
    padded: u32,
    batches: u32,
    heads: u32,
    group: u32,
    head_step: u32,
    row_tiles: u32,
    log_rows: u32,
    size: u32,
    value_size: u32,
    left: i32,
    right: i32,
    top_left: u32,
    scale: f32,
    cap_limit: f32,
    cap_factor: f32,
) where
    Columns<KEYS>: MatrixColumns,
{
    const { assert!(KEYS == portable_general_keys(PANELS)) };
    let Shared { queries, stages } = Shared::<T, PANELS, KEYS>::claim();
    // No divisor is zero, as there is a block; saying so keeps the check out. The last rows come first: they see the most keys.
    let (index, all_heads, group) = (block::index()[0], (heads * batches).max(1), group.max(1));
    let (head, batch) = (index % all_heads % heads.max(1), index % all_heads / heads.max(1));
    let row = (row_tiles - 1 - index / all_heads) * RESTING as u32;
    let sequences =
        Sequences { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: padded != 0 };
    let mut sequence = sequences.get(batch);
    if log_rows != 0 {
        // Whatever the arrays say, there is no more room in the log-sum-exp.
        (sequence.queries, sequence.rows) = (sequence.queries.min(log_rows), sequence.rows.min(log_rows));
    }
    let workspace = Workspace { words: workspace };
    if row < sequence.rows {
        let mask = Window { left, right, top_left: top_left != 0 }.of(&sequence);
        let tile = Span { begin: row, end: row + RESTING as u32 };
        let (blocks, whole) = (mask.blocks::<KEYS>(tile), mask.whole_blocks::<KEYS>(tile));
        let row_heads = if head_step == 0 { heads } else { head_step * batches };
        let of_queries = Rows { first: sequence.query_offset, count: sequence.queries, heads: row_heads, head: batch * head_step };
        let of_keys = Rows { first: sequence.key_offset, count: sequence.keys, heads: row_heads / group, head: batch * head_step / group };
        let start_copies = |block: u32, stage: u32| {
            copy_side(stages.tile(stage), &[k, v], of_keys, head / group, block * KEYS as u32, [size, value_size]);
            pipeline::commit_copies();
        };
        let of_head = if sink.len() > 1 { u64::from(head) } else { 0 };
        let sunk = if sink.is_empty() { f32::NEG_INFINITY } else { sink.load(of_head) * LOG2_E };
        let (mut softmax, mut sums) = (Softmax::with_sink(scale, sunk), [RegisterTile::<PANEL>::zero(); PANELS]);
        if blocks.begin < blocks.end {
            copy_panels(queries, &q, of_queries, head, row, size);
            start_copies(blocks.end - 1, 0);
            pipeline::wait_copies::<0>();
            block::sync();
            let mut stage = 0;
            for block in (blocks.begin..blocks.end).rev() {
                if block > blocks.begin {
                    start_copies(block - 1, 1 - stage);
                }
                let side = stages.tile(stage);
                let mut scores = product(queries, side.scored, size);
                if cap_limit != 0.0 {
                    cap::<KEYS>(&mut scores, cap_factor, cap_limit);
                }
                if block >= whole.end {
                    mask.hide_after::<KEYS>(&mut scores, row, block * KEYS as u32);
                }
                if block < whole.begin {
                    mask.hide_before::<KEYS>(&mut scores, row, block * KEYS as u32);
                }
                if let Some(factors) = softmax.update::<KEYS>(&mut scores) {
                    let mut panel = 0;
                    while panel < PANELS {
                        sums[panel].scale_rows(factors);
                        panel += 1;
                    }
                }
                let weights = scores.to_operand::<T>();
                let mut panel = 0;
                while panel < PANELS {
                    if panel * PANEL < value_size as usize {
                        accumulate(&mut sums[panel], weights, side.valued.tile(panel as u32));
                    }
                    panel += 1;
                }
                pipeline::wait_copies::<0>();
                block::sync();
                stage = 1 - stage;
            }
        }
        let finished = softmax.finish().of_rows(|half| row + register_tile::row(half) < sequence.queries);
        let statistics = match log_rows {
            0 => u64::from(head) * u64::from(query_rows) + u64::from(sequence.query_offset),
            rows => u64::from(batch * heads + head) * u64::from(rows),
        };
        if running.is_empty() {
            let mut panel = 0;
            while panel < PANELS {
                let place = Place { rows: of_queries, head, row, written: sequence.rows, panel: panel as u32 };
                finished.divide::<PANEL>(&mut sums[panel]);
                place.store(&sums[panel], 1.0, value_size, &out, &running);
                panel += 1;
            }
            store_rows(&log_sum_exp, statistics, row, sequence.rows, finished.log_sum_exp());
        } else {
            let row_stride = u64::from(row_heads) * u64::from(value_size);
            let head = Head { out: of_queries.start(0, head, value_size), statistics, rows: sequence.queries };
            let running = Running { out: running, log_sum_exp, row_stride, value_size };
            let shares = running.merge_logs(&finished, head, row);
            let mut panel = 0;
            while panel < PANELS {
                running.merge_columns::<PANEL>(&sums[panel], shares, head, row, (panel * PANEL) as u32);
                panel += 1;
            }
        }
        if !max_logit.is_empty() {
            workspace.raise(head, finished.largest_of_warp());
        }
    }
    if !max_logit.is_empty() {
        workspace.leave(WARPS, Some(max_logit));
    }
}
