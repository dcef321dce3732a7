//! The GPU kernels of Oxtile. One family a file or folder; each compiles to PTX and runs on the emulator.
//!
//! | file | what it holds |
//! |---|---|
//! | `amax`, `magnitude` | largest magnitudes: of one tensor and of many; the running maximum that other kernels use too |
//! | `mxfp8`, `nvfp4`, `fp8` | casts and their inverses, by format |
//! | `matrix`, `codes` | a matrix and its codes, as parameters of the casts |
//! | `interleave` | scales in the order of block-scaled products, and back |
//! | `group` | groups of matrices (experts) that one launch works on |
//! | `shards` | gathered shards of a transposed tensor joined |
//! | `sum_parts` | parts of ranks, summed in the order of the ranks, and rounded or added to a gradient |
//! | `activation`, `column_sums` | activations with their derivatives; bias gradients |
//! | `rms_norm`, `rotary`, `cross_entropy`, `embedding` | RMS norm; rotary embedding; softmax cross entropy with its gradient; embedding: forward and backward |
//! | `adamw` | a step of AdamW |
//! | `row` | rows and the threads that share them: the policy of kernels that reduce rows |
//! | `gemm` | matrix multiplication |
//! | `attention` | attention, forward and backward |
//! | `thd` | packed sequences that the ranks of context parallelism share |
//! | `all_reduce` | small sums over ranks in one launch a rank |
//! | `exchange` | messages between ranks by one kernel: all-gather and all-to-all of few bytes |
//! | `copy` | the smallest kernel, and the ceiling of the memory-bound ones |
//! | `fill` | numbers repeated |
//! | `wide` | the wide numbers that codes decode to: `mxfp8::Wide` |
//!
//! A family with kernels is a feature; all of them are the default. What several families use stands beside them, without a feature.
#![no_std]
#![deny(missing_docs)]
// What only some families use stands unused beside the others.
#![cfg_attr(not(feature = "all"), allow(dead_code, unused_imports))]

#[cfg(feature = "activation")]
pub mod activation;
#[cfg(feature = "adamw")]
pub mod adamw;
#[cfg(feature = "all_reduce")]
pub mod all_reduce;
#[cfg(feature = "amax")]
pub mod amax;
#[cfg(feature = "attention")]
pub mod attention;
pub mod codes;
#[cfg(feature = "column_sums")]
pub mod column_sums;
#[cfg(feature = "copy")]
pub mod copy;
#[cfg(feature = "cross_entropy")]
pub mod cross_entropy;
#[cfg(feature = "embedding")]
pub mod embedding;
#[cfg(feature = "exchange")]
pub mod exchange;
#[cfg(feature = "fill")]
pub mod fill;
#[cfg(feature = "fp8")]
pub mod fp8;
#[cfg(feature = "gemm")]
pub mod gemm;
pub mod group;
#[cfg(feature = "interleave")]
pub mod interleave;
pub mod magnitude;
pub mod matrix;
#[cfg(feature = "mxfp8")]
pub mod mxfp8;
#[cfg(feature = "nvfp4")]
pub mod nvfp4;
#[cfg(feature = "rms_norm")]
pub mod rms_norm;
#[cfg(feature = "rotary")]
pub mod rotary;
pub mod row;
#[cfg(feature = "shards")]
pub mod shards;
#[cfg(feature = "sum_parts")]
pub mod sum_parts;
#[cfg(feature = "thd")]
pub mod thd;
mod wide;

oxtile_tile::source_hash!();

/// Every kernel of this crate. A test holds it against the sources.
#[cfg(feature = "all")]
pub const KERNELS: &[oxtile_tile::launch::KernelFamily] = &[
    activation::ACTIVATE,
    adamw::ADAMW,
    amax::AMAX,
    amax::MULTI_AMAX,
    column_sums::COLUMN_SUMS,
    attention::ATTENTION_BACKWARD,
    attention::ATTENTION_BACKWARD_ADD_KEYS,
    attention::ATTENTION_BACKWARD_ADD_QUERIES,
    attention::ATTENTION_BACKWARD_ARRIVING,
    attention::ATTENTION_BACKWARD_ARRIVING_PACKED,
    attention::ATTENTION_BACKWARD_BLOCKS,
    attention::ATTENTION_BACKWARD_CONVERT,
    attention::ATTENTION_BACKWARD_CONVERT_GENERAL,
    attention::ATTENTION_BACKWARD_DELTAS,
    attention::ATTENTION_BACKWARD_GENERAL,
    all_reduce::ALL_REDUCE,
    attention::ATTENTION_BACKWARD_PADDING,
    attention::ATTENTION_BACKWARD_PORTABLE,
    attention::ATTENTION_BACKWARD_PREPARE,
    attention::ATTENTION_BACKWARD_REDUCE,
    attention::ATTENTION_BACKWARD_REDUCE_CHUNKS,
    attention::ATTENTION_BACKWARD_SINK,
    attention::ATTENTION_BACKWARD_WIDE_KEYS,
    attention::ATTENTION_BACKWARD_WIDE_QUERIES,
    attention::ATTENTION_COMBINE,
    attention::ATTENTION_FORWARD,
    attention::ATTENTION_FORWARD_FP8,
    attention::ATTENTION_FORWARD_PORTABLE,
    attention::ATTENTION_FORWARD_PORTABLE_GENERAL,
    attention::ATTENTION_FORWARD_SPLIT,
    copy::COPY_WORDS,
    fill::FILL_ROWS,
    cross_entropy::CROSS_ENTROPY,
    embedding::EMBEDDING,
    embedding::EMBEDDING_BACKWARD,
    exchange::EXCHANGE,
    fp8::FP8_CAST,
    fp8::FP8_CAST_DELAYED,
    fp8::FP8_CAST_TRANSPOSE,
    fp8::FP8_CAST_TRANSPOSE_DELAYED,
    fp8::FP8_CAST_ROW_BLOCKS,
    fp8::FP8_CAST_ROW_BLOCKS_ALONE,
    fp8::FP8_CAST_SQUARES,
    fp8::FP8_DEQUANTIZE,
    fp8::FP8_CAST_GROUPED,
    fp8::FP8_DEQUANTIZE_GROUPED,
    fp8::FP8_DEQUANTIZE_BLOCKS,
    fp8::FP8_PARTIAL_AMAX,
    fp8::FP8_PARTIAL_CAST,
    fp8::FP8_TRANSPOSE,
    fp8::FP8_UPDATE_SCALES,
    gemm::GEMM,
    gemm::GEMM_ANY,
    gemm::GEMM_BLOCKS,
    gemm::GEMM_EPILOGUE,
    gemm::GEMM_GATHERED,
    gemm::GEMM_SCATTERED,
    gemm::GEMM_GROUPED,
    gemm::GEMM_PORTABLE,
    interleave::INTERLEAVE_ROWS,
    interleave::INTERLEAVE_COLUMNS,
    interleave::DEINTERLEAVE_ROWS,
    interleave::DEINTERLEAVE_COLUMNS,
    interleave::INTERLEAVE_ROWS_GROUPED,
    interleave::INTERLEAVE_COLUMNS_GROUPED,
    interleave::DEINTERLEAVE_ROWS_GROUPED,
    interleave::DEINTERLEAVE_COLUMNS_GROUPED,
    mxfp8::MXFP8_CAST_ROWS,
    mxfp8::MXFP8_CAST_ROWS_INTERLEAVED,
    mxfp8::MXFP8_CAST_RAGGED_ROWS,
    mxfp8::MXFP8_CAST_COLUMNS,
    mxfp8::MXFP8_CAST_RAGGED_COLUMNS,
    mxfp8::MXFP8_CAST_BOTH,
    mxfp8::MXFP8_CAST_FUSED,
    mxfp8::MXFP8_CAST_FUSED_COLUMNS,
    mxfp8::MXFP8_CAST_FUSED_ROWS,
    mxfp8::MXFP8_DEQUANTIZE_ROWS,
    mxfp8::MXFP8_DEQUANTIZE_RAGGED_ROWS,
    mxfp8::MXFP8_DEQUANTIZE_COLUMNS,
    mxfp8::MXFP8_DEQUANTIZE_RAGGED_COLUMNS,
    mxfp8::MXFP8_DEQUANTIZE_ROWS_INTERLEAVED,
    mxfp8::MXFP8_DEQUANTIZE_COLUMNS_INTERLEAVED,
    mxfp8::MXFP8_CAST_ROWS_GROUPED,
    mxfp8::MXFP8_CAST_RAGGED_ROWS_GROUPED,
    mxfp8::MXFP8_CAST_COLUMNS_GROUPED,
    mxfp8::MXFP8_CAST_RAGGED_COLUMNS_GROUPED,
    mxfp8::MXFP8_CAST_BOTH_GROUPED,
    mxfp8::MXFP8_DEQUANTIZE_ROWS_GROUPED,
    mxfp8::MXFP8_DEQUANTIZE_RAGGED_ROWS_GROUPED,
    mxfp8::MXFP8_DEQUANTIZE_COLUMNS_GROUPED,
    mxfp8::MXFP8_DEQUANTIZE_RAGGED_COLUMNS_GROUPED,
    rms_norm::RMS_NORM,
    rms_norm::RMS_NORM_BACKWARD,
    rotary::ROTARY,
    shards::JOIN_SHARDS,
    shards::JOIN_SHARDS_GROUPED,
    sum_parts::ADD_PARTS,
    sum_parts::LARGEST_PART,
    sum_parts::SUM_PARTS,
    thd::STEP_SEQUENCES,
    thd::REORDER,
    thd::REORDER_NUMBERS,
    thd::PARTITION_INDICES,
    thd::READ_HALF,
    thd::COPY_VALID,
    thd::LSE_READ_HALF,
    thd::LSE_CORRECT,
    thd::OUT_CORRECT,
    thd::GRAD_CORRECT,
    nvfp4::NVFP4_CAST_ROWS,
    nvfp4::NVFP4_CAST_ROWS_STOCHASTIC,
    nvfp4::NVFP4_CAST_COLUMNS,
    nvfp4::NVFP4_CAST_BOTH,
    nvfp4::NVFP4_CAST_ROWS_4OVER6,
    nvfp4::NVFP4_CAST_ROWS_INTERLEAVED,
    nvfp4::NVFP4_CAST_COLUMNS_4OVER6,
    nvfp4::NVFP4_CAST_SCALED_ROWS,
    nvfp4::NVFP4_DEQUANTIZE_SCALED_ROWS,
    nvfp4::NVFP4_CAST_SQUARES,
    nvfp4::NVFP4_HADAMARD_AMAX,
    nvfp4::NVFP4_DEQUANTIZE_ROWS,
    nvfp4::NVFP4_DEQUANTIZE_COLUMNS,
    nvfp4::NVFP4_DEQUANTIZE_ROWS_INTERLEAVED,
    nvfp4::NVFP4_DEQUANTIZE_COLUMNS_INTERLEAVED,
    nvfp4::NVFP4_CAST_ROWS_GROUPED,
    nvfp4::NVFP4_CAST_COLUMNS_GROUPED,
    nvfp4::NVFP4_CAST_BOTH_GROUPED,
    nvfp4::NVFP4_DEQUANTIZE_ROWS_GROUPED,
    nvfp4::NVFP4_DEQUANTIZE_COLUMNS_GROUPED,
    nvfp4::NVFP4_GEMM_FACTORS,
];
