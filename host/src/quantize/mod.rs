//! Low-precision formats, on the kernels of [`oxtile_kernels`].
//!
//! Each type here holds loaded kernels: make it once, use it for every tensor. Calls enqueue and return.
//!
//! | file | what it holds |
//! |---|---|
//! | `format`, `tensor` | formats as types, and quantized tensors of any of them |
//! | `random` | random numbers of stochastic rounding |
//! | `amax`, `multi_amax`, `split_phase` | largest magnitudes, of one tensor, of many, and of all ranks' shards |
//! | `fp8` | FP8 with one scale a tensor or a block |
//! | `mxfp8` | MXFP8 |
//! | `nvfp4` | NVFP4 by rows, to the nearest value |
//! | `nvfp4_columns` | by columns and in both directions, also by stochastic rounding and after the Hadamard transform |
//! | `nvfp4_mapped`, `nvfp4_squares`, `nvfp4_stochastic` | four over six and row scales; one scale for 16 by 16 elements; stochastic rounding of rows |
//! | `layout`, `interleave`, `interleaved` | how scales lie, and their conversion to the order that matrix multiplication reads |
//! | `shards` | gathered shards of transposed tensors to the whole |
//! | `grouped` | many matrices (experts) by one launch |
//! | `gemm` | products of quantized matrices |

mod amax;
pub mod format;
pub mod fp8;
pub mod gemm;
pub mod grouped;
mod interleave;
mod interleaved;
pub mod layout;
mod multi_amax;
pub mod mxfp8;
pub mod nvfp4;
pub mod nvfp4_columns;
pub mod nvfp4_mapped;
pub mod nvfp4_squares;
pub mod nvfp4_stochastic;
mod random;
mod shards;
mod split_phase;
mod tensor;

pub use amax::{Amax, AmaxNumber};
pub use format::{
    Direction, Format, Fp8BlockFormat, Fp8Format, Mxfp8Format, Nvfp4Format, Nvfp4MappedFormat, ScaleBlock, ScaleDirection, Shapes,
    TensorAmax,
};
pub use fp8::{AmaxAlgorithm, BlockScaling, CurrentScaling, DelayedScales, DelayedScaling, Fp8Pair, ScaleOptions, Shard, ShardCasts};
pub use gemm::{Path as GemmPath, QuantizedGemm, QuantizedGemmConfig, QuantizedMatrix};
pub use interleave::{Interleave, InterleaveMxfp8, InterleaveNvfp4};
pub use interleaved::{InterleavedMxfp8, InterleavedNvfp4};
pub use layout::{Compact, Interleaved, InterleavedScales, Layout};
pub(crate) use multi_amax::FixedAmaxPlan;
pub use multi_amax::{MultiAmax, MultiAmaxPlan};
pub use mxfp8::{BiasGradient, FusedInput, FusedMxfp8, FusedOutput, Mxfp8};
pub use nvfp4::Nvfp4;
pub use nvfp4_columns::{HadamardAmax, Nvfp4Columns};
pub use nvfp4_mapped::{Nvfp4FourOverSix, Nvfp4ScaledRows};
pub use nvfp4_squares::Nvfp4Squares;
pub use nvfp4_stochastic::Nvfp4StochasticRows;
pub use random::RandomState;
pub use shards::JoinShards;
pub use split_phase::{GlobalAmax, LocalAmax};
pub use tensor::{Fp8BlockTensor, Fp8Tensor, Mxfp8Pair, Mxfp8Tensor, Nvfp4MappedTensor, Nvfp4Pair, Nvfp4Tensor, Pair, QuantizedTensor};
