//! Rowwise and columnwise cast to MXFP8 in one pass over the input.
//!
//! Floor: 2 (bf16) + 2 + 2/32 bytes an element. The [tile](super::column_tile) of the columnwise cast: its lanes hold whole
//! blocks of both directions. The input stays in registers; the scales of the columns are stored from
//! there, those of the rows, two bytes a row and warp, meet in shared memory first.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the row scales of all warps, before they are stored side by side |

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::cast_columns::edge_scales;
use super::column_tile::{ColumnTile, ROWS_A_LANE, raise, scales_of_columns, store_scales};
use super::row_scales::{RowScales, put_scale, scales_a_row};
use super::*;
use crate::codes::Codes;
use crate::matrix::{Matrix, MatrixArgument};

/// Where the row scales meet.
#[derive(SharedStorage)]
pub(super) struct Shared {
    row_scales: RowScales,
}

/// Casts a matrix `[rows, columns]` of whole vectors a row in both directions: the codes of both have its shape, `rows.scales` is
/// `[rows, ceil(columns / 32)]`, `columns.scales` `[ceil(rows / 32), columns]`.
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = 3)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_both<T: Magnitude, Q: Fp8>(input: Matrix<T>, rows: Codes<Q, ue8m0>, columns: Codes<Q, ue8m0>) {
    cast_both(&input.values, [&rows, &columns], &ColumnTile::of_lane(input.columns), input.columns);
}

/// What a CUDA block does, each warp with its tile.
#[inline(always)]
pub(super) fn cast_both<T: Magnitude, Q: Fp8>(
    input: &Global<T>,
    [by_rows, by_columns]: [&Codes<Q, ue8m0>; 2],
    tile: &ColumnTile<T>,
    columns: u64,
) {
    let staged = Shared::claim().row_scales;
    if tile.is_whole(input.len()) {
        let vectors = tile.load(input);
        // Both maxima of a row at once, while its magnitudes are there.
        let mut running = [0; 4];
        let of_rows: [_; ROWS_A_LANE] = core::array::from_fn(|step| {
            running = raise(running, vectors[step]);
            of_vector(vectors[step])
        });
        let of_columns = scales_of_columns::<T, Q>(running);
        if tile.row == 0 {
            store_scales::<T>(&by_columns.scales, tile.scale(), &of_columns);
        }
        let multipliers = of_columns.map(|scale| scale.multiplier);
        for (step, vector) in vectors.iter().enumerate() {
            let code = block_scale::<T, Q>(of_rows[step]);
            put_scale(staged, tile, step as u32, code);
            let element = tile.element(step);
            store_codes(&by_rows.data, element, *vector, [code.reciprocal(); 8]);
            store_codes(&by_columns.data, element, *vector, multipliers);
        }
    } else {
        let of_columns = edge_scales::<T, Q>(input, tile);
        if tile.row == 0 && tile.is_inside(input.len()) {
            store_scales::<T>(&by_columns.scales, tile.scale(), &of_columns);
        }
        let multipliers = of_columns.map(|scale| scale.multiplier);
        let mut step = 0;
        tile.for_each_step(input.len(), |element, inside| {
            let vector = if inside { input.load_vector(element) } else { Vector::from_words([0; 4]) };
            let code = block_scale::<T, Q>(of_vector(vector));
            put_scale(staged, tile, step, code);
            step += 1;
            if inside {
                store_codes(&by_rows.data, element, vector, [code.reciprocal(); 8]);
                store_codes(&by_columns.data, element, vector, multipliers);
            }
        });
    }
    block::sync();
    store_row_scales::<T>(&by_rows.scales, staged, tile, columns, input.len());
}

fn grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastBothArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = args.input;
    args.input.check()?;
    LaunchError::check_alignment("input.values", 16, values.address())?;
    LaunchError::check_multiple("input.columns", Vector::<T>::LANES as u64, columns)?;
    for (name, codes) in [("rows.data", &args.rows), ("columns.data", &args.columns)] {
        LaunchError::check_length(name, values.len(), codes.data.len())?;
        LaunchError::check_alignment(name, 8, codes.data.address())?;
    }
    LaunchError::check_length("rows.scales", rows * columns.div_ceil(BLOCK), args.rows.scales.len())?;
    LaunchError::check_length("columns.scales", rows.div_ceil(BLOCK) * columns, args.columns.scales.len())?;
    LaunchError::check_alignment("columns.scales", 8, args.columns.scales.address())?;
    if values.is_empty() {
        return Ok(Grid::x(0));
    }
    column_tile::grid_of_blocks::<T>(("input.rows", rows.div_ceil(BLOCK)), ("input.columns", columns))
}

/// Stores the staged scales, those of a row side by side.
#[inline(always)]
fn store_row_scales<T>(scales: &GlobalMut<ue8m0>, staged: RowScales, tile: &ColumnTile<T>, columns: u64, length: u64) {
    let blocks = columns.div_ceil(BLOCK);
    let first = tile.group * u64::from(scales_a_row::<T>());
    let mut slot = thread::index();
    while slot < BLOCK as u32 * scales_a_row::<T>() {
        let row = tile.row_block * BLOCK + u64::from(slot / scales_a_row::<T>());
        let block = first + u64::from(slot % scales_a_row::<T>());
        if row * columns < length && block < blocks {
            scales.store(row * blocks + block, staged.load(slot));
        }
        slot += THREADS;
    }
}
