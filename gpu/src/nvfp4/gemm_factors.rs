//! The factors of a product of NVFP4 matrices, for libraries that multiply codes and block scales alone.

use oxtile_tile::prelude::*;

/// What a decoded magnitude at the amax is: the largest element times the largest block scale.
const LARGEST: f32 = 6.0 * 448.0;

/// `factors = [alpha * a_amax * b_amax / (6 * 448)^2, beta]`, with the amaxes of both tensors. TransformerEngine
/// `common/recipe/nvfp4.cu`, in its order of operations.
#[kernel(threads = 32, grid = grid)]
pub fn nvfp4_gemm_factors(a_amax: Global<f32>, b_amax: Global<f32>, factors: GlobalMut<f32>, alpha: f32, beta: f32) {
    if thread::index() == 0 {
        factors.store(0, alpha * a_amax.load(0) * b_amax.load(0) * (1.0 / (LARGEST * LARGEST)));
        factors.store(1, beta);
    }
}

fn grid(args: &Nvfp4GemmFactorsArgs<'_>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    LaunchError::check_length("a_amax", 1, args.a_amax.len())?;
    LaunchError::check_length("b_amax", 1, args.b_amax.len())?;
    LaunchError::check_length("factors", 2, args.factors.len())?;
    Ok(Grid::x(1))
}
