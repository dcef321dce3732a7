//! Independent references: plain scalar Rust, written from the formulas, sharing no code with the kernels.
//!
//! Nothing here uses `oxtile_tile::num`. The oracles themselves are held to `tests/golden`, which numpy and
//! ml_dtypes made.

pub mod activation;
#[cfg(test)]
mod agreement;
pub mod amax;
pub mod attention;
pub mod attention_backward;
pub mod attention_fp8;
pub mod attention_head;
pub mod attention_head_backward;
pub mod formats;
pub mod fp8;
pub mod gemm;
pub mod interleave;
pub mod mxfp8;
pub mod nvfp4;
pub mod nvfp4_stochastic;
pub mod nvfp4_variants;
