//! The [tile](super::column_tile) of the fused casts whose blocks run along columns, of one result or two side by side: what is
//! read there, and what beside the codes is written.

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::prelude::*;

use super::cast_fused::INTERLEAVED_SCALES;
use super::column_tile::{self, ColumnTile, ROWS, store_scales};
use super::row_scales::{RowScales, scales_a_row};
use super::*;
use crate::activation::*;
use crate::interleave::{TILE_OUTER, interleaved_len, offset};

/// The maximum of the 32 by 32 elements that the lane's are part of, at every place of a word: agreed among the lanes of a block
/// of a row, and with those of the other rows.
#[inline(always)]
pub(super) fn square_maximum<T: Magnitude>(running: [u32; 4]) -> u32 {
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
#[expect(clippy::needless_range_loop, reason = "as in the kernels")]
pub(super) fn add<T: Float + Pod>(sums: &mut [f32; 8], row: Vector<T>) {
    for i in 0..Vector::<T>::LANES {
        sums[i] += row.lane(i).to_f32();
    }
}

/// A CUDA block's rows of all results, and a lane's place there; the grid may reach beyond.
pub(super) struct Tile<T> {
    pub place: ColumnTile<T>,
    first_row: u64,
    rows: u64,
    /// The columns of all results together.
    columns: u64,
    of_result: u64,
}

impl<T: Magnitude> Tile<T> {
    /// This lane's tile of the results of `O`, which lie side by side `[rows, columns]`.
    #[inline(always)]
    pub fn of_lane<O: Operation>(rows: u64, columns: u64) -> Self {
        let of_result = columns / O::RESULTS as u64;
        let place = ColumnTile::of_lane(of_result);
        Self { first_row: place.row_block * BLOCK, place, rows, columns, of_result }
    }

    /// How many of the tile's rows there are.
    #[inline(always)]
    pub fn rows_inside(&self) -> u32 {
        self.rows.saturating_sub(self.first_row).min(BLOCK) as u32
    }

    /// Whether all rows and the lane's columns are inside.
    #[inline(always)]
    pub fn is_whole(&self) -> bool {
        self.rows_inside() == BLOCK as u32 && self.place.column < self.of_result
    }

    /// The lane's row of a step.
    #[inline(always)]
    pub fn row(&self, step: usize) -> u32 {
        self.place.row + step as u32 * ROWS
    }

    #[inline(always)]
    pub fn of_result(&self, result: usize) -> ResultTile<'_, T> {
        let first = result as u64 * self.of_result;
        let end = first + self.of_result;
        let column = first + self.place.column;
        ResultTile {
            place: &self.place,
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

/// Where the operands of a lane's rows are. Rows and columns beyond the tensor are read as the last ones inside, which changes no
/// maximum.
pub(super) struct Source<'a, T> {
    operands: Operands<T>,
    tile: &'a Tile<T>,
    origin: [u64; 2],
    pitches: [u32; 2],
    last_row: u32,
}

impl<'a, T: Magnitude> Source<'a, T> {
    #[inline(always)]
    pub fn of<O: Operation>(operands: FusedOperands<T>, tile: &'a Tile<T>) -> Self {
        let operands = operands.of_results(tile.of_result);
        let origin = operands.at::<O>(tile.first_row.min(tile.rows - 1), tile.place.column.min(tile.of_result - Vector::<T>::LANES as u64));
        let pitches = [O::input_columns(tile.columns), O::gradient_columns(tile.columns)].map(|columns| columns as u32);
        Self { operands, tile, origin, pitches, last_row: tile.rows_inside().saturating_sub(1) }
    }

    /// The vectors of a step.
    #[inline(always)]
    pub fn places<O: Operation>(&self, step: usize) -> [Place<T>; 3] {
        // Few rows and few columns: products of 32 bits.
        let row = u64::from(self.tile.row(step).min(self.last_row));
        O::places(&self.operands, [0, 1].map(|i| self.origin[i] + row * u64::from(self.pitches[i])))
    }
}

/// The part of one result.
pub(super) struct ResultTile<'a, T> {
    pub place: &'a ColumnTile<T>,
    first_row: u64,
    rows: u64,
    /// Rows of the lane's columns that there are.
    rows_inside: u32,
    columns: u64,
    /// The result's first column, and the first after it.
    first: u64,
    end: u64,
    /// The lane's first column, and its first element.
    column: u64,
    element: u64,
}

impl<T: Magnitude> ResultTile<'_, T> {
    #[inline(always)]
    pub fn is_inside(&self, step: usize) -> bool {
        self.place.row + step as u32 * ROWS < self.rows_inside
    }

    #[inline(always)]
    pub fn element(&self, step: usize) -> u64 {
        self.element + step as u64 * u64::from(ROWS) * self.columns
    }

    /// The first column after those whose scales the result writes: the last one pads.
    #[inline(always)]
    fn scales_end(&self, interleaved: bool) -> u64 {
        if interleaved && self.end == self.columns { self.end.next_multiple_of(TILE_OUTER) } else { self.end }
    }

    /// The scales of the lane's columns.
    #[inline(always)]
    pub fn store_column_scales(&self, scales: &GlobalMut<ue8m0>, columns: &[BlockScale; 8], interleaved: bool) {
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
    pub fn store_row_scales(&self, scales: &GlobalMut<ue8m0>, staged: RowScales, interleaved: bool) {
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
    /// Each of the four lanes that hold a vector's columns sums a quarter of them: it gives away the half that is not its own twice.
    #[inline(always)]
    pub fn store_sums(&self, sums: &GlobalMut<f32>, of_lane: [f32; 8]) {
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

/// The operands of a launch, for the checks of both kernels.
pub(super) struct Shape {
    pub rows: u64,
    pub columns: u64,
    pub interleaved: bool,
}

impl Shape {
    /// The shape of the results of `O` of these operands, which are checked.
    pub fn of<O: Operation, T: Pod>(operands: &FusedOperandsArgument<'_, T>, options: u32) -> Result<Self, LaunchError> {
        operands.check::<O>()?;
        LaunchError::check_limit("operands.columns", O::input_columns(operands.columns), u32::MAX.into())?;
        Ok(Self { rows: operands.rows, columns: operands.columns, interleaved: options & INTERLEAVED_SCALES != 0 })
    }

    /// Checks the sums of each column over 32 rows, which may be left out.
    pub fn check_sums(&self, sums: &DeviceViewMut<'_, f32>) -> Result<(), LaunchError> {
        if sums.is_empty() {
            return Ok(());
        }
        LaunchError::check_length("partial_sums", self.rows.div_ceil(BLOCK) * self.columns, sums.len())?;
        // Of 16-bit types two are stored at once.
        LaunchError::check_alignment("partial_sums", 8, sums.address())
    }

    /// Checks the codes of one direction and their scales, one for each of so many blocks of `outer` rows or columns.
    pub fn check_codes<Q>(
        &self,
        (data_name, data): (&'static str, &DeviceViewMut<'_, Q>),
        (scales_name, scales): (&'static str, &DeviceViewMut<'_, ue8m0>),
        [outer, blocks]: [u64; 2],
    ) -> Result<(), LaunchError> {
        LaunchError::check_length(data_name, self.elements(), data.len())?;
        LaunchError::check_alignment(data_name, 8, data.address())?;
        let count = if self.interleaved { interleaved_len(outer, blocks) } else { outer * blocks };
        LaunchError::check_length(scales_name, count, scales.len())?;
        LaunchError::check_alignment(scales_name, 8, scales.address())
    }

    /// The grid over the results of `O`. Interleaved scales have padding beyond the last row block and column, which the grid covers too.
    pub fn grid<O: Operation, T>(&self) -> Result<Grid, LaunchError> {
        let row_blocks = self.rows.div_ceil(BLOCK);
        let (covered, padding) = match self.interleaved {
            true => (row_blocks.next_multiple_of(TILE_OUTER / BLOCK), self.columns.next_multiple_of(TILE_OUTER) - self.columns),
            false => (row_blocks, 0),
        };
        if self.elements() == 0 {
            Ok(Grid::x(0))
        } else {
            let columns = self.columns / O::RESULTS as u64 + padding;
            column_tile::grid_of_blocks::<T>(("operands.rows", covered), ("operands.columns", columns))
        }
    }

    fn elements(&self) -> u64 {
        self.rows.saturating_mul(self.columns)
    }
}
