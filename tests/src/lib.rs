//! Oracles, test inputs and the test binary of Oxtile.

pub mod inputs;
pub mod oracle;

#[cfg(test)]
#[path = "../golden/golden.rs"]
mod golden;
#[cfg(test)]
#[path = "../golden/mxfp8.rs"]
mod golden_mxfp8;
