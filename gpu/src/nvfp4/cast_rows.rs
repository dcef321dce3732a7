//! Rowwise cast to NVFP4.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element through device memory. The tensor is one run of
//! blocks; a thread takes one, so that nothing is exchanged: the loads of a warp are whole lines, its scales
//! one sector.
//!
//! | barrier | between |
//! |---|---|
//! | block | the table is written, and read |

use oxtile_tile::num::{e2m1x2, e2m1x8, e4m3};
use oxtile_tile::prelude::*;

use super::cast_block::encode_saturating;
use super::cast_tile::check_output;
use super::mapping::BlockElements;
use super::multipliers::{Multipliers, SCALES};
use super::rounding::{Nearest, ROWS, Random, Rounding, Stochastic8, Stochastic16};
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

/// As [`nvfp4_cast_rows`](fn@nvfp4_cast_rows), with stochastic rounding.
#[kernel(threads = THREADS, grid = stochastic_grid, shared = Shared, min_blocks = if size_of::<T>() == 4 { 3 } else { 4 })]
#[instances(T = [bf16, f32], R = [Stochastic8, Stochastic16])]
pub fn nvfp4_cast_rows_stochastic<T: Magnitude, R: Rounding>(
    input: Global<T>,
    amax: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
    random: Random,
) {
    cast(&input, amax.load(0), &data, &scales, R::new(random), DRAWN_STEPS, u64::from(block::index()[0]));
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
    let load = |index: u64| RowBlock::load(input, index.min(scales.len() - 1));
    let mut next = load(index);
    let multipliers = Shared::claim().multipliers;
    multipliers.fill::<R>(encode_scale(amax));
    block::sync();
    // An end that the compiler does not know keeps it from unrolling.
    let end = if steps == 1 { 1 } else { steps.min(block::threads()) };
    let mut step = 0;
    while step < end {
        let block = next;
        step += 1;
        if step < end {
            next = load(index + u64::from(THREADS));
        }
        if index < scales.len() {
            let (scale, codes) = block_codes(input, &block, index, multipliers, rounding);
            data.store_pair(index * BLOCK_BYTES, codes);
            scales.store(index, scale);
        }
        index += u64::from(THREADS);
    }
}

/// The scale and the codes of block `index`, which is loaded.
#[inline(always)]
pub(super) fn block_codes<T: Magnitude, R: Rounding>(
    input: &Global<T>,
    block: &RowBlock<T>,
    index: u64,
    multipliers: Multipliers,
    rounding: R,
) -> (e4m3, [u32; 2]) {
    let scale = multipliers.of_block(T::finish(block.running()));
    let codes = [0, 1].map(|half| {
        let (scaled, signs) = block.half(half, scale.scaled);
        rounding.encode(ROWS, index, half, scaled, signs)
    });
    let codes = match codes {
        [Some(low), Some(high)] if scale.is_exact => [low, high].map(e2m1x8::to_bits),
        _ => {
            let multiplier = multipliers.exact(scale.code);
            // A loop that loads the elements again costs the others no registers.
            encode_saturating(rounding, ROWS, index, |i| input.load(index * BLOCK + u64::from(i)).to_f32() * multiplier)
        }
    };
    (scale.code, codes)
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
    args.random.check::<R>()?;
    check(args.input, args.amax, &args.data, &args.scales, DRAWN_STEPS)
}

/// A block of a row in registers; a 16-bit type has half as many vectors, and zeros after them.
#[derive(Clone, Copy)]
pub(super) struct RowBlock<T>([Vector<T>; VECTORS]);

impl<T: Magnitude> RowBlock<T> {
    /// Block `index` of a run of blocks.
    #[inline(always)]
    pub fn load(input: &Global<T>, index: u64) -> Self {
        Self(core::array::from_fn(|i| {
            let first = i * Vector::<T>::LANES;
            if first < BLOCK as usize { input.load_vector(index * BLOCK + first as u64) } else { Vector::from_words([0; 4]) }
        }))
    }

    /// The running maximum of its magnitudes.
    #[inline(always)]
    pub fn running(&self) -> u32 {
        let vectors = self.0.iter().take(BLOCK as usize / Vector::<T>::LANES);
        vectors.fold(0, |running, vector| T::join(running, of_vector(*vector)))
    }

    /// Its elements.
    #[inline(always)]
    pub fn elements(&self) -> BlockElements {
        let [(low, low_signs), (high, high_signs)] = [0, 1].map(|half| self.half(half, 1.0));
        let magnitudes = core::array::from_fn(|i| if i < 8 { low[i] } else { high[i - 8] });
        BlockElements { magnitudes, signs: [low_signs, high_signs], amax: T::finish(self.running()) }
    }

    /// Half of it as [`Rounding::encode`] takes it: magnitudes times [`Rounding::SCALE`] and signs.
    #[inline(always)]
    fn half(&self, half: usize, multiplier: f32) -> ([f32; 8], u32) {
        let (first, lanes) = (8 * half, Vector::<T>::LANES);
        let word = |i: usize| self.0[first / lanes + i / 4].words()[i % 4];
        let magnitudes = |vector: usize| Vector::<T>::from_words(self.0[vector].words().map(T::magnitudes));
        let scaled = |i: usize| magnitudes((first + i) / lanes).lane(i % lanes).to_f32() * multiplier;
        (core::array::from_fn(scaled), T::signs(word))
    }
}
