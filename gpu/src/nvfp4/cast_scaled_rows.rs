//! Rowwise cast to NVFP4 with an amax of its own for each row, found in the same pass.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element and 4 a row: a warp takes a row, reads it for its amax, and again, from a cache, for
//! the cast. Nothing is exchanged between warps.

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_rows::RowBlock;
use super::mapping::{FourOverSix, FourOverSix256, FourOverSixSquared, FourOverSixSquared256, Mapping, ToSix};
use super::*;
use crate::magnitude::Magnitude;

const THREADS: u32 = 256;
/// Blocks of a lane that are loaded before the first is looked at.
const AT_ONCE: usize = 4;
/// Rows of a CUDA block: one a warp.
const ROWS: u32 = THREADS / warp::LANES;

/// Casts the rows of a matrix of `columns` columns, a multiple of 16: `amaxes[row]` becomes the largest magnitude of a row, NaN dropped,
/// which stands for the tensor's.
#[kernel(threads = THREADS, grid = grid, min_blocks = 2)]
#[instances(T = [bf16, f16, f32], M = [ToSix])]
#[instances(T = [bf16], M = [FourOverSix, FourOverSixSquared, FourOverSix256, FourOverSixSquared256])]
pub fn nvfp4_cast_scaled_rows<T: Magnitude, M: Mapping>(
    input: Global<T>,
    amaxes: GlobalMut<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
    columns: u64,
) {
    let row = u64::from(block::index()[0]) * u64::from(ROWS) + u64::from(thread::warp());
    if row < amaxes.len() {
        let first = row * (columns / BLOCK) + u64::from(thread::lane());
        let end = (row + 1) * (columns / BLOCK);
        let last = end.saturating_sub(1);
        let mut running = 0;
        let mut index = first;
        while index < end {
            // A block beyond the row is its last once more.
            let load = |i: usize| RowBlock::load(&input, (index + i as u64 * u64::from(warp::LANES)).min(last));
            let blocks: [RowBlock<T>; AT_ONCE] = core::array::from_fn(load);
            running = blocks.iter().fold(running, |running, block| T::join(running, block.running()));
            index += AT_ONCE as u64 * u64::from(warp::LANES);
        }
        let amax = f32::from_bits(warp::max_u32(T::finish(running).to_bits()));
        if thread::lane() == 0 {
            amaxes.store(row, amax);
        }
        let tensor = M::tensor_scale(amax);
        if first >= end {
            return;
        }
        let mut index = first;
        let mut next = RowBlock::load(&input, index);
        while index < end {
            let block = next;
            next = RowBlock::load(&input, (index + u64::from(warp::LANES)).min(last));
            let (scale, codes) = M::cast(&block.elements(), tensor, |i| input.load(index * BLOCK + u64::from(i)).to_f32());
            data.store_pair(index * BLOCK_BYTES, codes);
            scales.store(index, scale);
            index += u64::from(warp::LANES);
        }
    }
}

fn grid<T: Magnitude, M: Mapping>(args: &Nvfp4CastScaledRowsArgs<'_, T, M>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.input.len();
    LaunchError::check_multiple("columns", BLOCK, args.columns)?;
    LaunchError::check_length("input", args.amaxes.len().saturating_mul(args.columns), elements)?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("data", elements / 2, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    Grid::cover("amaxes", args.amaxes.len(), ROWS)
}
