//! The GPU kernels of Oxtile. One family a file; each compiles to PTX and runs on the emulator.
#![no_std]
#![warn(missing_docs)]

pub mod copy;

use oxtile_tile::launch::KernelFamily;

/// Every kernel of this crate. A test holds it against the sources.
pub const KERNELS: &[KernelFamily] = &[copy::COPY_WORDS];
