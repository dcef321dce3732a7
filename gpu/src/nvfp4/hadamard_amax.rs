//! The largest magnitudes of a tensor before and after the Hadamard transform of its columns.
//!
//! Floor: 2 bytes an element, read once. A thread takes 16 rows of four columns a step, and walks down the tensor.

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::max;
use oxtile_tile::prelude::*;

use super::cast_tile::lane_of;
use super::*;
use crate::magnitude::Magnitude;
use crate::matrix::{Matrix, MatrixArgument};

const THREADS: u32 = 256;
/// CUDA blocks a multiprocessor: 1024 threads of 64 registers.
const RESIDENT: u32 = 4;
const GRID_LIMIT: u64 = 65_535;

#[derive(SharedStorage)]
struct Shared {
    before: ReduceStorage,
    after: ReduceStorage,
}

/// Raises `amax[0]` to the largest magnitude of a matrix `[rows, columns]`, both multiples of 16, and `transformed_amax[0]` to that of
/// its columns [transformed](super::hadamard) in groups of 16 rows. NaN is dropped.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = RESIDENT)]
pub fn nvfp4_hadamard_amax(input: Matrix<bf16>, amax: GlobalMut<f32>, transformed_amax: GlobalMut<f32>) {
    let Matrix { values: input, rows, columns } = input;
    let [x, y, _] = block::index();
    let column = (u64::from(x) * u64::from(THREADS) + u64::from(thread::index())) * 4;
    let (mut before, mut after) = (0, 0.0);
    let mut row = if column < columns { u64::from(y) * BLOCK } else { rows };
    while row < rows {
        let pairs: [[u32; 2]; BLOCK as usize] = core::array::from_fn(|i| input.load_pair((row + i as u64) * columns + column));
        for pair in 0..2 {
            let words = pairs.map(|words| words[pair]);
            before = words.into_iter().fold(before, bf16::raise);
            for place in 0..2 {
                after = max(after, hadamard::transformed_amax(words.map(|word| lane_of::<bf16>(word, place))));
            }
        }
        row += u64::from(block::count()[1]) * BLOCK;
    }
    let shared = Shared::claim();
    let before = block::max_u32(bf16::finish(before).to_bits(), shared.before);
    let after = block::max_u32(after.to_bits(), shared.after);
    if thread::index() == 0 {
        atomic::max_non_negative(&amax, 0, f32::from_bits(before));
        atomic::max_non_negative(&transformed_amax, 0, f32::from_bits(after));
    }
}

/// As many CUDA blocks as the device holds, twice over.
fn grid(args: &Nvfp4HadamardAmaxArgs<'_>, device: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    LaunchError::check_multiple("input.rows", BLOCK, rows)?;
    LaunchError::check_multiple("input.columns", BLOCK, columns)?;
    args.input.check()?;
    LaunchError::check_alignment("input.values", 16, values.address())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    LaunchError::check_length("transformed_amax", 1, args.transformed_amax.len())?;
    let across = Grid::cover("input.columns", columns, THREADS * 4)?;
    let wanted = (2 * RESIDENT * device.multiprocessors).div_ceil(across.x.max(1));
    let down = (rows / BLOCK).min(u64::from(wanted)).min(GRID_LIMIT);
    Ok(if down == 0 { Grid::x(0) } else { Grid::xy(across.x, down as u32) })
}
