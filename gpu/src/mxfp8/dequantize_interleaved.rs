//! MXFP8 whose scales are [interleaved](crate::interleave) back to wide numbers, without a pass that makes them compact.
//!
//! The code of the kernels for compact scales: a lane loads each scale from where the interleave put it.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::dequantize_columns::{Place, dequantize_columns, grid_of, value};
use super::dequantize_rows::{dequantize_elements, dequantize_rows};
use super::*;
use crate::interleave::{interleaved_len, offset};

/// `output[i] = data[i] * scale`, rounded to nearest even, rows of `columns` elements, whole blocks.
#[kernel(threads = THREADS, grid = rows_grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_rows_interleaved<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>, columns: u64) {
    let blocks = (columns / BLOCK) as u32;
    dequantize_rows(&data, &output, u64::from(block::index()[0]), |block| {
        let row = (block as u32).checked_div(blocks).unwrap_or(0);
        scales.load(offset(row.into(), (block as u32 - row * blocks).into(), blocks.into()))
    });
}

/// The same of columnwise codes, rows of whole vectors of `output`.
#[kernel(threads = THREADS, grid = columns_grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_columns_interleaved<Q: Fp8, T: Wide>(
    data: Global<Q>,
    scales: Global<ue8m0>,
    output: GlobalMut<T>,
    rows: u64,
    columns: u64,
) {
    let (place, row_blocks) = (Place::<T>::of_lane(columns), rows.div_ceil(BLOCK));
    dequantize_columns(&data, &output, &place, || {
        // A vector's columns are of one run of 32: their scales lie 16 bytes apart.
        let first = offset(place.column, place.row_block(), row_blocks);
        let code = |i: usize| scales.load(first + 16 * (i % Vector::<T>::LANES) as u64).to_bits();
        core::array::from_fn(|i| value(code(i).into()))
    });
}

fn rows_grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeRowsInterleavedArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, columns) = (args.data.len(), args.columns);
    check(elements, columns, args.data.address(), (args.output.len(), args.output.address()))?;
    LaunchError::check_multiple("columns", BLOCK, columns)?;
    LaunchError::check_limit("data", elements, u64::from(u32::MAX) * BLOCK)?;
    let rows = elements.checked_div(columns).unwrap_or(0);
    LaunchError::check_length("scales", interleaved_len(rows, columns / BLOCK), args.scales.len())?;
    Grid::cover("data", elements, dequantize_elements::<T>() as u32)
}

fn columns_grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeColumnsInterleavedArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, rows, columns) = (args.data.len(), args.rows, args.columns);
    LaunchError::check_length("data", rows.saturating_mul(columns), elements)?;
    check(elements, columns, args.data.address(), (args.output.len(), args.output.address()))?;
    LaunchError::check_length("scales", interleaved_len(columns, rows.div_ceil(BLOCK)), args.scales.len())?;
    let compact = rows.div_ceil(BLOCK) * columns;
    grid_of::<T>(elements, columns, compact)
}

fn check(elements: u64, columns: u64, data: u64, output: (u64, u64)) -> Result<(), LaunchError> {
    LaunchError::check_multiple("data", columns, elements)?;
    LaunchError::check_alignment("data", 8, data)?;
    LaunchError::check_length("output", elements, output.0)?;
    LaunchError::check_alignment("output", 16, output.1)
}
