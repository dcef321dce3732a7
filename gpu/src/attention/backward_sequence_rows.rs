//! What goes before and after the backward pass of attention for sequences: statistics into its blocks of queries, and sums of `dQ` out
//! of them.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile};
use oxtile_tile::shared::SharedTile;
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup;

use super::backward_sequence::{QueryBlock, QueryBlocks};
use super::backward_statistics::QueryStatistics;
use super::backward_sums::add_transposed;
use super::backward_tensors::{BlockStatistics, QuerySums};
use super::sequence::{Sequences, place};
use super::shape::{Heads, check_one};

const THREADS: u32 = 2 * warpgroup::THREADS;
/// Heads that grids count.
const MOST_HEADS: u64 = 65535;
/// Rows of `dQ'` of a fragment.
const PANEL: usize = 64;

/// The statistics of each block of queries, laid out as [`QueryBlocks`], of those of each query.
#[kernel(threads = THREADS, grid = blocks_grid)]
pub fn attention_backward_blocks(queries: QueryStatistics, statistics: BlockStatistics, sequences: Sequences, heads: Heads) {
    let BlockStatistics { offsets, deltas, blocks, size, .. } = statistics;
    let (at, head) = (block::index()[0] * THREADS + thread::index(), block::index()[1]);
    if at >= blocks * size {
        return;
    }
    let query_blocks = QueryBlocks { query_ends: sequences.query_ends, batches: heads.batches, size, blocks };
    let [mut offset, mut delta] = [f32::NEG_INFINITY, 0.0];
    // The divisor is not zero, as there is an element; `max(1)` saves its check.
    if let Some(QueryBlock { batch, index, .. }) = query_blocks.get(at / size.max(1)) {
        let sequence = query_blocks.limit(batch, sequences.without_diagonals().get(batch)).cut(queries.rows);
        let row = index * size + at % size.max(1);
        if row < sequence.queries {
            [offset, delta] = queries.load(queries.place([batch, head, heads.heads], &sequences, sequence.query_offset, row));
        }
    }
    let to = u64::from(head) * u64::from(blocks * size) + u64::from(at);
    offsets.store(to, offset);
    deltas.store(to, delta);
}

fn blocks_grid(args: &AttentionBackwardBlocksArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let Heads { batches, heads, .. } = args.heads;
    args.sequences.check(batches)?;
    args.queries.check([batches, heads], args.sequences.query_rows)?;
    args.statistics.check(heads.into())?;
    LaunchError::check_limit("heads.heads", heads.into(), MOST_HEADS)?;
    let of_head = args.statistics.rows;
    Ok(Grid::xy(of_head.div_ceil(THREADS), heads))
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const QUERIES: usize> {
    /// `SPAN` queries each, one after the other.
    rows: SharedTile<T, QUERIES, D, Swizzle128>,
}

/// Where the gradients of queries go.
#[derive(Clone, Copy, Parameter)]
pub struct QueryTarget<T: RegisterElement, const D: usize, const QUERIES: usize> {
    /// A tensor of `[heads, rows, size]`, as [`place`] has it.
    pub rounded: Option<TensorMapMut<T, QUERIES, D, Swizzle128, 5>>,
    /// The tensor, in `f32`, that they are added to instead.
    pub added: Option<GlobalMut<f32>>,
    /// Elements of a row of a head: a multiple of 8.
    pub size: u32,
    /// The factor of scores, and so of their gradients.
    pub scale: f32,
}

/// The gradients of queries are the sums that [`attention_backward_general`](fn@super::attention_backward_general) left, times a factor. Sums to which
/// nothing was added count as zero; the turns are zero afterwards. Rows of padding become zeros, but those that are added to stay.
///
/// A CUDA block takes a block of queries; the last of a sequence takes its padding too.
#[kernel(threads = THREADS, grid = convert_grid, shared = Shared<T, D, QUERIES>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], QUERIES = [96], SPAN = [48])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64])]
pub fn attention_backward_convert_general<T: RegisterElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    sums: QuerySums,
    target: QueryTarget<T, D, QUERIES>,
    sequences: Sequences,
    heads: Heads,
) where
    Columns<SPAN>: MatrixColumns,
{
    let QuerySums { values, turns, blocks } = sums;
    let rows = Shared::<T, D, QUERIES>::claim().rows;
    let ([block, head, _], part) = (block::index(), warpgroup::index());
    let query_blocks = QueryBlocks { query_ends: sequences.query_ends, batches: heads.batches, size: QUERIES as u32, blocks };
    let Some(QueryBlock { batch, index, is_last }) = query_blocks.get(block) else { return };
    let sequence = query_blocks.limit(batch, sequences.without_diagonals().get(batch));
    let at = u64::from(head) * u64::from(blocks) + u64::from(block);
    let mut sum = if turns.load(at) != 0 {
        RegisterTile::<SPAN>::load_fragments(&values, (2 * at + u64::from(part)) * (SPAN * PANEL) as u64)
    } else {
        RegisterTile::zero()
    };
    sum.map(|x| x * target.scale);
    block::sync();
    if thread::index() == 0 {
        turns.store(at, 0);
    }
    let (panel, span) = (part % (D / PANEL) as u32 * PANEL as u32, part / (D / PANEL) as u32 * SPAN as u32);
    let (head, first) = (heads.of(batch, head), index * QUERIES as u32);
    if let Some(added) = target.added {
        let size = target.size;
        let row = u64::from(if heads.step == 0 { heads.heads } else { heads.heads * heads.batches }) * u64::from(size);
        let start = u64::from(sequence.query_offset) * row + u64::from(head) * u64::from(size);
        add_transposed(&sum, &added, start, row, [first + span, sequence.queries], [panel, size]);
        return;
    }
    let Some(grad_q) = target.rounded else { return };
    let end = if is_last { sequence.rows } else { sequence.rows.min(first + QUERIES as u32) };
    let mut row = first;
    while row < end {
        sum.to_operand::<T>().store_transposed(rows, [span, panel]);
        sync::fence_proxy_async();
        block::sync();
        if thread::index() == 0 {
            grad_q.store(place(sequence.query_offset, sequence.rows, head, row), rows);
            pipeline::commit_stores();
            pipeline::wait_stores_read::<0>();
        }
        block::sync();
        // After the queries there is padding.
        sum = RegisterTile::zero();
        row += QUERIES as u32;
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
    let Heads { batches, heads, .. } = args.heads;
    args.sequences.check(batches)?;
    args.heads.check()?;
    let row_heads = args.heads.of_row()?;
    args.sums.check(["sums.values", "sums.turns", "sums.blocks"], heads.into(), QUERIES * D)?;
    LaunchError::check_multiple("target.size", 8, args.target.size.into())?;
    LaunchError::check_limit("target.size", args.target.size.into(), D as u64)?;
    check_one("target.rounded", [args.target.rounded.is_some(), args.target.added.is_some()])?;
    if let Some(added) = &args.target.added {
        let rows = u64::from(args.sequences.query_rows).saturating_mul(row_heads);
        LaunchError::check_length("target.added", rows.saturating_mul(args.target.size.into()), added.len())?;
    }
    LaunchError::check_limit("heads.heads", heads.into(), MOST_HEADS)?;
    Ok(Grid::xy(args.sums.blocks, heads))
}
