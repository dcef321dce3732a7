//! Cast to FP8 with one scale for the tensor, as it is and transposed, in one pass over the input.
//!
//! Floor: 2 (bf16) + 1 + 1 bytes an element. A CUDA block loads its [tile](super::tile), stores the codes row by row from
//! registers, and puts their transpose together in [shared memory](super::staging).
//!
//! | barrier | between |
//! |---|---|
//! | block | the transpose is written to shared memory, and read |
//! | of `block::max_u32` (delayed) | the warps' maxima are written, and read |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::staging::Staging;
use super::tile::{LINES, Lines, Tile};
use super::*;
use crate::magnitude::{Magnitude, of_vector};
use crate::matrix::Matrix;

/// CUDA blocks a multiprocessor: `f32` needs twice the registers.
pub(super) const fn resident<T>() -> u32 {
    if size_of::<T>() == 4 { 2 } else { 4 }
}

/// The transpose of the tile.
#[derive(SharedStorage)]
struct Shared {
    staging: Staging,
}

/// And where the warps' maxima meet.
#[derive(SharedStorage)]
struct SharedDelayed {
    staging: Staging,
    reduce: ReduceStorage,
}

/// Casts a matrix `[rows, columns]` of whole vectors a row as [`fp8_cast`](fn@super::fp8_cast) does, to `data`, and to `transposed`, `[columns, rows]`.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_transpose<T: Magnitude, Q: Fp8>(
    input: Matrix<T>,
    amax: Global<f32>,
    data: GlobalMut<Q>,
    transposed: GlobalMut<Q>,
    scale_inverse: GlobalMut<f32>,
    options: ScaleOptions,
) {
    let tile = Tile::<T>::of_block(input.rows, input.columns);
    let lines = tile.load(&input.values);
    let scale = ScaleRule::new(options, f32::MAX).scale::<Q>(amax.load(0));
    let staging = Shared::claim().staging;
    cast_lines(&tile, &lines, scale, &data, &staging);
    if tile.is_first() && thread::index() == 0 {
        scale_inverse.store(0, 1.0 / scale);
    }
    block::sync();
    staging.store(&tile, &transposed);
}

fn grid<T: Magnitude, Q: Fp8>(args: &Fp8CastTransposeArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("amax", 1, args.amax.len())?;
    LaunchError::check_length("data", args.input.values.len(), args.data.len())?;
    LaunchError::check_length("transposed", args.input.values.len(), args.transposed.len())?;
    LaunchError::check_length("scale_inverse", 1, args.scale_inverse.len())?;
    Tile::<T>::check_vectors(args.input.columns, ("input.values", args.input.values.address()), ("data", args.data.address()))?;
    Tile::<T>::grid(&args.input)
}

/// Casts a matrix `[rows, columns]` of whole vectors a row as [`fp8_cast_delayed`](fn@super::fp8_cast_delayed) does, to `data`, and to `transposed`,
/// `[columns, rows]`.
#[kernel(threads = THREADS, grid = delayed_grid, shared = SharedDelayed, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_transpose_delayed<T: Magnitude, Q: Fp8>(
    input: Matrix<T>,
    scale: Global<f32>,
    data: GlobalMut<Q>,
    transposed: GlobalMut<Q>,
    scale_inverse: GlobalMut<f32>,
    amax: GlobalMut<f32>,
) {
    let tile = Tile::<T>::of_block(input.rows, input.columns);
    let lines = tile.load(&input.values);
    let shared = SharedDelayed::claim();
    cast_lines(&tile, &lines, scale.load(0), &data, &shared.staging);
    let running = maximum(&lines);
    // Its barrier is between the transpose's writes and reads too.
    let largest = block::max_u32(T::finish(running).to_bits(), shared.reduce);
    if thread::index() == 0 {
        atomic::max_non_negative(&amax, 0, f32::from_bits(largest));
        if tile.is_first() {
            scale_inverse.store(0, 1.0 / scale.load(0));
        }
    }
    shared.staging.store(&tile, &transposed);
}

fn delayed_grid<T: Magnitude, Q: Fp8>(args: &Fp8CastTransposeDelayedArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("scale", 1, args.scale.len())?;
    LaunchError::check_length("data", args.input.values.len(), args.data.len())?;
    LaunchError::check_length("transposed", args.input.values.len(), args.transposed.len())?;
    LaunchError::check_length("scale_inverse", 1, args.scale_inverse.len())?;
    LaunchError::check_length("amax", 1, args.amax.len())?;
    Tile::<T>::check_vectors(args.input.columns, ("input.values", args.input.values.address()), ("data", args.data.address()))?;
    Tile::<T>::grid(&args.input)
}

/// Stores the codes of the lane's part of a tile, and puts them into the transpose.
#[inline(always)]
pub(super) fn cast_lines<T: Magnitude, Q: Fp8>(tile: &Tile<T>, lines: &Lines<T>, scale: f32, data: &GlobalMut<Q>, staging: &Staging) {
    Tile::<T>::for_each_step(|step| {
        let codes: [_; LINES] = core::array::from_fn(|line| encode::<T, Q>(lines[step][line], scale));
        for (line, codes) in codes.iter().enumerate() {
            tile.store_codes(data, step, line, *codes);
        }
        staging.put(tile, step, codes);
    });
}

/// The lane's running maximum of its part of a tile.
#[inline(always)]
pub(super) fn maximum<T: Magnitude>(lines: &Lines<T>) -> u32 {
    let mut running = 0;
    Tile::<T>::for_each_step(|step| {
        let [a, b, c, d] = lines[step].map(of_vector);
        running = T::join(running, T::join(T::join(a, b), T::join(c, d)));
    });
    running
}
