//! Attention, forward, on any GPU from sm_80 on: what [`attention_forward_portable`](fn@super::attention_forward_portable) does not do.
//!
//! Heads have any size, scores are capped, the softmax has a sink, the result is merged into a running one, each head's largest score is
//! found. All of it is chosen at run time, outside the loop over blocks of keys or by a branch that all threads take together. The structure
//! is that kernel's, with two differences: heads are panels of 64 elements, of which what hangs over is zero and those that a head lacks are
//! left out; and queries stay in shared memory, from which each step reads them again, so that the registers hold the result alone.
//!
//! These differences are in every step, and this kernel has 1.6 times the instructions of the other at head size 64. What a policy of both,
//! compiled for each, would cost was not measured.
//!
//! Shared memory stays below the 99 KiB of sm_86, sm_89 and sm_120.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile};
use oxtile_tile::shared::Tiles;

use super::epilogue::store_rows;
use super::mask::{Span, Window};
use super::panels::{
    PANEL, PORTABLE_ROWS, Panels, Place, Rows, Side, THREADS, accumulate, copy_panels, copy_side, portable_general_keys, product,
};
use super::portable::{self, HeadRows, LogSumExp, SizedInputs, tile_of_block};
use super::running::{Place as RunningPlace, Running};
use super::schedule::Tile;
use super::scores::Scores;
use super::sequence::Sequences;
use super::shape::{Checked, Heads};
use super::softmax::Softmax;
use super::workspace::Workspace;

const WARPS: u32 = THREADS / warp::LANES;

#[derive(SharedStorage)]
struct Shared<T: Pod, const PANELS: usize, const KEYS: usize> {
    queries: Panels<T, PORTABLE_ROWS, PANELS>,
    stages: Tiles<Side<T, KEYS, PANELS>, 2>,
}

/// The result and its log-sum-exp, or running ones, which become those of the keys seen before and now together.
#[derive(Clone, Copy, Parameter)]
pub struct PortableGeneralResults<T: Pod> {
    /// The result, rows of heads as the queries are.
    pub out: Option<GlobalMut<T>>,
    /// The running result, in its place.
    pub running: Option<GlobalMut<f32>>,
    /// The log-sum-exp, running too if there is a running result.
    pub log_sum_exp: LogSumExp,
    /// Each head's largest scaled score.
    pub max_logit: Option<MaxLogit>,
}

/// Each head's largest scaled score.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct MaxLogit {
    /// The scores, `[heads]`.
    pub values: GlobalMut<f32>,
    /// [`Workspace`].
    pub workspace: GlobalMut<u32>,
}

/// Attends, with heads of up to `64 * PANELS` elements. `row_tiles` blocks of 64 queries are as many as the longest sequence may have. Rows of padding become zeros.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, PANELS, KEYS>)]
#[instances(T = [bf16, f16], PANELS = [1, 2], KEYS = [64])]
#[instances(T = [bf16, f16], PANELS = [4], KEYS = [32])]
pub fn attention_forward_portable_general<T: RegisterElement, const PANELS: usize, const KEYS: usize>(
    inputs: SizedInputs<T>,
    results: PortableGeneralResults<T>,
    sequences: Sequences,
    heads: Heads,
    row_tiles: u32,
    window: Window,
    scores: Scores,
) where
    Columns<KEYS>: MatrixColumns,
{
    const { assert!(KEYS == portable_general_keys(PANELS)) };
    let Shared { queries, stages } = Shared::<T, PANELS, KEYS>::claim();
    let (tile, group) = (tile_of_block(&heads, row_tiles, PORTABLE_ROWS), heads.group.max(1));
    let SizedInputs { size, value_size, .. } = inputs;
    let (Tile { row, head, batch }, sequence) = (tile, sequences.get(tile.batch).cut(results.log_sum_exp.rows));
    if row < sequence.rows {
        let mask = window.of(&sequence);
        let rows = Span { begin: row, end: row + PORTABLE_ROWS as u32 };
        let (blocks, whole) = (mask.blocks::<KEYS>(rows), mask.whole_blocks::<KEYS>(rows));
        let (row_heads, first_head) = (heads.in_row(), heads.of(batch, 0));
        let of_queries = Rows { first: sequence.query_offset, count: sequence.queries, heads: row_heads, head: first_head };
        let of_keys = Rows { first: sequence.key_offset, count: sequence.keys, heads: row_heads / group, head: first_head / group };
        let start_copies = |block: u32, stage: u32| {
            copy_side(stages.tile(stage), &[inputs.k, inputs.v], of_keys, head / group, block * KEYS as u32, [size, value_size]);
            pipeline::commit_copies();
        };
        let sunk = match inputs.sink {
            Some(sink) => sink.load(if sink.len() > 1 { u64::from(head) } else { 0 }) * LOG2_E,
            None => f32::NEG_INFINITY,
        };
        let (mut softmax, mut sums) = (Softmax::with_sink(scores.scale, sunk), [RegisterTile::<PANEL>::zero(); PANELS]);
        if blocks.begin < blocks.end {
            copy_panels(queries, &inputs.q, of_queries, head, row, size);
            start_copies(blocks.end - 1, 0);
            pipeline::wait_copies::<0>();
            block::sync();
            let mut stage = 0;
            for block in (blocks.begin..blocks.end).rev() {
                if block > blocks.begin {
                    start_copies(block - 1, 1 - stage);
                }
                let side = stages.tile(stage);
                let mut products = product(queries, side.scored, size);
                if scores.are_capped() {
                    scores.cap::<KEYS>(&mut products);
                }
                if block >= whole.end {
                    mask.hide_after::<KEYS>(&mut products, row, block * KEYS as u32);
                }
                if block < whole.begin {
                    mask.hide_before::<KEYS>(&mut products, row, block * KEYS as u32);
                }
                if let Some(factors) = softmax.update::<KEYS>(&mut products) {
                    let mut panel = 0;
                    while panel < PANELS {
                        sums[panel].scale_rows(factors);
                        panel += 1;
                    }
                }
                let weights = products.to_operand::<T>();
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
        let log_sum_exp = results.log_sum_exp.values;
        let statistics = results.log_sum_exp.start(&tile, &heads, &sequence, sequences.query_rows);
        if let Some(merged) = results.running {
            let place = RunningPlace { start: of_queries.start(0, head, value_size), statistics, rows: sequence.queries };
            let row_stride = u64::from(row_heads) * u64::from(value_size);
            let running = Running::<T, false>::in_the_middle(merged, log_sum_exp, row_stride, value_size);
            let shares = running.merge_logs(&finished, place, row);
            let mut panel = 0;
            while panel < PANELS {
                running.merge_columns::<PANEL>(&sums[panel], shares, place, row, (panel * PANEL) as u32);
                panel += 1;
            }
        } else {
            let (out, mut panel) = (results.out.unwrap_or_default(), 0);
            while panel < PANELS {
                let place = Place { rows: of_queries, head, row, written: sequence.rows, panel: panel as u32 };
                finished.divide::<PANEL>(&mut sums[panel]);
                place.store_rounded(&sums[panel], value_size, &out);
                panel += 1;
            }
            store_rows(&log_sum_exp, statistics, row, sequence.rows, finished.log_sum_exp());
        }
        if let Some(MaxLogit { workspace, .. }) = results.max_logit {
            Workspace { words: workspace }.raise(head, finished.largest_of_warp());
        }
    }
    if let Some(MaxLogit { values, workspace }) = results.max_logit {
        Workspace { words: workspace }.leave(WARPS, Some(values));
    }
}

fn grid<T: RegisterElement, const PANELS: usize, const KEYS: usize>(
    args: &AttentionForwardPortableGeneralArgs<'_, T, PANELS, KEYS>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<KEYS>: MatrixColumns,
{
    let AttentionForwardPortableGeneralArgs { inputs, results, sequences, heads, row_tiles, window, .. } = args;
    let grid = portable::grid(sequences, heads, *row_tiles, PORTABLE_ROWS)?;
    window.check()?;
    let rows = HeadRows::of(sequences, heads)?;
    inputs.check(rows, PANELS * PANEL, heads.heads)?;
    results.check(rows.queries.saturating_mul(inputs.value_size.into()))?;
    results.log_sum_exp.check(heads, sequences.query_rows)?;
    if let Some(max_logit) = &results.max_logit {
        max_logit.check(heads)?;
    }
    Ok(grid)
}

impl<T: Pod> PortableGeneralResultsArgument<'_, T> {
    /// Of so many elements.
    fn check(&self, elements: u64) -> Checked {
        if let Some(running) = &self.running {
            LaunchError::check_length("results.running", elements, running.len())?;
            LaunchError::check_alignment("results.running", 8, running.address())?;
        }
        // One of both: a running result asks for no other.
        let of_out = if self.running.is_some() { 0 } else { elements };
        let (length, address) = self.out.as_ref().map_or((0, 0), |out| (out.len(), out.address()));
        LaunchError::check_length("results.out", of_out, length)?;
        LaunchError::check_alignment("results.out", 4, address)
    }
}

impl MaxLogitArgument<'_> {
    fn check(&self, heads: &Heads) -> Checked {
        LaunchError::check_length("results.max_logit.values", heads.heads.into(), self.values.len())?;
        LaunchError::check_length("results.max_logit.workspace", Workspace::words(heads.heads.into()), self.workspace.len())
    }
}
