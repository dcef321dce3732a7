//! Gradients of keys and values whose tile was split among several: their parts, and the sum of those.
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

use super::backward_tensors::KeyGradients;
use super::backward_workspace::{KEYS, PART};

const THREADS: u32 = 2 * warpgroup::THREADS;

/// Elements of the parts of a tile with heads of `D`: those of keys, then those of values.
pub const fn partial_elements(head_size: u64) -> u64 {
    2 * KEYS as u64 * head_size
}

/// Where those of a warpgroup's keys, or values if `of_values`, begin in tile `tile`.
#[inline(always)]
pub(super) fn partial_start<const D: usize>(tile: u32, of_values: bool, part: u32) -> u64 {
    u64::from(tile) * partial_elements(D as u64) + u64::from(2 * u32::from(of_values) + part) * (PART * D) as u64
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
    parts: Tiles<SharedTile<T, PART, D, Swizzle128>, 2>,
}

/// The gradients, of `[batches, heads]`, are the sums of `splits` parts each, which [`attention_backward`](fn@super::attention_backward) left in
/// `partials`, of `[batches, heads splits, blocks of keys]` tiles.
///
/// Floor: the parts are read once, 4 bytes an element. A CUDA block takes a block of keys of a head, of keys or of values.
#[kernel(threads = THREADS, grid = grid, shared = Shared<T, D>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64, 128])]
pub fn attention_backward_reduce<T: RegisterElement + StoredElement, const D: usize>(
    partials: GlobalMut<f32>,
    gradients: KeyGradients<T, D, 4>,
    heads: u32,
    splits: u32,
    key_blocks: u32,
) where
    Columns<D>: MatrixColumns,
{
    let rows = Shared::<T, D>::claim().parts.tile(warpgroup::index());
    let ([block, head, which], part) = (block::index(), warpgroup::index());
    let first = head * splits * key_blocks + block;
    let mut sum = RegisterTile::<D>::load_fragments(&partials, partial_start::<D>(first, which != 0, part));
    for split in 1..splits {
        let other = RegisterTile::<D>::load_fragments(&partials, partial_start::<D>(first + split * key_blocks, which != 0, part));
        sum.map_pairs(|half, pair, values| {
            let other = other.pair(half, pair);
            [0, 1].map(|i| values[i] + other[i])
        });
    }
    sum.store_columns(0, rows);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        // The divisor is not zero, as there is a block; saying so keeps the check out.
        let at = [head / heads.max(1), head % heads.max(1), block * KEYS as u32 + part * PART as u32, 0];
        if which == 0 {
            gradients.k.store(at, rows)
        } else {
            gradients.v.store(at, rows)
        }
        pipeline::commit_stores();
        pipeline::wait_stores::<0>();
    }
}

fn grid<T: RegisterElement + StoredElement, const D: usize>(
    args: &AttentionBackwardReduceArgs<'_, T, D>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    let of_head = u64::from(args.splits) * u64::from(args.key_blocks) * partial_elements(D as u64);
    LaunchError::check_multiple("partials", of_head * u64::from(args.heads), args.partials.len())?;
    let heads = args.partials.len() / of_head.max(1);
    LaunchError::check_limit("heads", heads, 65535)?;
    Ok(Grid { x: args.key_blocks, y: heads as u32, z: 2 })
}
