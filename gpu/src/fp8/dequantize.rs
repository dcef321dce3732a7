//! FP8 with one scale for the tensor back to wide numbers.
//!
//! Floor: 1 + 2 (bf16) bytes an element. The mirror image of the cast: a thread loads the codes of its vectors first.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::run::{Piece, Run};
use super::*;
use crate::wide::Wide;

/// Output vectors of a thread; for MXFP8, which moves the same bytes, 2 were best on an H200.
const STEPS: usize = 2;
/// CUDA blocks a multiprocessor: 2048 threads of 32 registers.
pub(super) const RESIDENT: u32 = 8;

/// `output[i] = data[i] * scale_inverse[0]`, rounded to nearest even.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn fp8_dequantize<Q: Fp8, T: Wide>(data: Global<Q>, scale_inverse: Global<f32>, output: GlobalMut<T>) {
    dequantize_run(&data, &output, u64::from(block::index()[0]), || scale_inverse.load(0));
}

/// Elements that a CUDA block decodes.
pub(super) const fn elements<T: Wide>() -> u32 {
    Run::<T, STEPS>::ELEMENTS
}

/// Decodes the run of CUDA block `block` of the tensor's.
#[inline(always)]
pub(super) fn dequantize_run<Q: Fp8, T: Wide>(data: &Global<Q>, output: &GlobalMut<T>, block: u64, factor: impl Fn() -> f32) {
    let run = Run::<T, STEPS>::of_block(block, data.len(), output.start(), data.start());
    if run.is_whole() {
        let codes: [_; STEPS] = core::array::from_fn(|step| load_codes::<Q, T>(data, run.element(step)));
        let factor = factor();
        for (step, codes) in codes.iter().enumerate() {
            output.store_vector(run.element(step), decode::<Q, T>(*codes, factor));
        }
    } else {
        let factor = factor();
        run.for_each_piece(|piece| match piece {
            Piece::Vector(element) => output.store_vector(element, decode::<Q, T>(load_codes::<Q, T>(data, element), factor)),
            Piece::Element(element) => output.store(element, T::from_f32(data.load(element).to_f32() * factor)),
        });
    }
}

fn grid<Q: Fp8, T: Wide>(args: &Fp8DequantizeArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("scale_inverse", 1, args.scale_inverse.len())?;
    LaunchError::check_length("output", args.data.len(), args.output.len())?;
    Grid::cover("data", args.data.len(), Run::<T, STEPS>::ELEMENTS)
}
