//! MXFP8 of a [group](crate::group) of matrices back to wide numbers by one launch.
//!
//! The code of the single kernels. All members lie in one buffer of codes, one of scales and one of values: word 3 of a member's record
//! says where its codes and values start, 4 where its row scales, 5 where its column scales.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::dequantize_columns::{self, Place as Columns, dequantize_columns, load_scales};
use super::dequantize_rows::{dequantize_elements, dequantize_rows};
use super::ragged_columns::ColumnBlock;
use super::ragged_rows::Place;
use super::*;
use crate::group::{self, Grouped, Member, Members};

/// Blocks of the single kernels that a CUDA block does.
const PARTS: u32 = 2;
/// CUDA blocks a multiprocessor by columns: 2048 threads of 32 registers; with 6 a group is 3 % slower.
const COLUMNS_RESIDENT: u32 = 8;

/// Decodes rowwise members of whole blocks a row.
#[kernel(threads = THREADS, grid = rows_grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_rows_grouped<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, table: Members, output: GlobalMut<T>) {
    let member = Member::of_block(&table);
    let [data_start, scales_start, _] = member.starts;
    let (data, output) = (data.slice(data_start, member.elements()), output.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.elements() / BLOCK);
    group::for_each_part::<PARTS>(member.block, |part| dequantize_rows(&data, &output, part, |block| scales.load(block)));
}

/// Decodes rowwise members of any shape.
#[kernel(threads = THREADS, grid = ragged_rows_grid)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_ragged_rows_grouped<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, table: Members, output: GlobalMut<T>) {
    let member = Member::of_block(&table);
    let [data_start, scales_start, _] = member.starts;
    let (data, output) = (data.slice(data_start, member.elements()), output.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.rows * member.columns.div_ceil(BLOCK));
    ragged_rows::dequantize(&data, &scales, &output, &Place::at(member.place(Place::groups(member.columns)), member.columns));
}

/// Decodes columnwise members of whole vectors a row.
#[kernel(threads = THREADS, grid = columns_grid, min_blocks = COLUMNS_RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_columns_grouped<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, table: Members, output: GlobalMut<T>) {
    let member = Member::of_block(&table);
    let [data_start, _, scales_start] = member.starts;
    let (data, output) = (data.slice(data_start, member.elements()), output.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.rows.div_ceil(BLOCK) * member.columns);
    group::for_each_part::<PARTS>(member.block, |part| {
        let place = Columns::<T>::at(Member::place_of(part, Columns::<T>::groups(member.columns)), member.columns);
        dequantize_columns(&data, &output, &place, || load_scales::<T>(&scales, place.scale()));
    });
}

/// Decodes columnwise members of any shape.
#[kernel(threads = THREADS, grid = ragged_columns_grid)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_ragged_columns_grouped<Q: Fp8, T: Wide>(
    data: Global<Q>,
    scales: Global<ue8m0>,
    table: Members,
    output: GlobalMut<T>,
) {
    let member = Member::of_block(&table);
    let [data_start, _, scales_start] = member.starts;
    let (data, output) = (data.slice(data_start, member.elements()), output.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.rows.div_ceil(BLOCK) * member.columns);
    let place = member.place(ColumnBlock::groups(member.columns));
    ragged_columns::dequantize(&data, &scales, &output, &ColumnBlock::at(place, member.columns, data.len()));
}

macro_rules! grids {
    ($($grid:ident: $args:ident;)*) => { $(
        fn $grid<Q: Fp8, T: Wide>(args: &$args<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
            LaunchError::check_length("output", args.data.len(), args.output.len())?;
            args.table.grid()
        }
    )* };
}
grids! {
    rows_grid: Mxfp8DequantizeRowsGroupedArgs;
    ragged_rows_grid: Mxfp8DequantizeRaggedRowsGroupedArgs;
    columns_grid: Mxfp8DequantizeColumnsGroupedArgs;
    ragged_columns_grid: Mxfp8DequantizeRaggedColumnsGroupedArgs;
}

impl<Q: Fp8, T: Wide> Grouped for Mxfp8DequantizeRowsGrouped<Q, T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows * columns).div_ceil(u64::from(PARTS) * dequantize_elements::<T>())
    }
}

impl<Q: Fp8, T: Wide> Grouped for Mxfp8DequantizeRaggedRowsGrouped<Q, T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows * Place::groups(columns)
    }
}

impl<Q: Fp8, T: Wide> Grouped for Mxfp8DequantizeColumnsGrouped<Q, T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows.div_ceil(dequantize_columns::ROWS) * Columns::<T>::groups(columns)).div_ceil(PARTS.into())
    }
}

impl<Q: Fp8, T: Wide> Grouped for Mxfp8DequantizeRaggedColumnsGrouped<Q, T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(BLOCK) * ColumnBlock::groups(columns)
    }
}
