//! Ranks and the collectives among them.
//!
//! A program of one rank uses [`SingleRank`], so that the same program runs with many; [`EmulatedCommunicator`] gives
//! the ranks of a virtual cluster, [`NcclCommunicator`] those of worlds on GPUs, [`HostRank`] those of one host that reach each other's
//! memory. Every collective is
//! enqueued on a stream and ordered with other work on its buffers as a launch is; every rank calls the same
//! collectives in the same order, an empty rank too. [`Rank`] and [`WorldSize`] themselves lie in `host/src/rank`, below the runtime.
//!
//! | file | what it holds |
//! |---|---|
//! | `communicator` | the trait: all-gather, all-reduce and what else ranks do together |
//! | `single_rank` | a world of one rank |
//! | `emulated`, `virtual_rank` | ranks of a virtual cluster |
//! | `nccl` | ranks on GPUs |
//! | `group`, `operand` | calls that are made as one, and the memory that a call reads or writes |
//! | `team`, `team_board` | some ranks of a world, and their part of its board |
//! | `host_rank` | ranks of one host that reach each other's memory |
//! | `meeting` | where the ranks of an arena meet |
//! | `sequence` | whether all ranks call the same, in one order |

mod communicator;
mod emulated;
mod group;
mod host_rank;
mod meeting;
mod nccl;
mod operand;
mod sequence;
mod single_rank;
mod team;
mod team_board;
mod virtual_rank;

pub use communicator::{Communicator, ReduceMax, Reducible};
pub use emulated::EmulatedCommunicator;
pub use host_rank::HostRank;
pub use meeting::{ArenaRank, Meeting};
pub use nccl::{NcclCommunicator, NcclOptions, NcclVersion, UniqueId};
pub(crate) use nccl::{Window, Windows};
pub(crate) use sequence::Sequence;
pub use single_rank::SingleRank;
pub use team::{Member, Team};

pub use crate::bootstrap::{self, Board};
pub use crate::rank::{DType, Rank, ReduceOp, WorldSize};
