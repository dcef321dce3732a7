//! Delayed scaling: new scales from histories of amaxes, of any number of tensors in one launch.
//!
//! Rules: TransformerEngine `common/recipe/delayed_scaling.cu`, the form after a reduction. A history is a column of `[length, tensors]`; row 0
//! collects the amax of the step at hand, the oldest is in row 1. An update takes row 0, or what ranks agreed on where that is not
//! 0, as the latest amax; puts it at the end, moves the others down by one and sets row 0 to 0. A tensor without an amax was
//! not used: its history and scale stay.
//!
//! Floor: 8 bytes an entry of the histories. Lanes are tensors, so that a row is read in whole lines; each warp moves [`ROWS`] rows
//! a step.
//!
//! | barrier | between |
//! |---|---|
//! | of a step | rows are read, and overwritten by the warp below |
//! | block | the warps' maxima are written, and read |

use oxtile_tile::num::max;
use oxtile_tile::prelude::*;

use super::THREADS;

const WARPS: u32 = THREADS / warp::LANES;
/// Rows of a warp and step.
const ROWS: usize = 8;

/// The largest amax of each tensor in each warp's rows.
#[derive(SharedStorage)]
struct Shared {
    maxima: SharedArray<f32, { (WARPS * warp::LANES) as usize }>,
}

/// Rolls `history`, `[length, tensors]`, and sets `scales` and `scale_inverses`: `scale = scaled_largest / amax`, at most the largest `f32`,
/// where `amax` is the largest of the history or, if `most_recent`, the latest; the old scale where that is 0, Inf or NaN.
/// `agreed` holds the latest amax of each tensor over all ranks.
#[kernel(threads = THREADS, grid = grid, shared = Shared)]
pub fn fp8_update_scales(
    history: GlobalMut<f32>,
    agreed: Option<Global<f32>>,
    scales: GlobalMut<f32>,
    scale_inverses: GlobalMut<f32>,
    length: u64,
    scaled_largest: f32,
    most_recent: bool,
) {
    let tensors = scales.len();
    let tensor = u64::from(block::index()[0]) * u64::from(warp::LANES) + u64::from(thread::lane());
    let latest = if tensor < tensors { latest_amax(&history, agreed, tensor) } else { 0.0 };
    let is_used = latest != 0.0;
    let mut largest = 0.0;
    let mut first = u64::from(thread::warp()) * ROWS as u64;
    let mut step = 0;
    while step < length {
        let row = |i: usize| first + i as u64;
        let newer: [f32; ROWS] = core::array::from_fn(|i| match row(i) + 1 {
            next if !is_used || next > length => 0.0,
            next if next == length => latest,
            next => history.load(next * tensors + tensor),
        });
        block::sync();
        for (i, amax) in newer.iter().enumerate() {
            largest = max(largest, *amax);
            if is_used && row(i) < length {
                history.store(row(i) * tensors + tensor, if row(i) == 0 { 0.0 } else { *amax });
            }
        }
        first += u64::from(WARPS) * ROWS as u64;
        step += u64::from(WARPS) * ROWS as u64;
    }
    let maxima = Shared::claim().maxima;
    maxima.store(thread::index(), largest);
    block::sync();
    if thread::warp() == 0 && tensor < tensors {
        let largest = (0..WARPS).fold(0.0, |largest, warp| max(largest, maxima.load(warp * warp::LANES + thread::lane())));
        let amax = if most_recent { latest } else { largest };
        let scale = new_scale(scales.load(tensor), scaled_largest, amax);
        scales.store(tensor, scale);
        scale_inverses.store(tensor, 1.0 / scale);
    }
}

fn grid(args: &Fp8UpdateScalesArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let tensors = args.scales.len();
    LaunchError::check_length("scale_inverses", tensors, args.scale_inverses.len())?;
    LaunchError::check_length("history", args.length.max(1).saturating_mul(tensors), args.history.len())?;
    if let Some(agreed) = args.agreed {
        LaunchError::check_length("agreed", tensors, agreed.len())?;
    }
    Grid::cover("scales", tensors, warp::LANES)
}

/// The amax of the current step: that of all ranks, or this rank's own.
#[inline(always)]
fn latest_amax(history: &GlobalMut<f32>, agreed: Option<Global<f32>>, tensor: u64) -> f32 {
    let of_ranks = agreed.map_or(0.0, |agreed| agreed.load(tensor));
    if of_ranks == 0.0 { history.load(tensor) } else { of_ranks }
}

#[inline(always)]
fn new_scale(old: f32, scaled_largest: f32, amax: f32) -> f32 {
    let scale = if amax > 0.0 && amax < f32::INFINITY { scaled_largest / amax } else { old };
    if scale.abs() == f32::INFINITY { f32::MAX } else { scale }
}
