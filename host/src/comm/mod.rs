//! Ranks and the collectives among them.
//!
//! A program of one rank uses [`SingleRank`] and is then the same program as that of many; [`EmulatedCommunicator`] gives
//! the ranks of a virtual cluster, [`NcclCommunicator`] those of worlds on GPUs, [`HostRank`] those of one host that reach each other's
//! memory. Every collective is
//! enqueued on a stream and ordered with other work on its buffers as a launch is; every rank calls the same
//! collectives in the same order, an empty rank too.

mod board;
pub mod bootstrap;
mod communicator;
mod emulated;
mod group;
mod host_rank;
mod meeting;
mod nccl;
mod operand;
mod rank;
mod sequence;
mod single_rank;
mod team;
mod team_board;
mod virtual_rank;

pub use board::Board;
#[cfg(test)]
pub(crate) use board::LocalBoard;
pub use communicator::{Communicator, DType, ReduceMax, ReduceOp, Reducible};
pub use emulated::EmulatedCommunicator;
pub use host_rank::HostRank;
pub use meeting::{ArenaRank, Meeting};
pub use nccl::{NcclCommunicator, NcclOptions, NcclVersion, UniqueId};
pub(crate) use nccl::{Window, Windows};
pub use rank::{Rank, WorldSize};
pub(crate) use sequence::Sequence;
pub use single_rank::SingleRank;
pub use team::{Member, Team};
