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

use oxtile_tile::num::{Pod, e2m1x2, e2m1x8, e4m3, min};
use oxtile_tile::prelude::*;

use super::*;
use crate::magnitude::{Magnitude, of_vector};

const THREADS: u32 = 256;
/// CUDA blocks a multiprocessor: 1536 threads of 40 registers.
const RESIDENT: u32 = 6;
/// Codes of a scale that is neither negative nor NaN, and one more.
const SCALES: usize = 128;
/// Vectors that hold a block of the widest type.
const VECTORS: usize = 4;
const _: () = assert!(VECTORS as u64 * 16 == BLOCK * size_of::<f32>() as u64 && SCALES <= THREADS as usize);

/// What a CUDA block shares.
#[derive(SharedStorage)]
struct Shared {
    /// The multiplier of each scale.
    multipliers: SharedArray<f32, SCALES>,
}

/// Casts blocks of a tensor whose largest magnitude is `amax[0]`: pairs of codes to `data`, one scale a block to `scales`.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_rows<T: Magnitude>(input: Global<T>, amax: Global<f32>, data: GlobalMut<e2m1x2>, scales: GlobalMut<e4m3>) {
    let index = u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index());
    // Threads beyond the last block load it too: no branch parts the loads from the table.
    let vectors = load_block(&input, index.min(scales.len() - 1));
    let encode_scale = encode_scale(amax.load(0));
    let multipliers = Shared::claim().multipliers;
    if thread::index() < SCALES as u32 {
        let scale = e4m3::from_bits(thread::index() as u8);
        multipliers.store(thread::index(), multiplier(scale, encode_scale));
    }
    block::sync();
    let scale = block_scale(amax_of::<T>(&vectors), encode_scale);
    let multiplier = multipliers.load(u32::from(scale.to_bits()));
    if index < scales.len() {
        data.store_pair(index * BLOCK_BYTES, [0, 8].map(|first| encode(&vectors, first, multiplier).to_bits()));
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

/// The codes of eight elements from `first` on.
#[inline(always)]
fn encode<T: Magnitude>(vectors: &[Vector<T>; VECTORS], first: usize, multiplier: f32) -> e2m1x8 {
    let lanes = Vector::<T>::LANES;
    let x: [f32; 8] = core::array::from_fn(|i| {
        let vector = vectors[(first + i) / lanes];
        Vector::<T>::from_words(vector.words().map(T::without_nan)).lane((first + i) % lanes).to_f32()
    });
    // Two products: one by 256 times the multiplier would overflow where the tensor or the scale is tiny.
    e2m1x8::from_scaled(x.map(|x| min(x.abs() * multiplier, 6.0) * 256.0), x)
}
