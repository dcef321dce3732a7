//! Benchmarks of Oxtile: kernels on a GPU, timed by device events in turn with torch's implementations.
//!
//! docs/performance/README.md says how and why; [`run::run`] does it.
//!
//! | file | what it holds |
//! |---|---|
//! | `family` | the benchmarks of each kernel family |
//! | `ranks` | what many ranks do together |
//! | `bench`, `pattern`, `random` | what is measured, on which data |
//! | `peers` | torch in a process of its own |
//! | `run`, `rounds` | a run: its families, and rounds in which each side is timed once |
//! | `machine`, `results` | what it ran on, and the raw results |
//! | `statistics`, `render`, `choices`, `chart` | medians, quartiles and intervals, tables, those of what was chosen, drawings |
//! | `status` | the tables of docs/status.md |

#![warn(missing_docs)]

pub mod bench;
pub mod chart;
pub mod choices;
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
pub mod status;
