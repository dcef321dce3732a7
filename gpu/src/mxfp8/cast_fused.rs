//! The cast to MXFP8 with what stands around it in a model: an activation or its derivative before, sums of columns and
//! the largest magnitude beside, scales interleaved or shared by both directions.
//!
//! Floor: the operands once, and 1 + 1/32 bytes an element and direction. The [tile](super::column_tile) of the columnwise
//! cast. A lane computes its 8 vectors from [`Operation::values`], rounds them to the input type, and goes on from there: scales,
//! codes, sums and amax are those of the rounded values. What is not wanted, an empty view says; such choices are the same for
//! the whole grid. Rows and columns beyond the tensor are loaded as the last ones inside, which changes no maximum, so
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
use crate::interleave::{TILE_BLOCKS, TILE_OUTER, interleaved_len, offset};

/// Option: 32 by 32 elements share a scale, so that both directions have the same codes.
pub const SQUARE_BLOCKS: u32 = 1;
/// Option: scales are [interleaved](crate::interleave) in both directions, the padding 0.
pub const INTERLEAVED_SCALES: u32 = 2;

#[derive(SharedStorage)]
struct Shared {
    row_scales: RowScales,
    reduce: ReduceStorage,
}

/// Casts the result of `O`, `[rows, columns]`, whole vectors a row.
///
/// - `row_data`, `row_scales` and `column_data`, `column_scales`: as in the casts without an operation; a direction that is not
///   wanted has empty ones.
/// - `partial_sums`: `[ceil(rows / 32), columns]`, the sums of each column over 32 rows, or empty.
/// - `amax`: raised to the largest magnitude, NaN dropped, or empty. The host zeroes it first.
/// - `skip`: where its one element is 1, nothing is written; or empty.
/// - `options`: [`SQUARE_BLOCKS`], [`INTERLEAVED_SCALES`].
#[kernel(threads = THREADS, grid = grid, shared = Shared, min_blocks = 2)]
#[instances(O = [Identity], T = [bf16, f16, f32], Q = [e4m3, e5m2])]
#[instances(O = [
    Forward<Gelu>, Forward<Silu>, Forward<QuickGelu>, Forward<Relu>, Forward<SquaredRelu>,
    Backward<Gelu>, Backward<Silu>, Backward<QuickGelu>, Backward<Relu>, Backward<SquaredRelu>,
    GatedForward<Gelu>, GatedForward<Silu>, GatedForward<QuickGelu>, GatedForward<Relu>, GatedForward<SquaredRelu>,
    GatedBackward<Gelu>, GatedBackward<Silu>, GatedBackward<QuickGelu>, GatedBackward<Relu>, GatedBackward<SquaredRelu>
], T = [bf16], Q = [e4m3])]
#[expect(clippy::too_many_arguments, reason = "two directions and what stands around a cast")]
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
    let shared = Shared::claim();
    let interleaved = options & INTERLEAVED_SCALES != 0;
    let tile = Tile::<T>::of_lane(rows, columns);
    let operands = Operands { input, gradient, columns };
    let vectors: [_; ROWS_A_LANE] = core::array::from_fn(|step| {
        let [a, b, c, d, e, f, g, h] = O::values(&operands, tile.row(step).min(rows - 1), tile.column().min(tile.last_column()));
        T::vector([a, b, c, d], [e, f, g, h])
    });
    let running = vectors.iter().fold([0; 4], |running, row| raise(running, *row));
    // Nothing is larger than the maximum of its square, and everything at least 0.
    let of_square = if options & SQUARE_BLOCKS != 0 { square_maximum::<T>(running) } else { 0 };

    if !row_data.is_empty() {
        for (step, vector) in vectors.iter().enumerate() {
            let code = block_scale::<T, Q>(T::join(of_vector(*vector), of_square));
            stage(shared.row_scales, &tile.place, step as u32, code);
            if tile.is_inside(step) {
                store_codes(&row_data, tile.element(step), *vector, [code.reciprocal(); 8]);
            }
        }
    }
    if !column_data.is_empty() {
        let scales = scales_of_columns::<T, Q>(running.map(|word| T::join(word, of_square)));
        if tile.place.row == 0 {
            tile.store_column_scales(&column_scales, &scales, interleaved);
        }
        let multipliers = scales.map(|scale| scale.multiplier);
        for (step, vector) in vectors.iter().enumerate() {
            if tile.is_inside(step) {
                store_codes(&column_data, tile.element(step), *vector, multipliers);
            }
        }
    }
    if !partial_sums.is_empty() {
        tile.store_sums(&partial_sums, &vectors);
    }
    if !amax.is_empty() {
        let largest = running.into_iter().fold(0, T::join);
        let largest = block::max_u32(T::finish(largest).to_bits(), shared.reduce);
        if thread::index() == 0 {
            atomic::max_non_negative(&amax, 0, f32::from_bits(largest));
        }
    }
    if !row_data.is_empty() {
        block::sync();
        tile.store_row_scales(&row_scales, shared.row_scales, interleaved);
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

/// A lane's place in a tensor that the grid may reach beyond.
struct Tile<T> {
    place: ColumnTile<T>,
    rows: u64,
    columns: u64,
}

impl<T: Magnitude> Tile<T> {
    #[inline(always)]
    fn of_lane(rows: u64, columns: u64) -> Self {
        Self { place: ColumnTile::of_lane(columns), rows, columns }
    }

    /// The lane's row of a step.
    #[inline(always)]
    fn row(&self, step: usize) -> u64 {
        self.place.row_block * BLOCK + u64::from(self.place.row + step as u32 * ROWS)
    }

    /// The lane's first column.
    #[inline(always)]
    fn column(&self) -> u64 {
        self.place.column
    }

    /// The first column of a row's last vector.
    #[inline(always)]
    fn last_column(&self) -> u64 {
        self.columns - Vector::<T>::LANES as u64
    }

    #[inline(always)]
    fn is_inside(&self, step: usize) -> bool {
        self.row(step) < self.rows && self.column() < self.columns
    }

    #[inline(always)]
    fn element(&self, step: usize) -> u64 {
        self.row(step) * self.columns + self.column()
    }

    /// The scales of the lane's columns.
    #[inline(always)]
    fn store_column_scales(&self, scales: &GlobalMut<ue8m0>, columns: &[BlockScale; 8], interleaved: bool) {
        let row_blocks = self.rows.div_ceil(BLOCK);
        let is_inside = self.column() < self.columns && self.place.row_block < row_blocks;
        if !interleaved {
            if is_inside {
                store_scales::<T>(scales, self.place.scale(), columns);
            }
        } else if self.column() < self.columns.next_multiple_of(TILE_OUTER) {
            // A vector's columns are of one run of 32: their scales lie 16 bytes apart.
            let first = offset(self.column(), self.place.row_block, row_blocks);
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
        let first = u64::from(block::index()[0]) * u64::from(scales_a_row::<T>());
        let mut slot = thread::index();
        while slot < BLOCK as u32 * scales_a_row::<T>() {
            let row = self.place.row_block * BLOCK + u64::from(slot / scales_a_row::<T>());
            let block = first + u64::from(slot % scales_a_row::<T>());
            let is_inside = row < self.rows && block < blocks;
            if interleaved && block < blocks.next_multiple_of(TILE_BLOCKS) {
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
    fn store_sums(&self, sums: &GlobalMut<f32>, vectors: &[Vector<T>; ROWS_A_LANE]) {
        for i in 0..Vector::<T>::LANES {
            let mut sum = 0.0;
            for (step, vector) in vectors.iter().enumerate() {
                sum += if self.row(step) < self.rows { vector.lane(i).to_f32() } else { 0.0 };
            }
            sum += warp::shuffle_xor(sum, 8);
            sum += warp::shuffle_xor(sum, 16);
            if self.place.row == 0 && self.is_inside(0) {
                sums.store(self.place.scale() + i as u64, sum);
            }
        }
    }
}

fn grid<O: Operation, T: Magnitude + Wide, Q: Fp8>(args: &Mxfp8CastFusedArgs<'_, O, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let (rows, columns, elements) = (args.rows, args.columns, args.rows.saturating_mul(args.columns));
    check_operands::<O, T>(&args.input, &args.gradient, ("input", elements), columns)?;
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
    // Interleaved scales have padding beyond the last row block, which somebody writes.
    let covered = if interleaved { row_blocks.next_multiple_of(TILE_OUTER / BLOCK) } else { row_blocks };
    if elements == 0 { Ok(Grid::x(0)) } else { column_tile::grid_of_blocks::<T>("input", covered, columns) }
}
