//! Virtual GPUs: streams are queues that a seeded scheduler empties when somebody waits.

mod clock;
mod cluster;
mod collective;
mod explore;
mod log;
mod operation;
mod options;
#[cfg(test)]
mod protocols;
mod race;
mod random;
mod ranges;
mod reduction;
mod sanitizer;
mod schedule;
mod scheduler;
#[cfg(test)]
pub(crate) mod tables;
mod wait;

pub(crate) use cluster::Cluster;
pub(crate) use collective::{Call, Group, Part, Region, Transfer};
pub use explore::{Exploration, Explored, explore};
pub use options::EmulatedOptions;
pub use race::{RaceKind, StreamRace, StreamUse};
pub(crate) use ranges::Place;
pub(crate) use reduction::Reduction;
