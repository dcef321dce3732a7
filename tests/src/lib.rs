//! Oracles, test inputs and the test binary of Oxtile. References in plain Rust and tensors of difficult values are a crate of their own,
//! `oxtile-oracle`, which is optimised more than the cases.
//!
//! | file | what it holds |
//! |---|---|
//! | `cases` | the cases, by families of kernels |
//! | `case`, `backend`, `sweep` | what a case is, and how it compares; cases on each back end; casts of all numbers |
//! | `mutation` | mutants that the emulator must report |
//! | `coverage` | which built instances no case launches |
//! | `golden` | the GPU's bytes of the conformance kernels |
//! | `launches`, `replacement` | which kernels each case launches; the cases of one kernel; kernels that were compiled after the case binary |
//! | `driver`, `times` | the driver by its name; how long each case took |

pub mod driver;
pub mod launches;

pub use oxtile_oracle as oracle;
pub use oxtile_oracle::inputs;
