//! All cases, a family of kernels a file.
//!
//! | file | what it holds |
//! |---|---|
//! | `amax`, `copy`, `exchange`, `fill`, `gemm`, `gemm_gathered`, `gemm_grouped`, `gemm_portable`, `shards`, `activation`, `conformance` | kernels of that name |
//! | `gemm_blocks` | FP8 codes with a scale for every block |
//! | `gemm_transposed` | products of 8-bit operands that do not lie along the sum |
//! | `gemm_epilogue` | what a product keeps and reads beside its result |
//! | `gathered_product`, `gemm_gathered_limits`, `gemm_scattered` | a product of which an operand arrives, for the others; flags that do not come, and what is refused; parts that arrive and are added, and tiles that leave |
//! | `conformance_parameters` | conformance kernels whose parameters are structs |
//! | `attention`, `attention_general`, `attention_nan` | forward attention: dense tensors; any layout and option; values that are NaN |
//! | `attention_limits`, `attention_backward_limits`, `attention_backward_limits_wide` | what the forward kernels refuse, the backward ones, and those of wide heads |
//! | `attention_heads` | tensors with strides, and parts of them |
//! | `attention_arriving`, `attention_arriving_packed` | attention of a rank whose keys arrive while the kernel runs; of packed sequences |
//! | `attention_ring`, `attention_steps` | steps of a ring: merged in place; first, middle and last ones |
//! | `attention_split`, `attention_fp8`, `attention_fp8_sequences`, `attention_portable` | divided keys; 8 bits; 8 bits of packed sequences and with options; any GPU |
//! | `attention_backward`, `attention_backward_general`, `attention_backward_wide`, `attention_backward_portable` | the backward pass: dense tensors; sequences and options; heads above 128; any GPU |
//! | `attention_problem`, `attention_backward_pass` | a problem of attention in any layout, and its gradients, for the others |
//! | `fp8` | FP8 |
//! | `mxfp8`, `mxfp8_columns`, `mxfp8_fused`, `mxfp8_bias` | MXFP8: by rows; by columns and in both directions; fused; with bias gradients |
//! | `nvfp4`, `nvfp4_columns`, `nvfp4_variants`, `nvfp4_sweeps` | NVFP4: by rows; by columns, Hadamard, stochastic; other rules; all numbers |
//! | `interleave`, `interleaved` | interleaved scales; casts that write them and kernels that read them |
//! | `grouped`, `grouped_fp8` | groups of matrices |
//! | `nvfp4_shards`, `grouped_shards`, `in_turn` | shards quantized by ranks; ranks that take turns on one device |
//! | `quantized_gemm` | products of quantized matrices |
//! | `approximate` | functions that hardware approximates |
//! | `rms_norm`, `rotary`, `cross_entropy`, `embedding`, `adamw`, `sum_parts` | kernels of that name, forward and backward |
//! | `thd`, `thd_rows`, `thd_correct` | packed sequences that ranks share: the sequences of launches; rows that move; what a step of a ring adds |
//! | `element` | the wide element types, for the others |

mod activation;
mod adamw;
mod amax;
mod approximate;
mod attention;
mod attention_arriving;
mod attention_arriving_packed;
mod attention_backward;
mod attention_backward_general;
mod attention_backward_limits;
mod attention_backward_limits_wide;
mod attention_backward_pass;
mod attention_backward_portable;
mod attention_backward_wide;
mod attention_fp8;
mod attention_fp8_sequences;
mod attention_general;
mod attention_heads;
mod attention_limits;
mod attention_nan;
mod attention_portable;
mod attention_problem;
mod attention_ring;
mod attention_split;
mod attention_steps;
mod conformance;
mod conformance_parameters;
mod copy;
mod cross_entropy;
mod element;
mod embedding;
mod exchange;
mod fill;
mod fp8;
mod gathered_product;
mod gemm;
mod gemm_blocks;
mod gemm_epilogue;
mod gemm_gathered;
mod gemm_gathered_limits;
mod gemm_grouped;
mod gemm_portable;
mod gemm_scattered;
mod gemm_transposed;
mod grouped;
mod grouped_fp8;
mod grouped_shards;
mod in_turn;
mod interleave;
mod interleaved;
mod mxfp8;
mod mxfp8_bias;
mod mxfp8_columns;
mod mxfp8_fused;
mod nvfp4;
mod nvfp4_columns;
mod nvfp4_shards;
mod nvfp4_sweeps;
mod nvfp4_variants;
mod quantized_gemm;
mod rms_norm;
mod rotary;
mod shards;
mod sum_parts;
mod thd;
mod thd_correct;
mod thd_rows;

use crate::case::Case;

pub fn all() -> Vec<Case> {
    [
        copy::cases(),
        exchange::cases(),
        fill::cases(),
        amax::cases(),
        fp8::cases(),
        mxfp8::cases(),
        mxfp8_columns::cases(),
        mxfp8_fused::cases(),
        mxfp8_bias::cases(),
        nvfp4::cases(),
        activation::cases(),
        nvfp4_columns::cases(),
        nvfp4_shards::cases(),
        nvfp4_sweeps::cases(),
        nvfp4_variants::cases(),
        interleave::cases(),
        interleaved::cases(),
        shards::cases(),
        grouped::cases(),
        grouped_fp8::cases(),
        grouped_shards::cases(),
        gemm::cases(),
        gemm_blocks::cases(),
        gemm_epilogue::cases(),
        gemm_gathered::cases(),
        gemm_scattered::cases(),
        gemm_grouped::cases(),
        gemm_portable::cases(),
        gemm_transposed::cases(),
        quantized_gemm::cases(),
        attention::cases(),
        attention_backward::cases(),
        attention_backward_general::cases(),
        attention_arriving::cases(),
        attention_arriving_packed::cases(),
        attention_backward_limits::cases(),
        attention_backward_limits_wide::cases(),
        attention_backward_portable::cases(),
        attention_backward_wide::cases(),
        attention_fp8::cases(),
        attention_fp8_sequences::cases(),
        attention_general::cases(),
        attention_heads::cases(),
        attention_nan::cases(),
        attention_portable::cases(),
        attention_ring::cases(),
        attention_limits::cases(),
        attention_split::cases(),
        attention_steps::cases(),
        conformance::cases(),
        approximate::cases(),
        rms_norm::cases(),
        rotary::cases(),
        cross_entropy::cases(),
        embedding::cases(),
        adamw::cases(),
        sum_parts::cases(),
        thd::cases(),
        thd_rows::cases(),
        thd_correct::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
