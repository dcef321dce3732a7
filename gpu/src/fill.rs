//! Numbers repeated: what a running log-sum-exp begins with.
//!
//! Floor: 4 bytes an element, written once.

use oxtile_tile::prelude::*;

const THREADS: u32 = 256;

/// `target[i] = values[i / rows % values.len()]`: each value `rows` times, over and over.
#[kernel(threads = THREADS, grid = grid)]
pub fn fill_rows(values: Global<f32>, target: GlobalMut<f32>, rows: u32) {
    let i = u64::from(block::index()[0]) * u64::from(THREADS) + u64::from(thread::index());
    if i < target.len() {
        target.store(i, values.load(i / u64::from(rows) % values.len()));
    }
}

fn grid(args: &FillRowsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let elements = args.target.len();
    if elements > 0 {
        LaunchError::check_at_least("values", 1, args.values.len())?;
        LaunchError::check_at_least("rows", 1, args.rows.into())?;
    }
    Grid::cover("target", elements, THREADS)
}
