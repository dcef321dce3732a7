//! The benchmarks, one file a kernel family.
//!
//! | file | what it holds |
//! |---|---|
//! | `amax`, `copy`, `fp8`, `fp8_blocks`, `gemm`, `gemm_grouped`, `grouped`, `interleave`, `mxfp8`, `mxfp8_fused`, `nvfp4`, `quantized_gemm` | the family of that name |
//! | `attention`, `attention_packed` | attention, forward: dense tensors, steps of a ring; packed sequences |
//! | `attention_backward` | attention, backward |
//! | `attention_fp8`, `attention_portable` | attention of e4m3 tensors; on any GPU |
//! | `attention_wide` | attention of heads above 128: backward, packed sequences |
//! | `attention_shape` | the sizes of an attention problem, and what they cost |
//! | `attention_sweep` | attention at shapes of every kind |
//! | `gemm_shapes` | products at the shapes of models |
//! | `gemm_transposed` | products of 8-bit operands of every layout |
//! | `training` | RMS norm, rotary embedding, cross entropy, AdamW, embedding |
//! | `launch`, `raw_launch` | what a launch costs the host: by Oxtile, and by the driver alone |

pub mod amax;
pub mod attention;
pub mod attention_backward;
pub mod attention_fp8;
mod attention_packed;
pub mod attention_portable;
mod attention_shape;
pub mod attention_sweep;
pub mod attention_wide;
pub mod copy;
pub mod fp8;
mod fp8_blocks;
pub mod gemm;
mod gemm_grouped;
pub mod gemm_shapes;
mod gemm_transposed;
pub mod grouped;
pub mod interleave;
pub mod launch;
pub mod mxfp8;
pub mod mxfp8_fused;
pub mod nvfp4;
mod quantized_gemm;
mod raw_launch;
pub mod training;

use crate::bench::{Bench, Size};

/// The families in the order they run. The copies come first: their rate is the ceiling of the others.
pub const NAMES: [&str; 17] = [
    copy::FAMILY,
    amax::FAMILY,
    fp8::FAMILY,
    mxfp8::FAMILY,
    mxfp8_fused::FAMILY,
    interleave::FAMILY,
    grouped::FAMILY,
    nvfp4::FAMILY,
    gemm::FAMILY,
    gemm_grouped::FAMILY,
    attention::FAMILY,
    attention_backward::FAMILY,
    attention_fp8::FAMILY,
    attention_portable::FAMILY,
    attention_wide::FAMILY,
    training::FAMILY,
    launch::FAMILY,
];

/// Every benchmark that is measured by device events.
pub fn device_benches(size: Size) -> Vec<Bench> {
    [
        copy::benches(size),
        amax::benches(size),
        fp8::benches(size),
        fp8_blocks::benches(size),
        mxfp8::benches(size),
        mxfp8_fused::benches(size),
        interleave::benches(size),
        grouped::benches(size),
        nvfp4::benches(size),
        gemm::benches(size),
        gemm_transposed::benches(size),
        gemm_grouped::benches(size),
        quantized_gemm::benches(size),
        attention::benches(size),
        attention_backward::benches(size),
        attention_fp8::benches(size),
        attention_portable::benches(size),
        attention_wide::benches(size),
        training::benches(size),
    ]
    .into_iter()
    .flatten()
    .collect()
}
