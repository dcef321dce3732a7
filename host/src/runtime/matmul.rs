//! A matrix multiplication as cuBLASLt takes it. Values alone: the CUDA back end translates them for the library.
//!
//! Matrices are column-major without gaps: a row-major `[rows, columns]` is its transpose here.

use super::backend::StreamId;
use super::error::Result;

/// `D = alpha op(A) op(B) + beta D`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matmul {
    pub a: MatmulOperand,
    pub b: MatmulOperand,
    pub d: MatmulMatrix,
    /// Whether sums of 8-bit products may lose bits for speed.
    pub fast_accumulation: bool,
    pub factors: MatmulFactors,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MatmulOperand {
    pub matrix: MatmulMatrix,
    pub transposed: bool,
    pub scale: MatmulScale,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MatmulMatrix {
    pub element: MatmulElement,
    pub rows: u64,
    pub columns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatmulElement {
    Bf16,
    F32,
    E4m3,
    E2m1,
}

/// Which elements share a scale. cuBLAS Library, 2.1.5, "Narrow Precision Data Types Usage".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatmulScale {
    /// None has one.
    None,
    /// All: one f32.
    Tensor,
    /// 128 along the summed dimension: f32, in lines along the other one, filled up to multiples of 4.
    Row128,
    /// Squares of 128: f32, in lines along the summed dimension, filled up to multiples of 4.
    Square128,
    /// 32 along the summed dimension: UE8M0, interleaved in tiles of 128 by 4.
    Row32,
    /// 16 so: E4M3, interleaved.
    Row16,
}

/// Where `alpha` and `beta` are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MatmulFactors {
    Host {
        alpha: f32,
        beta: f32,
    },
    /// Side by side in device memory.
    Device,
}

/// The device addresses of a multiplication; 0 for what it does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct MatmulMemory {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    pub a_scale: u64,
    pub b_scale: u64,
    pub factors: u64,
    pub workspace: u64,
}

/// What a workspace holds: as much as PyTorch gives cuBLASLt on Hopper.
pub(crate) const WORKSPACE_BYTES: u64 = 32 << 20;

impl MatmulMemory {
    /// Addresses that are never read, aligned as a buffer's are: used to ask whether there is an algorithm at all.
    pub const ANY: Self = Self { a: 256, b: 256, d: 256, a_scale: 256, b_scale: 256, factors: 256, workspace: 256 };
}

/// A multiplication in given memory, ready to be enqueued any number of times.
pub(crate) trait MatmulPlan: Send + Sync {
    /// Called by [`Backend::matmul`](super::backend::Backend::matmul) alone.
    fn enqueue(&self, stream: StreamId) -> Result<()>;
}
