//! Benchmarks of Oxtile: kernels on a GPU, timed by device events in turn with torch's implementations.
//!
//! docs/performance/README.md says how and why; [`run::run`] does it.

#![warn(missing_docs)]

pub mod bench;
pub mod chart;
pub mod family;
pub mod machine;
pub mod pattern;
pub mod peers;
pub mod random;
pub mod ranks;
pub mod render;
pub mod results;
pub mod rounds;
pub mod run;
pub mod statistics;
