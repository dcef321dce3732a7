//! Attention, backward, of every layout, mask and option, and on any GPU from sm_80 on: matrix multiplication by warps, copies by
//! `cp.async`.
//!
//! The same steps give all three gradients. 64 rows of one head stay in shared memory; rows of the other side pass in two stages,
//! `STEP` at a time: one is copied while the other is multiplied, with one barrier a step.
//!
//! | | stay | pass | scores, gradients of weights | result |
//! |---|---|---|---|---|
//! | queries | `Q`, `dO` | `K`, `V` | `S = Q K'`, `dP = dO V'` | `dQ += dS K` |
//! | keys | `K`, `V` | `Q`, `dO` of all heads that share the keys | `S' = K Q'`, `dP' = V dO'` | `dK += dS' Q`, `dV += P' dO` |
//!
//! with weights `P = exp2(S - lse)` and gradients of scores `dS = P (dP - delta)`, which stay in registers as left operands. So
//! every sum has one owner, which adds in one order: the bits are the same in every run and under every grid, nothing is zeroed before
//! and nothing waits. The price is that scores are computed twice: seven products where
//! [`attention_backward`](fn@super::attention_backward) has five.
//!
//! That is another algorithm, so a kernel of its own; what a policy of both would cost was not measured.
//!
//! Heads are panels of 64 elements, what hangs over is zero. A block has `PARTS` panels of the result; where heads have more, the next
//! block in y has them, and computes the scores again.
//!
//! Tensors are rows of `[heads, size]`, sequences of which lie as [`Sequences`] says. Rows start at multiples of 16 bytes.
//!
//! Source: Dao, "FlashAttention-2", 2023, algorithm 2.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{Pod, exp2, fma, reciprocal};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, THREAD_ROWS};
use oxtile_tile::shared::Tiles;

use super::backward_statistics::QueryStatistics;
use super::mask::{Span, Window};
use super::panels::{PANEL, PORTABLE_ROWS, Place, Rows, Side, THREADS, accumulate, copy_side, product};
use super::scores::Scores;
use super::sequence::{Sequences, SequencesArgument};
use super::shape::{Heads, MOST_BLOCKS, check_one};

/// What is known of each query of a side.
#[derive(SharedStorage, Clone, Copy)]
struct Statistics {
    /// `-log2(sum of exponentials)`, -inf where nothing counts.
    offsets: SharedArray<f32, PORTABLE_ROWS>,
    deltas: SharedArray<f32, PORTABLE_ROWS>,
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const PANELS: usize, const STEP: usize> {
    fixed: Side<T, PORTABLE_ROWS, PANELS>,
    passing: Tiles<Side<T, STEP, PANELS>, 2>,
    /// Of the queries that pass, by stage; of those that stay, once.
    statistics: Tiles<Statistics, 2>,
}

/// What is read, and the sizes of its heads: multiples of 8.
#[derive(Clone, Copy, Parameter)]
pub struct PortableTensors<T: Pod> {
    /// Queries.
    pub q: Global<T>,
    /// Keys.
    pub k: Global<T>,
    /// Values.
    pub v: Global<T>,
    /// Gradients of the result.
    pub grad_out: Global<T>,
    /// Elements of a row of a head of `Q` and `K`.
    pub size: u32,
    /// The same of `V` and `dO`.
    pub value_size: u32,
}

/// Where gradients go: of queries, or of keys and values.
#[derive(Clone, Copy, Parameter)]
pub struct PortableTarget<T: Pod> {
    /// Of queries, or of keys.
    pub grad: Option<GlobalMut<T>>,
    /// Of values.
    pub grad_v: Option<GlobalMut<T>>,
    /// The tensor, in `f32`, that they are added to instead.
    pub grad_sum: Option<GlobalMut<f32>>,
    /// The same for those of values.
    pub grad_v_sum: Option<GlobalMut<f32>>,
    /// The factor of scores: that of the gradients of queries and keys.
    pub scale: f32,
    /// Blocks of 64 fixed rows that the longest sequence may have.
    pub row_tiles: u32,
}

/// Computes the gradients of keys and of values if `OF_KEYS`, else those of queries. Rows of padding become zeros, but those that are added to stay.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, PANELS, STEP>)]
#[instances(T = [bf16, f16], PANELS = [1], STEP = [64], PARTS = [1], OF_KEYS = [false, true])]
#[instances(T = [bf16, f16], PANELS = [2], STEP = [32], PARTS = [2], OF_KEYS = [false, true])]
#[instances(T = [bf16, f16], PANELS = [4], STEP = [16], PARTS = [2], OF_KEYS = [false, true])]
pub fn attention_backward_portable<T: RegisterElement, const PANELS: usize, const STEP: usize, const PARTS: usize, const OF_KEYS: bool>(
    tensors: PortableTensors<T>,
    statistics: QueryStatistics,
    target: PortableTarget<T>,
    sequences: Sequences,
    heads: Heads,
    window: Window,
    scores: Scores,
) where
    Columns<STEP>: MatrixColumns,
{
    let (PortableTensors { q, k, v, grad_out, size, value_size }, row_tiles) = (tensors, target.row_tiles);
    let Heads { batches, heads, group, step: head_step } = heads;
    let shared = Shared::<T, PANELS, STEP>::claim();
    // No divisor is zero, as there is a block; `max(1)` saves its check.
    let group = group.max(1);
    let fixed_heads = if OF_KEYS { heads / group } else { heads };
    let (index, all_heads) = (block::index()[0], (fixed_heads * batches).max(1));
    let (head, batch) = (index % all_heads % fixed_heads.max(1), index % all_heads / fixed_heads.max(1));
    // Those that most rows of the other side see come first.
    let tile = if OF_KEYS { index / all_heads } else { row_tiles - 1 - index / all_heads };
    let row = tile * PORTABLE_ROWS as u32;

    let sequence = sequences.get(batch).cut(statistics.rows);
    let written = if OF_KEYS { sequences.key_rows(batch, &sequence) } else { sequence.rows };
    if row >= written {
        return;
    }
    let mask = window.of(&sequence);
    // Rows of the other side that see any of these, or that any of these sees.
    let seen = |rows: Span| if OF_KEYS { mask.rows(rows) } else { mask.blocks::<1>(rows) };

    let row_heads = if head_step == 0 { heads } else { head_step * batches };
    let queries = Rows { first: sequence.query_offset, count: sequence.queries, heads: row_heads, head: batch * head_step };
    let keys = Rows { first: sequence.key_offset, count: sequence.keys, heads: row_heads / group, head: batch * head_step / group };
    let (fixed, fixed_tensors, passing, passing_tensors) =
        if OF_KEYS { (keys, [k, v], queries, [q, grad_out]) } else { (queries, [q, grad_out], keys, [k, v]) };
    let sizes = [size, value_size];
    let copy_statistics = |copies: Statistics, head: u32, first: u32, count: usize| {
        let (at, row) = (thread::index(), first + thread::index());
        if at >= count as u32 {
            return;
        }
        let [mut offset, mut delta] = [f32::NEG_INFINITY, 0.0];
        if row < queries.count {
            [offset, delta] = statistics.load(statistics.place([batch, head, heads], &sequences, queries.first, row));
        }
        copies.offsets.store(at, offset);
        copies.deltas.store(at, delta);
    };

    let columns = seen(Span { begin: row, end: row + PORTABLE_ROWS as u32 });
    let head_steps = columns.end.saturating_sub(columns.begin).div_ceil(STEP as u32);
    let steps = if OF_KEYS { head_steps * group } else { head_steps };
    let column_of = |step: u32| columns.begin + step % head_steps.max(1) * STEP as u32;
    let start_copies = |step: u32| {
        let (column, side) = (column_of(step), shared.passing.tile(step % 2));
        let head = if OF_KEYS { head * group + step / head_steps.max(1) } else { head / group };
        copy_side(side, &passing_tensors, passing, head, column, sizes);
        if OF_KEYS {
            copy_statistics(shared.statistics.tile(step % 2), head, column, STEP);
        }
        pipeline::commit_copies();
    };

    let first_panel = block::index()[1] * PARTS as u32;
    let (mut sums, mut value_sums) = ([RegisterTile::<PANEL>::zero(); PARTS], [RegisterTile::<PANEL>::zero(); PARTS]);
    if steps > 0 {
        copy_side(shared.fixed, &fixed_tensors, fixed, head, row, sizes);
        if !OF_KEYS {
            copy_statistics(shared.statistics.tile(0), head, row, PORTABLE_ROWS);
        }
        start_copies(0);
        pipeline::wait_copies::<0>();
        block::sync();
        let weights = Weights {
            seen: [0, 1].map(|half| {
                let row = row + register_tile::row(half);
                seen(Span { begin: row, end: row + 1 })
            }),
            scale: scores.scale,
            slope: if scores.are_capped() { reciprocal(scores.cap_limit) } else { 0.0 },
        };
        for step in 0..steps {
            if step + 1 < steps {
                start_copies(step + 1);
            }
            let side = shared.passing.tile(step % 2);
            let mut products = product(shared.fixed.scored, side.scored, size);
            let mut gradients = product(shared.fixed.valued, side.valued, value_size);
            if scores.are_capped() {
                scores.cap(&mut products);
            }
            let copies = shared.statistics.tile(if OF_KEYS { step % 2 } else { 0 });
            weights.apply::<STEP, OF_KEYS>(&mut products, &mut gradients, column_of(step), copies);
            let (of_scores, of_weights) = (gradients.to_operand::<T>(), products.to_operand::<T>());
            let mut part = 0;
            while part < PARTS {
                let panel = first_panel + part as u32;
                if panel < size.div_ceil(PANEL as u32) {
                    accumulate(&mut sums[part], of_scores, side.scored.tile(panel));
                }
                if OF_KEYS && panel < value_size.div_ceil(PANEL as u32) {
                    accumulate(&mut value_sums[part], of_weights, side.valued.tile(panel));
                }
                part += 1;
            }
            pipeline::wait_copies::<0>();
            block::sync();
        }
    }
    let [grad, grad_v] = [target.grad, target.grad_v].map(|grad| grad.unwrap_or_default());
    let [grad_sum, grad_v_sum] = [target.grad_sum, target.grad_v_sum].map(|sum| sum.unwrap_or_default());
    let mut part = 0;
    while part < PARTS {
        let panel = first_panel + part as u32;
        let place = Place { rows: fixed, head, row, written, panel };
        place.store(&sums[part], target.scale, size, &grad, &grad_sum);
        if OF_KEYS {
            place.store(&value_sums[part], 1.0, value_size, &grad_v, &grad_v_sum);
        }
        part += 1;
    }
}

/// How scores become weights.
struct Weights {
    /// Which columns count for each of the thread's rows.
    seen: [Span; THREAD_ROWS],
    scale: f32,
    /// What makes the hyperbolic tangent of a capped score, of which the gradient of the cap is made; 0 without a cap.
    slope: f32,
}

impl Weights {
    /// Turns scores into weights, and gradients of weights into gradients of scores, in a tile that begins at column `first`. The
    /// statistics are the columns', or the rows'.
    #[inline(always)]
    #[track_caller]
    fn apply<const N: usize, const OF_COLUMNS: bool>(
        &self,
        scores: &mut RegisterTile<N>,
        gradients: &mut RegisterTile<N>,
        first: u32,
        statistics: Statistics,
    ) where
        Columns<N>: MatrixColumns,
    {
        let of_row = |half: u32| [statistics.offsets.load(register_tile::row(half)), statistics.deltas.load(register_tile::row(half))];
        let of_rows = if OF_COLUMNS { [[0.0; 2]; 2] } else { [of_row(0), of_row(1)] };
        let mut pair = 0;
        while pair < RegisterTile::<N>::PAIRS {
            let column = register_tile::column(pair as u32);
            let of_columns = match OF_COLUMNS {
                true => [statistics.offsets.load_pair(column), statistics.deltas.load_pair(column)],
                false => [[0.0; 2]; 2],
            };
            let mut half = 0;
            while half < THREAD_ROWS {
                let (found, of_weights) = (scores.pair(half, pair), gradients.pair(half, pair));
                let Span { begin, end } = self.seen[half];
                let both = [0, 1].map(|i| {
                    let [offset, delta] = if OF_COLUMNS { [of_columns[0][i], of_columns[1][i]] } else { of_rows[half] };
                    let at = first + column + i as u32;
                    let weight = exp2(fma(found[i], self.scale, offset));
                    let tangent = found[i] * self.slope;
                    let gradient = weight * (of_weights[i] - delta) * fma(-tangent, tangent, 1.0);
                    if at >= begin && at < end { [weight, gradient] } else { [0.0; 2] }
                });
                scores.set_pair(half, pair, both.map(|[weight, _]| weight));
                gradients.set_pair(half, pair, both.map(|[_, gradient]| gradient));
                half += 1;
            }
            pair += 1;
        }
    }
}

fn grid<T: RegisterElement, const PANELS: usize, const STEP: usize, const PARTS: usize, const OF_KEYS: bool>(
    args: &AttentionBackwardPortableArgs<'_, T, PANELS, STEP, PARTS, OF_KEYS>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<STEP>: MatrixColumns,
{
    const { assert!(STEP <= PORTABLE_ROWS && PARTS <= PANELS, "statistics and panels have room") };
    let Heads { batches, heads, group, .. } = args.heads;
    args.heads.check()?;
    args.sequences.check(batches)?;
    args.window.check()?;
    let PortableTensorsArgument { q, k, v, grad_out, size, value_size } = &args.tensors;
    let [size, value_size] = [*size, *value_size].map(u64::from);
    for (name, size) in [("tensors.size", size), ("tensors.value_size", value_size)] {
        LaunchError::check_multiple(name, 8, size)?;
        LaunchError::check_limit(name, size, (PANELS * PANEL) as u64)?;
    }
    let SequencesArgument { query_rows, key_rows, .. } = args.sequences;
    args.statistics.check([batches, heads], query_rows)?;
    let row_heads = args.heads.of_row()?;
    let (queries, key_heads) = (u64::from(query_rows).saturating_mul(row_heads), row_heads / u64::from(group).max(1));
    let keys = u64::from(key_rows).saturating_mul(key_heads);
    for (name, view, rows, size) in [
        ("tensors.q", q, queries, size),
        ("tensors.k", k, keys, size),
        ("tensors.v", v, keys, value_size),
        ("tensors.grad_out", grad_out, queries, value_size),
    ] {
        LaunchError::check_length(name, rows.saturating_mul(size), view.len())?;
        LaunchError::check_alignment(name, 16, view.address())?;
    }
    let PortableTargetArgument { grad, grad_v, grad_sum, grad_v_sum, row_tiles, .. } = &args.target;
    check_one("target.grad", [grad.is_some(), grad_sum.is_some()])?;
    if OF_KEYS {
        check_one("target.grad_v", [grad_v.is_some(), grad_v_sum.is_some()])?;
    }
    let rows = if OF_KEYS { keys } else { queries };
    for (name, grad, size) in [("target.grad", grad, size), ("target.grad_v", grad_v, value_size)] {
        let Some(grad) = grad else { continue };
        LaunchError::check_length(name, rows.saturating_mul(size), grad.len())?;
        LaunchError::check_alignment(name, 4, grad.address())?;
    }
    for (name, sum, size) in [("target.grad_sum", grad_sum, size), ("target.grad_v_sum", grad_v_sum, value_size)] {
        let Some(sum) = sum else { continue };
        LaunchError::check_length(name, rows.saturating_mul(size), sum.len())?;
        LaunchError::check_alignment(name, 8, sum.address())?;
    }
    let fixed_rows = if OF_KEYS { key_rows } else { query_rows };
    LaunchError::check_limit("target.row_tiles", (*row_tiles).into(), u64::from(fixed_rows).div_ceil(PORTABLE_ROWS as u64))?;
    let tile_heads = if OF_KEYS { heads / group.max(1) } else { heads };
    let blocks = u64::from(tile_heads).saturating_mul(batches.into()).saturating_mul((*row_tiles).into());
    LaunchError::check_limit("target.row_tiles", blocks, MOST_BLOCKS)?;
    let widest = if OF_KEYS { size.max(value_size) } else { size };
    Ok(Grid::xy(blocks as u32, widest.div_ceil((PARTS * PANEL) as u64).max(1) as u32))
}
