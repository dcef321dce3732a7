use oxtile_tile::launch::Kernel;
use oxtile_tile::prelude::*;

#[kernel(threads = 32, grid = grid)]
#[instances(T = [f32])]
pub fn fill<T: Float + oxtile_tile::num::Pod>(output: GlobalMut<T>) {
    output.store(0, T::from_f32(0.0));
}

fn grid<T: Float + oxtile_tile::num::Pod>(_: &FillArgs<'_, T>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    Ok(Grid::x(1))
}

fn launched<K: Kernel>() {}

fn main() {
    launched::<Fill<bf16>>();
}
