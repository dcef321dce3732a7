//! Independent references: plain scalar Rust, written from the formulas, sharing no code with the kernels.
//!
//! Nothing here uses `oxtile_tile::num`. The oracles themselves are held to `tests/golden`, which numpy and
//! ml_dtypes made.
//!
//! | file | what it holds |
//! |---|---|
//! | `formats`, `agreement` | number formats by definition, held to golden vectors |
//! | `fp8`, `mxfp8`, `nvfp4` | the formats |
//! | `nvfp4_stochastic`, `nvfp4_variants` | stochastic rounding; four over six, an amax for each row |
//! | `amax`, `activation`, `gemm`, `interleave`, `rms_norm`, `rotary`, `cross_entropy`, `adamw` | what they are named after |
//! | `attention`, `attention_backward` | attention of all heads, forward and backward |
//! | `attention_head`, `attention_head_backward` | one head of one sequence, with every option |
//! | `thd` | packed sequences that ranks share |
//! | `attention_fp8` | what rounded weights lose at least |
//! | `rows` | sums of products of rows, for references of other tests too |
//! | `inputs` | test tensors of difficult values |

pub mod activation;
pub mod adamw;
#[cfg(test)]
mod agreement;
pub mod amax;
pub mod attention;
pub mod attention_backward;
pub mod attention_fp8;
pub mod attention_head;
pub mod attention_head_backward;
pub mod cross_entropy;
pub mod formats;
pub mod fp8;
pub mod gemm;
pub mod inputs;
pub mod interleave;
pub mod mxfp8;
pub mod nvfp4;
pub mod nvfp4_stochastic;
pub mod nvfp4_variants;
pub mod rms_norm;
pub mod rotary;
pub mod rows;
pub mod thd;

#[cfg(test)]
#[path = "../../golden/golden.rs"]
mod golden;
#[cfg(test)]
#[path = "../../golden/fp8.rs"]
mod golden_fp8;
#[cfg(test)]
#[path = "../../golden/hex.rs"]
mod golden_hex;
#[cfg(test)]
#[path = "../../golden/mxfp8.rs"]
mod golden_mxfp8;
#[cfg(test)]
#[path = "../../golden/nvfp4.rs"]
mod golden_nvfp4;
#[cfg(test)]
#[path = "../../golden/nvfp4_reference.rs"]
mod golden_nvfp4_reference;
