//! Rowwise cast to NVFP4.
//!
//! Floor: 2 (bf16) + 1/2 + 1/16 bytes an element through device memory. The tensor is one run of
//! blocks; a thread takes one, so that nothing is exchanged: the loads of a warp are whole lines, its scales
//! one sector. There are 127 scales, so a block's multiplier is looked up instead of divided for. The table
//! is made by each CUDA block while its loads are under way.
//!
//! | barrier | between |
//! |---|---|
//! | block | the table is written, and read |

use oxtile_tile::num::{Pod, e2m1, e2m1x2, e2m1x8, e4m3, min};
use oxtile_tile::prelude::*;

use super::*;
use crate::magnitude::{Magnitude, of_vector};

const THREADS: u32 = 256;
/// CUDA blocks a multiprocessor: 2048 threads of 32 registers, or 1536 of 40 for `f32`, whose blocks take twice as many.
const fn resident<T>() -> u32 {
    if size_of::<T>() == 4 { 6 } else { 8 }
}
/// Codes of a scale that is neither negative nor NaN, and one more.
const SCALES: usize = 128;
/// Vectors that hold a block of the widest type.
const VECTORS: usize = 4;
const _: () = assert!(VECTORS as u64 * 16 == BLOCK * size_of::<f32>() as u64 && SCALES <= THREADS as usize);

/// What follows from the tensor's amax.
#[derive(SharedStorage)]
struct Shared {
    /// The multiplier of each scale.
    multipliers: SharedArray<f32, SCALES>,
    /// The multipliers times 256, as the rounding takes them; at most `MAX`.
    scaled: SharedArray<f32, SCALES>,
    /// What a block's amax is multiplied by.
    scale_factor: SharedArray<f32, 1>,
}

/// Casts blocks of a tensor whose largest magnitude is `amax[0]`: pairs of codes to `data`, one scale a block to `scales`.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_rows<T: Magnitude>(input: Global<T>, amax: Global<f32>, data: GlobalMut<e2m1x2>, scales: GlobalMut<e4m3>) {
    let index = u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index());
    // Threads beyond the last block load it too: no branch parts the loads from the table.
    let vectors = load_block(&input, index.min(scales.len() - 1));
    let shared = Shared::claim();
    if thread::index() < SCALES as u32 {
        shared.fill(encode_scale(amax.load(0)));
    }
    block::sync();
    if index < scales.len() {
        let block_amax = amax_of(&vectors);
        let scale = block_scale(block_amax, shared.scale_factor.load(0));
        let multiplier = shared.scaled.load(u32::from(scale.to_bits()));
        let exact = multiplier < f32::MAX || block_amax == 0.0;
        let codes = match [0, 8].map(|first| encode(&vectors, first, multiplier)) {
            [Some(low), Some(high)] if exact => [low, high].map(e2m1x8::to_bits),
            _ => encode_saturating(&input, index, shared.multipliers.load(u32::from(scale.to_bits()))),
        };
        data.store_pair(index * BLOCK_BYTES, codes);
        scales.store(index, scale);
    }
}

fn grid<T: Magnitude>(args: &Nvfp4CastRowsArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.input.len();
    LaunchError::check_multiple("input", BLOCK, elements)?;
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    LaunchError::check_length("data", elements / 2, args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_length("scales", elements / BLOCK, args.scales.len())?;
    Grid::cover("input", elements, THREADS * BLOCK as u32)
}

impl Shared {
    /// Written by the first `SCALES` threads, one scale each.
    #[inline(always)]
    fn fill(&self, encode_scale: f32) {
        let index = thread::index();
        let multiplier = multiplier(e4m3::from_bits(index as u8), encode_scale);
        self.multipliers.store(index, multiplier);
        self.scaled.store(index, min(multiplier * 256.0, f32::MAX));
        if index == 0 {
            self.scale_factor.store(0, scale_factor(encode_scale));
        }
    }
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

/// The codes of eight elements from `first` on, unless one is a NaN or saturates.
#[inline(always)]
fn encode<T: Magnitude>(vectors: &[Vector<T>; VECTORS], first: usize, multiplier: f32) -> Option<e2m1x8> {
    let lanes = Vector::<T>::LANES;
    let word = |i: usize| vectors[first / lanes + i / 4].words()[i % 4];
    let magnitudes = |vector: usize| Vector::<T>::from_words(vectors[vector].words().map(T::magnitudes));
    let scaled = |i: usize| magnitudes((first + i) / lanes).lane(i % lanes).to_f32() * multiplier;
    e2m1x8::from_scaled(core::array::from_fn(scaled), T::signs(word))
}

/// The codes of a block, whatever is in it. A NaN, or a scale that was rounded down to one of the lowest, is
/// rare: a loop that loads the elements again costs the others no registers.
#[inline(always)]
fn encode_saturating<T: Magnitude>(input: &Global<T>, block: u64, multiplier: f32) -> [u32; 2] {
    let first = block * BLOCK;
    // An end that the compiler does not know keeps it from unrolling.
    let end = (first + BLOCK).min(input.len());
    let mut codes = 0;
    let mut element = first;
    while element < end {
        let code = e2m1::from_f32(input.load(element).to_f32() * multiplier);
        codes |= u64::from(code.to_bits()) << (4 * (element - first));
        element += 1;
    }
    [codes as u32, (codes >> 32) as u32]
}
