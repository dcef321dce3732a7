//! MXFP8 back to wide numbers, rows of whole blocks.
//!
//! Floor: 1 + 1/32 + 2 (bf16) bytes an element. The mirror image of the cast: a lane loads the scale of
//! one block for its warp, gets that of each step's block by a shuffle, and stores one vector a step.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::*;

/// Output vectors of a lane. Writes outweigh reads, and short runs of them suit the memory: 2 steps
/// were 1 % faster than 1, 4 or 8 on an H200, 16-byte loads of codes 30 % slower.
const STEPS: usize = 2;

/// `output[i] = data[i] * scale`, rounded to nearest even.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_rows<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>) {
    dequantize_rows::<Q, T>(&data, &output, u64::from(block::index()[0]), |block| scales.load(block));
}

/// Elements that a CUDA block decodes.
pub(super) const fn dequantize_elements<T>() -> u64 {
    WARPS as u64 * warp_tile::<T>(STEPS)
}

/// The work of the tensor's CUDA block `index`; `scale` gives the scale of a block of elements.
#[inline(always)]
pub(super) fn dequantize_rows<Q: Fp8, T: Wide>(data: &Global<Q>, output: &GlobalMut<T>, index: u64, scale: impl Fn(u64) -> ue8m0) {
    let tile = (index * u64::from(WARPS) + u64::from(thread::warp())) * warp_tile::<T>(STEPS);
    if tile + warp_tile::<T>(STEPS) <= data.len() {
        dequantize_tile::<Q, T>(data, output, tile, scale);
    } else {
        let mut element = lane_element::<T>(tile, 0);
        while element < data.len() {
            let codes = load_codes::<Q, T>(data, element);
            output.store_vector(element, decode::<Q, T>(codes, [scale(element / BLOCK).to_f32(); 8]));
            element += warp_tile::<T>(1);
        }
    }
}

fn grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeRowsArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.data.len();
    LaunchError::check_multiple("data", BLOCK, elements)?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    LaunchError::check_length("output", elements, args.output.len())?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    Grid::cover("data", elements, dequantize_elements::<T>() as u32)
}

/// A whole tile: all loads first.
#[inline(always)]
fn dequantize_tile<Q: Fp8, T: Wide>(data: &Global<Q>, output: &GlobalMut<T>, tile: u64, scale: impl Fn(u64) -> ue8m0) {
    let codes: [_; STEPS] = core::array::from_fn(|step| load_codes::<Q, T>(data, lane_element::<T>(tile, step)));
    let blocks = (warp_tile::<T>(STEPS) / BLOCK) as u32;
    let scale = scale(tile / BLOCK + u64::from(thread::lane() % blocks)).to_f32();
    // By reference: an iterator that owns the array leaves it in local memory where the body is long (sm_80).
    for (step, codes) in codes.iter().enumerate() {
        let of_block = warp::shuffle(scale, block_in_tile::<T>(step as u32));
        output.store_vector(lane_element::<T>(tile, step), decode::<Q, T>(*codes, [of_block; 8]));
    }
}
