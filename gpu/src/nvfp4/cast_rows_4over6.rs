//! Rowwise cast to NVFP4 by a [mapping](super::mapping) to 4 or 6.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element. The tensor is one run of blocks; a thread takes one and casts it twice in
//! registers. Bound by arithmetic: about 30 instructions an element.

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_rows::RowBlock;
use super::cast_tile::check_output;
use super::mapping::{FourOverSix, FourOverSix256, FourOverSixSquared, FourOverSixSquared256, Mapping};
use super::*;
use crate::magnitude::Magnitude;

const THREADS: u32 = 256;

/// Casts blocks of a tensor whose largest magnitude is `amax[0]`: pairs of codes to `data`, one scale a block to `scales`.
#[kernel(threads = THREADS, grid = grid, min_blocks = if size_of::<T>() == 4 { 2 } else { 3 })]
#[instances(T = [bf16, f16, f32], M = [FourOverSix])]
#[instances(T = [bf16], M = [FourOverSixSquared, FourOverSix256, FourOverSixSquared256])]
pub fn nvfp4_cast_rows_4over6<T: Magnitude, M: Mapping>(
    input: Global<T>,
    amax: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
) {
    let index = u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index());
    if index < scales.len() {
        let block = RowBlock::load(&input, index);
        let tensor = M::tensor_scale(amax.load(0));
        let (scale, codes) = M::cast(&block.elements(), tensor, |i| input.load(index * BLOCK + u64::from(i)).to_f32());
        data.store_pair(index * BLOCK_BYTES, codes);
        scales.store(index, scale);
    }
}

fn grid<T: Magnitude, M: Mapping>(args: &Nvfp4CastRows4over6Args<'_, T, M>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("input", BLOCK, args.input.len())?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    check_output(args.input.len(), ("amax", &args.amax), ("data", &args.data), ("scales", &args.scales))?;
    Grid::cover("input", args.input.len(), THREADS * BLOCK as u32)
}
