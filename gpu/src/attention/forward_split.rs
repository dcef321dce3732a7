//! Attention, forward, of few queries and many keys: the keys of a tile are divided among blocks.
//!
//! A tile of queries on its own walks over all keys of its head on one multiprocessor. Where there are fewer tiles than
//! multiprocessors, each tile is computed `parts` times, on a part of the keys each, by the structure of
//! [`attention_forward`](fn@super::attention_forward); a block computes one part and ends. What it finds goes to a workspace in
//! `f32`, normalised, with the logarithms of its sums. [`attention_combine`](fn@super::attention_combine) puts the parts together in
//! their order, so that results are the same in every run.
//!
//! A kernel of its own: a `Problem` (`problem.rs`) would carry a queue, a handed-over tile and the end of the loop over tiles,
//! which a block of one part does not have. What that would cost was not measured.
//!
//! Floor: keys and values are read once.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;
use oxtile_tile::tensor_map::TensorMap;

use super::epilogue::{store_rows, store_sums};
use super::mask::{Mask, Span, check_reach};
use super::parts::PartsMut;
use super::rings::Rings;
use super::schedule::Schedule;
use super::shape::{MOST_BLOCKS, Shape};
use super::softmax::Softmax;
use super::walk::walk;
use super::warpgroup_roles::{Narrow, Pair, Role, WARPGROUP_QUERIES, WarpgroupRoles, Wide};

type Shared<T, const D: usize, const V: usize, const KEYS: usize, G> = Rings<T, D, V, KEYS, G, (), ()>;

/// Queries, keys and values as [`attention_forward`](fn@super::attention_forward) has them.
#[derive(Clone, Copy, Parameter)]
pub struct SplitInputs<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize> {
    /// Queries.
    pub q: TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, 4>,
    /// Keys.
    pub k: TensorMap<T, KEYS, D, Swizzle128, 4>,
    /// Values.
    pub v: TensorMap<T, KEYS, V, Swizzle128, 4>,
}

/// Attends, each block to a part of the keys of a tile of queries. A part in which a row sees no key gives it 0 and -inf. `diagonal` is the
/// last key that query 0 sees, [`FAR`](super::FAR) if all see all; `scale` is the factor of scores, with `log2(e)`.
#[kernel(threads = G::THREADS, grid = grid, shared = Shared<T, D, V, KEYS, G>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [80], G = [Wide])]
pub fn attention_forward_split<T, const D: usize, const V: usize, const KEYS: usize, G>(
    inputs: SplitInputs<T, D, V, KEYS>,
    parts: PartsMut,
    shape: Shape,
    diagonal: i32,
    scale: f32,
) where
    T: RegisterElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS, G>::begin();
    let Shape { batches, heads, group, queries: rows, keys } = shape;
    // No divisor is zero, as there is a block; `max(1)` saves its check.
    let (index, of_keys) = (block::index()[0] / parts.count.max(1), block::index()[0] % parts.count.max(1));
    let (row_tiles, all_heads) = (rows.div_ceil(G::QUERIES), shape.all_heads());
    let schedule = Schedule { tile_rows: G::QUERIES, row_tiles, heads, batches, section: all_heads };
    let Some(tile) = schedule.tile(index) else { return };
    let mask = Mask { last: diagonal, ..Mask::full(rows, keys) };
    let blocks = mask.blocks::<KEYS>(Span { begin: tile.row, end: tile.row + G::QUERIES }).part(of_keys, parts.count);
    match G::role() {
        Role::Copies(role) => {
            if !G::begin_copies(role) {
                return;
            }
            let mut rings = shared.producers();
            rings.load_queries(&inputs.q, || (), |part| [tile.batch, tile.head, tile.row + part * WARPGROUP_QUERIES as u32, 0]);
            for block in (blocks.begin..blocks.end).rev() {
                rings.load_block(&inputs.k, &inputs.v, [tile.batch, tile.head / group.max(1), block * KEYS as u32, 0]);
            }
        }
        Role::Multiplies(role) => {
            let part = G::begin_multiplies(role);
            let mut rings = shared.consumers();
            let stage = rings.queries.wait();
            let query = G::query(G::part(stage.memory(), part));
            let row = tile.row + part * WARPGROUP_QUERIES as u32;
            let whole = mask.whole_blocks::<KEYS>(Span { begin: row, end: row + WARPGROUP_QUERIES as u32 }).end;
            let mut softmax = Softmax::new(scale);
            let (mut sum, ()) = walk::<T, D, V, KEYS, _>(
                query,
                &mut rings.keys,
                &mut rings.values,
                &mut softmax,
                blocks,
                |scores, step| {
                    if step.block >= whole {
                        mask.hide_after::<KEYS>(scores, row, step.block * KEYS as u32);
                    }
                },
                (),
            );
            let finished = softmax.finish();
            finished.divide(&mut sum);
            let head = u64::from(of_keys * all_heads + tile.batch * heads + tile.head) * u64::from(rows);
            store_sums(&parts.sums, head, row, rows, parts.size, &sum);
            store_rows(&parts.logs, head, row, rows, finished.log_sum);
        }
    }
}

/// A block for each part of each tile.
fn grid<T, const D: usize, const V: usize, const KEYS: usize, G>(
    args: &AttentionForwardSplitArgs<'_, T, D, V, KEYS, G>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement,
    G: WarpgroupRoles,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let AttentionForwardSplitArgs { parts, shape, diagonal, .. } = args;
    shape.check()?;
    check_reach("diagonal", *diagonal)?;
    LaunchError::check_limit("parts.size", parts.size.into(), V as u64)?;
    let part_heads = shape.many_heads().saturating_mul(parts.count.into());
    LaunchError::check_limit("parts.count * shape.heads * shape.batches", part_heads, MOST_BLOCKS)?;
    parts.check(shape.many_heads().saturating_mul(shape.queries.into()))?;
    let blocks = part_heads * u64::from(shape.queries.div_ceil(G::QUERIES));
    LaunchError::check_limit("shape.queries", blocks, MOST_BLOCKS)?;
    Ok(Grid::x(blocks as u32))
}
