//! Columnwise MXFP8 for rows that are no whole vectors, at any address.
//!
//! One column of a row block a thread, one element at a time, coalesced along the rows. For the odd shapes of tests and
//! of the ends of models; whole vectors have the fast kernels.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::*;

/// Casts rows of `columns` elements; `scales` is `[ceil(rows / 32), columns]`.
#[kernel(threads = THREADS, grid = cast_grid)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_ragged_columns<T: Magnitude, Q: Fp8>(input: Global<T>, data: GlobalMut<Q>, scales: GlobalMut<ue8m0>, columns: u64) {
    cast(&input, &data, &scales, &ColumnBlock::of_thread(columns, input.len()));
}

/// What a thread does with its block.
#[inline(always)]
pub(super) fn cast<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, scales: &GlobalMut<ue8m0>, block: &ColumnBlock) {
    if block.is_inside {
        let mut running = 0;
        block.for_each(|element| running = <f32 as Magnitude>::raise(running, input.load(element).to_f32().to_bits()));
        let code = scale_of::<Q>(f32::from_bits(running));
        scales.store(block.scale, code);
        block.for_each(|element| data.store(element, Q::from_f32(input.load(element).to_f32() * code.reciprocal())));
    }
}

/// `output[i] = data[i] * scale`, rounded to nearest even, rows of `columns` elements.
#[kernel(threads = THREADS, grid = dequantize_grid)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_ragged_columns<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>, columns: u64) {
    dequantize(&data, &scales, &output, &ColumnBlock::of_thread(columns, data.len()));
}

/// What a thread does with its block.
#[inline(always)]
pub(super) fn dequantize<Q: Fp8, T: Wide>(data: &Global<Q>, scales: &Global<ue8m0>, output: &GlobalMut<T>, block: &ColumnBlock) {
    if block.is_inside {
        let scale = scales.load(block.scale).to_f32();
        block.for_each(|element| output.store(element, T::from_f32(data.load(element).to_f32() * scale)));
    }
}

/// The block of a thread: grid x is the row block, y counts groups of `THREADS` columns.
pub(super) struct ColumnBlock {
    first: u64,
    end: u64,
    columns: u64,
    scale: u64,
    is_inside: bool,
}

impl ColumnBlock {
    #[inline(always)]
    fn of_thread(columns: u64, length: u64) -> Self {
        let [row_block, group, _] = block::index();
        Self::at([u64::from(group), u64::from(row_block)], columns, length)
    }

    /// Groups of columns side by side.
    #[inline(always)]
    pub const fn groups(columns: u64) -> u64 {
        columns.div_ceil(THREADS as u64)
    }

    /// The thread's block in a group of columns of a row block.
    #[inline(always)]
    pub fn at([group, row_block]: [u64; 2], columns: u64, length: u64) -> Self {
        let column = group * u64::from(THREADS) + u64::from(thread::index());
        let scale = row_block * columns + column;
        let start = row_block * BLOCK * columns;
        Self { first: start + column, end: length.min(start + BLOCK * columns), columns, scale, is_inside: column < columns }
    }

    /// Calls `use_element` for each element from the first row to the last.
    #[inline(always)]
    fn for_each(&self, mut use_element: impl FnMut(u64)) {
        let mut element = self.first;
        while element < self.end {
            use_element(element);
            element += self.columns;
        }
    }
}

fn cast_grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastRaggedColumnsArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("data", args.input.len(), args.data.len())?;
    grid("input", args.input.len(), args.scales.len(), args.columns)
}

fn dequantize_grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeRaggedColumnsArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.data.len(), args.output.len())?;
    grid("data", args.data.len(), args.scales.len(), args.columns)
}

fn grid(tensor: &'static str, elements: u64, scales: u64, columns: u64) -> Result<Grid, LaunchError> {
    let row_blocks = column_tile::row_blocks(tensor, elements, columns)?;
    LaunchError::check_length("scales", row_blocks * columns, scales)?;
    LaunchError::check_limit("columns", columns, 65_535 * u64::from(THREADS))?;
    LaunchError::check_limit("rows", row_blocks * BLOCK, i32::MAX as u64 * BLOCK)?;
    Ok(Grid::xy(row_blocks as u32, ColumnBlock::groups(columns) as u32))
}
