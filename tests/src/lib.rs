//! Oracles, test inputs and the test binary of Oxtile.

pub mod driver;
pub mod inputs;
pub mod launches;
pub mod oracle;

#[cfg(test)]
#[path = "../golden/golden.rs"]
mod golden;
#[cfg(test)]
#[path = "../golden/fp8.rs"]
mod golden_fp8;
#[cfg(test)]
#[path = "../golden/hex.rs"]
mod golden_hex;
#[cfg(test)]
#[path = "../golden/mxfp8.rs"]
mod golden_mxfp8;
#[cfg(test)]
#[path = "../golden/nvfp4.rs"]
mod golden_nvfp4;
#[cfg(test)]
#[path = "../golden/nvfp4_reference.rs"]
mod golden_nvfp4_reference;
