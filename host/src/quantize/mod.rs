//! Low-precision formats, on the kernels of [`oxtile_kernels`].
//!
//! Each type here holds loaded kernels: make it once, use it for every tensor. Calls enqueue and return.

mod amax;
pub mod mxfp8;

pub use amax::{Amax, MultiAmax, MultiAmaxPlan};
pub use mxfp8::{Mxfp8, Mxfp8Tensor};
