use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
pub fn fill(output: GlobalMut<f32>, name: u128) {}

fn grid(_: &FillArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

fn main() {}
