//! What goes before and behind the backward pass of attention for sequences: statistics into its blocks of queries, and sums of `dQ` out
//! of them.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, THREAD_ROWS};
use oxtile_tile::shared::SharedTile;
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup;

use super::backward_sequence::{QueryBlock, QueryBlocks};
use super::sequence::{Sequences, place};

const THREADS: u32 = 2 * warpgroup::THREADS;
/// Rows of `dQ'` of a fragment.
const PANEL: usize = 64;

/// For each query of `[heads, blocks, size]`: `offsets` is `-log2(e) log_sum_exp`, `of_blocks` its delta; -inf and 0 where no query is,
/// and for queries that see nothing, so that their weights are 0.
///
/// `log_sum_exp` and `deltas` are `[heads, query_rows]` if `log_rows` is 0, else `[batches, heads, log_rows]`. Blocks lie as
/// [`attention_backward_general`](fn@super::attention_backward_general) has them.
#[kernel(threads = THREADS, grid = blocks_grid)]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_backward_blocks(
    log_sum_exp: Global<f32>,
    deltas: Global<f32>,
    offsets: GlobalMut<f32>,
    of_blocks: GlobalMut<f32>,
    query_ends: Global<u32>,
    query_offsets: Global<u32>,
    query_rows: u32,
    batches: u32,
    heads: u32,
    log_rows: u32,
    blocks: u32,
    size: u32,
) {
    let (at, head) = (block::index()[0] * THREADS + thread::index(), block::index()[1]);
    if at >= blocks * size {
        return;
    }
    let query_blocks = QueryBlocks { query_ends, batches, size, blocks };
    let (mut offset, mut delta) = (f32::NEG_INFINITY, 0.0);
    // The divisor is not zero, as there is an element; saying so keeps the check out.
    if let Some(QueryBlock { batch, index, .. }) = query_blocks.get(at / size.max(1)) {
        let sequence = query_blocks.limit(batch, Sequences::of_queries(query_ends, query_offsets, query_rows, false).get(batch));
        let row = index * size + at % size.max(1);
        if row < sequence.queries {
            let from = match log_rows {
                0 => u64::from(head) * u64::from(query_rows) + u64::from(sequence.query_offset + row),
                rows => u64::from(batch * heads + head) * u64::from(rows) + u64::from(row),
            };
            let log_sum = log_sum_exp.load(from);
            offset = if log_sum == f32::NEG_INFINITY { log_sum } else { -LOG2_E * log_sum };
            delta = deltas.load(from);
        }
    }
    let to = u64::from(head) * u64::from(blocks * size) + u64::from(at);
    offsets.store(to, offset);
    of_blocks.store(to, delta);
}

fn blocks_grid(args: &AttentionBackwardBlocksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let of_head = u64::from(args.blocks) * u64::from(args.size);
    LaunchError::check_length("offsets", u64::from(args.heads) * of_head, args.offsets.len())?;
    LaunchError::check_length("of_blocks", u64::from(args.heads) * of_head, args.of_blocks.len())?;
    LaunchError::check_length("deltas", args.log_sum_exp.len(), args.deltas.len())?;
    LaunchError::check_length("query_ends", u64::from(args.batches) + 1, args.query_ends.len())?;
    LaunchError::check_length("query_offsets", u64::from(args.batches) + 1, args.query_offsets.len())?;
    LaunchError::check_limit("blocks", of_head, (1 << 31) - 1)?;
    LaunchError::check_limit("heads", args.heads.into(), 65535)?;
    Ok(Grid::xy(of_head.div_ceil(THREADS.into()) as u32, args.heads))
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const QUERIES: usize> {
    /// `SPAN` queries each, one after the other.
    rows: SharedTile<T, QUERIES, D, Swizzle128>,
}

/// `grad_q` is `scale` times the sums that [`attention_backward_general`](fn@super::attention_backward_general) left, or that is added
/// to `grad_q_sum` if it is not empty. Sums to which nobody added count as zero; the turns are zero afterwards. Rows of padding become
/// zeros, those of sums stay.
///
/// A CUDA block takes a block of queries; the last of a sequence takes its padding too. `grad_q` is a tensor of `[heads, rows, size]`, as
/// [`place`] has it; the others are those of the kernel before. `heads` are query heads.
#[kernel(threads = THREADS, grid = convert_grid, shared = Shared<T, D, QUERIES>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], QUERIES = [96], SPAN = [48])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_backward_convert_general<T: RegisterElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    sums: GlobalMut<f32>,
    turns: GlobalMut<u32>,
    grad_q: TensorMapMut<T, QUERIES, D, Swizzle128, 5>,
    grad_q_sum: GlobalMut<f32>,
    query_ends: Global<u32>,
    query_offsets: Global<u32>,
    query_rows: u32,
    padded: u32,
    batches: u32,
    heads: u32,
    sequence_heads: u32,
    blocks: u32,
    size: u32,
    scale: f32,
) where
    Columns<SPAN>: MatrixColumns,
{
    let rows = Shared::<T, D, QUERIES>::claim().rows;
    let ([block, head, _], part) = (block::index(), warpgroup::index());
    let query_blocks = QueryBlocks { query_ends, batches, size: QUERIES as u32, blocks };
    let Some(QueryBlock { batch, index, is_last }) = query_blocks.get(block) else { return };
    let sequence = query_blocks.limit(batch, Sequences::of_queries(query_ends, query_offsets, query_rows, padded != 0).get(batch));
    let at = u64::from(head) * u64::from(blocks) + u64::from(block);
    let mut sum = if turns.load(at) != 0 {
        RegisterTile::<SPAN>::load_fragments(&sums, (2 * at + u64::from(part)) * (SPAN * PANEL) as u64)
    } else {
        RegisterTile::zero()
    };
    sum.map(|x| x * scale);
    block::sync();
    if thread::index() == 0 {
        turns.store(at, 0);
    }
    let (panel, span) = (part % (D / PANEL) as u32 * PANEL as u32, part / (D / PANEL) as u32 * SPAN as u32);
    let (head, first) = (head + batch * sequence_heads, index * QUERIES as u32);
    if !grad_q_sum.is_empty() {
        let row = u64::from(if sequence_heads == 0 { heads } else { heads * batches }) * u64::from(size);
        let start = u64::from(sequence.query_offset) * row + u64::from(head) * u64::from(size);
        add_transposed(&sum, &grad_q_sum, start, row, [first + span, sequence.queries], [panel, size]);
        return;
    }
    let end = if is_last { sequence.rows } else { sequence.rows.min(first + QUERIES as u32) };
    let mut row = first;
    while row < end {
        sum.to_operand::<T>().store_transposed(rows, [span, panel]);
        sync::fence_proxy_async();
        block::sync();
        if thread::index() == 0 {
            grad_q.store(place(sequence.query_offset, sequence.rows, head, row), rows);
            pipeline::commit_stores();
            pipeline::wait_stores::<0>();
        }
        block::sync();
        // Behind the queries there is padding.
        sum = RegisterTile::zero();
        row += QUERIES as u32;
    }
}

/// Adds the transpose of a warpgroup's tile, whose first row is `row` of `rows` and first column `column` of `size`, to those of a tensor
/// of rows of `stride` elements, of which those from `start` on are the head's.
#[inline(always)]
#[track_caller]
fn add_transposed<const SPAN: usize>(
    tile: &RegisterTile<SPAN>,
    target: &GlobalMut<f32>,
    start: u64,
    stride: u64,
    [row, rows]: [u32; 2],
    [column, size]: [u32; 2],
) where
    Columns<SPAN>: MatrixColumns,
{
    let mut half = 0;
    while half < THREAD_ROWS {
        let column = column + register_tile::row(half as u32);
        let mut pair = 0;
        while pair < RegisterTile::<SPAN>::PAIRS {
            let row = row + register_tile::column(pair as u32);
            let mut i = 0;
            while i < 2 {
                if row + (i as u32) < rows && column < size {
                    let at = start + u64::from(row + i as u32) * stride + u64::from(column);
                    target.store(at, target.load(at) + tile.pair(half, pair)[i]);
                }
                i += 1;
            }
            pair += 1;
        }
        half += 1;
    }
}

fn convert_grid<T: RegisterElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    args: &AttentionBackwardConvertGeneralArgs<'_, T, D, QUERIES, SPAN>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(QUERIES * D == 2 * SPAN * PANEL, "the warpgroups' parts make dQ") };
    let blocks = u64::from(args.blocks) * u64::from(args.heads);
    LaunchError::check_length("sums", blocks * (QUERIES * D) as u64, args.sums.len())?;
    LaunchError::check_length("turns", blocks, args.turns.len())?;
    LaunchError::check_length("query_ends", u64::from(args.batches) + 1, args.query_ends.len())?;
    LaunchError::check_length("query_offsets", u64::from(args.batches) + 1, args.query_offsets.len())?;
    LaunchError::check_limit("size", args.size.into(), D as u64)?;
    LaunchError::check_limit("blocks", args.blocks.into(), (1 << 31) - 1)?;
    LaunchError::check_limit("heads", args.heads.into(), 65535)?;
    Ok(Grid::xy(args.blocks, args.heads))
}
