//! The cast to MXFP8 with what stands around it in a model: an activation or its derivative before, sums of columns and
//! the largest magnitude beside, scales interleaved or shared by both directions.
//!
//! Floor: the operands once, and 1 + 1/32 bytes an element and direction. The [tile](super::column_tile) of the columnwise
//! cast. A lane computes its 8 vectors of each result from [`Operation::values`], rounds them to the input type, and keeps them in
//! shared memory that no other lane reads: registers for 16 warps a multiprocessor become room for 24 and more. From there on
//! scales, codes, sums and amax are those of the rounded values. What is not wanted, an empty view says; such choices are the same
//! for the whole grid. Rows and columns beyond the tensor are loaded as the last ones inside, which changes no maximum, so
//! all tiles take one path.
//!
//! | barrier | waits for |
//! |---|---|
//! | `block::sync` | the row scales of all warps, before they are stored side by side |
//! | in `block::max_u32` | the warps' amaxes, in memory of their own |

use oxtile_tile::block::ReduceStorage;
use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::column_tile::{ColumnTile, ROWS, ROWS_A_LANE, raise, scales_of_columns, store_scales};
use super::row_scales::{RowScales, scales_a_row, stage};
use super::*;
use crate::activation::*;
use crate::interleave::{TILE_OUTER, interleaved_len, offset};

/// Option: 32 by 32 elements share a scale, so that both directions have the same codes.
pub const SQUARE_BLOCKS: u32 = 1;
/// Option: scales are [interleaved](crate::interleave) in both directions, the padding 0.
pub const INTERLEAVED_SCALES: u32 = 2;

/// CUDA blocks a multiprocessor: two results take more registers.
const fn resident<O: Operation>() -> u32 {
    if O::RESULTS == 1 { 4 } else { 2 }
}

/// What a result needs of shared memory.
#[derive(SharedStorage, Clone, Copy)]
struct Part {
    /// The vectors of each lane, step by step.
    vectors: SharedArray<u32, { ROWS_A_LANE * THREADS as usize * 4 }>,
    row_scales: RowScales,
}

impl Part {
    #[inline(always)]
    fn store<T: Pod>(self, step: usize, vector: Vector<T>) {
        self.vectors.store_vector((step as u32 * THREADS + thread::index()) * 4, vector.words());
    }

    #[inline(always)]
    fn load<T: Pod>(self, step: usize) -> Vector<T> {
        Vector::from_words(self.vectors.load_vector((step as u32 * THREADS + thread::index()) * 4))
    }
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
/// - `options`: [`SQUARE_BLOCKS`], [`INTERLEAVED_SCALES`].
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
    let last_row = tile.rows_inside().saturating_sub(1);
    let mut running = [[0; 4]; 2];
    for step in 0..ROWS_A_LANE {
        // Few rows and few columns: products of 32 bits.
        let row = tile.row(step).min(last_row);
        let values = O::values(&operands, [0, 1].map(|i| origin[i] + u64::from(row) * u64::from(pitches[i])));
        for result in 0..O::RESULTS {
            let vector = vector_of::<T>(values[result]);
            running[result] = raise(running[result], vector);
            parts[result].store(step, vector);
        }
    }

    for result in 0..O::RESULTS {
        let (part, running) = (parts[result], running[result]);
        let tile = tile.of_result(result);
        // Nothing is larger than the maximum of its square, and everything at least 0.
        let of_square = if options & SQUARE_BLOCKS != 0 { square_maximum::<T>(running) } else { 0 };
        if !row_data.is_empty() {
            for step in 0..ROWS_A_LANE {
                let vector = part.load::<T>(step);
                let code = block_scale::<T, Q>(T::join(of_vector(vector), of_square));
                stage(part.row_scales, &place, step as u32, code);
                if tile.is_inside(step) {
                    store_codes(&row_data, tile.element(step), vector, [code.reciprocal(); 8]);
                }
            }
        }
        if !column_data.is_empty() {
            let scales = scales_of_columns::<T, Q>(running.map(|word| T::join(word, of_square)));
            if place.row == 0 {
                tile.store_column_scales(&column_scales, &scales, interleaved);
            }
            let multipliers = scales.map(|scale| scale.multiplier);
            for step in 0..ROWS_A_LANE {
                if tile.is_inside(step) {
                    store_codes(&column_data, tile.element(step), part.load::<T>(step), multipliers);
                }
            }
        }
        if !partial_sums.is_empty() {
            tile.store_sums(&partial_sums, part);
        }
    }
    if !amax.is_empty() {
        let largest = running.into_iter().flatten().fold(0, T::join);
        let largest = block::max_u32(T::finish(largest).to_bits(), shared.reduce);
        if thread::index() == 0 {
            atomic::max_non_negative(&amax, 0, f32::from_bits(largest));
        }
    }
    if !row_data.is_empty() {
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
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "as in the kernel")]
    fn store_sums(&self, sums: &GlobalMut<f32>, part: Part) {
        let mut total = [0.0; 8];
        for step in 0..ROWS_A_LANE {
            let vector = if self.is_inside(step) { part.load::<T>(step) } else { Vector::from_words([0; 4]) };
            for i in 0..Vector::<T>::LANES {
                total[i] += vector.lane(i).to_f32();
            }
        }
        for i in 0..Vector::<T>::LANES {
            total[i] += warp::shuffle_xor(total[i], 8);
            total[i] += warp::shuffle_xor(total[i], 16);
            if self.place.row == 0 && self.rows_inside != 0 {
                sums.store(self.place.row_block * self.columns + self.column + i as u64, total[i]);
            }
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
