//! Oracles, test inputs and the test binary of Oxtile.
//!
//! | file | what it holds |
//! |---|---|
//! | `cases` | the cases, by families of kernels |
//! | `case`, `backend`, `sweep` | what a case is, and how it compares; cases on each back end; casts of all numbers |
//! | `oracle` | references in plain Rust |
//! | `inputs` | test tensors of difficult values |
//! | `mutation` | mutants that the emulator must report |
//! | `coverage` | which built instances no case launches |
//! | `golden` | the GPU's bytes of the conformance kernels |
//! | `launches`, `replacement` | which kernels each case launches; the cases of one kernel; kernels that were compiled after the case binary |
//! | `driver`, `times` | the driver by its name; how long each case took |

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
