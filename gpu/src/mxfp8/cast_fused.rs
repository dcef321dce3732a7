//! The cast to MXFP8 with what stands around it in a model: an activation or its derivative before, sums of columns and
//! the largest magnitude beside, scales interleaved or shared by both directions.
//!
//! Floor: the operands once, and 1 + 1/32 bytes an element and direction. The [tile](super::column_tile) of the columnwise
//! cast. A lane's 8 vectors of each result lie in shared memory that no other lane reads: registers for 16 warps a multiprocessor
//! become room for 24 and more. Operands are copied there, all at once, computed with and rounded to the input type in place, and cast.
//! From the rounding on scales, codes, sums and amax are those of the rounded values. What is not wanted, an empty view says;
//! such choices are the same for the whole grid. Rows and columns beyond the tensor are read as the last ones inside, which
//! changes no maximum, so all tiles are computed alike; what is computed of a whole tile is cast in both directions by one loop
//! without a branch.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the row scales of all warps, before they are stored side by side |
//! | in `block::max_u32` | the warps' amaxes, in memory of their own |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::column_tile::{ColumnTile, ROWS, ROWS_A_LANE, scales_of_columns, store_scales};
use super::computed::{Computed, Part};
use super::row_scales::{RowScales, scales_a_row, stage};
use super::*;
use crate::activation::*;
use crate::interleave::{TILE_OUTER, interleaved_len, offset};

/// Option: 32 by 32 elements share a scale, so that both directions have the same codes.
pub const SQUARE_BLOCKS: u32 = 1;
/// Option: scales are [interleaved](crate::interleave) in both directions, the padding 0.
pub const INTERLEAVED_SCALES: u32 = 2;
/// Option: operands are copied, all at once, where they are loaded otherwise while results of others are computed; the same results, sooner
/// where there are [many tiles](copied_where_many). The input itself is always copied.
pub const COPIED_OPERANDS: u32 = 4;

/// [`COPIED_OPERANDS`] where the results of `O`, side by side `[rows, columns]`, have tiles for more than four waves of CUDA blocks
/// on an H200, or nothing: with fewer, a CUDA block that waits has none beside it that computes.
pub const fn copied_where_many<O: Operation, T>(rows: u64, columns: u64) -> u32 {
    const MULTIPROCESSORS: u64 = 132;
    let tiles = rows.div_ceil(BLOCK).saturating_mul(ColumnTile::<T>::groups(columns / O::RESULTS as u64));
    if tiles > 4 * MULTIPROCESSORS * resident::<O>() as u64 { COPIED_OPERANDS } else { 0 }
}

/// CUDA blocks a multiprocessor: two results take more registers.
const fn resident<O: Operation>() -> u32 {
    if O::RESULTS == 1 { 4 } else { 2 }
}

#[derive(SharedStorage)]
struct Shared<O: Operation> {
    parts: O::Each<Part>,
    reduce: ReduceStorage,
}

/// Casts the results of `O`, side by side `[rows, columns]`, whole vectors a row; of two, whole blocks.
///
/// - `row_data`, `row_scales` and `column_data`, `column_scales`: as in the casts without an operation; a direction that is not
///   wanted has empty ones.
/// - `partial_sums`: `[ceil(rows / 32), columns]`, the sums of each column over 32 rows, or empty.
/// - `amax`: raised to the largest magnitude, NaN dropped, or empty. The host zeroes it first.
/// - `skip`: where its one element is 1, nothing is written; or empty.
/// - `options`: [`SQUARE_BLOCKS`], [`INTERLEAVED_SCALES`], [`COPIED_OPERANDS`].
#[kernel(threads = THREADS, grid = grid, shared = Shared<O>, min_blocks = resident::<O>())]
#[instances(O = [Identity], T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16], Q = [e4m3])]
#[expect(clippy::too_many_arguments, reason = "two directions and what stands around a cast")]
#[expect(clippy::needless_range_loop, reason = "the indices are constants once loops are unrolled")]
pub fn mxfp8_cast_fused<O: Operation, T: Magnitude + Wide, Q: Fp8>(
    input: Global<T>,
    gradient: Global<T>,
    row_data: GlobalMut<Q>,
    row_scales: GlobalMut<ue8m0>,
    column_data: GlobalMut<Q>,
    column_scales: GlobalMut<ue8m0>,
    partial_sums: GlobalMut<f32>,
    amax: GlobalMut<f32>,
    skip: Global<f32>,
    rows: u64,
    columns: u64,
    options: u32,
) {
    if !skip.is_empty() && skip.load(0) == 1.0 {
        return;
    }
    let shared = Shared::<O>::claim();
    let parts = shared.parts.as_ref();
    let interleaved = options & INTERLEAVED_SCALES != 0;
    let of_result = columns / O::RESULTS as u64;
    let place = ColumnTile::<T>::of_lane(of_result);
    let operands = Operands { input, gradient, columns: of_result };
    let tile = Tile { place: &place, first_row: place.row_block * BLOCK, rows, columns, of_result };
    let origin = operands.at::<O>(tile.first_row.min(rows - 1), place.column.min(of_result - Vector::<T>::LANES as u64));
    let pitches = [O::input_columns(columns), O::gradient_columns(columns)].map(|columns| columns as u32);
    let [squares, by_rows, by_columns] = [options & SQUARE_BLOCKS != 0, !row_data.is_empty(), !column_data.is_empty()];
    let last_row = tile.rows_inside().saturating_sub(1);
    let places = |step: usize| {
        // Few rows and few columns: products of 32 bits.
        let row = u64::from(tile.row(step).min(last_row));
        O::places(&operands, [0, 1].map(|i| origin[i] + row * u64::from(pitches[i])))
    };
    let Computed { running, row_codes } = if O::COMPUTES && options & COPIED_OPERANDS == 0 {
        Computed::of_loaded::<O, T, Q>(parts, places)
    } else {
        Computed::of_copied::<O, T, Q>(parts, places, by_rows)
    };

    let together = O::COMPUTES && by_rows && by_columns && warp::all(tile.is_whole());
    for result in 0..O::RESULTS {
        let (part, running) = (parts[result], running[result]);
        let tile = tile.of_result(result);
        // Nothing is larger than the maximum of its square, and everything at least 0.
        let of_square = if squares { square_maximum::<T>(running) } else { 0 };
        let of_square_eight_times = u64::from(scale_of::<Q>(T::finish(of_square)).to_bits()) * 0x0101_0101_0101_0101;
        let row_codes = if squares { of_square_eight_times } else { row_codes[result] };
        let row_code = |step: usize| ue8m0::from_bits((row_codes >> (8 * step)) as u8);
        let scales = scales_of_columns::<T, Q>(running.map(|word| T::join(word, of_square)));
        let multipliers = scales.map(|scale| scale.multiplier);
        if by_columns && place.row == 0 {
            tile.store_column_scales(&column_scales, &scales, interleaved);
        }
        let mut sums = [0.0; 8];
        if together {
            for step in 0..ROWS_A_LANE {
                stage(part.row_scales, &place, step as u32, row_code(step));
            }
            let cast = |step: usize| {
                let vector = part.load::<T>(step);
                store_codes(&row_data, tile.element(step), vector, [row_code(step).reciprocal(); 8]);
                store_codes(&column_data, tile.element(step), vector, multipliers);
                vector
            };
            if partial_sums.is_empty() {
                (0..ROWS_A_LANE).for_each(|step| _ = cast(step));
            } else {
                (0..ROWS_A_LANE).for_each(|step| add(&mut sums, cast(step)));
            }
        } else {
            if by_rows {
                for step in 0..ROWS_A_LANE {
                    let vector = part.load::<T>(step);
                    let code = if O::COMPUTES { row_code(step) } else { block_scale::<T, Q>(T::join(of_vector(vector), of_square)) };
                    stage(part.row_scales, &place, step as u32, code);
                    if tile.is_inside(step) {
                        store_codes(&row_data, tile.element(step), vector, [code.reciprocal(); 8]);
                    }
                }
            }
            for step in (0..ROWS_A_LANE).filter(|step| by_columns && tile.is_inside(*step)) {
                store_codes(&column_data, tile.element(step), part.load::<T>(step), multipliers);
            }
            for step in (0..ROWS_A_LANE).filter(|step| !partial_sums.is_empty() && tile.is_inside(*step)) {
                add(&mut sums, part.load::<T>(step));
            }
        }
        if !partial_sums.is_empty() {
            tile.store_sums(&partial_sums, sums);
        }
    }
    if !amax.is_empty() {
        let largest = running.into_iter().flatten().fold(0, T::join);
        let largest = block::max_u32(T::finish(largest).to_bits(), shared.reduce);
        if thread::index() == 0 {
            atomic::max_non_negative(&amax, 0, f32::from_bits(largest));
        }
    }
    if by_rows {
        block::sync();
        for result in 0..O::RESULTS {
            tile.of_result(result).store_row_scales(&row_scales, parts[result].row_scales, interleaved);
        }
    }
}

/// The maximum of the 32 by 32 elements that the lane's are part of, at every place of a word: agreed among the lanes of a block
/// of a row, and with those of the other rows.
#[inline(always)]
fn square_maximum<T: Magnitude>(running: [u32; 4]) -> u32 {
    let mut largest = T::spread(running.into_iter().fold(0, T::join));
    let mut flip = 1;
    while flip < warp::LANES {
        // Lane bits between a block of a row and the rows number other blocks.
        if flip < lanes_a_block::<T>() || flip >= warp::LANES / ROWS {
            largest = T::join(largest, warp::shuffle_xor(largest, flip));
        }
        flip *= 2;
    }
    largest
}

/// Adds a row of the lane's columns to their sums.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "as in the kernel")]
fn add<T: Float + Pod>(sums: &mut [f32; 8], row: Vector<T>) {
    for i in 0..Vector::<T>::LANES {
        sums[i] += row.lane(i).to_f32();
    }
}

/// A CUDA block's rows of all results, and a lane's place there; the grid may reach beyond.
struct Tile<'a, T> {
    place: &'a ColumnTile<T>,
    first_row: u64,
    rows: u64,
    /// Of all results.
    columns: u64,
    of_result: u64,
}

impl<'a, T: Magnitude> Tile<'a, T> {
    /// How many of the tile's rows there are.
    #[inline(always)]
    fn rows_inside(&self) -> u32 {
        self.rows.saturating_sub(self.first_row).min(BLOCK) as u32
    }

    /// Whether all rows and the lane's columns are inside.
    #[inline(always)]
    fn is_whole(&self) -> bool {
        self.rows_inside() == BLOCK as u32 && self.place.column < self.of_result
    }

    /// The lane's row of a step.
    #[inline(always)]
    fn row(&self, step: usize) -> u32 {
        self.place.row + step as u32 * ROWS
    }

    #[inline(always)]
    fn of_result(&self, result: usize) -> ResultTile<'a, T> {
        let first = result as u64 * self.of_result;
        let end = first + self.of_result;
        let column = first + self.place.column;
        ResultTile {
            place: self.place,
            first_row: self.first_row,
            rows: self.rows,
            rows_inside: if column < end { self.rows_inside() } else { 0 },
            columns: self.columns,
            first,
            end,
            column,
            element: (self.first_row + u64::from(self.place.row)) * self.columns + column,
        }
    }
}

/// The part of one result.
struct ResultTile<'a, T> {
    place: &'a ColumnTile<T>,
    first_row: u64,
    rows: u64,
    /// Rows of the lane's columns that there are.
    rows_inside: u32,
    columns: u64,
    /// The result's first column, and the first behind it.
    first: u64,
    end: u64,
    /// The lane's first column, and its first element.
    column: u64,
    element: u64,
}

impl<T: Magnitude> ResultTile<'_, T> {
    #[inline(always)]
    fn is_inside(&self, step: usize) -> bool {
        self.place.row + step as u32 * ROWS < self.rows_inside
    }

    #[inline(always)]
    fn element(&self, step: usize) -> u64 {
        self.element + step as u64 * u64::from(ROWS) * self.columns
    }

    /// The first column behind those whose scales the result writes: the last one pads.
    #[inline(always)]
    fn scales_end(&self, interleaved: bool) -> u64 {
        if interleaved && self.end == self.columns { self.end.next_multiple_of(TILE_OUTER) } else { self.end }
    }

    /// The scales of the lane's columns.
    #[inline(always)]
    fn store_column_scales(&self, scales: &GlobalMut<ue8m0>, columns: &[BlockScale; 8], interleaved: bool) {
        let row_blocks = self.rows.div_ceil(BLOCK);
        let is_inside = self.rows_inside != 0;
        if !interleaved {
            if is_inside {
                store_scales::<T>(scales, self.place.row_block * self.columns + self.column, columns);
            }
        } else if self.column < self.scales_end(interleaved) && self.place.row_block < row_blocks.next_multiple_of(TILE_OUTER / BLOCK) {
            // A vector's columns are of one run of 32: their scales lie 16 bytes apart.
            let first = offset(self.column, self.place.row_block, row_blocks);
            let code = |i: usize| if is_inside { columns[i].code } else { ue8m0::from_bits(0) };
            for i in 0..Vector::<T>::LANES {
                scales.store(first + 16 * i as u64, code(i));
            }
        }
    }

    /// The staged scales of the rows.
    #[inline(always)]
    fn store_row_scales(&self, scales: &GlobalMut<ue8m0>, staged: RowScales, interleaved: bool) {
        let blocks = self.columns.div_ceil(BLOCK);
        let first = self.first / BLOCK + u64::from(block::index()[0]) * u64::from(scales_a_row::<T>());
        let end = self.scales_end(interleaved).div_ceil(BLOCK);
        let mut slot = thread::index();
        while slot < BLOCK as u32 * scales_a_row::<T>() {
            let row = self.first_row + u64::from(slot / scales_a_row::<T>());
            let block = first + u64::from(slot % scales_a_row::<T>());
            let is_inside = row < self.rows && block < self.end.div_ceil(BLOCK);
            if interleaved && block < end && row < self.rows.next_multiple_of(TILE_OUTER) {
                let code = if is_inside { staged.load(slot) } else { ue8m0::from_bits(0) };
                scales.store(offset(row, block, blocks), code);
            } else if !interleaved && is_inside {
                scales.store(row * blocks + block, staged.load(slot));
            }
            slot += THREADS;
        }
    }

    /// The sums of the tile's columns, in an order of their own but always the same.
    ///
    /// Of the four lanes that hold a vector's columns each sums a quarter of them: it gives away the half that is not its own twice.
    #[inline(always)]
    fn store_sums(&self, sums: &GlobalMut<f32>, of_lane: [f32; 8]) {
        let [high, odd] = [8, 16].map(|flip| thread::lane() & flip != 0);
        let quarter = Vector::<T>::LANES / 4;
        let half: [f32; 4] = core::array::from_fn(|i| {
            let [first, second] = [of_lane[i % (2 * quarter)], of_lane[i % (2 * quarter) + 2 * quarter]];
            let [kept, given] = if high { [second, first] } else { [first, second] };
            kept + warp::shuffle_xor(given, 8)
        });
        let own: [f32; 2] = core::array::from_fn(|i| {
            let [first, second] = [half[i % quarter], half[i % quarter + quarter]];
            let [kept, given] = if odd { [second, first] } else { [first, second] };
            kept + warp::shuffle_xor(given, 16)
        });
        if self.rows_inside != 0 {
            let column = self.column + (u64::from(high) * 2 + u64::from(odd)) * quarter as u64;
            let first = self.place.row_block * self.columns + column;
            if quarter == 2 { sums.store_pair(first, own.map(f32::to_bits)) } else { sums.store(first, own[0]) }
        }
    }
}

fn grid<O: Operation, T: Magnitude + Wide, Q: Fp8>(args: &Mxfp8CastFusedArgs<'_, O, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (rows, columns, elements) = (args.rows, args.columns, args.rows.saturating_mul(args.columns));
    check_operands::<O, T>(&args.input, &args.gradient, ("input", elements), columns)?;
    if O::RESULTS > 1 {
        LaunchError::check_multiple("columns", BLOCK * O::RESULTS as u64, columns)?;
    }
    LaunchError::check_limit("columns", O::input_columns(columns), u32::MAX.into())?;
    let (row_blocks, blocks) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    let interleaved = args.options & INTERLEAVED_SCALES != 0;
    let scales = |outer, blocks| if interleaved { interleaved_len(outer, blocks) } else { outer * blocks };
    let directions = [
        (("row_data", &args.row_data), ("row_scales", &args.row_scales), scales(rows, blocks)),
        (("column_data", &args.column_data), ("column_scales", &args.column_scales), scales(columns, row_blocks)),
    ];
    for ((data_name, data), (scales_name, scales), count) in directions.iter().filter(|((_, data), ..)| !data.is_empty()) {
        LaunchError::check_length(data_name, elements, data.len())?;
        LaunchError::check_alignment(data_name, 8, data.address())?;
        LaunchError::check_length(scales_name, *count, scales.len())?;
        LaunchError::check_alignment(scales_name, 8, scales.address())?;
    }
    for (name, length, optional) in
        [("partial_sums", row_blocks * columns, args.partial_sums.len()), ("amax", 1, args.amax.len()), ("skip", 1, args.skip.len())]
    {
        if optional != 0 {
            LaunchError::check_length(name, length, optional)?;
        }
    }
    // Interleaved scales have padding beyond the last row block and column, which somebody writes.
    let (covered, padding) = match interleaved {
        true => (row_blocks.next_multiple_of(TILE_OUTER / BLOCK), columns.next_multiple_of(TILE_OUTER) - columns),
        false => (row_blocks, 0),
    };
    if elements == 0 { Ok(Grid::x(0)) } else { column_tile::grid_of_blocks::<T>(covered, columns / O::RESULTS as u64 + padding) }
}
