//! Matrix multiplication of any shape: for what TMA cannot address or the tensor cores cannot transpose.
//!
//! A thread computes one element and reads its row and column from device memory, in `f32` from the first product to the
//! last. Correct but slow: at most one multiplication for every two loads.

use oxtile_tile::num::{Pod, e4m3, fma};
use oxtile_tile::prelude::*;

use super::fusion::{check_scales, factor, gelu_of};

const THREADS: u32 = 256;
/// Rows and columns of a block's tile: a warp has a row.
const TILE: [u32; 2] = [8, 32];

/// `D = alpha A B + beta D`, bias and GELU as [`gemm`](fn@super::gemm) has them. Strides are elements between neighbours:
/// `a_row` and `a_step` in `A` along M and K, `b_column` and `b_step` in `B` along N and K.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [bf16, e4m3], O = [bf16, f32])]
#[expect(clippy::too_many_arguments, reason = "the operands of a GEMM")]
pub fn gemm_any<T: Float + Pod, O: Float + Pod>(
    a: Global<T>,
    b: Global<T>,
    d: GlobalMut<O>,
    bias: Global<O>,
    a_scale: Global<f32>,
    b_scale: Global<f32>,
    m: u32,
    n: u32,
    k: u32,
    a_row: u32,
    a_step: u32,
    b_column: u32,
    b_step: u32,
    alpha: f32,
    beta: f32,
    gelu: u32,
) {
    let [x, y, _] = block::index();
    let (row, column) = (x * TILE[0] + thread::warp(), y * TILE[1] + thread::lane());
    if row >= m || column >= n {
        return;
    }
    let (mut at_a, mut at_b) = (u64::from(row) * u64::from(a_row), u64::from(column) * u64::from(b_column));
    let mut sum = 0.0;
    for _ in 0..k {
        sum = fma(a.load(at_a).to_f32(), b.load(at_b).to_f32(), sum);
        (at_a, at_b) = (at_a + u64::from(a_step), at_b + u64::from(b_step));
    }
    let at = u64::from(row) * u64::from(n) + u64::from(column);
    let mut value = alpha * factor(&a_scale) * factor(&b_scale) * sum;
    if beta != 0.0 {
        value = fma(beta, d.load(at).to_f32(), value);
    }
    if !bias.is_empty() {
        value += bias.load(column.into()).to_f32();
    }
    d.store(at, O::from_f32(if gelu != 0 { gelu_of(value) } else { value }));
}

fn grid<T: Float + Pod, O: Float + Pod>(args: &GemmAnyArgs<'_, T, O>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let [m, n, k] = [args.m, args.n, args.k].map(u64::from);
    LaunchError::check_length("a", m * k, args.a.len())?;
    LaunchError::check_length("b", n * k, args.b.len())?;
    LaunchError::check_length("d", m * n, args.d.len())?;
    if !args.bias.is_empty() {
        LaunchError::check_length("bias", n, args.bias.len())?;
    }
    check_scales(args.a_scale.len(), args.b_scale.len())?;
    Ok(Grid::xy(args.m.div_ceil(TILE[0]), args.n.div_ceil(TILE[1])))
}
