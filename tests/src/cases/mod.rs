//! All cases, a family of kernels a file.

mod amax;
mod conformance;
mod copy;
mod element;
mod fp8;
mod gemm;
mod interleave;
mod mxfp8;
mod mxfp8_columns;
mod nvfp4;

use crate::case::Case;

pub fn all() -> Vec<Case> {
    [
        copy::cases(),
        amax::cases(),
        fp8::cases(),
        mxfp8::cases(),
        mxfp8_columns::cases(),
        nvfp4::cases(),
        interleave::cases(),
        gemm::cases(),
        conformance::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
