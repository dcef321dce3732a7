//! The largest magnitude of one tensor or of many.
//!
//! Memory-bound: each element is read once. A tensor is cut into tiles of [`TILE_BYTES`]; a block
//! walks its tiles with `UNROLL` vectors a thread in flight, keeps the maximum in the input type
//! (no unpacking), reduces it once and raises the output by an atomic. The output is raised, not
//! set: the host zeroes it first, in the same stream.
//!
//! | kernel | grid | reads | raises |
//! |---|---|---|---|
//! | [`amax`](fn@amax) | fills the device | one tensor | `output[0]` |
//! | [`multi_amax`](fn@multi_amax) | fills the device | every tensor of a device table | one or two slots a tensor |
//!
//! NaN elements are dropped, an empty tensor leaves its slots alone, Inf gives Inf: the rules of
//! TransformerEngine's `nvte_multi_compute_amax` (PR 2960, `common/recipe/multi_amax.cu`), without
//! its limit of 64 tensors a launch and for tensors of any alignment.

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::global::GlobalTable;
use oxtile_tile::prelude::*;

use crate::magnitude::{Magnitude, of_vector};

const THREADS: u32 = 256;
/// Vectors a thread keeps in flight.
const UNROLL: u32 = 8;
/// Bytes a block reads at a time.
pub const TILE_BYTES: u64 = (THREADS * UNROLL * 16) as u64;
/// Blocks that fill a multiprocessor.
const RESIDENT: u32 = 4;
/// The number of no output slot.
pub const NO_SLOT: u32 = u32::MAX;

/// The shared memory of a block's reduction.
#[derive(SharedStorage)]
struct Shared {
    reduce: ReduceStorage,
}

/// Raises `output[0]` to the largest magnitude in `input`.
#[kernel(threads = THREADS, grid = amax_grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32])]
pub fn amax<T: Magnitude>(input: Global<T>, output: GlobalMut<f32>) {
    let (first, blocks) = (u64::from(block::index()[0]), u64::from(block::count()[0]));
    let mut running = 0;
    let mut tile = first;
    while tile < tiles::<T>(input.len()) {
        running = T::join(running, tile_maximum(&input, tile));
        tile += blocks;
    }
    let largest = block::max_u32(T::finish(running).to_bits(), Shared::claim().reduce);
    if thread::index() == 0 {
        atomic::max_non_negative(&output, 0, f32::from_bits(largest));
    }
}

fn amax_grid<T: Magnitude>(args: &AmaxArgs<'_, T>, device: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", 1, args.output.len())?;
    Ok(resident_grid(tiles::<T>(args.input.len()), device))
}

/// Raises `outputs[slots[2 i]]` and `outputs[slots[2 i + 1]]` to the largest magnitude in tensor `i`.
///
/// `first_tiles[i]` is the number of tiles ([`tiles`]) of all tensors before `i`, with the total at
/// the end: `tensors.len() + 1` values. A slot may be [`NO_SLOT`] or another that is not in
/// `outputs`, which raises nothing; two tensors may share one.
///
/// Each block takes an equal run of consecutive tiles and raises the slots once a tensor it meets.
#[kernel(threads = THREADS, grid = multi_amax_grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32])]
pub fn multi_amax<T: Magnitude>(tensors: GlobalTable<T>, first_tiles: Global<u64>, slots: Global<u32>, outputs: GlobalMut<f32>) {
    let (index, blocks) = (u64::from(block::index()[0]), u64::from(block::count()[0]));
    let total = first_tiles.load(tensors.len());
    let share = total.div_ceil(blocks);
    let (mut tile, end) = (index * share, total.min((index + 1) * share));
    while tile < end {
        let tensor = tensor_of_tile(&first_tiles, tensors.len(), tile);
        let (input, first) = (tensors.get(tensor), first_tiles.load(tensor));
        let last = end.min(first_tiles.load(tensor + 1));
        let mut running = 0;
        while tile < last {
            running = T::join(running, tile_maximum(&input, tile - first));
            tile += 1;
        }
        let largest = block::max_u32(T::finish(running).to_bits(), Shared::claim().reduce);
        if thread::index() < 2 {
            let slot = slots.load(2 * tensor + u64::from(thread::index()));
            // The host cannot check a table on the device: a slot out of range is skipped.
            if u64::from(slot) < outputs.len() && slot != NO_SLOT {
                atomic::max_non_negative(&outputs, u64::from(slot), f32::from_bits(largest));
            }
        }
        block::sync();
    }
}

fn multi_amax_grid<T: Magnitude>(args: &MultiAmaxArgs<'_, T>, device: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("first_tiles", args.tensors.len() + 1, args.first_tiles.len())?;
    LaunchError::check_length("slots", 2 * args.tensors.len(), args.slots.len())?;
    Ok(resident_grid(if args.tensors.is_empty() { 0 } else { u64::MAX }, device))
}

/// At most as many blocks as are resident together.
fn resident_grid(tiles: u64, device: &DeviceLimits) -> Grid {
    let resident = device.multiprocessors * RESIDENT;
    Grid::x(u32::try_from(tiles).unwrap_or(resident).min(resident))
}

/// Tiles of a tensor of `length` elements of `T`; none for an empty one.
pub const fn tiles<T>(length: u64) -> u64 {
    (length * size_of::<T>() as u64).div_ceil(TILE_BYTES)
}

/// The tensor that holds `tile`: the last whose first tile is not beyond it. Empty tensors hold none.
#[inline(always)]
fn tensor_of_tile(first_tiles: &Global<u64>, tensors: u64, tile: u64) -> u64 {
    let (mut below, mut above) = (0, tensors);
    while below + 1 < above {
        let middle = (below + above) / 2;
        if first_tiles.load(middle) <= tile { below = middle } else { above = middle }
    }
    below
}

/// This thread's part of the maximum of a tile. Tiles are cut from the first 16-byte boundary on; the
/// few elements before it and the incomplete vector at the end belong to tile 0.
#[inline(always)]
fn tile_maximum<T: Magnitude>(input: &Global<T>, tile: u64) -> u32 {
    let lanes = Vector::<T>::LANES as u64;
    let tile_elements = u64::from(THREADS * UNROLL) * lanes;
    let head = input.elements_to_boundary();
    let body_end = input.len() - (input.len() - head) % lanes;
    let start = head + tile * tile_elements;
    let vector = |step: u32| start + u64::from(step * THREADS + thread::index()) * lanes;
    if start + tile_elements <= body_end {
        let vectors: [Vector<T>; UNROLL as usize] = core::array::from_fn(|step| input.load_vector(vector(step as u32)));
        return vectors.into_iter().fold(0, |running, v| T::join(running, of_vector(v)));
    }
    let mut running = 0;
    for step in 0..UNROLL {
        if vector(step) < body_end {
            running = T::join(running, of_vector(input.load_vector(vector(step))));
        }
    }
    if tile == 0 {
        let index = u64::from(thread::index());
        if index < head {
            running = T::raise(running, input.load(index).to_word());
        }
        if body_end + index < input.len() {
            running = T::raise(running, input.load(body_end + index).to_word());
        }
    }
    running
}
