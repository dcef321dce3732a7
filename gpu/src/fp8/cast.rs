//! Cast to FP8 with one scale for the tensor: the scale follows from the tensor's amax (current scaling), or is given and the
//! amax is recorded for later ones (delayed scaling).
//!
//! Floor: 2 (bf16) + 1 bytes an element. The tensor is one run of vectors, of any length and at any address; a thread
//! loads its vectors first, so that the scale's division is done while they are under way. The scale is the same
//! in every thread and costs each some twenty instructions, which is less than a launch in between.
//!
//! | barrier | between |
//! |---|---|
//! | of `block::max_u32` (delayed) | the warps' maxima are written, and read |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::run::{Piece, Run};
use super::*;
use crate::magnitude::{Magnitude, of_vector};

/// Vectors that a thread keeps in flight.
const STEPS: usize = 4;
/// CUDA blocks a multiprocessor: 1536 threads of 40 registers.
pub(super) const RESIDENT: u32 = 6;

/// Where the warps' maxima meet.
#[derive(SharedStorage)]
struct Shared {
    reduce: ReduceStorage,
}

/// `data[i] = input[i] * scale`, `scale` made of `amax[0]` by the rule of the format, `scale_inverse[0] = 1 / scale`.
#[kernel(threads = THREADS, grid = cast_grid, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast<T: Magnitude, Q: Fp8>(
    input: Global<T>,
    amax: Global<f32>,
    data: GlobalMut<Q>,
    scale_inverse: GlobalMut<f32>,
    options: ScaleOptions,
) {
    let rule = ScaleRule::new(options, f32::MAX);
    let scale = || rule.scale::<Q>(amax.load(0));
    cast_run(&input, &data, u64::from(block::index()[0]), scale);
    if block::index()[0] == 0 && thread::index() == 0 {
        scale_inverse.store(0, 1.0 / scale());
    }
}

fn cast_grid<T: Magnitude, Q: Fp8>(args: &Fp8CastArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("amax", 1, args.amax.len())?;
    LaunchError::check_length("data", args.input.len(), args.data.len())?;
    LaunchError::check_length("scale_inverse", 1, args.scale_inverse.len())?;
    // An empty tensor has a scale too.
    Grid::cover("input", args.input.len().max(1), Run::<T, STEPS>::ELEMENTS)
}

/// `data[i] = input[i] * scale[0]`, `scale_inverse[0] = 1 / scale[0]`; raises `amax[0]` to the largest magnitude in `input`.
#[kernel(threads = THREADS, grid = delayed_grid, shared = Shared, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_delayed<T: Magnitude, Q: Fp8>(
    input: Global<T>,
    scale: Global<f32>,
    data: GlobalMut<Q>,
    scale_inverse: GlobalMut<f32>,
    amax: GlobalMut<f32>,
) {
    let running = cast_run(&input, &data, u64::from(block::index()[0]), || scale.load(0));
    let largest = block::max_u32(T::finish(running).to_bits(), Shared::claim().reduce);
    if thread::index() == 0 {
        atomic::max_non_negative(&amax, 0, f32::from_bits(largest));
        if block::index()[0] == 0 {
            scale_inverse.store(0, 1.0 / scale.load(0));
        }
    }
}

fn delayed_grid<T: Magnitude, Q: Fp8>(args: &Fp8CastDelayedArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("scale", 1, args.scale.len())?;
    LaunchError::check_length("data", args.input.len(), args.data.len())?;
    LaunchError::check_length("scale_inverse", 1, args.scale_inverse.len())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    Grid::cover("input", args.input.len().max(1), Run::<T, STEPS>::ELEMENTS)
}

/// Elements that a CUDA block casts.
pub(super) const fn elements<T: Magnitude>() -> u32 {
    Run::<T, STEPS>::ELEMENTS
}

/// Casts the run of CUDA block `block` of the tensor's; returns the thread's running maximum of it.
#[inline(always)]
pub(super) fn cast_run<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, block: u64, scale: impl Fn() -> f32) -> u32 {
    let run = Run::<T, STEPS>::of_block(block, input.len(), input.start(), data.start());
    if run.is_whole() {
        let vectors: [_; STEPS] = core::array::from_fn(|step| input.load_vector(run.element(step)));
        let scale = scale();
        for (step, vector) in vectors.iter().enumerate() {
            store_codes::<T, Q>(data, run.element(step), *vector, scale);
        }
        return vectors.into_iter().fold(0, |running, vector| T::join(running, of_vector(vector)));
    }
    let (scale, mut running) = (scale(), 0);
    run.for_each_piece(|piece| match piece {
        Piece::Vector(element) => {
            let vector = input.load_vector(element);
            running = T::join(running, of_vector(vector));
            store_codes::<T, Q>(data, element, vector, scale);
        }
        Piece::Element(element) => {
            let value = input.load(element);
            running = T::raise(running, value.to_word());
            data.store(element, Q::from_f32(value.to_f32() * scale));
        }
    });
    running
}

/// `data[first..] = vector * scale`.
#[inline(always)]
fn store_codes<T: Magnitude, Q: Fp8>(data: &GlobalMut<Q>, first: u64, vector: Vector<T>, scale: f32) {
    let codes = encode::<T, Q>(vector, scale);
    if Vector::<T>::LANES == 8 { data.store_pair(first, codes) } else { data.store_word(first, codes[0]) }
}
