//! Cast to FP8 with one scale for each 128 neighbours of a row, of the transpose of a matrix, and of the matrix in the same pass.
//!
//! Floor: 2 (bf16) + 1 (+ 1) bytes an element, and 4 (+ 4) for 128. A CUDA block takes a [tile](super::tile): 128 blocks of its rows
//! and 128 of its columns. Lanes agree on the amaxes of rows by shuffles; those of columns meet in shared memory. Each block's scale is
//! computed by one lane, and handed to the lanes that hold its elements. The matrix alone is cast by
//! [`fp8_cast_row_blocks_alone`](fn@super::fp8_cast_row_blocks_alone).
//!
//! | barrier | between |
//! |---|---|
//! | first | the maxima of the columns in each warp are written, and read |
//! | second | the scales of the columns are written, and read |
//! | third | the transpose is written to shared memory, and read |

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::staging::Staging;
use super::tile::{LINES, Lines, SIDE, Tile, WARPS};
use super::*;
use crate::codes::Codes;
use crate::magnitude::Magnitude;
use crate::matrix::{Matrix, MatrixArgument};

/// CUDA blocks a multiprocessor: the input stays in registers beside the scales of eight columns, and `f32` needs twice as many.
const fn resident<T>() -> u32 {
    if size_of::<T>() == 4 { 1 } else { 4 }
}

/// Columns of a tile.
const COLUMNS: u32 = SIDE as u32;

/// The transpose of the tile, the running maxima of its columns in each warp, and their scales.
#[derive(SharedStorage)]
struct Shared {
    staging: Staging,
    maxima: Maxima,
    scales: Scales,
}

type Maxima = SharedArray<u32, { WARPS as usize * COLUMNS as usize }>;
/// Bits of `f32`, one a column.
type Scales = SharedArray<u32, { COLUMNS as usize }>;

/// Casts a matrix `[rows, columns]` of whole vectors a row to `codes`, and its transpose to `transposed`, `[columns, rows]`; either may be
/// left out. The inverse of the scale of block `j` of row `i` is `codes.scales[j, i]`, in rows of a multiple of 4, and so in
/// `transposed.scales` of the transpose. What fills up the rows is not written.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_row_blocks<T: Magnitude, Q: Fp8>(
    input: Matrix<T>,
    codes: Option<Codes<Q, f32>>,
    transposed: Option<Codes<Q, f32>>,
    options: ScaleOptions,
) {
    let tile = Tile::<T>::of_block(input.rows, input.columns);
    let lines = tile.load(&input.values);
    let rule = ScaleRule::new(options, T::MAX.to_f32());
    let shared = Shared::claim();
    if let Some(transposed) = &transposed {
        find_maxima(&tile, &lines, shared.maxima);
        block::sync();
        make_column_scale::<T, Q>(&tile, rule, shared.maxima, shared.scales, &transposed.scales);
    }
    if let Some(codes) = &codes {
        cast_rows(&tile, &lines, rule, codes);
    }
    // A separate branch: otherwise the values for both casts are converted once, kept, and do not fit the registers.
    if let Some(transposed) = &transposed {
        block::sync();
        let scales = column_scales(&tile, shared.scales);
        Tile::<T>::for_each_step(|step| {
            shared.staging.put(&tile, step, core::array::from_fn(|line| encode_by::<T, Q>(lines[step][line], scales)));
        });
        block::sync();
        shared.staging.store(&tile, &transposed.data);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Fp8CastRowBlocksArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    if let Some(codes) = &args.codes {
        LaunchError::check_length("codes.data", values.len(), codes.data.len())?;
        LaunchError::check_length("codes.scales", columns.div_ceil(SIDE) * row_of_scales(rows), codes.scales.len())?;
    }
    if let Some(transposed) = &args.transposed {
        LaunchError::check_length("transposed.data", values.len(), transposed.data.len())?;
        LaunchError::check_length("transposed.scales", rows.div_ceil(SIDE) * row_of_scales(columns), transposed.scales.len())?;
    }
    let address = args.codes.as_ref().map_or(0, |codes| codes.data.address());
    Tile::<T>::check_vectors(columns, ("input.values", values.address()), ("codes.data", address))?;
    Tile::<T>::grid(&args.input)
}

/// Casts the lane's rows, each with its neighbours' scale. Lane `i` of those that hold a row divides for the `i`th of their rows.
#[allow(clippy::needless_range_loop, reason = "an iterator leaves the tile in local memory")]
#[inline(always)]
fn cast_rows<T: Magnitude, Q: Fp8>(tile: &Tile<T>, lines: &Lines<T>, rule: ScaleRule, codes: &Codes<Q, f32>) {
    let lane = thread::lane() % Tile::<T>::VECTORS;
    let number = |step: usize, line: usize| (step * LINES + line) as u32;
    let mut own = 0;
    Tile::<T>::for_each_step(|step| {
        for line in 0..LINES {
            let running = maximum_of_block::<T>(lines[step][line], Tile::<T>::VECTORS);
            own = if lane == number(step, line) { running } else { own };
        }
    });
    let scale = rule.scale::<Q>(T::finish(own));
    let (step, line) = (lane as usize / LINES, lane as usize % LINES);
    // Whether the row is in the matrix, not the lane's part of it.
    if step < Tile::<T>::STEPS && tile.has(tile.group(step) * LINES as u32 + line as u32, 0) {
        codes.scales.store(tile.first_column / SIDE * row_of_scales(tile.rows) + tile.row(step, line), 1.0 / scale);
    }
    Tile::<T>::for_each_step(|step| {
        for line in 0..LINES {
            let of_row = warp::shuffle(scale, thread::lane() - lane + number(step, line));
            tile.store_codes(&codes.data, step, line, encode::<T, Q>(lines[step][line], of_row));
        }
    });
}

/// Writes the running maxima of the warp's part of each column to shared memory, where those of all warps meet.
#[allow(clippy::needless_range_loop, reason = "an iterator leaves the tile in local memory")]
#[inline(always)]
fn find_maxima<T: Magnitude>(tile: &Tile<T>, lines: &Lines<T>, maxima: Maxima) {
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
    if thread::lane() < Tile::<T>::VECTORS {
        maxima.store_vector(thread::warp() * COLUMNS + tile.column() / T::PER_WORD as u32, Vector::from_words(running));
    }
}

/// Makes the scale of the column whose number is the thread's, and stores its inverse. Threads beyond the columns make none.
#[inline(always)]
fn make_column_scale<T: Magnitude, Q: Fp8>(
    tile: &Tile<T>,
    rule: ScaleRule,
    maxima: Maxima,
    scales: Scales,
    scale_inverses: &GlobalMut<f32>,
) {
    let column = thread::index();
    if column < COLUMNS {
        let (word, place) = (column / T::PER_WORD as u32, column as usize % T::PER_WORD);
        let running = (0..WARPS).fold(0, |running, warp| T::join(running, maxima.load(warp * COLUMNS + word)));
        let scale = rule.scale::<Q>(T::maximum_of(running, place));
        scales.store(column, scale.to_bits());
        if tile.has(0, column) {
            let first = tile.first_row / SIDE * row_of_scales(tile.columns) + tile.first_column;
            scale_inverses.store(first + u64::from(column), 1.0 / scale);
        }
    }
}

/// The scales of the lane's columns, of which `T` has four or eight.
#[inline(always)]
fn column_scales<T: Magnitude>(tile: &Tile<T>, scales: Scales) -> [f32; 8] {
    let four = |from: u32| scales.load_vector(tile.column() + from).words();
    let (low, high) = (four(0), if Vector::<T>::LANES == 8 { four(4) } else { [0; 4] });
    core::array::from_fn(|i| f32::from_bits(if i < 4 { low[i] } else { high[i - 4] }))
}
