//! Virtual GPUs: streams are queues that a seeded scheduler empties when somebody waits.

mod cluster;
mod operation;
mod random;
mod schedule;

pub(crate) use cluster::Cluster;
pub use cluster::EmulatedOptions;
