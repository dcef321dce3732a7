//! All cases, a family of kernels a file.

mod amax;
mod conformance;
mod copy;
mod element;
mod mxfp8;

use crate::case::Case;

pub fn all() -> Vec<Case> {
    [copy::cases(), amax::cases(), mxfp8::cases(), conformance::cases()].into_iter().flatten().collect()
}
