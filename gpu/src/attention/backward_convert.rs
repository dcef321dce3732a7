//! The last step of the backward pass of attention: sums of `dQ` become rows of `dQ`.
//!
//! Floor: 4 bytes an element are read, 2 written. A CUDA block takes a block of queries: its two warpgroups load their fragments of
//! `dQ'` as they were added up, and write them transposed to shared memory, from where TMA stores rows.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile};
use oxtile_tile::shared::SharedTile;
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup;

use super::backward_sums::{DenseRows, add_transposed};
use super::backward_tensors::QuerySums;
use super::shape::MOST_BLOCKS;

const THREADS: u32 = 2 * warpgroup::THREADS;
/// Rows of `dQ'` of a fragment.
const PANEL: usize = 64;

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const QUERIES: usize> {
    /// `SPAN` queries each, one after the other.
    rows: SharedTile<T, QUERIES, D, Swizzle128>,
}

/// `grad_q`, `[batches, heads, queries, D]`, is `scale` times the sums that [`attention_backward`](fn@super::attention_backward) left. Sums to which
/// nothing was added count as zero; the turns are zero afterwards.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, D, QUERIES>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [128], QUERIES = [80], SPAN = [80])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64])]
pub fn attention_backward_convert<T: RegisterElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    sums: QuerySums,
    grad_q: TensorMapMut<T, QUERIES, D, Swizzle128, 4>,
    heads: u32,
    scale: f32,
) where
    Columns<SPAN>: MatrixColumns,
{
    let rows = Shared::<T, D, QUERIES>::claim().rows;
    let (block, part) = (block::index()[0], warpgroup::index());
    let QuerySums { values, turns, blocks } = sums;
    let mut sum = if turns.load(block.into()) != 0 {
        RegisterTile::<SPAN>::load_fragments(&values, (2 * u64::from(block) + u64::from(part)) * (SPAN * PANEL) as u64)
    } else {
        RegisterTile::zero()
    };
    sum.map(|x| x * scale);
    let (panel, span) = (part % (D / PANEL) as u32, part / (D / PANEL) as u32 * SPAN as u32);
    sum.to_operand::<T>().store_transposed(rows, [span, panel * PANEL as u32]);
    sync::fence_proxy_async();
    block::sync();
    if thread::index() == 0 {
        turns.store(block.into(), 0);
        let (head, block) = (block / blocks.max(1), block % blocks.max(1));
        grad_q.store([head / heads.max(1), head % heads.max(1), block * QUERIES as u32, 0], rows);
        pipeline::commit_stores();
        pipeline::wait_stores_read::<0>();
    }
}

fn grid<T: RegisterElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    args: &AttentionBackwardConvertArgs<'_, T, D, QUERIES, SPAN>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(QUERIES * D == 2 * SPAN * PANEL, "the warpgroups' parts make dQ") };
    let blocks = args.sums.turns.len();
    LaunchError::check_multiple("sums.turns", u64::from(args.sums.blocks) * u64::from(args.heads), blocks)?;
    LaunchError::check_length("sums.values", blocks.saturating_mul((QUERIES * D) as u64), args.sums.values.len())?;
    LaunchError::check_alignment("sums.values", 16, args.sums.values.address())?;
    LaunchError::check_limit("sums.turns", blocks, MOST_BLOCKS)?;
    Ok(Grid::x(blocks as u32))
}

/// The same, added to an `f32` tensor.
///
/// Floor: 12 bytes an element.
#[kernel(threads = THREADS, grid = add_grid, requires = sm_90a)]
#[instances(D = [128], QUERIES = [80], SPAN = [80])]
#[instances(D = [128], QUERIES = [64], SPAN = [64])]
#[instances(D = [64], QUERIES = [128], SPAN = [64])]
pub fn attention_backward_add_queries<const D: usize, const QUERIES: usize, const SPAN: usize>(
    sums: QuerySums,
    grad_q: GlobalMut<f32>,
    rows: DenseRows,
    scale: f32,
) where
    Columns<SPAN>: MatrixColumns,
{
    let (at, part) = (block::index()[0], warpgroup::index());
    let QuerySums { values, turns, blocks } = sums;
    if turns.load(at.into()) != 0 {
        let mut sum = RegisterTile::<SPAN>::load_fragments(&values, (2 * u64::from(at) + u64::from(part)) * (SPAN * PANEL) as u64);
        sum.map(|x| x * scale);
        // The divisor is not zero, as there is a block; `max(1)` saves its check.
        let (head, row) = (at / blocks.max(1), at % blocks.max(1) * QUERIES as u32);
        let (panel, span) = (part % (D / PANEL) as u32 * PANEL as u32, part / (D / PANEL) as u32 * SPAN as u32);
        let (start, stride) = (rows.first(head) * D as u64, u64::from(rows.row_heads) * D as u64);
        add_transposed(&sum, &grad_q, start, stride, [row + span, rows.rows], [panel, D as u32]);
    }
    block::sync();
    if thread::index() == 0 {
        turns.store(at.into(), 0);
    }
}

fn add_grid<const D: usize, const QUERIES: usize, const SPAN: usize>(
    args: &AttentionBackwardAddQueriesArgs<'_, D, QUERIES, SPAN>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<SPAN>: MatrixColumns,
{
    let blocks = args.sums.check(["sums.values", "sums.turns", "sums.blocks"], args.rows.all_heads(), QUERIES * D)?;
    LaunchError::check_limit("rows.rows", args.rows.rows.into(), u64::from(args.sums.blocks) * QUERIES as u64)?;
    args.rows.check("grad_q", D as u64, args.grad_q.len())?;
    Ok(Grid::x(blocks as u32))
}
