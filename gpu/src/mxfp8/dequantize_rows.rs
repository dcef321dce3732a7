//! MXFP8 back to wide numbers, rows of whole blocks.
//!
//! Floor: 1 + 1/32 + 2 (bf16) bytes an element. The mirror image of the cast: a lane loads the scale of
//! one block for its warp, gets that of each step's block by a shuffle, and stores one vector a step.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::*;

/// `output[i] = data[i] * scale`, rounded to nearest even.
#[kernel(threads = THREADS, grid = grid)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_rows<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>) {
    let warp = u64::from(block::index()[0]) * u64::from(WARPS) + u64::from(thread::warp());
    let tile = warp * warp_tile::<T>();
    if tile + warp_tile::<T>() <= data.len() {
        dequantize_tile::<Q, T, true>(&data, &scales, &output, tile);
    } else {
        dequantize_tile::<Q, T, false>(&data, &scales, &output, tile);
    }
}

fn grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeRowsArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.data.len();
    LaunchError::check_multiple("data", BLOCK, elements)?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    LaunchError::check_length("output", elements, args.output.len())?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    Grid::cover("data", elements, WARPS * warp_tile::<T>() as u32)
}

#[inline(always)]
fn dequantize_tile<Q: Fp8, T: Wide, const FULL: bool>(data: &Global<Q>, scales: &Global<ue8m0>, output: &GlobalMut<T>, tile: u64) {
    let width = Vector::<T>::LANES as u32;
    let lanes_a_block = BLOCK as u32 / width;
    let (lane, blocks_a_step) = (thread::lane(), width);
    let first = |step: usize| tile + u64::from((step as u32 * warp::LANES + lane) * width);
    let here = |element: u64| FULL || element < data.len();

    let codes: [[u32; 2]; STEPS] =
        core::array::from_fn(|step| if here(first(step)) { load_codes::<Q, T>(data, first(step)) } else { [0; 2] });
    let block = tile / BLOCK + u64::from(lane);
    let has_block = lane < STEPS as u32 * blocks_a_step && (FULL || block < scales.len());
    let scale = if has_block { scales.load(block).to_f32() } else { 0.0 };
    for step in 0..STEPS {
        let of_block = warp::shuffle(scale, step as u32 * blocks_a_step + lane / lanes_a_block);
        if here(first(step)) {
            let low = Q::decode4(codes[step][0]).map(|x| x * of_block);
            let high = Q::decode4(codes[step][1]).map(|x| x * of_block);
            output.store_vector(first(step), T::vector(low, high));
        }
    }
}

/// The codes of one output vector: 8, or 4 and nothing.
#[inline(always)]
fn load_codes<Q: Fp8, T: Wide>(data: &Global<Q>, first: u64) -> [u32; 2] {
    if Vector::<T>::LANES == 8 { data.load_pair(first) } else { [data.load_word(first), 0] }
}
