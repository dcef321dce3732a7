//! Gradients of keys and values whose tile was split among several, or that are added to others: their parts, and the sum of those.
//!
//! Where there are fewer tiles of keys than multiprocessors, or a mask makes them uneven, a tile's query heads are split among
//! several, which leave `f32` parts in memory, as their registers hold them (`oxtile_tile::fragment_tile`). One small kernel adds them up
//! in the order of heads, so the bits do not depend on which was done first.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::warpgroup;

use super::backward_sums::{DenseRows, KeySums, add_rows};
use super::backward_tensors::KeyGradients;
use super::backward_workspace::{BACKWARD_KEYS, WARPGROUP_KEYS};
use super::shape::MOST_BLOCKS;

const THREADS: u32 = 2 * warpgroup::THREADS;

/// Elements of the parts of a tile with heads of `D`: those of keys, then those of values.
pub const fn partial_elements(head_size: u64) -> u64 {
    2 * BACKWARD_KEYS as u64 * head_size
}

/// Where those of a warpgroup's keys, or values if `of_values`, begin in tile `tile`.
#[inline(always)]
pub(super) fn partial_start<const D: usize>(tile: u32, of_values: bool, part: u32) -> u64 {
    u64::from(tile) * partial_elements(D as u64) + u64::from(2 * u32::from(of_values) + part) * (WARPGROUP_KEYS * D) as u64
}

/// Writes a warpgroup's tile to `target` from `start` on, as [`RegisterTile::load_fragments`] reads it: the numbers of a pair of both
/// rows together, those of all threads one after the other, the pairs one after the other.
#[inline(always)]
#[track_caller]
pub(super) fn store_fragments<const D: usize>(tile: &RegisterTile<D>, target: &GlobalMut<f32>, start: u64)
where
    Columns<D>: MatrixColumns,
{
    let at = start + u64::from(4 * (thread::index() % warpgroup::THREADS));
    let mut pair = 0;
    while pair < RegisterTile::<D>::PAIRS {
        let ([a, b], [c, d]) = (tile.pair(0, pair), tile.pair(1, pair));
        let words = [a, b, c, d].map(f32::to_bits);
        target.store_vector(at + pair as u64 * u64::from(4 * warpgroup::THREADS), Vector::from_words(words));
        pair += 1;
    }
}

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize> {
    /// Of each warpgroup.
    parts: Tiles<SharedTile<T, WARPGROUP_KEYS, D, Swizzle128>, 2>,
}

/// Parts of gradients of keys and values: tiles of `[splits, heads of all batches, blocks of keys]`, of any steps from one split and head to the next.
#[derive(Clone, Copy, Parameter)]
pub struct KeyParts {
    /// [`partial_elements`] of each tile.
    pub values: GlobalMut<f32>,
    /// Parts of a tile.
    pub splits: u32,
    /// Heads of all batches.
    pub heads: u32,
    /// Blocks of keys of a head.
    pub key_blocks: u32,
    /// Tiles from one part to the next.
    pub split_step: u32,
    /// Tiles from one head to the next.
    pub head_step: u32,
}

impl KeyParts {
    /// The sum of the parts of a warpgroup's keys, or of its values, of a block of a head of all batches: in the order of parts.
    #[inline(always)]
    #[track_caller]
    pub(super) fn sum<const D: usize>(&self, head: u32, block: u32, of_values: bool, part: u32) -> RegisterTile<D>
    where
        Columns<D>: MatrixColumns,
    {
        let Self { values, splits, split_step, head_step, .. } = *self;
        let first = head * head_step + block;
        let mut sum = RegisterTile::<D>::load_fragments(&values, partial_start::<D>(first, of_values, part));
        for split in 1..splits {
            let other = RegisterTile::<D>::load_fragments(&values, partial_start::<D>(first + split * split_step, of_values, part));
            sum.map_pairs(|half, pair, values| {
                let other = other.pair(half, pair);
                [0, 1].map(|i| values[i] + other[i])
            });
        }
        sum
    }
}

impl KeyPartsArgument<'_> {
    /// Refuses parts beyond the room for them, with heads of `size`; how many heads there are.
    fn heads(&self, size: u64) -> Result<u64, LaunchError> {
        let Self { splits, heads, key_blocks, split_step, head_step, .. } = *self;
        let last = |count: u32, step: u32| u64::from(count.saturating_sub(1)) * u64::from(step);
        let tiles = last(splits, split_step) + last(heads, head_step) + u64::from(key_blocks);
        LaunchError::check_at_least("parts.splits", 1, splits.into())?;
        LaunchError::check_limit("parts.key_blocks", tiles, MOST_BLOCKS)?;
        let used = if heads == 0 || key_blocks == 0 { 0 } else { tiles * partial_elements(size) };
        LaunchError::check_length("parts.values", used, self.values.len().min(used))?;
        LaunchError::check_alignment("parts.values", 16, self.values.address())?;
        Ok(heads.into())
    }
}

/// The gradients, of `[batches, heads]`, are the sums of the parts that [`attention_backward`](fn@super::attention_backward) left.
///
/// Floor: the parts are read once, 4 bytes an element. A CUDA block takes a block of rows of one head, of the keys or of the values.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, D>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64, 128])]
pub fn attention_backward_reduce<T: RegisterElement + StoredElement, const D: usize>(
    parts: KeyParts,
    gradients: KeyGradients<T, D, 4>,
    heads: u32,
) where
    Columns<D>: MatrixColumns,
{
    let rows = Shared::<T, D>::claim().parts.tile(warpgroup::index());
    let ([block, head, which], part) = (block::index(), warpgroup::index());
    let sum = parts.sum::<D>(head, block, which != 0, part);
    sum.store_columns(0, rows);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        // The divisor is not zero, as there is a block; `max(1)` saves its check.
        let at = [head / heads.max(1), head % heads.max(1), block * BACKWARD_KEYS as u32 + part * WARPGROUP_KEYS as u32, 0];
        if which == 0 {
            gradients.k.store(at, rows)
        } else {
            gradients.v.store(at, rows)
        }
        pipeline::commit_stores();
        pipeline::wait_stores_read::<0>();
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize>(
    args: &AttentionBackwardReduceArgs<'_, T, D>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let heads = args.parts.heads(D as u64)?;
    LaunchError::check_multiple("heads", args.heads.into(), heads)?;
    LaunchError::check_limit("heads", heads, 65535)?;
    Ok(Grid::xyz(args.parts.key_blocks, heads as u32, 2))
}

/// The same sums, added to `f32` tensors.
///
/// Floor: 12 bytes an element and 4 more for each further part.
#[kernel(threads = THREADS, grid = add_grid, requires = sm_90a)]
#[instances(D = [64, 128])]
pub fn attention_backward_add_keys<const D: usize>(parts: KeyParts, sums: KeySums, rows: DenseRows)
where
    Columns<D>: MatrixColumns,
{
    let ([at, _, which], part) = (block::index(), warpgroup::index());
    // The divisor is not zero, as there is a block; `max(1)` saves its check.
    let (head, block) = (at / parts.key_blocks.max(1), at % parts.key_blocks.max(1));
    let sum = parts.sum::<D>(head, block, which != 0, part);
    let key = block * BACKWARD_KEYS as u32 + part * WARPGROUP_KEYS as u32;
    let target = if which == 0 { sums.k } else { sums.v };
    add_rows(&sum, &target, rows.first(head), rows.row_heads.into(), [key, rows.rows], D as u32);
}

fn add_grid<const D: usize>(args: &AttentionBackwardAddKeysArgs<'_, D>, _: &DeviceLimits) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let (heads, size) = (args.parts.heads(D as u64)?, D as u64);
    LaunchError::check_length("parts.heads", args.rows.all_heads(), heads)?;
    LaunchError::check_limit("rows.rows", args.rows.rows.into(), u64::from(args.parts.key_blocks) * BACKWARD_KEYS as u64)?;
    for (name, sum) in [("sums.k", &args.sums.k), ("sums.v", &args.sums.v)] {
        args.rows.check(name, size, sum.len())?;
        LaunchError::check_alignment(name, 8, sum.address())?;
    }
    let blocks = heads * u64::from(args.parts.key_blocks);
    LaunchError::check_limit("parts.key_blocks", blocks, MOST_BLOCKS)?;
    Ok(Grid::xyz(blocks as u32, 1, 2))
}
