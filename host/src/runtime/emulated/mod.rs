//! Virtual GPUs: streams are queues that a seeded scheduler empties when a thread waits.
//!
//! | file | what it holds |
//! |---|---|
//! | `cluster` | the back end: one memory, all streams, the scheduler |
//! | `options` | how a cluster is made |
//! | `operation`, `schedule` | what waits in a stream's queue, and the choice of which goes on |
//! | `scheduler`, `streams` | the state of a cluster, how its queues are emptied, and which streams and graphs there are |
//! | `underway` | launches that wait for flags, a piece at a time |
//! | `room` | which work can begin beside what is under way: multiprocessors and hardware queues |
//! | `wait` | host threads that wait, and so do the cluster's work |
//! | `collective`, `reduction` | operations of several ranks, and their sums |
//! | `ranges` | memory of several ranks in one range of addresses |
//! | `clock`, `extent`, `sanitizer`, `race` | which uses of memory are ordered, what bytes they touch, and the report of two that are not |
//! | `log` | what the scheduler did, as spans |
//! | `explore`, `random` | every order of operations, or one drawn from a seed |
//! | `script` | the order of a run, noted or given |
//! | `explain` | the files of `OXTILE_EXPLAIN` |
//! | `protocols`, `tables` | tests: exhaustive searches of signal protocols, and tables that do not grow |

mod clock;
mod cluster;
mod collective;
mod explain;
mod explore;
mod extent;
mod log;
mod operation;
mod options;
#[cfg(test)]
mod protocols;
mod race;
mod random;
mod ranges;
mod reduction;
mod room;
mod sanitizer;
mod schedule;
mod scheduler;
mod script;
mod streams;
#[cfg(test)]
pub(crate) mod tables;
mod underway;
mod wait;

pub(crate) use cluster::Cluster;
pub(crate) use collective::{Call, Group, Part, Region, Transfer};
pub use explore::{Exploration, Explored, explore};
pub use options::EmulatedOptions;
pub use race::{RaceKind, StreamRace, StreamUse};
pub(crate) use ranges::Place;
pub(crate) use reduction::Reduction;
pub(crate) use script::{Decision, Script};
