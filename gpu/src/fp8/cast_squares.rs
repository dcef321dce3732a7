//! Cast to FP8 with one scale for each 128x128 square, as it is and transposed, in one pass over the input.
//!
//! Floor: 2 (bf16) + 1 + 1 bytes an element, and 8 a square. A CUDA block takes one square, its [tile](super::tile): the amax of
//! what it holds in registers, then the cast of [`fp8_cast_transpose`](fn@super::fp8_cast_transpose).
//!
//! | barrier | between |
//! |---|---|
//! | first | the warps' maxima are written, and read |
//! | second | the transpose is written to shared memory, and read |

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::cast_transpose::{cast_lines, maximum, resident};
use super::stage::Stage;
use super::tile::{SIDE, Tile, WARPS};
use super::*;
use crate::magnitude::Magnitude;

/// The transpose of the square, and the largest magnitude in each warp.
#[derive(SharedStorage)]
struct Shared {
    stage: Stage,
    maxima: SharedArray<u32, { WARPS as usize }>,
}

/// Casts a matrix `[rows, columns]` of whole vectors a row to `data` and, where that is not empty, to `transposed`, `[columns, rows]`. The
/// inverse of the scale of square `i, j` is `scale_inverses[i, j]`, in rows of a multiple of 4, and `transposed_scale_inverses[j, i]`,
/// in such rows too. What fills up the rows is not written.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[allow(clippy::too_many_arguments)]
pub fn fp8_cast_squares<T: Magnitude, Q: Fp8>(
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
    let shared = Shared::claim();
    let of_warp = warp::max_u32(T::finish(maximum(&lines)).to_bits());
    if thread::lane() == 0 {
        shared.maxima.store(thread::warp(), of_warp);
    }
    block::sync();
    let amax = f32::from_bits((0..WARPS).fold(0, |largest, warp| largest.max(shared.maxima.load(warp))));
    let scale = ScaleRule { epsilon, power_of_two: power_of_two != 0, largest: T::MAX.to_f32() }.scale::<Q>(amax);
    cast_lines(&tile, &lines, scale, &data, &shared.stage);
    let [row, column] = [tile.first_row / SIDE, tile.first_column / SIDE];
    if thread::index() == 0 && tile.has_elements() {
        scale_inverses.store(row * row_of_scales(columns.div_ceil(SIDE)) + column, 1.0 / scale);
        if !transposed.is_empty() {
            transposed_scale_inverses.store(column * row_of_scales(rows.div_ceil(SIDE)) + row, 1.0 / scale);
        }
    }
    if !transposed.is_empty() {
        block::sync();
        shared.stage.store(&tile, &transposed);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Fp8CastSquaresArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, [down, across]) = (args.input.len(), [args.rows, args.columns].map(|side| side.div_ceil(SIDE)));
    LaunchError::check_length("data", elements, args.data.len())?;
    LaunchError::check_length("scale_inverses", down * row_of_scales(across), args.scale_inverses.len())?;
    if !args.transposed.is_empty() {
        LaunchError::check_length("transposed", elements, args.transposed.len())?;
        LaunchError::check_length("transposed_scale_inverses", across * row_of_scales(down), args.transposed_scale_inverses.len())?;
    }
    Tile::<T>::check_vectors(args.columns, ("input", args.input.address()), ("data", args.data.address()))?;
    Tile::<T>::grid("input", elements, args.rows, args.columns)
}
