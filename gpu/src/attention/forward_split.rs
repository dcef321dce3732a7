//! Attention, forward, of few queries and many keys: the keys of a tile are divided among blocks.
//!
//! A tile of queries on its own walks over all keys of its head on one multiprocessor. Where there are fewer tiles than
//! multiprocessors, each tile is computed `splits` times, on a part of the keys each, by the structure of
//! [`attention_forward`](fn@super::attention_forward); a block computes one part and ends. What it finds goes to a workspace in
//! `f32`, normalised, with the logarithms of its sums. [`attention_combine`](fn@super::attention_combine) puts the parts together in
//! their order, so that results are the same in every run.
//!
//! Floor: keys and values are read once.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;
use oxtile_tile::tensor_map::TensorMap;

use super::combine::MOST_SPLITS;
use super::epilogue::{store_rows, store_sums};
use super::mask::{FAR, Mask, Span};
use super::schedule::Schedule;
use super::softmax::Softmax;
use super::team::{Narrow, PART, Pair, Part, Role, Team, Wide};
use super::walk::{Block, walk};

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize, const V: usize, const KEYS: usize, G: Team> {
    queries: Pipeline<G::Parts<Part<T, D>>, 1>,
    keys: Pipeline<Block<T, KEYS, D>, 2>,
    values: Pipeline<Block<T, KEYS, V>, 2>,
}

/// Attends, each block to a part of the keys of a tile of queries. `sums` becomes the results of the parts, `[splits, batches,
/// heads, rows, value_size]`, and `logs` the logarithms to base 2 of their sums of exponentials, `[splits, batches, heads, rows]`;
/// a part in which a row sees no key gives it 0 and -inf. `diagonal` is the last key that query 0 sees,
/// [`FAR`](super::FAR) if all see all; the rest is as [`attention_forward`](fn@super::attention_forward) has it.
#[kernel(threads = G::THREADS, grid = grid, shared = Shared<T, D, V, KEYS, G>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], V = [64], KEYS = [128], G = [Narrow])]
#[instances(T = [bf16, f16], D = [128], V = [128], KEYS = [128], G = [Pair])]
#[instances(T = [bf16, f16], D = [192], V = [128], KEYS = [128], G = [Wide])]
#[instances(T = [bf16, f16], D = [256], V = [256], KEYS = [80], G = [Wide])]
#[expect(clippy::too_many_arguments, reason = "tensors and sizes of attention")]
pub fn attention_forward_split<T, const D: usize, const V: usize, const KEYS: usize, G>(
    q: TensorMap<T, PART, D, Swizzle128, 4>,
    k: TensorMap<T, KEYS, D, Swizzle128, 4>,
    v: TensorMap<T, KEYS, V, Swizzle128, 4>,
    sums: GlobalMut<f32>,
    logs: GlobalMut<f32>,
    batches: u32,
    heads: u32,
    group: u32,
    rows: u32,
    keys: u32,
    diagonal: i32,
    splits: u32,
    value_size: u32,
    scale: f32,
) where
    T: RegisterElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let shared = Shared::<T, D, V, KEYS, G>::claim();
    if thread::index() == 0 {
        shared.queries.init(G::CONSUMER_WARPS);
        shared.keys.init(G::CONSUMER_WARPS);
        shared.values.init(G::CONSUMER_WARPS);
    }
    block::sync();
    // No divisor is zero, as there is a block; saying so keeps the check out.
    let (index, split) = (block::index()[0] / splits.max(1), block::index()[0] % splits.max(1));
    let (row_tiles, all_heads) = (rows.div_ceil(G::QUERIES), heads * batches);
    let schedule = Schedule { tile_rows: G::QUERIES, row_tiles, heads, batches, section: all_heads };
    let Some(tile) = schedule.tile(index) else { return };
    let mask = Mask { last: diagonal, ..Mask::full(rows, keys) };
    let blocks = mask.blocks::<KEYS>(Span { begin: tile.row, end: tile.row + G::QUERIES }).part(split, splits);
    match G::role() {
        Role::Copies(role) => {
            if !G::begin_copies(role) {
                return;
            }
            let (mut queries, mut key_ring, mut value_ring) = (shared.queries.producer(), shared.keys.producer(), shared.values.producer());
            let (stage, full) = queries.acquire(G::PARTS * Part::<T, D>::SIZE);
            for part in 0..G::PARTS {
                q.load(G::part(stage, part), [tile.batch, tile.head, tile.row + part * PART as u32, 0], full);
            }
            let head = tile.head / group.max(1);
            for block in (blocks.begin..blocks.end).rev() {
                let (stage, full) = key_ring.acquire(Block::<T, KEYS, D>::SIZE);
                k.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
                let (stage, full) = value_ring.acquire(Block::<T, KEYS, V>::SIZE);
                v.load(stage, [tile.batch, head, block * KEYS as u32, 0], full);
            }
        }
        Role::Multiplies(role) => {
            let part = G::begin_multiplies(role);
            let (mut queries, mut key_ring, mut value_ring) = (shared.queries.consumer(), shared.keys.consumer(), shared.values.consumer());
            let stage = queries.wait();
            let query = G::query(G::part(stage.memory(), part));
            let row = tile.row + part * PART as u32;
            let whole = mask.whole_blocks::<KEYS>(Span { begin: row, end: row + PART as u32 }).end;
            let mut softmax = Softmax::new(scale);
            let mut sum = walk::<T, D, V, KEYS>(query, &mut key_ring, &mut value_ring, &mut softmax, blocks, |scores, step| {
                if step.block >= whole {
                    mask.hide_after::<KEYS>(scores, row, step.block * KEYS as u32);
                }
            });
            let finished = softmax.finish();
            sum.scale_rows(finished.factor);
            let head = u64::from(split * all_heads + tile.batch * heads + tile.head) * u64::from(rows);
            store_sums(&sums, head, row, rows, value_size, &sum);
            store_rows(&logs, head, row, rows, finished.log_sum);
        }
    }
}

fn grid<T, const D: usize, const V: usize, const KEYS: usize, G>(
    args: &AttentionForwardSplitArgs<'_, T, D, V, KEYS, G>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement,
    G: Team,
    Columns<D>: MatrixColumns,
    Columns<V>: MatrixColumns,
    Columns<KEYS>: MatrixColumns,
{
    let (heads, splits) = (u64::from(args.batches) * u64::from(args.heads), u64::from(args.splits));
    let (rows, value_size) = (u64::from(args.rows), u64::from(args.value_size));
    LaunchError::check_limit("splits", splits, MOST_SPLITS.into())?;
    LaunchError::check_limit("group", u64::from(args.group), u64::from(args.heads))?;
    LaunchError::check_multiple("heads", u64::from(args.group), u64::from(args.heads))?;
    LaunchError::check_limit("keys", u64::from(args.keys), (1 << 30) - 1)?;
    LaunchError::check_limit("rows", rows, (1 << 30) - 1)?;
    LaunchError::check_limit("diagonal", args.diagonal.unsigned_abs().into(), FAR.unsigned_abs().into())?;
    LaunchError::check_multiple("value_size", 2, value_size)?;
    LaunchError::check_limit("value_size", value_size, V as u64)?;
    let part_heads = splits.saturating_mul(heads);
    LaunchError::check_limit("splits * heads * batches", part_heads, (1 << 31) - 1)?;
    LaunchError::check_length("logs", part_heads * rows, args.logs.len())?;
    LaunchError::check_length("sums", (part_heads * rows).saturating_mul(value_size), args.sums.len())?;
    LaunchError::check_alignment("sums", 8, args.sums.address())?;
    let blocks = part_heads * rows.div_ceil(G::QUERIES.into());
    LaunchError::check_limit("rows", blocks, (1 << 31) - 1)?;
    Ok(Grid::x(blocks as u32))
}
