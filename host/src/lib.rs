//! Low-precision quantization, attention and sharded GPU work on kernels written in Rust.
#![warn(missing_docs)]

pub mod runtime;
pub mod tensor;

pub use oxtile_kernels as kernels;
pub use oxtile_tile::num;
pub use runtime::{Buffer, Device, EmulatedOptions, Error, Event, Graph, HostElement, Kind, Loaded, PinnedBuffer, Result, Runtime, Stream};
pub use tensor::DeviceTable;
