//! Cast to FP8 with one scale for each 128 neighbours of a row, of the matrix, of its transpose, or of both in one pass.
//!
//! Floor: 2 (bf16) + 1 (+ 1) bytes an element, and 4 (+ 4) for 128. A CUDA block takes a [tile](super::tile): 128 blocks of its rows
//! and 128 of its columns. Those of the rows are agreed on by shuffles; those of the columns meet in shared memory.
//!
//! | barrier | between |
//! |---|---|
//! | first | the maxima of the columns in each warp are written, and read |
//! | second | the transpose is written to shared memory, and read |

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::stage::Stage;
use super::tile::{LINES, Lines, SIDE, Tile, WARPS};
use super::*;
use crate::magnitude::{Magnitude, of_vector};

/// CUDA blocks a multiprocessor: the input stays in registers beside the scales of eight columns, and `f32` needs twice as many.
const fn resident<T>() -> u32 {
    if size_of::<T>() == 4 { 1 } else { 2 }
}

/// The transpose of the tile, and the running maxima of its columns in each warp.
#[derive(SharedStorage)]
struct Shared {
    stage: Stage,
    maxima: SharedArray<u32, { WARPS as usize * SIDE as usize }>,
}

/// Casts a matrix `[rows, columns]` of whole vectors a row to `data`, and its transpose to `transposed`, `[columns, rows]`; either may be
/// empty. The inverse of the scale of block `j` of row `i` is `scale_inverses[j, i]`, in rows of a multiple of 4, and so in
/// `transposed_scale_inverses` of the transpose. What fills up the rows is not written.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[allow(clippy::too_many_arguments)]
pub fn fp8_cast_row_blocks<T: Magnitude, Q: Fp8>(
    input: Global<T>,
    data: GlobalMut<Q>,
    scale_inverses: GlobalMut<f32>,
    transposed: GlobalMut<Q>,
    transposed_scale_inverses: GlobalMut<f32>,
    rows: u64,
    columns: u64,
    epsilon: f32,
    power_of_two: u32,
) {
    let tile = Tile::<T>::of_block(rows, columns);
    let lines = tile.load(&input);
    let rule = ScaleRule { epsilon, power_of_two: power_of_two != 0, largest: T::MAX.to_f32() };
    if !data.is_empty() {
        cast_rows(&tile, &lines, rule, &data, &scale_inverses);
    }
    if !transposed.is_empty() {
        let shared = Shared::claim();
        let scales = column_scales::<T, Q>(&tile, &lines, rule, shared.maxima);
        store_column_scales(&tile, scales, &transposed_scale_inverses);
        Tile::<T>::for_each_step(|step| {
            shared.stage.put(&tile, step, core::array::from_fn(|line| encode_by::<T, Q>(lines[step][line], scales)));
        });
        block::sync();
        shared.stage.store(&tile, &transposed);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Fp8CastRowBlocksArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, rows, columns) = (args.input.len(), args.rows, args.columns);
    if !args.data.is_empty() {
        LaunchError::check_length("data", elements, args.data.len())?;
        LaunchError::check_length("scale_inverses", columns.div_ceil(SIDE) * row_of_scales(rows), args.scale_inverses.len())?;
    }
    if !args.transposed.is_empty() {
        let scales = rows.div_ceil(SIDE) * row_of_scales(columns);
        LaunchError::check_length("transposed", elements, args.transposed.len())?;
        LaunchError::check_length("transposed_scale_inverses", scales, args.transposed_scale_inverses.len())?;
    }
    Tile::<T>::check_vectors(columns, ("input", args.input.address()), ("data", args.data.address()))?;
    Tile::<T>::grid("input", elements, rows, columns)
}

/// Casts the lane's rows, each with its neighbours' scale.
#[allow(clippy::needless_range_loop, reason = "an iterator leaves the tile in local memory")]
#[inline(always)]
fn cast_rows<T: Magnitude, Q: Fp8>(
    tile: &Tile<T>,
    lines: &Lines<T>,
    rule: ScaleRule,
    data: &GlobalMut<Q>,
    scale_inverses: &GlobalMut<f32>,
) {
    let first = tile.first_column / SIDE * row_of_scales(tile.rows);
    Tile::<T>::for_each_step(|step| {
        for line in 0..LINES {
            let mut running = of_vector(lines[step][line]);
            let mut flip = 1;
            while flip < Tile::<T>::VECTORS {
                running = T::join(running, warp::shuffle_xor(running, flip));
                flip *= 2;
            }
            let scale = rule.scale::<Q>(T::finish(running));
            tile.store_codes(data, step, line, encode::<T, Q>(lines[step][line], scale));
            if thread::lane().is_multiple_of(Tile::<T>::VECTORS) && tile.is_inside(step, line) {
                scale_inverses.store(first + tile.row(step, line), 1.0 / scale);
            }
        }
    });
}

/// The scales of the lane's columns in the tile, of which `T` has four or eight. Contains one block barrier.
#[allow(clippy::needless_range_loop, reason = "an iterator leaves the tile in local memory")]
#[inline(always)]
fn column_scales<T: Magnitude, Q: Fp8>(
    tile: &Tile<T>,
    lines: &Lines<T>,
    rule: ScaleRule,
    maxima: SharedArray<u32, { WARPS as usize * SIDE as usize }>,
) -> [f32; 8] {
    let mut running = [0; 4];
    Tile::<T>::for_each_step(|step| {
        for line in 0..LINES {
            let words = lines[step][line].words();
            running = core::array::from_fn(|i| T::raise(running[i], words[i]));
        }
    });
    // Lanes that hold the same columns are the others of a warp.
    if Tile::<T>::VECTORS < warp::LANES {
        running = running.map(|word| T::join(word, warp::shuffle_xor(word, Tile::<T>::VECTORS)));
    }
    let place = |warp: u32| warp * SIDE as u32 + tile.column() / Tile::<T>::LANES * 4;
    if thread::lane() < Tile::<T>::VECTORS {
        maxima.store_vector(place(thread::warp()), running);
    }
    block::sync();
    for warp in 0..WARPS {
        let words = maxima.load_vector(place(warp));
        running = core::array::from_fn(|i| T::join(running[i], words[i]));
    }
    core::array::from_fn(|i| {
        let column = i % Vector::<T>::LANES;
        rule.scale::<Q>(T::maximum_of(running[column / T::PER_WORD], column % T::PER_WORD))
    })
}

/// Stores the inverses of the tile's column scales, from the first lanes of the first warp.
#[inline(always)]
fn store_column_scales<T: Magnitude>(tile: &Tile<T>, scales: [f32; 8], scale_inverses: &GlobalMut<f32>) {
    let column = tile.first_column + u64::from(tile.column());
    if thread::index() < Tile::<T>::VECTORS && column < tile.columns && tile.first_row < tile.rows {
        let first = tile.first_row / SIDE * row_of_scales(tile.columns) + column;
        for (i, scale) in scales.iter().enumerate().take(Vector::<T>::LANES) {
            scale_inverses.store(first + i as u64, 1.0 / scale);
        }
    }
}
