//! NVFP4 back to wide numbers.
//!
//! Floor: 1/2 + 1/16 + 2 (bf16) bytes an element. The tensor is one run of blocks. In each of `STEPS` steps
//! a lane takes half a block, so that a warp writes whole lines; its scale comes from a sector that the
//! whole warp reads.

use oxtile_tile::num::{e2m1x2, e2m1x8, e4m3};
use oxtile_tile::prelude::*;

use super::*;
use crate::wide::Wide;

pub(super) const THREADS: u32 = 256;
/// Elements of a lane and step: the codes of one register.
const PART: u64 = 8;
/// Steps of a thread. Writes outweigh reads, as they do in MXFP8's, where 2 were best.
const STEPS: usize = 2;
/// CUDA blocks a multiprocessor: 2048 threads of 32 registers.
pub(super) const RESIDENT: u32 = 8;

/// `output[i] = data[i] * (scale * amax * fp32(1/2688))`, rounded to nearest even.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_rows<T: Wide>(data: Global<e2m1x2>, scales: Global<e4m3>, amax: Global<f32>, output: GlobalMut<T>) {
    dequantize(&data, amax.load(0), &output, u64::from(block::index()[0]), |block| scales.load(block));
}

/// Elements that a CUDA block decodes.
pub(super) const ELEMENTS: u64 = THREADS as u64 * STEPS as u64 * PART;

/// The work of the tensor's CUDA block `index`; `scale` gives the scale of a block of elements.
#[inline(always)]
pub(super) fn dequantize<T: Wide>(data: &Global<e2m1x2>, amax: f32, output: &GlobalMut<T>, index: u64, scale: impl Fn(u64) -> e4m3) {
    let first = index * u64::from(THREADS) * STEPS as u64 + u64::from(thread::index());
    let part = |step: usize| first + step as u64 * u64::from(THREADS);
    let parts = output.len() / PART;
    if part(STEPS - 1) < parts {
        let loaded: [_; STEPS] = core::array::from_fn(|step| load_part(data, &scale, part(step)));
        for (step, loaded) in loaded.iter().enumerate() {
            store_part(output, part(step), loaded.0, decode_factor(loaded.1, amax));
        }
    } else {
        let mut part = first;
        while part < parts {
            let (codes, scale) = load_part(data, &scale, part);
            store_part(output, part, codes, decode_factor(scale, amax));
            part += u64::from(THREADS);
        }
    }
}

fn grid<T: Wide>(args: &Nvfp4DequantizeRowsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.output.len();
    LaunchError::check_multiple("output", BLOCK, elements)?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    LaunchError::check_length("data", elements / 2, args.data.len())?;
    LaunchError::check_alignment("data", 4, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    Grid::cover("output", elements, ELEMENTS as u32)
}

/// Eight codes, which last in the cache, and their scale.
#[inline(always)]
pub(super) fn load_part(data: &Global<e2m1x2>, scale: impl Fn(u64) -> e4m3, part: u64) -> (e2m1x8, e4m3) {
    (e2m1x8::from_bits(data.lasting().load_word(part * PART / 2)), scale(part * PART / BLOCK))
}

/// Stores the values of eight codes.
#[inline(always)]
pub(super) fn store_part<T: Wide>(output: &GlobalMut<T>, part: u64, codes: e2m1x8, factor: f32) {
    let [a, b, c, d, e, f, g, h] = codes.to_f32().map(|x| x * factor);
    let (low, high) = ([a, b, c, d], [e, f, g, h]);
    output.store_vector(part * PART, T::vector(low, high));
    if (Vector::<T>::LANES as u64) < PART {
        output.store_vector(part * PART + PART / 2, T::vector(high, low));
    }
}
