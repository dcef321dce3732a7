//! Rowwise cast to MXFP8, rows of whole blocks.
//!
//! Floor: 2 (bf16) + 1 + 1/32 bytes an element through device memory. Such rows follow each other
//! without a seam, so the tensor is one run of blocks. In each of `STEPS` steps a lane holds one vector,
//! the neighbouring lanes that share a block agree on its amax by shuffles, and the codes are stored. At
//! the end each lane stores one scale: neighbouring bytes, one sector a warp. Loads carry no eviction or
//! sector hints, which cost 8 % on an H200.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::*;
use crate::magnitude::{Magnitude, of_vector};

/// Casts whole blocks: `data[i] = input[i] / scale`, one scale a block in `scales[i / 32]`.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_rows<T: Magnitude, Q: Fp8>(input: Global<T>, data: GlobalMut<Q>, scales: GlobalMut<ue8m0>) {
    let warp = u64::from(block::index()[0]) * u64::from(WARPS) + u64::from(thread::warp());
    let tile = warp * warp_tile::<T>();
    if tile + warp_tile::<T>() <= input.len() {
        cast_tile::<T, Q, true>(&input, &data, &scales, tile);
    } else {
        cast_tile::<T, Q, false>(&input, &data, &scales, tile);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastRowsArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.input.len();
    LaunchError::check_multiple("input", BLOCK, elements)?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("data", elements, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    Grid::cover("input", elements, WARPS * warp_tile::<T>() as u32)
}

/// The elements from `tile` on, by one warp; all of them there if `FULL`, else those below the end.
#[inline(always)]
fn cast_tile<T: Magnitude, Q: Fp8, const FULL: bool>(input: &Global<T>, data: &GlobalMut<Q>, scales: &GlobalMut<ue8m0>, tile: u64) {
    let width = Vector::<T>::LANES as u32;
    let lanes_a_block = BLOCK as u32 / width;
    let (lane, blocks_a_step) = (thread::lane(), width);
    let first = |step: usize| tile + u64::from((step as u32 * warp::LANES + lane) * width);
    let here = |element: u64| FULL || element < input.len();

    let vectors: [Vector<T>; STEPS] =
        core::array::from_fn(|step| if here(first(step)) { input.load_vector(first(step)) } else { Vector::from_words([0; 4]) });
    let codes: [ue8m0; STEPS] = core::array::from_fn(|step| {
        let running = block_maximum::<T>(of_vector(vectors[step]), lanes_a_block);
        scale_of::<Q>(T::finish(running))
    });
    for step in 0..STEPS {
        if here(first(step)) {
            store_codes(data, first(step), vectors[step], codes[step].reciprocal());
        }
    }
    // Lane `step` of a block's lanes stores the scale of its block in that step.
    let (mine, block_lane) = (lane % lanes_a_block, lane / lanes_a_block);
    let scale = (1..STEPS).fold(codes[0], |scale, step| if mine == step as u32 { codes[step] } else { scale });
    let block = tile / BLOCK + u64::from(mine * blocks_a_step + block_lane);
    if mine < STEPS as u32 && (FULL || block < scales.len()) {
        scales.store(block, scale);
    }
}

/// The running maximum over the lanes that share a block.
#[inline(always)]
fn block_maximum<T: Magnitude>(mut running: u32, lanes_a_block: u32) -> u32 {
    let mut flip = 1;
    while flip < lanes_a_block {
        running = T::join(running, warp::shuffle_xor(running, flip));
        flip *= 2;
    }
    running
}

/// `data[first..] = vector * multiplier`, rounded.
#[inline(always)]
fn store_codes<T: Magnitude, Q: Fp8>(data: &GlobalMut<Q>, first: u64, vector: Vector<T>, multiplier: f32) {
    let four = |from: usize| Q::encode4(core::array::from_fn(|i| vector.lane(from + i).to_f32() * multiplier));
    if Vector::<T>::LANES == 8 { data.store_pair(first, [four(0), four(4)]) } else { data.store_word(first, four(0)) }
}
