//! Matrix multiplication of 8-bit operands of any shape: for what TMA cannot address or the tensor cores cannot transpose.
//!
//! A thread computes one element and reads its row and column from device memory, in `f32` from the first product to the
//! last. Correct but slow: at most one multiplication for every two loads.

use oxtile_tile::num::{Pod, e4m3, fma};
use oxtile_tile::prelude::*;

use super::Shape;
use super::fusion::{Fusion, gelu_of};

const THREADS: u32 = 256;
/// Rows and columns of a block's tile: a warp has a row.
const TILE: [u32; 2] = [8, 32];
/// Rows of blocks that a grid has; a block goes on with the tile after those of all.
const MOST_BLOCKS: u32 = u16::MAX as u32;

/// A matrix of any strides that is multiplied.
#[derive(Clone, Copy, Parameter)]
pub struct Operand<T: Pod> {
    /// The elements.
    pub values: Global<T>,
    /// Elements from a row of `A`, or a column of `B`, to the next.
    pub stride: u32,
    /// Elements from one to the next along K.
    pub step: u32,
}

impl<T: Pod> OperandArgument<'_, T> {
    /// Of so many rows and elements along K, the last of which lies in the matrix.
    fn check(&self, [values, stride]: [&'static str; 2], rows: u64, depth: u64) -> Result<(), LaunchError> {
        let len = self.values.len();
        LaunchError::check_length(values, rows * depth, len)?;
        let last = (rows.saturating_sub(1) * u64::from(self.stride)).saturating_add(depth.saturating_sub(1) * u64::from(self.step));
        LaunchError::check_limit(stride, if len == 0 { 0 } else { last }, len.saturating_sub(1))
    }
}

/// `D = alpha A B + beta D`, bias and GELU as [`gemm`](fn@super::gemm) has them.
#[kernel(threads = THREADS, grid = grid)]
#[instances(T = [e4m3], O = [bf16, f32])]
pub fn gemm_any<T: Float + Pod, O: Float + Pod>(a: Operand<T>, b: Operand<T>, d: GlobalMut<O>, shape: Shape, fusion: Fusion<O>) {
    let Shape { m, n, k } = shape;
    let [[x, y, _], [_, rows_of_blocks, _]] = [block::index(), block::count()];
    let (mut row, column) = (u64::from(y * TILE[0] + thread::warp()), x * TILE[1] + thread::lane());
    if column >= n {
        return;
    }
    while row < u64::from(m) {
        let (mut at_a, mut at_b) = (row * u64::from(a.stride), u64::from(column) * u64::from(b.stride));
        let mut sum = 0.0;
        for _ in 0..k {
            sum = fma(a.values.load(at_a).to_f32(), b.values.load(at_b).to_f32(), sum);
            (at_a, at_b) = (at_a + u64::from(a.step), at_b + u64::from(b.step));
        }
        let at = row * u64::from(n) + u64::from(column);
        let mut value = fusion.factor() * sum;
        if fusion.beta != 0.0 {
            value = fma(fusion.beta, d.load(at).to_f32(), value);
        }
        if let Some(bias) = fusion.bias {
            value += bias.load(column.into()).to_f32();
        }
        d.store(at, O::from_f32(if fusion.gelu { gelu_of(value) } else { value }));
        row += u64::from(rows_of_blocks * TILE[0]);
    }
}

fn grid<T: Float + Pod, O: Float + Pod>(args: &GemmAnyArgs<'_, T, O>, _: &DeviceLimits) -> Result<Grid, LaunchError> {
    let Shape { m, n, k } = args.shape;
    let [rows, columns, depth] = [m, n, k].map(u64::from);
    args.a.check(["a.values", "a.stride"], rows, depth)?;
    args.b.check(["b.values", "b.stride"], columns, depth)?;
    LaunchError::check_length("d", rows * columns, args.d.len())?;
    args.fusion.check(columns)?;
    Ok(Grid::xy(n.div_ceil(TILE[1]), m.div_ceil(TILE[0]).min(MOST_BLOCKS)))
}
