//! Columnwise MXFP8 back to wide numbers.
//!
//! Floor: 1 + 1/32 + 2 (bf16) bytes an element. The mirror image of the cast, on the same [tile](super::column_tile): a
//! lane loads its codes of 8 rows and the scales of its columns, and stores one vector a row.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::column_tile::{ColumnTile, ROWS_A_LANE};
use super::*;

/// `output[i] = data[i] * scale`, rounded to nearest even, rows of `columns` elements, whole vectors of `output`.
#[kernel(threads = THREADS, grid = grid, min_blocks = 2)]
#[instances(Q = [e4m3, e5m2], T = [bf16, f16, f32])]
pub fn mxfp8_dequantize_columns<Q: Fp8, T: Wide>(data: Global<Q>, scales: Global<ue8m0>, output: GlobalMut<T>, columns: u64) {
    let tile = ColumnTile::of_lane(columns);
    dequantize_columns::<Q, T>(&data, &output, &tile, || load_scales::<T>(&scales, tile.scale()));
}

/// What a warp does with its tile; `scales` loads those of the lane's columns.
#[inline(always)]
pub(super) fn dequantize_columns<Q: Fp8, T: Wide>(
    data: &Global<Q>,
    output: &GlobalMut<T>,
    tile: &ColumnTile<T>,
    scales: impl Fn() -> [f32; 8],
) {
    if tile.is_whole(data.len()) {
        let codes: [_; ROWS_A_LANE] = core::array::from_fn(|step| load_codes::<Q, T>(data, tile.element(step)));
        let scales = scales();
        for (step, codes) in codes.iter().enumerate() {
            output.store_vector(tile.element(step), decode::<Q, T>(*codes, scales));
        }
    } else if tile.is_inside(data.len()) {
        let scales = scales();
        tile.for_each_step(data.len(), |element, inside| {
            if inside {
                output.store_vector(element, decode::<Q, T>(load_codes::<Q, T>(data, element), scales));
            }
        });
    }
}

fn grid<Q: Fp8, T: Wide>(args: &Mxfp8DequantizeColumnsArgs<'_, Q, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_alignment("scales", 8, args.scales.address())?;
    LaunchError::check_length("output", args.data.len(), args.output.len())?;
    LaunchError::check_alignment("output", 16, args.output.address())?;
    column_tile::grid::<T>("data", args.data.len(), args.columns, ("scales", args.scales.len()))
}

/// The scales of the lane's columns, eight, or four and nothing.
#[inline(always)]
pub(super) fn load_scales<T: Wide>(scales: &Global<ue8m0>, first: u64) -> [f32; 8] {
    let words = if Vector::<T>::LANES == 8 { scales.load_pair(first) } else { [scales.load_word(first), 0] };
    core::array::from_fn(|i| value(words[i / 4] >> (i % 4 * 8) & 0xff))
}

/// What `ue8m0::to_f32` gives for a code, by a maximum and a select: two comparisons become a branch a column.
#[inline(always)]
pub(super) fn value(code: u32) -> f32 {
    let bits = (code << 23).max(0x0040_0000);
    f32::from_bits(if code == 0xff { 0x7fff_ffff } else { bits })
}
