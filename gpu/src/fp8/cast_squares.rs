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
use super::staging::Staging;
use super::tile::{SIDE, Tile, WARPS};
use super::*;
use crate::codes::Codes;
use crate::magnitude::Magnitude;
use crate::matrix::{Matrix, MatrixArgument};

/// The transpose of the square, and the largest magnitude in each warp.
#[derive(SharedStorage)]
struct Shared {
    staging: Staging,
    maxima: SharedArray<u32, { WARPS as usize }>,
}

/// Casts a matrix `[rows, columns]` of whole vectors a row to `codes` and, where it is there, to `transposed`, `[columns, rows]`. The
/// inverse of the scale of square `i, j` is `codes.scales[i, j]`, in rows of a multiple of 4, and `transposed.scales[j, i]`,
/// in such rows too. What fills up the rows is not written.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn fp8_cast_squares<T: Magnitude, Q: Fp8>(
    input: Matrix<T>,
    codes: Codes<Q, f32>,
    transposed: Option<Codes<Q, f32>>,
    options: ScaleOptions,
) {
    let Matrix { values: input, rows, columns } = input;
    let tile = Tile::<T>::of_block(rows, columns);
    let lines = tile.load(&input);
    let shared = Shared::claim();
    let rule = ScaleRule::new(options, T::MAX.to_f32());
    let of_warp = warp::max_u32(T::finish(maximum(&lines)).to_bits());
    if thread::lane() == 0 {
        shared.maxima.store(thread::warp(), of_warp);
    }
    block::sync();
    let amax = f32::from_bits((0..WARPS).fold(0, |largest, warp| largest.max(shared.maxima.load(warp))));
    let scale = rule.scale::<Q>(amax);
    cast_lines(&tile, &lines, scale, &codes.data, &shared.staging);
    let [row, column] = [tile.first_row / SIDE, tile.first_column / SIDE];
    if thread::index() == 0 && tile.has_elements() {
        codes.scales.store(row * row_of_scales(columns.div_ceil(SIDE)) + column, 1.0 / scale);
        if let Some(transposed) = &transposed {
            transposed.scales.store(column * row_of_scales(rows.div_ceil(SIDE)) + row, 1.0 / scale);
        }
    }
    if let Some(transposed) = &transposed {
        block::sync();
        shared.staging.store(&tile, &transposed.data);
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Fp8CastSquaresArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    let (elements, [down, across]) = (values.len(), [rows, columns].map(|side| side.div_ceil(SIDE)));
    LaunchError::check_length("codes.data", elements, args.codes.data.len())?;
    LaunchError::check_length("codes.scales", down * row_of_scales(across), args.codes.scales.len())?;
    if let Some(transposed) = &args.transposed {
        LaunchError::check_length("transposed.data", elements, transposed.data.len())?;
        LaunchError::check_length("transposed.scales", across * row_of_scales(down), transposed.scales.len())?;
    }
    Tile::<T>::check_vectors(columns, ("input.values", values.address()), ("codes.data", args.codes.data.address()))?;
    Tile::<T>::grid(&args.input)
}
