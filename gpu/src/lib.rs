//! The GPU kernels of Oxtile, written in Rust.
