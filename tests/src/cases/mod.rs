//! All cases, a family of kernels a file.

mod activation;
mod amax;
mod attention;
mod attention_backward;
mod attention_backward_general;
mod attention_backward_limits;
mod attention_backward_pass;
mod attention_backward_portable;
mod attention_fp8;
mod attention_general;
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
mod element;
mod exchange;
mod fp8;
mod gemm;
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
mod shards;

use crate::case::Case;

pub fn all() -> Vec<Case> {
    [
        copy::cases(),
        exchange::cases(),
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
        quantized_gemm::cases(),
        attention::cases(),
        attention_backward::cases(),
        attention_backward_general::cases(),
        attention_backward_limits::cases(),
        attention_backward_portable::cases(),
        attention_fp8::cases(),
        attention_general::cases(),
        attention_nan::cases(),
        attention_portable::cases(),
        attention_ring::cases(),
        attention_limits::cases(),
        attention_split::cases(),
        attention_steps::cases(),
        conformance::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
