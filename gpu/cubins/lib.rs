//! Compiled kernels of Oxtile for the architecture that this crate is named after, as `cargo xtask package` packs them. The library `oxtile` takes them from
//! here: there is nothing else to call.
#![no_std]
#![deny(missing_docs)]

/// The pack. It is empty in a checkout, where programs find the kernels that `cargo xtask build-ptx` wrote.
pub static PACK: &[u8] = include_bytes!(env!("OXTILE_PACK"));
