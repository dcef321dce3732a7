//! MXFP8 for rows that end within a block: the last block of a row is shorter.
//!
//! Rows start at any element, so no vectors: one warp a block, one element a lane, coalesced. For the
//! odd shapes of tests and of the ends of models; whole blocks have the fast kernels.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::*;

/// Casts rows of `columns` elements; `scales` is `[rows, ceil(columns / 32)]`.
#[kernel(threads = THREADS, grid = cast_grid)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_ragged_rows<T: Magnitude, Q: Fp8>(input: Global<T>, data: GlobalMut<Q>, scales: GlobalMut<ue8m0>, columns: u64) {
    cast(&input, &data, &scales, &Place::of_lane(columns));
}

/// What a warp does at its place.
#[inline(always)]
pub(super) fn cast<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, scales: &GlobalMut<ue8m0>, place: &Place) {
    let Place { element, scale, in_row } = *place;
    let value = if in_row { input.load(element).to_f32() } else { 0.0 };
    let running = <f32 as Magnitude>::raise(0, value.to_bits());
    let code = scale_of::<Q>(f32::from_bits(warp::max_u32(running)));
    if in_row {
        data.store(element, Q::from_f32(value * code.reciprocal()));
        if thread::lane() == 0 {
            scales.store(scale, code);
        }
    }
}

/// `output[i] = data[i] * scale`, rounded to nearest even, rows of `columns` elements.
#[kernel(threads = THREADS, grid = dequantize_grid)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_ragged_rows<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>, columns: u64) {
    dequantize(&data, &scales, &output, &Place::of_lane(columns));
}

/// What a lane does at its place.
#[inline(always)]
pub(super) fn dequantize<Q: Fp8, T: Wide>(data: &Global<Q>, scales: &Global<ue8m0>, output: &GlobalMut<T>, place: &Place) {
    let Place { element, scale, in_row } = *place;
    if in_row {
        output.store(element, T::from_f32(data.load(element).to_f32() * scales.load(scale).to_f32()));
    }
}

/// Where a lane works: grid x is the row, y counts groups of `WARPS` blocks along it.
pub(super) struct Place {
    element: u64,
    scale: u64,
    in_row: bool,
}

impl Place {
    #[inline(always)]
    fn of_lane(columns: u64) -> Self {
        let [row, group, _] = block::index();
        Self::at([u64::from(group), u64::from(row)], columns)
    }

    /// Groups of blocks along a row.
    #[inline(always)]
    pub const fn groups(columns: u64) -> u64 {
        columns.div_ceil(WARPS as u64 * BLOCK)
    }

    /// The lane's place in a group of a row.
    #[inline(always)]
    pub fn at([group, row]: [u64; 2], columns: u64) -> Self {
        let block = group * u64::from(WARPS) + u64::from(thread::warp());
        let column = block * BLOCK + u64::from(thread::lane());
        Self { element: row * columns + column, scale: row * columns.div_ceil(BLOCK) + block, in_row: column < columns }
    }
}

fn cast_grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastRaggedRowsArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("data", args.input.len(), args.data.len())?;
    grid("input", args.input.len(), args.scales.len(), args.columns)
}

fn dequantize_grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeRaggedRowsArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("output", args.data.len(), args.output.len())?;
    grid("data", args.data.len(), args.scales.len(), args.columns)
}

fn grid(tensor: &'static str, elements: u64, scales: u64, columns: u64) -> Result<Grid, LaunchError> {
    if elements == 0 {
        LaunchError::check_length("scales", 0, scales)?;
        return Ok(Grid::x(0));
    }
    LaunchError::check_multiple(tensor, columns, elements)?;
    let (rows, blocks) = (elements / columns, columns.div_ceil(BLOCK));
    LaunchError::check_length("scales", rows * blocks, scales)?;
    let groups = Place::groups(columns);
    LaunchError::check_limit("columns", columns, 65_535 * u64::from(WARPS) * BLOCK)?;
    LaunchError::check_limit("rows", rows, i32::MAX as u64)?;
    Ok(Grid::xy(rows as u32, groups as u32))
}
