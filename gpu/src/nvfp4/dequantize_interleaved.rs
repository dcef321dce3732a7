//! NVFP4 whose scales are [interleaved](crate::interleave) back to wide numbers, without a pass that makes them compact.
//!
//! The code of the kernels for compact scales: each is loaded from where the interleave put it.

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::dequantize_columns;
use super::dequantize_rows::{self, ELEMENTS, RESIDENT};
use super::*;
use crate::interleave::{interleaved_len, offset};
use crate::wide::Wide;

/// `output[i] = data[i] * (scale * amax * fp32(1/2688))`, rounded to nearest even, rows of `columns` elements.
#[kernel(threads = dequantize_rows::THREADS, grid = rows_grid, min_blocks = RESIDENT)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_rows_interleaved<T: Wide>(
    data: Global<e2m1x2>,
    scales: Global<e4m3>,
    amax: Global<f32>,
    output: GlobalMut<T>,
    columns: u64,
) {
    let blocks = (columns / BLOCK) as u32;
    dequantize_rows::dequantize(&data, amax.load(0), &output, u64::from(block::index()[0]), |block| {
        let row = (block as u32).checked_div(blocks).unwrap_or(0);
        scales.load(offset(row.into(), (block as u32 - row * blocks).into(), blocks.into()))
    });
}

/// The same of columnwise codes, which are those of the transpose; `output` is `[rows, columns]`, both multiples of 16.
#[kernel(threads = dequantize_columns::THREADS, grid = columns_grid, min_blocks = 3)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_columns_interleaved<T: Wide>(
    data: Global<e2m1x2>,
    scales: Global<e4m3>,
    amax: Global<f32>,
    output: GlobalMut<T>,
    rows: u64,
    columns: u64,
) {
    let [x, y, _] = block::index();
    let scale = |(column, row_block)| scales.load(offset(column, row_block, rows / BLOCK));
    dequantize_columns::dequantize(&data, &amax, &output, [rows, columns], [x.into(), y.into()], scale);
}

fn rows_grid<T: Wide>(args: &Nvfp4DequantizeRowsInterleavedArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (elements, columns) = (args.output.len(), args.columns);
    LaunchError::check_multiple("columns", BLOCK, columns)?;
    LaunchError::check_multiple("output", columns, elements)?;
    LaunchError::check_limit("output", elements, u64::from(u32::MAX) * BLOCK)?;
    check(&args.output, &args.data, &args.amax)?;
    let rows = elements.checked_div(columns).unwrap_or(0);
    LaunchError::check_length("scales", interleaved_len(rows, columns / BLOCK), args.scales.len())?;
    Grid::cover("output", elements, ELEMENTS as u32)
}

fn columns_grid<T: Wide>(args: &Nvfp4DequantizeColumnsInterleavedArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (rows, columns) = (args.rows, args.columns);
    LaunchError::check_multiple("rows", BLOCK, rows)?;
    LaunchError::check_multiple("columns", BLOCK, columns)?;
    LaunchError::check_length("output", rows.saturating_mul(columns), args.output.len())?;
    check(&args.output, &args.data, &args.amax)?;
    LaunchError::check_length("scales", interleaved_len(columns, rows / BLOCK), args.scales.len())?;
    dequantize_columns::grid_of_tiles::<T>(rows, columns)
}

fn check<T: Wide>(output: &DeviceViewMut<'_, T>, data: &DeviceView<'_, e2m1x2>, amax: &DeviceView<'_, f32>) -> Result<(), LaunchError> {
    LaunchError::check_alignment("output", 16, output.address())?;
    LaunchError::check_length("data", output.len() / 2, data.len())?;
    LaunchError::check_alignment("data", 8, data.address())?;
    LaunchError::check_length("amax", 1, amax.len())
}
