//! Rowwise cast to NVFP4.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element through device memory. The tensor is one run of
//! blocks; a thread takes one, so that nothing is exchanged: the loads of a warp are whole lines, its scales
//! one sector.
//!
//! | barrier | between |
//! |---|---|
//! | block | the table is written, and read |

use oxtile_tile::num::{Pod, e2m1x2, e2m1x8, e4m3};
use oxtile_tile::prelude::*;

use super::cast_block::encode_saturating;
use super::cast_tile::check_output;
use super::multipliers::{Multipliers, SCALES};
use super::rounding::{Nearest, ROWS, Rounding, Stochastic8, Stochastic16};
use super::*;
use crate::magnitude::{Magnitude, of_vector};

pub(super) const THREADS: u32 = 256;
/// CUDA blocks a multiprocessor: 2048 threads of 32 registers, or 1536 of 40 for `f32`, whose blocks take twice as many.
pub(super) const fn resident<T>() -> u32 {
    if size_of::<T>() == 4 { 6 } else { 8 }
}
/// Blocks of a thread that draws: more than one spread the cost of the table.
const DRAWN_STEPS: u32 = 4;
/// Vectors that hold a block of the widest type.
const VECTORS: usize = 4;
const _: () = assert!(VECTORS as u64 * 16 == BLOCK * size_of::<f32>() as u64 && SCALES <= THREADS as usize);

#[derive(SharedStorage)]
pub(super) struct Shared {
    multipliers: Multipliers,
}

/// Casts blocks of a tensor whose largest magnitude is `amax[0]`: pairs of codes to `data`, one scale a block to `scales`.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_rows<T: Magnitude>(input: Global<T>, amax: Global<f32>, data: GlobalMut<e2m1x2>, scales: GlobalMut<e4m3>) {
    cast(&input, amax.load(0), &data, &scales, Nearest, 1, u64::from(block::index()[0]));
}

/// As [`nvfp4_cast_rows`](fn@nvfp4_cast_rows), rounded by chance, from `seed` and `offset[0]`.
#[kernel(threads = THREADS, grid = stochastic_grid, shared = Shared, min_blocks = if size_of::<T>() == 4 { 3 } else { 4 })]
#[instances(T = [bf16, f32], R = [Stochastic8, Stochastic16])]
pub fn nvfp4_cast_rows_stochastic<T: Magnitude, R: Rounding>(
    input: Global<T>,
    amax: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
    seed: u64,
    offset: Global<u64>,
) {
    cast(&input, amax.load(0), &data, &scales, R::new(seed, &offset), DRAWN_STEPS, u64::from(block::index()[0]));
}

/// The blocks of CUDA block `block` of the tensor's, `steps` of a thread: the next is loaded while one is cast.
#[inline(always)]
pub(super) fn cast<T: Magnitude, R: Rounding>(
    input: &Global<T>,
    amax: f32,
    data: &GlobalMut<e2m1x2>,
    scales: &GlobalMut<e4m3>,
    rounding: R,
    steps: u32,
    block: u64,
) {
    let mut index = block * u64::from(THREADS * steps) + u64::from(thread::index());
    // Threads beyond the last block load it too: no branch parts the loads from the table.
    let load = |index: u64| load_block(input, index.min(scales.len() - 1));
    let mut next = load(index);
    let multipliers = Shared::claim().multipliers;
    multipliers.fill::<R>(encode_scale(amax));
    block::sync();
    // An end that the compiler does not know keeps it from unrolling.
    let end = if steps == 1 { 1 } else { steps.min(block::threads()) };
    let mut step = 0;
    while step < end {
        let vectors = next;
        step += 1;
        if step < end {
            next = load(index + u64::from(THREADS));
        }
        if index < scales.len() {
            cast_block(input, &vectors, index, data, scales, multipliers, rounding);
        }
        index += u64::from(THREADS);
    }
}

#[inline(always)]
fn cast_block<T: Magnitude, R: Rounding>(
    input: &Global<T>,
    vectors: &[Vector<T>; VECTORS],
    index: u64,
    data: &GlobalMut<e2m1x2>,
    scales: &GlobalMut<e4m3>,
    multipliers: Multipliers,
    rounding: R,
) {
    let scale = multipliers.of_block(amax_of(vectors));
    let codes = match [0, 1].map(|half| {
        let (scaled, signs) = halves(vectors, half, scale.scaled);
        rounding.encode(ROWS, index, half, scaled, signs)
    }) {
        [Some(low), Some(high)] if scale.is_exact => [low, high].map(e2m1x8::to_bits),
        _ => {
            let multiplier = multipliers.exact(scale.code);
            // A loop that loads the elements again costs the others no registers.
            encode_saturating(rounding, ROWS, index, |i| input.load(index * BLOCK + u64::from(i)).to_f32() * multiplier)
        }
    };
    data.store_pair(index * BLOCK_BYTES, codes);
    scales.store(index, scale.code);
}

fn grid<T: Magnitude>(args: &Nvfp4CastRowsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    check(args.input, args.amax, &args.data, &args.scales, 1)
}

fn check<T>(
    input: DeviceView<'_, T>,
    amax: DeviceView<'_, f32>,
    data: &DeviceViewMut<'_, e2m1x2>,
    scales: &DeviceViewMut<'_, e4m3>,
    steps: u32,
) -> Result<Grid, LaunchError> {
    LaunchError::check_multiple("input", BLOCK, input.len())?;
    LaunchError::check_alignment("input", 16, input.address())?;
    check_output(input.len(), ("amax", &amax), ("data", data), ("scales", scales))?;
    Grid::cover("input", input.len(), THREADS * steps * BLOCK as u32)
}

fn stochastic_grid<T: Magnitude, R: Rounding>(args: &Nvfp4CastRowsStochasticArgs<'_, T, R>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("offset", R::DRAWS, args.offset.len())?;
    check(args.input, args.amax, &args.data, &args.scales, DRAWN_STEPS)
}

/// The vectors of a block; a 16-bit type has half as many, and zeros after them.
#[inline(always)]
fn load_block<T: Pod>(input: &Global<T>, block: u64) -> [Vector<T>; VECTORS] {
    core::array::from_fn(|i| {
        let first = i * Vector::<T>::LANES;
        if first < BLOCK as usize { input.load_vector(block * BLOCK + first as u64) } else { Vector::from_words([0; 4]) }
    })
}

#[inline(always)]
fn amax_of<T: Magnitude>(vectors: &[Vector<T>; VECTORS]) -> f32 {
    let mut running = 0;
    for vector in vectors.iter().take(BLOCK as usize / Vector::<T>::LANES) {
        running = T::join(running, of_vector(*vector));
    }
    T::finish(running)
}

/// Half of a block as [`Rounding::encode`] takes it: magnitudes times [`Rounding::SCALE`] and signs.
#[inline(always)]
fn halves<T: Magnitude>(vectors: &[Vector<T>; VECTORS], half: usize, multiplier: f32) -> ([f32; 8], u32) {
    let (first, lanes) = (8 * half, Vector::<T>::LANES);
    let word = |i: usize| vectors[first / lanes + i / 4].words()[i % 4];
    let magnitudes = |vector: usize| Vector::<T>::from_words(vectors[vector].words().map(T::magnitudes));
    let scaled = |i: usize| magnitudes((first + i) / lanes).lane(i % lanes).to_f32() * multiplier;
    (core::array::from_fn(scaled), T::signs(word))
}
