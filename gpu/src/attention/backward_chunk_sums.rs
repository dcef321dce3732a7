//! What follows the backward pass of packed sequences whose keys arrive: the sums of what ranks have stored for one another, and zeros where nothing attends.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::shared::{SharedTile, Tiles};
use oxtile_tile::tensor_map::TensorMapMut;
use oxtile_tile::warpgroup;

use super::arriving::RANK_CHUNKS;
use super::backward_reduce::{KeyParts, partial_elements};
use super::backward_tensors::KeyGradients;
use super::backward_workspace::{BACKWARD_KEYS, WARPGROUP_KEYS};
use super::chunk_schedule::Chunks;
use super::sequence::place;
use super::shape::MOST_BLOCKS;

const THREADS: u32 = 2 * warpgroup::THREADS;
/// Heads that grids count.
const MOST_HEADS: u64 = 65535;

#[derive(SharedStorage)]
struct Shared<T: Pod, const D: usize> {
    /// Of each warpgroup.
    parts: Tiles<SharedTile<T, WARPGROUP_KEYS, D, Swizzle128>, 2>,
}

/// The gradients of a rank's packed keys are the sums, in the order of ranks, of what [`attention_backward_arriving_packed`](fn@super::attention_backward_arriving_packed) of all ranks
/// stored in its slots. Rows of padding, and those after all sequences, become zeros.
///
/// Floor: the slots are read once, 4 bytes an element. A CUDA block takes a tile of one head, of the keys or of the values.
#[kernel(threads = THREADS, grid = reduce_grid, shared = Shared<T, D>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64, 128])]
pub fn attention_backward_reduce_chunks<T: RegisterElement + StoredElement, const D: usize>(
    slots: GlobalMut<f32>,
    gradients: KeyGradients<T, D, 5>,
    chunks: Chunks,
    heads: u32,
    is_causal: bool,
) where
    Columns<D>: MatrixColumns,
{
    let rows = Shared::<T, D>::claim().parts.tile(warpgroup::index());
    let ([tile, head, which], part) = (block::index(), warpgroup::index());
    let Some([half, first, index, count]) = chunks.of_slot(tile) else { return };
    // The late chunk is seen by the ranks up to this one, if there is a mask.
    let splits = if is_causal && half == 1 { chunks.rank + 1 } else { chunks.world };
    let key_blocks = chunks.tiles_of_slot();
    let parts = KeyParts { values: slots, splits, heads, key_blocks, split_step: key_blocks * heads, head_step: key_blocks };
    // After all sequences there are no parts.
    let sum = if half < RANK_CHUNKS { parts.sum::<D>(head, tile, which != 0, part) } else { RegisterTile::zero() };
    sum.store_columns(0, rows);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        let at = place(first, count, head, index * BACKWARD_KEYS as u32 + part * WARPGROUP_KEYS as u32);
        if which == 0 {
            gradients.k.store(at, rows)
        } else {
            gradients.v.store(at, rows)
        }
        pipeline::commit_stores();
        pipeline::wait_stores_read::<0>();
    }
}

fn reduce_grid<T: RegisterElement + StoredElement, const D: usize>(
    args: &AttentionBackwardReduceChunksArgs<'_, T, D>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    args.chunks.check(BACKWARD_KEYS)?;
    LaunchError::check_limit("heads", args.heads.into(), MOST_HEADS)?;
    let tiles = Chunks::slot_tiles(args.chunks.sequences.key_rows.into(), args.chunks.batches.into());
    let all = tiles.saturating_mul(args.heads.into()).saturating_mul(args.chunks.world.into());
    LaunchError::check_limit("chunks.sequences.key_rows", all, MOST_BLOCKS)?;
    LaunchError::check_length("slots", all * partial_elements(D as u64), args.slots.len())?;
    LaunchError::check_alignment("slots", 16, args.slots.address())?;
    // What is after all sequences may end in one tile more.
    Ok(Grid::xyz(tiles as u32 + 1, args.heads, 2))
}

/// Gradients of queries that do not attend become zeros: padding of chunks, and rows after all sequences.
///
/// A CUDA block takes a chunk of one head; most of them have nothing to do.
#[kernel(threads = THREADS, grid = padding_grid, shared = Shared<T, D>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64, 128])]
pub fn attention_backward_padding<T: RegisterElement + StoredElement, const D: usize>(
    gradient: TensorMapMut<T, WARPGROUP_KEYS, D, Swizzle128, 5>,
    chunks: Chunks,
    heads: u32,
) where
    Columns<D>: MatrixColumns,
{
    let ([piece, head, _], zeros) = (block::index(), Shared::<T, D>::claim().parts.tile(warpgroup::index()));
    let [rows, first] = chunks.rows(piece);
    let queries = if piece + 1 < chunks.pieces() { chunks.queries(piece).min(rows) } else { 0 };
    if queries == rows || head >= heads {
        return;
    }
    let part = warpgroup::index();
    RegisterTile::<D>::zero().store_columns(0, zeros);
    sync::fence_proxy_async();
    warpgroup::sync(part);
    if warpgroup::is_leader() {
        let mut row = queries + part * WARPGROUP_KEYS as u32;
        while row < rows {
            gradient.store(place(first, rows, head, row), zeros);
            row += BACKWARD_KEYS as u32;
        }
        pipeline::commit_stores();
        pipeline::wait_stores_read::<0>();
    }
}

fn padding_grid<T: RegisterElement + StoredElement, const D: usize>(
    args: &AttentionBackwardPaddingArgs<'_, T, D>,
    _: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
{
    args.chunks.check(BACKWARD_KEYS)?;
    LaunchError::check_limit("heads", args.heads.into(), MOST_HEADS)?;
    let pieces = u64::from(RANK_CHUNKS) * u64::from(args.chunks.batches) + 1;
    LaunchError::check_limit("chunks.batches", pieces, MOST_BLOCKS)?;
    Ok(Grid::xy(pieces as u32, args.heads))
}
