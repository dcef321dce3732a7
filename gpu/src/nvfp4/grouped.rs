//! NVFP4 of a [group](crate::group) of matrices by one launch: cast by rows, by columns and in both directions, and back.
//!
//! The code of the single kernels. All members lie in one buffer of pairs of codes, one of scales and one of values; word 3 of a member's
//! record says where its values start, which is twice where its pairs do, 4 where its scales do, and its amax has the member's number.

use oxtile_tile::global::GlobalTable;
use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::cast_both::{self, cast_both};
use super::cast_columns::{self, cast_columns};
use super::cast_rows::{self, cast};
use super::cast_tile::{self, CastTile};
use super::rounding::Nearest;
use super::*;
use crate::codes::Codes;
use crate::group::{self, Grouped, Member, Members};
use crate::magnitude::Magnitude;
use crate::wide::Wide;

/// Blocks of elements that a thread of the rowwise cast does: looking for the member and making the table of multipliers take long.
const CAST_STEPS: u32 = 4;
/// Tiles that a CUDA block of the columnwise cast does, and of the cast in both directions.
const COLUMN_TILES: u32 = 2;
const BOTH_TILES: u32 = 2;
/// Blocks of the single inverse of the rowwise cast that a CUDA block does.
const DEQUANTIZE_PARTS: u32 = 4;

/// Casts members by rows, each at a multiple of 16 bytes.
#[kernel(threads = cast_rows::THREADS, grid = rows_grid, shared = cast_rows::Shared, min_blocks = if size_of::<T>() == 4 { 3 } else { 5 })]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_rows_grouped<T: Magnitude>(
    inputs: GlobalTable<T>,
    table: Members,
    amaxes: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
) {
    let member = Member::of_block(&table);
    let Codes { data, scales } = outputs(&member, Codes { data, scales });
    cast(&inputs.get(member.index), amaxes.load(member.index), &data, &scales, Nearest, CAST_STEPS, member.block);
}

/// Casts members by columns, each at a multiple of 16 bytes.
#[kernel(threads = cast_tile::THREADS, grid = columns_grid, shared = cast_columns::Shared, min_blocks = cast_tile::resident::<Nearest>())]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_columns_grouped<T: Magnitude>(
    inputs: GlobalTable<T>,
    table: Members,
    amaxes: Global<f32>,
    data: GlobalMut<e2m1x2>,
    scales: GlobalMut<e4m3>,
) {
    let member = Member::of_block(&table);
    let (input, amax, codes) = (inputs.get(member.index), amaxes.slice(member.index, 1), outputs(&member, Codes { data, scales }));
    for_each_tile::<T, COLUMN_TILES>(&member, cast_columns::Shared::claim().tile, |tile, before| {
        cast_columns::<T, Nearest, false>(&input, &amax, codes, Nearest, tile, before);
    });
}

/// Casts members in both directions, each at a multiple of 16 bytes.
#[kernel(threads = cast_tile::THREADS, grid = both_grid, shared = cast_both::Shared, min_blocks = cast_tile::resident::<Nearest>())]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_cast_both_grouped<T: Magnitude>(
    inputs: GlobalTable<T>,
    table: Members,
    amaxes: Global<f32>,
    rows: Codes<e2m1x2, e4m3>,
    columns: Codes<e2m1x2, e4m3>,
) {
    let member = Member::of_block(&table);
    let (input, amax) = (inputs.get(member.index), amaxes.slice(member.index, 1));
    let codes = [rows, columns].map(|codes| outputs(&member, codes));
    for_each_tile::<T, BOTH_TILES>(&member, cast_both::Shared::claim().tile, |tile, before| {
        cast_both::<T, Nearest, false>(&input, [&amax, &amax], codes, Nearest, tile, false, before);
    });
}

/// Decodes rowwise members.
#[kernel(threads = dequantize_rows::THREADS, grid = dequantize_rows_grid, min_blocks = 6)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_rows_grouped<T: Wide>(
    data: Global<e2m1x2>,
    scales: Global<e4m3>,
    amaxes: Global<f32>,
    table: Members,
    output: GlobalMut<T>,
) {
    let member = Member::of_block(&table);
    let [start, scales_start, _] = member.starts;
    let (data, output) = (data.slice(start / 2, member.elements() / 2), output.slice(start, member.elements()));
    let scales = scales.slice(scales_start, member.elements() / BLOCK);
    let amax = amaxes.load(member.index);
    group::for_each_part::<DEQUANTIZE_PARTS>(member.block, |part| {
        dequantize_rows::dequantize(&data, amax, &output, part, |block| scales.load(block));
    });
}

/// Decodes columnwise members.
#[kernel(threads = dequantize_columns::THREADS, grid = dequantize_columns_grid, min_blocks = 3)]
#[instances(T = [bf16, f16, f32])]
pub fn nvfp4_dequantize_columns_grouped<T: Wide>(
    data: Global<e2m1x2>,
    scales: Global<e4m3>,
    amaxes: Global<f32>,
    table: Members,
    output: GlobalMut<T>,
) {
    let member = Member::of_block(&table);
    let Member { rows, columns, starts: [start, scales_start, _], .. } = member;
    let (data, output) = (data.slice(start / 2, member.elements() / 2), output.slice(start, member.elements()));
    let (scales, amax) = (scales.slice(scales_start, member.elements() / BLOCK), amaxes.slice(member.index, 1));
    let [across, _] = dequantize_columns::tiles::<T>(rows, columns);
    let scale = |(column, row_block)| scales.load(column * (rows / BLOCK) + row_block);
    dequantize_columns::dequantize(&data, &amax, &output, [rows, columns], member.place(across), scale);
}

/// A member's part of the outputs.
#[inline(always)]
fn outputs(member: &Member, Codes { data, scales }: Codes<e2m1x2, e4m3>) -> Codes<e2m1x2, e4m3> {
    let [start, scales_start, _] = member.starts;
    Codes { data: data.slice(start / 2, member.elements() / 2), scales: scales.slice(scales_start, member.elements() / BLOCK) }
}

/// Calls `cast` for each of the `COUNT` tiles of a CUDA block that the member has, one after the other, and says whether there was one before.
#[inline(always)]
fn for_each_tile<T: Magnitude, const COUNT: u32>(member: &Member, words: cast_tile::TileWords, cast: impl Fn(&CastTile<T>, bool)) {
    let Member { rows, columns, .. } = *member;
    let [across, down] = CastTile::<T>::tiles(rows, columns);
    group::for_each_part::<COUNT>(member.block, |part| {
        if part < across * down {
            cast(&CastTile::at(words, Member::place_of(part, across), rows, columns), part > member.block * u64::from(COUNT));
        }
    });
}

/// CUDA blocks that do `count` tiles each.
fn blocks_of_tiles<T: Magnitude>(rows: u64, columns: u64, count: u32) -> u64 {
    CastTile::<T>::tiles(rows, columns).iter().product::<u64>().div_ceil(u64::from(count))
}

macro_rules! grids {
    ($($grid:ident: $args:ident<$t:ident: $bound:ident>;)*) => { $(
        fn $grid<$t: $bound>(args: &$args<'_, $t>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
            args.table.grid()
        }
    )* };
}
grids! {
    rows_grid: Nvfp4CastRowsGroupedArgs<T: Magnitude>;
    columns_grid: Nvfp4CastColumnsGroupedArgs<T: Magnitude>;
    both_grid: Nvfp4CastBothGroupedArgs<T: Magnitude>;
    dequantize_rows_grid: Nvfp4DequantizeRowsGroupedArgs<T: Wide>;
    dequantize_columns_grid: Nvfp4DequantizeColumnsGroupedArgs<T: Wide>;
}

impl<T: Magnitude> Grouped for Nvfp4CastRowsGrouped<T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows * columns).div_ceil(u64::from(cast_rows::THREADS * CAST_STEPS) * BLOCK)
    }
}

impl<T: Magnitude> Grouped for Nvfp4CastColumnsGrouped<T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        blocks_of_tiles::<T>(rows, columns, COLUMN_TILES)
    }
}

impl<T: Magnitude> Grouped for Nvfp4CastBothGrouped<T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        blocks_of_tiles::<T>(rows, columns, BOTH_TILES)
    }
}

impl<T: Wide> Grouped for Nvfp4DequantizeRowsGrouped<T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        (rows * columns).div_ceil(u64::from(DEQUANTIZE_PARTS) * dequantize_rows::ELEMENTS)
    }
}

impl<T: Wide> Grouped for Nvfp4DequantizeColumnsGrouped<T> {
    fn blocks(rows: u64, columns: u64) -> u64 {
        dequantize_columns::tiles::<T>(rows, columns).iter().product()
    }
}
