//! Columnwise cast to MXFP8: 32 rows of one column share a scale. The codes keep the shape, nothing is transposed.
//!
//! Floor: 2 (bf16) + 1 + 1/32 bytes an element. Each warp works alone on its [tile](super::column_tile): all loads
//! first, the amax of each column within the lane and then by two shuffles, the scales from the lanes of the first row, 64
//! bytes a warp of bf16, and the codes. A tile at an edge is read twice, row by row.

use oxtile_tile::num::{e4m3, e5m2};
use oxtile_tile::prelude::*;

use super::column_tile::{ColumnTile, raise, scales_of_columns, store_scales};
use super::*;

/// Casts rows of `columns` elements, whole vectors: `data[i] = input[i] / scale`, one scale for 32 rows of a column in
/// `scales`, `[ceil(rows / 32), columns]`.
#[kernel(threads = THREADS, grid = grid, min_blocks = 4)]
#[instances(T = [bf16, f16, f32], Q = [e4m3, e5m2])]
pub fn mxfp8_cast_columns<T: Magnitude, Q: Fp8>(input: Global<T>, data: GlobalMut<Q>, scales: GlobalMut<ue8m0>, columns: u64) {
    cast_columns(&input, &data, &scales, &ColumnTile::of_lane(columns));
}

/// What a warp does with its tile.
#[inline(always)]
pub(super) fn cast_columns<T: Magnitude, Q: Fp8>(input: &Global<T>, data: &GlobalMut<Q>, scales: &GlobalMut<ue8m0>, tile: &ColumnTile<T>) {
    if tile.is_whole(input.len()) {
        let vectors = tile.load(input);
        let of_columns = scales_of_columns::<T, Q>(vectors.iter().fold([0; 4], |running, row| raise(running, *row)));
        if tile.row == 0 {
            store_scales::<T>(scales, tile.scale(), &of_columns);
        }
        let multipliers = of_columns.map(|scale| scale.multiplier);
        for (step, vector) in vectors.iter().enumerate() {
            store_codes(data, tile.element(step), *vector, multipliers);
        }
    } else {
        let of_columns = edge_scales::<T, Q>(input, tile);
        if tile.row == 0 && tile.is_inside(input.len()) {
            store_scales::<T>(scales, tile.scale(), &of_columns);
        }
        let multipliers = of_columns.map(|scale| scale.multiplier);
        tile.for_each_step(input.len(), |element, inside| {
            if inside {
                store_codes(data, element, input.load_vector(element), multipliers);
            }
        });
    }
}

fn grid<T: Magnitude, Q: Fp8>(args: &Mxfp8CastColumnsArgs<'_, T, Q>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_alignment("input", 16, args.input.address())?;
    LaunchError::check_length("data", args.input.len(), args.data.len())?;
    LaunchError::check_alignment("data", 8, args.data.address())?;
    LaunchError::check_alignment("scales", 8, args.scales.address())?;
    column_tile::grid::<T>("input", args.input.len(), args.columns, ("scales", args.scales.len()))
}

/// The scales of the lane's columns in a tile at an edge.
#[inline(always)]
pub(super) fn edge_scales<T: Magnitude, Q: Fp8>(input: &Global<T>, tile: &ColumnTile<T>) -> [BlockScale; 8] {
    let mut running = [0; 4];
    tile.for_each_step(input.len(), |element, inside| {
        if inside {
            running = raise(running, input.load_vector(element));
        }
    });
    scales_of_columns::<T, Q>(running)
}
