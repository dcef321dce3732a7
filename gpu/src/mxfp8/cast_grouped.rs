//! The casts to MXFP8 of a [group](crate::group) of matrices by one launch.
//!
//! Floors as those of the single casts, whose code this is. The codes of all members lie in one buffer, their scales in another, those
//! of columns in a third: word 3 of a member's record says where its codes start, 4 where its row scales, 5 where its column scales.

use oxtile_tile::global::GlobalTable;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::cast_both::{self, cast_both};
use super::cast_columns::cast_columns;
use super::cast_rows::{cast_elements, cast_rows};
use super::column_tile::ColumnTile;
use super::ragged_columns::ColumnBlock;
use super::ragged_rows::Place;
use super::*;
use crate::codes::Codes;
use crate::group::{Grouped, Member, Members};

/// CUDA blocks a multiprocessor. Addresses that a single cast finds among its parameters are in registers here: one block fewer than there.
const ROWS_RESIDENT: u32 = RESIDENT - 1;
/// Blocks of the single cast that a CUDA block does: looking for the member costs 4 % of one on an H200.
const ROWS_PARTS: u64 = 2;

/// The same of the cast in both directions; `f16` needs more registers than the three blocks of the others have.
const fn both_resident<T: Element>() -> u32 {
    if matches!(T::NAME.as_bytes(), b"f16") { 2 } else { 3 }
}

/// Casts members of whole blocks a row, each at a multiple of 16 bytes, by rows.
#[kernel(threads = THREADS, grid = rows_grid, min_blocks = ROWS_RESIDENT)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_rows_grouped<T: Magnitude, Q: Fp8>(inputs: GlobalTable<T>, table: Members, data: GlobalMut<Q>, scales: GlobalMut<ue8m0>) {
    let member = Member::of_block(&table);
    let [data_start, scales_start, _] = member.starts;
    let (input, data) = (inputs.get(member.index), data.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.elements() / BLOCK);
    for part in 0..ROWS_PARTS {
        cast_rows(&input, &data, &scales, member.block * ROWS_PARTS + part);
    }
}

/// Casts members of any shape at any address by rows.
#[kernel(threads = THREADS, grid = ragged_rows_grid)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_ragged_rows_grouped<T: Magnitude, Q: Fp8>(
    inputs: GlobalTable<T>,
    table: Members,
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
) {
    let member = Member::of_block(&table);
    let [data_start, scales_start, _] = member.starts;
    let (input, data) = (inputs.get(member.index), data.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.rows * member.columns.div_ceil(BLOCK));
    ragged_rows::cast(&input, &data, &scales, &Place::at(member.place(Place::groups(member.columns)), member.columns));
}

/// Casts members of whole vectors a row, each at a multiple of 16 bytes, by columns.
#[kernel(threads = THREADS, grid = columns_grid, min_blocks = 4)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_columns_grouped<T: Magnitude, Q: Fp8>(
    inputs: GlobalTable<T>,
    table: Members,
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
) {
    let member = Member::of_block(&table);
    let [data_start, _, scales_start] = member.starts;
    let (input, data) = (inputs.get(member.index), data.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.rows.div_ceil(BLOCK) * member.columns);
    cast_columns(&input, &data, &scales, &ColumnTile::at(member.place(ColumnTile::<T>::groups(member.columns)), member.columns));
}

/// Casts members of any shape at any address by columns.
#[kernel(threads = THREADS, grid = ragged_columns_grid)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_ragged_columns_grouped<T: Magnitude, Q: Fp8>(
    inputs: GlobalTable<T>,
    table: Members,
    data: GlobalMut<Q>,
    scales: GlobalMut<ue8m0>,
) {
    let member = Member::of_block(&table);
    let [data_start, _, scales_start] = member.starts;
    let (input, data) = (inputs.get(member.index), data.slice(data_start, member.elements()));
    let scales = scales.slice(scales_start, member.rows.div_ceil(BLOCK) * member.columns);
    let place = member.place(ColumnBlock::groups(member.columns));
    ragged_columns::cast(&input, &data, &scales, &ColumnBlock::at(place, member.columns, input.len()));
}

/// Casts members of whole vectors a row, each at a multiple of 16 bytes, in both directions.
#[kernel(threads = THREADS, grid = both_grid, shared = cast_both::Shared, min_blocks = both_resident::<T>())]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_both_grouped<T: Magnitude, Q: Fp8>(
    inputs: GlobalTable<T>,
    table: Members,
    rows: Codes<Q, ue8m0>,
    columns: Codes<Q, ue8m0>,
) {
    let member = Member::of_block(&table);
    let [data_start, row_start, column_start] = member.starts;
    let rows = Codes {
        data: rows.data.slice(data_start, member.elements()),
        scales: rows.scales.slice(row_start, member.rows * member.columns.div_ceil(BLOCK)),
    };
    let columns = Codes {
        data: columns.data.slice(data_start, member.elements()),
        scales: columns.scales.slice(column_start, member.rows.div_ceil(BLOCK) * member.columns),
    };
    let tile = ColumnTile::at(member.place(ColumnTile::<T>::groups(member.columns)), member.columns);
    cast_both(&inputs.get(member.index), [&rows, &columns], &tile, member.columns);
}

macro_rules! grids {
    ($($grid:ident: $args:ident;)*) => { $(
        fn $grid<T: Magnitude, Q: Fp8>(args: &$args<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
            args.table.grid()
        }
    )* };
}
grids! {
    rows_grid: Mxfp8CastRowsGroupedArgs;
    ragged_rows_grid: Mxfp8CastRaggedRowsGroupedArgs;
    columns_grid: Mxfp8CastColumnsGroupedArgs;
    ragged_columns_grid: Mxfp8CastRaggedColumnsGroupedArgs;
    both_grid: Mxfp8CastBothGroupedArgs;
}

impl<T: Magnitude, Q: Fp8> Grouped for Mxfp8CastRowsGrouped<T, Q> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows * columns).div_ceil(ROWS_PARTS * cast_elements::<T>())
    }
}

impl<T: Magnitude, Q: Fp8> Grouped for Mxfp8CastRaggedRowsGrouped<T, Q> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows * Place::groups(columns)
    }
}

impl<T: Magnitude, Q: Fp8> Grouped for Mxfp8CastColumnsGrouped<T, Q> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(BLOCK) * ColumnTile::<T>::groups(columns)
    }
}

impl<T: Magnitude, Q: Fp8> Grouped for Mxfp8CastRaggedColumnsGrouped<T, Q> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(BLOCK) * ColumnBlock::groups(columns)
    }
}

impl<T: Magnitude, Q: Fp8> Grouped for Mxfp8CastBothGrouped<T, Q> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(BLOCK) * ColumnTile::<T>::groups(columns)
    }
}
