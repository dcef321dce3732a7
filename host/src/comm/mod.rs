//! Ranks and the collectives among them.
//!
//! A program of one rank uses [`SingleRank`] and is then the same program as that of many. Every collective is
//! enqueued on a stream and ordered with other work on its buffers as a launch is; every rank calls the same
//! collectives in the same order, an empty rank too.

mod communicator;
mod rank;
mod single_rank;

pub use communicator::{Communicator, ReduceMax, ReduceOp, Reducible};
pub use rank::{Rank, WorldSize};
pub use single_rank::SingleRank;
