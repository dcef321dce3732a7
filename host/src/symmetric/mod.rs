//! Symmetric memory: one arena a rank, one-sided operations on it, and signals.
//!
//! Each rank opens an [`Arena`] and takes the same [buffers](SymmetricBuffer) and [channels](Channel) from it in the same order, so that all
//! ranks know where each other's lie. On a stream it [gets](Peer::get) from and [puts](Peer::put) to its peers; what orders the
//! ranks' streams are [signals](Arena::signal) that carry [epochs](Epoch). A [`Ticket`] stands for a result that other ranks take part in.
//!
//! | file | what it holds |
//! |---|---|
//! | `arena`, `options`, `layout` | one rank's memory, how it is opened, and what is taken from it |
//! | `rendezvous`, `declared` | where the ranks come together, and that every rank takes and calls the same |
//! | `closing`, `failure` | the end of an arena, in order, and out of order by poison |
//! | `awaited`, `watcher` | what streams wait for: which rank is named when a deadline is over, and what ends a host's wait |
//! | `buffer`, `rows`, `contiguous` | buffers that every rank has, by peer, by rows of a peer and as one range of addresses |
//! | `signal`, `handover`, `flags` | words that order the ranks' streams, flags that a graph may hold, and flags that kernels wait for |
//! | `batch` | operations that are enqueued together |
//! | `ticket` | results that other ranks take part in |
//! | `gather` | all-gathers in chunks: fetched, sent, or by a communicator |
//! | `exchange` | all-gather and all-to-all of few bytes, by one kernel |
//! | `backend` | the trait of memory that other ranks reach, and the virtual cluster's |
//! | `vmm`, `nccl`, `nvshmem` | that memory by the CUDA driver, by NCCL and by NVSHMEM |
//!
//! ```
//! use oxtile::comm::{EmulatedCommunicator, WorldSize};
//! use oxtile::symmetric::{Arena, ArenaOptions, Epoch};
//! use oxtile::{Buffer, Result, Runtime};
//!
//! # fn main() -> Result<()> {
//! let runtime = Runtime::emulated(2)?;
//! let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap())?;
//! let arenas: Vec<_> = ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default())).collect::<Result<_>>()?;
//! let mut buffers: Vec<_> = arenas.iter().map(|arena| arena.buffer::<u32>(2)).collect::<Result<_>>()?;
//! let channels: Vec<_> = arenas.iter().map(|arena| arena.channel()).collect::<Result<_>>()?;
//! let streams: Vec<_> = ranks.iter().map(|rank| rank.device().stream()).collect::<Result<_>>()?;
//! let (zero, one) = (arenas[0].rank(), arenas[1].rank());
//!
//! // Rank 1 writes its buffer and signals; rank 0 waits for the signal and gets the buffer.
//! buffers[1].local_mut().copy_from_slice(&streams[1], &[7_u32, 8])?;
//! arenas[1].signal(&streams[1], channels[1], zero, Epoch::ZERO.next())?;
//!
//! arenas[0].wait(&streams[0], channels[0], one, Epoch::ZERO.next())?;
//! let target = Buffer::uninitialised(&streams[0], 2)?;
//! let target = buffers[0].peer(one)?.get(&streams[0], 0..2, target, 0)?.wait()?;
//! assert_eq!(target.to_vec(&streams[0])?, [7, 8]);
//!
//! // No rank frees what another may still read.
//! drop(buffers);
//! let closing: Vec<_> = arenas.into_iter().map(Arena::close).collect::<Result<_, _>>()?;
//! closing.into_iter().try_for_each(|arena| arena.finish())
//! # }
//! ```

mod arena;
mod awaited;
mod backend;
mod batch;
mod buffer;
mod closing;
mod contiguous;
mod declared;
mod exchange;
mod failure;
mod flags;
mod gather;
mod handover;
mod layout;
mod nccl;
mod nvshmem;
mod options;
mod rendezvous;
mod rows;
mod signal;
mod ticket;
pub mod vmm;
mod watcher;

pub use arena::Arena;
pub use backend::{ArenaMemory, Capabilities, SymmetricBackend};
pub use batch::Batch;
pub(crate) use buffer::{Calls, replaced};
pub use buffer::{Peer, SymmetricBuffer};
pub use closing::{CloseError, Closing};
pub use contiguous::{ContiguousView, ContiguousViewMut};
pub use exchange::{Exchange, ExchangeOptions};
pub use flags::{FlagSignals, Flags};
pub use gather::{
    ChunkedGather, CollectiveGather, GatherMemory, Places, PullGather, PushGather, PushMemory, PutOrder, Ready, ReleaseError,
};
pub use handover::Handover;
pub use options::ArenaOptions;
pub use rows::{Pitched, Rows};
pub use signal::{Channel, Epoch};
pub use ticket::Ticket;

pub use crate::rank::{BackendName, FlagName, Step, SymmetricError};
