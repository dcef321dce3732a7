//! Low-precision quantization, attention and sharded GPU work on kernels written in Rust.
