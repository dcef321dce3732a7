//! NCCL: the communicator of worlds on GPUs, within a host and across hosts.
//!
//! | file | what it holds |
//! |---|---|
//! | `communicator` | a world of ranks, from the first meeting to the end |
//! | `collectives` | the collectives |
//! | `bootstrap` | how ranks exchange NCCL's id and agree on a communicator |
//! | `handle`, `watchdog` | one communicator whose calls have a deadline |
//! | `windows` | memory that NCCL allocates and registers |
//! | `library` | NCCL's shared library |
//! | `fake` | a stand-in for tests |
//!
//! ```no_run
//! use oxtile::comm::{Communicator, NcclCommunicator, NcclOptions, Rank, ReduceOp, WorldSize};
//! use oxtile::{Buffer, Runtime};
//!
//! # fn main() -> oxtile::Result<()> {
//! let world = WorldSize::new(2).unwrap();
//! let id = NcclCommunicator::unique_id()?; // on one rank; the others get its bytes
//! std::thread::scope(|scope| {
//!     for rank in world.ranks() {
//!         scope.spawn(move || -> oxtile::Result<()> {
//!             let device = Runtime::cuda()?.device(rank.index())?;
//!             let stream = device.stream()?;
//!             let comm = NcclCommunicator::join(&device, id, rank, world, &NcclOptions::default())?;
//!             let mut sum = Buffer::from_slice(&stream, &[1.0_f32])?;
//!             comm.all_reduce(&stream, &mut sum, ReduceOp::Sum)?;
//!             comm.synchronize(&stream)?;
//!             assert_eq!(sum.to_vec(&stream)?, [2.0]);
//!             Ok(())
//!         });
//!     }
//! });
//! # Ok(()) }
//! ```

mod bootstrap;
mod collectives;
mod communicator;
#[cfg(test)]
mod fake;
mod handle;
mod library;
mod watchdog;
mod windows;

pub use communicator::{NcclCommunicator, NcclOptions};
pub use library::{NcclVersion, UniqueId};
pub(crate) use windows::{Window, Windows};
