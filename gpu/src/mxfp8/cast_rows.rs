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

/// Vectors of the wide type that a lane keeps in flight.
pub(super) const STEPS: usize = 4;

/// Casts whole blocks: `data[i] = input[i] / scale`, one scale a block in `scales[i / 32]`.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_rows<T: Magnitude, Q: Fp8>(input: Global<T>, data: GlobalMut<Q>, scales: GlobalMut<ue8m0>) {
    cast_rows::<T, Q>(&input, &data, &scales, u64::from(block::index()[0]));
}

/// Elements that a CUDA block casts.
pub(super) const fn cast_elements<T>() -> u64 {
    WARPS as u64 * warp_tile::<T>(STEPS)
}

/// What CUDA block `block` of the tensor's does.
#[inline(always)]
pub(super) fn cast_rows<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, scales: &GlobalMut<ue8m0>, block: u64) {
    let tile = (block * u64::from(WARPS) + u64::from(thread::warp())) * warp_tile::<T>(STEPS);
    if tile + warp_tile::<T>(STEPS) <= input.len() {
        cast_tile::<T, Q>(input, data, tile, |block, code| scales.store(tile / BLOCK + u64::from(block), code));
    } else {
        let mut start = tile;
        while start < input.len() {
            let element = lane_element::<T>(start, 0);
            let code = cast_step::<T, Q>(input, data, element, element < input.len());
            if element < input.len() && thread::lane().is_multiple_of(lanes_a_block::<T>()) {
                scales.store(element / BLOCK, code);
            }
            start += warp_tile::<T>(1);
        }
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastRowsArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.input.len();
    LaunchError::check_multiple("input", BLOCK, elements)?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("data", elements, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    Grid::cover("input", elements, cast_elements::<T>() as u32)
}

/// A whole tile of a warp: all loads first, the scales last. `store_scale` is told the block of the tile and its scale.
#[inline(always)]
pub(super) fn cast_tile<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, tile: u64, store_scale: impl Fn(u32, ue8m0)) {
    let vectors: [_; STEPS] = core::array::from_fn(|step| input.load_vector(lane_element::<T>(tile, step)));
    let codes: [_; STEPS] = core::array::from_fn(|step| block_scale::<T, Q>(of_vector(vectors[step])));
    for step in 0..STEPS {
        store_codes(data, lane_element::<T>(tile, step), vectors[step], [codes[step].reciprocal(); 8]);
    }
    // Of the lanes of a block, lane `step` stores the scale of their block in that step.
    let step = thread::lane() % lanes_a_block::<T>();
    let code = (1..STEPS).fold(codes[0], |code, i| if step == i as u32 { codes[i] } else { code });
    if step < STEPS as u32 {
        store_scale(block_in_tile::<T>(step), code);
    }
}

/// One step of a tile that is not whole: the scale of the lane's block, of zeros if it is not inside. `element` is the lane's first.
#[inline(always)]
pub(super) fn cast_step<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, element: u64, inside: bool) -> ue8m0 {
    let vector = if inside { input.load_vector(element) } else { Vector::from_words([0; 4]) };
    let code = block_scale::<T, Q>(of_vector(vector));
    if inside {
        store_codes(data, element, vector, [code.reciprocal(); 8]);
    }
    code
}
