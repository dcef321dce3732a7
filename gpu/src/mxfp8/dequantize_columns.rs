//! Columnwise MXFP8 back to wide numbers.
//!
//! Floor: 1 + 1/32 + 2 (bf16) bytes an element. Not on the [tile](super::column_tile) of the cast: nothing is agreed on, so that a warp
//! takes whole runs of rows, a vector a lane, of two rows below each other, and the scales of its columns.

use core::marker::PhantomData;

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::*;

/// Rows of a lane, which share their scales. Writes outweigh reads, as they do rowwise: 2 were 0.6 % faster than 4 on an H200, 5 % than 1.
const STEPS: usize = 2;
/// Rows of a CUDA block, whose warps lie below each other.
pub(super) const ROWS: u64 = WARPS as u64 * STEPS as u64;

/// Columns of a CUDA block.
const fn columns_a_block<T>() -> u32 {
    warp_tile::<T>(1) as u32
}

/// `output[i] = data[i] * scale`, rounded to nearest even, rows of `columns` elements, whole vectors of `output`.
#[kernel(threads = THREADS, grid = grid, min_blocks = RESIDENT)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_columns<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>, columns: u64) {
    let place = Place::<T>::of_lane(columns);
    dequantize_columns::<Q, T>(&data, &output, &place, || load_scales::<T>(&scales, place.scale()));
}

/// A lane's work on its rows; `scales` loads the scales of its columns.
#[inline(always)]
pub(super) fn dequantize_columns<Q: Fp8, T: Wide>(
    data: &Global<Q>,
    output: &GlobalMut<T>,
    place: &Place<T>,
    scales: impl Fn() -> [f32; 8],
) {
    if place.is_inside(STEPS - 1, data.len()) {
        let codes: [_; STEPS] = core::array::from_fn(|step| load_codes::<Q, T>(data, place.element(step)));
        let scales = scales();
        for (step, codes) in codes.iter().enumerate() {
            output.store_vector(place.element(step), decode::<Q, T>(*codes, scales));
        }
    } else {
        let mut step = 0;
        while place.is_inside(step, data.len()) {
            let codes = load_codes::<Q, T>(data, place.element(step));
            output.store_vector(place.element(step), decode::<Q, T>(codes, scales()));
            step += 1;
        }
    }
}

/// Where a lane works in a tensor of so many columns: a vector in each of `STEPS` rows.
pub(super) struct Place<T> {
    row: u64,
    /// The lane's first column.
    pub column: u64,
    columns: u64,
    element: PhantomData<T>,
}

impl<T> Place<T> {
    /// Grid x walks along the rows, y and z from strip to strip.
    #[inline(always)]
    pub fn of_lane(columns: u64) -> Self {
        let [group, y, z] = block::index();
        Self::at([u64::from(group), u64::from(z) * u64::from(block::count()[1]) + u64::from(y)], columns)
    }

    /// CUDA blocks side by side in a tensor of so many columns.
    #[inline(always)]
    pub const fn groups(columns: u64) -> u64 {
        columns.div_ceil(columns_a_block::<T>() as u64)
    }

    /// The lane's place in a group of columns of a strip of [`ROWS`].
    #[inline(always)]
    pub fn at([group, strip]: [u64; 2], columns: u64) -> Self {
        Self {
            row: strip * ROWS + u64::from(thread::warp() * STEPS as u32),
            column: lane_element::<T>(group * u64::from(columns_a_block::<T>()), 0),
            columns,
            element: PhantomData,
        }
    }

    /// The block of 32 rows that the lane's rows are of.
    #[inline(always)]
    pub fn row_block(&self) -> u64 {
        self.row / BLOCK
    }

    /// Where the scale of the lane's first column is.
    #[inline(always)]
    pub fn scale(&self) -> u64 {
        self.row_block() * self.columns + self.column
    }

    /// The lane's first element in one of its rows.
    #[inline(always)]
    fn element(&self, step: usize) -> u64 {
        self.row * self.columns + self.column + step as u64 * self.columns
    }

    /// Whether one of its rows is inside a tensor of `length` elements.
    #[inline(always)]
    fn is_inside(&self, step: usize, length: u64) -> bool {
        self.column < self.columns && self.element(step) < length
    }
}

fn grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeColumnsArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_alignment("scales", 8, args.scales.address())?;
    LaunchError::check_length("output", args.data.len(), args.output.len())?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    grid_of::<T>(args.data.len(), args.columns, args.scales.len())
}

/// The grid for so many codes of whole vectors a row, and the length of their compact scales checked.
pub(super) fn grid_of<T>(elements: u64, columns: u64, scales: u64) -> Result<Grid, LaunchError> {
    if column_tile::check::<T>("data", elements, columns, ("scales", scales))? == 0 {
        return Ok(Grid::x(0));
    }
    let groups = Grid::cover("columns", columns, columns_a_block::<T>())?;
    Grid::down(groups.x, "rows", elements / columns, ROWS)
}

/// The scales of the lane's columns, eight, or four and nothing.
#[inline(always)]
pub(super) fn load_scales<T: Wide>(scales: &Global<ue8m0>, first: u64) -> [f32; 8] {
    let words = if Vector::<T>::LANES == 8 { scales.load_pair(first) } else { [scales.load_word(first), 0] };
    core::array::from_fn(|i| value(words[i / 4] >> (i % 4 * 8) & 0xff))
}

/// The value of `ue8m0::to_f32` for a code, by a maximum and a select: two comparisons would become a branch for each column.
#[inline(always)]
pub(super) fn value(code: u32) -> f32 {
    let bits = (code << 23).max(0x0040_0000);
    f32::from_bits(if code == 0xff { 0x7fff_ffff } else { bits })
}
