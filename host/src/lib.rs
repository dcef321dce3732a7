//! Low-precision quantization, attention and sharded GPU work on kernels written in Rust.
#![warn(missing_docs)]

pub mod runtime;

pub use oxtile_kernels as kernels;
pub use oxtile_tile::num;
