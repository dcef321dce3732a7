//! Attention, backward, of every layout, mask and option, and on any GPU from sm_80 on: matrix multiplication by warps, copies by
//! `cp.async`.
//!
//! The same steps give all three gradients. 64 rows of one head rest in shared memory; rows of the other side pass in two stages,
//! `STEP` at a time: one is copied while the other is multiplied, with one barrier a step.
//!
//! | | rest | pass | scores, gradients of weights | result |
//! |---|---|---|---|---|
//! | queries | `Q`, `dO` | `K`, `V` | `S = Q K'`, `dP = dO V'` | `dQ += dS K` |
//! | keys | `K`, `V` | `Q`, `dO` of all heads that share the keys | `S' = K Q'`, `dP' = V dO'` | `dK += dS' Q`, `dV += P' dO` |
//!
//! with weights `P = exp2(S - lse)` and gradients of scores `dS = P (dP - delta)`, which stay in registers as left operands. So
//! every sum has one owner, who adds in one order: the bits are the same in every run and under every grid, nothing is zeroed before
//! and nothing waits. The price is that scores are computed twice: seven products where
//! [`attention_backward`](fn@super::attention_backward) has five.
//!
//! Heads are panels of 64 elements, what hangs over is zero. A block has `PARTS` panels of the result; where heads have more, the next
//! block in y has them, and computes the scores again.
//!
//! Tensors are rows of `[heads, size]`, sequences of which lie as [`Sequences`] says. Rows start at multiples of 16 bytes.
//!
//! Source: Dao, "FlashAttention-2", 2023, algorithm 2.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{Pod, exp2, fma, reciprocal};
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, THREAD_ROWS};
use oxtile_tile::shared::Tiles;

use super::limits::check_sequences;
use super::mask::{Span, Window};
use super::panels::{PANEL, Place, RESTING, Rows, Side, THREADS, accumulate, copy_side, product};
use super::sequence::Sequences;
use super::softmax::cap;

/// What is known of each query of a side.
#[derive(SharedStorage, Clone, Copy)]
struct Statistics {
    /// `-log2(sum of exponentials)`, -inf where nothing counts.
    offsets: SharedArray<f32, RESTING>,
    deltas: SharedArray<f32, RESTING>,
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const PANELS: usize, const STEP: usize> {
    resting: Side<T, RESTING, PANELS>,
    passing: Tiles<Side<T, STEP, PANELS>, 2>,
    /// Of the queries that pass, by stage; of those that rest, once.
    statistics: Tiles<Statistics, 2>,
}

/// Computes `grad` and `grad_v`: the gradients of keys and of values if `OF_KEYS`, else `grad` is that of queries.
///
/// | parameter | |
/// |---|---|
/// | `grad_sum`, `grad_v_sum` | `f32` tensors that the gradients are added to; if they are empty, `grad` and `grad_v` are written |
/// | `log_sum_exp`, `deltas` | `[heads, query_rows]` if `log_rows` is 0, else `[batches, heads, log_rows]`; natural, and the row sums of `O dO` |
/// | `query_ends` to `padded` | [`Sequences`]; rows of padding become zeros |
/// | `head_step` | 0, or so many heads of queries, and as many of keys as share them, separate sequences that share rows (sbhd) |
/// | `row_tiles` | blocks of 64 resting rows that the longest sequence may have |
/// | `size`, `value_size` | of a row of a head: multiples of 8 |
/// | `left`, `right`, `top_left` | [`Window`] |
/// | `scale`, `cap_limit`, `cap_factor` | as [`Scores`](super::Scores) has them |
/// | `grad_scale` | the factor of scores: that of the gradients of queries and keys |
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, PANELS, STEP>)]
#[instances(T = [bf16, f16], PANELS = [1], STEP = [64], PARTS = [1], OF_KEYS = [false, true])]
#[instances(T = [bf16, f16], PANELS = [2], STEP = [32], PARTS = [2], OF_KEYS = [false, true])]
#[instances(T = [bf16, f16], PANELS = [4], STEP = [16], PARTS = [2], OF_KEYS = [false, true])]
#[expect(clippy::too_many_arguments, reason = "tensors, sizes and options of attention")]
pub fn attention_backward_portable<T: RegisterElement, const PANELS: usize, const STEP: usize, const PARTS: usize, const OF_KEYS: bool>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    grad_out: Global<T>,
    log_sum_exp: Global<f32>,
    deltas: Global<f32>,
    grad: GlobalMut<T>,
    grad_v: GlobalMut<T>,
    grad_sum: GlobalMut<f32>,
    grad_v_sum: GlobalMut<f32>,
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
    size: u32,
    value_size: u32,
    left: i32,
    right: i32,
    top_left: u32,
    scale: f32,
    cap_limit: f32,
    cap_factor: f32,
    grad_scale: f32,
) where
    Columns<STEP>: MatrixColumns,
{
    let shared = Shared::<T, PANELS, STEP>::claim();
    // No divisor is zero, as there is a block; saying so keeps the check out.
    let group = group.max(1);
    let resting_heads = if OF_KEYS { heads / group } else { heads };
    let (index, all_heads) = (block::index()[0], (resting_heads * batches).max(1));
    let (head, batch) = (index % all_heads % resting_heads.max(1), index % all_heads / resting_heads.max(1));
    // Those that most rows of the other side see come first.
    let tile = if OF_KEYS { index / all_heads } else { row_tiles - 1 - index / all_heads };
    let row = tile * RESTING as u32;

    let sequences =
        Sequences { query_ends, key_ends, query_offsets, key_offsets, diagonals: None, query_rows, key_rows, padded: padded != 0 };
    let sequence = sequences.get(batch);
    let written = if OF_KEYS { sequences.key_rows(batch, &sequence) } else { sequence.rows };
    if row >= written {
        return;
    }
    let mask = Window { left, right, top_left: top_left != 0 }.of(&sequence);
    // Rows of the other side that see any of these, or that any of these sees.
    let seen = |rows: Span| if OF_KEYS { mask.rows(rows) } else { mask.blocks::<1>(rows) };

    let row_heads = if head_step == 0 { heads } else { head_step * batches };
    let queries = Rows { first: sequence.query_offset, count: sequence.queries, heads: row_heads, head: batch * head_step };
    let keys = Rows { first: sequence.key_offset, count: sequence.keys, heads: row_heads / group, head: batch * head_step / group };
    let (resting, resting_tensors, passing, passing_tensors) =
        if OF_KEYS { (keys, [k, v], queries, [q, grad_out]) } else { (queries, [q, grad_out], keys, [k, v]) };
    let sizes = [size, value_size];
    let copy_statistics = |target: Statistics, head: u32, first: u32, count: usize| {
        let (at, row) = (thread::index(), first + thread::index());
        if at >= count as u32 {
            return;
        }
        let (mut offset, mut delta) = (f32::NEG_INFINITY, 0.0);
        if row < queries.count {
            let from = match log_rows {
                0 => u64::from(head) * u64::from(query_rows) + u64::from(queries.first + row),
                rows => u64::from(batch * heads + head) * u64::from(rows) + u64::from(row),
            };
            let log_sum = log_sum_exp.load(from);
            // A query that sees nothing has no weights.
            offset = if log_sum == f32::NEG_INFINITY { log_sum } else { -LOG2_E * log_sum };
            delta = deltas.load(from);
        }
        target.offsets.store(at, offset);
        target.deltas.store(at, delta);
    };

    let columns = seen(Span { begin: row, end: row + RESTING as u32 });
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
        copy_side(shared.resting, &resting_tensors, resting, head, row, sizes);
        if !OF_KEYS {
            copy_statistics(shared.statistics.tile(0), head, row, RESTING);
        }
        start_copies(0);
        pipeline::wait_copies::<0>();
        block::sync();
        let weights = Weights {
            seen: [0, 1].map(|half| {
                let row = row + register_tile::row(half);
                seen(Span { begin: row, end: row + 1 })
            }),
            scale,
            slope: if cap_limit == 0.0 { 0.0 } else { reciprocal(cap_limit) },
        };
        for step in 0..steps {
            if step + 1 < steps {
                start_copies(step + 1);
            }
            let side = shared.passing.tile(step % 2);
            let mut scores = product(shared.resting.scored, side.scored, size);
            let mut gradients = product(shared.resting.valued, side.valued, value_size);
            if cap_limit != 0.0 {
                cap(&mut scores, cap_factor, cap_limit);
            }
            let statistics = shared.statistics.tile(if OF_KEYS { step % 2 } else { 0 });
            weights.apply::<STEP, OF_KEYS>(&mut scores, &mut gradients, column_of(step), statistics);
            let (of_scores, of_weights) = (gradients.to_operand::<T>(), scores.to_operand::<T>());
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
    let mut part = 0;
    while part < PARTS {
        let panel = first_panel + part as u32;
        let place = Place { rows: resting, head, row, written, panel };
        place.store(&sums[part], grad_scale, size, &grad, &grad_sum);
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
    const { assert!(STEP <= RESTING && PARTS <= PANELS, "statistics and panels have room") };
    check_sequences(args.batches, &args.query_ends, &args.key_ends, &args.query_offsets, &args.key_offsets)?;
    LaunchError::check_limit("group", u64::from(args.group), u64::from(args.heads))?;
    LaunchError::check_limit("size", u64::from(args.size), (PANELS * PANEL) as u64)?;
    LaunchError::check_limit("value_size", u64::from(args.value_size), (PANELS * PANEL) as u64)?;
    for (name, address) in
        [("q", args.q.address()), ("k", args.k.address()), ("v", args.v.address()), ("grad_out", args.grad_out.address())]
    {
        LaunchError::check_alignment(name, 16, address)?;
    }
    LaunchError::check_alignment("grad", 4, args.grad.address())?;
    LaunchError::check_alignment("grad_v", 4, args.grad_v.address())?;
    LaunchError::check_alignment("grad_sum", 8, args.grad_sum.address())?;
    LaunchError::check_alignment("grad_v_sum", 8, args.grad_v_sum.address())?;
    let heads = if OF_KEYS { args.heads / args.group.max(1) } else { args.heads };
    let blocks = u64::from(heads).saturating_mul(u64::from(args.batches)).saturating_mul(u64::from(args.row_tiles));
    LaunchError::check_limit("row_tiles", blocks, (1 << 31) - 1)?;
    let widest = if OF_KEYS { args.size.max(args.value_size) } else { args.size };
    Ok(Grid::xy(blocks as u32, widest.div_ceil((PARTS * PANEL) as u32).max(1)))
}
