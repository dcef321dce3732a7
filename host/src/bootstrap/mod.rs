//! How the ranks of a job find one another, before there is a communicator.
//!
//! A launcher (`oxtile launch`, torchrun, srun, mpirun) tells each process its rank by variables, which [`Environment`] reads.
//! [`Store::connect`] is the rendezvous: rank 0 listens, all connect, and all return when the last has come. The [`Store`] then
//! carries what must be agreed on before GPUs can talk: it gathers bytes of all ranks, broadcasts those of one, waits for all.
//!
//! Every wait has a deadline. A rank that ends, or does not come in time, is an error on every other rank that names it
//! ([`BootstrapError`]); after an error the store cannot be used any more, and a new rendezvous makes a new one. Ranks may be threads
//! of one process: [`threads`].
//!
//! | file | what it holds |
//! |---|---|
//! | `environment`, `job` | what a launcher tells a process: its rank, rank 0's address, the job |
//! | `rendezvous`, `search`, `connecting`, `lookup` | how ranks come together at rank 0, on whichever of its ports and addresses |
//! | `handshake` | how both ends of a connection prove that they are of one job |
//! | `door` | where connections come in at rank 0, and stay until they have proved it |
//! | `server` | what rank 0 runs for all |
//! | `store` | what connected ranks exchange |
//! | `board`, `store_board` | notes that all ranks can read, in one process and over a store |
//! | `frame`, `wire` | what goes over a connection |
//! | `parsed` | tests: what holds for any bytes that come over one |
//! | `at_exit` | threads that other processes need when this one ends |
//!
//! ```
//! use std::time::Duration;
//! use oxtile::comm::{WorldSize, bootstrap};
//!
//! let world = WorldSize::new(3).expect("not zero");
//! let ranks = bootstrap::threads(world, Duration::from_secs(30))?;
//! std::thread::scope(|scope| {
//!     for mut store in ranks {
//!         scope.spawn(move || {
//!             let said = format!("hello from {}", store.rank());
//!             let all = store.all_gather(said.as_bytes())?;
//!             assert_eq!(all[2], b"hello from rank 2");
//!             store.close()
//!         });
//!     }
//! });
//! # Ok::<(), bootstrap::BootstrapError>(())
//! ```
//!
//! It is not a way to move data: one process holds every byte that is exchanged.

mod at_exit;
pub(crate) mod board;
mod connecting;
mod door;
mod environment;
mod frame;
mod handshake;
mod job;
mod lookup;
#[cfg(any(test, fuzzing))]
pub mod parsed;
mod rendezvous;
mod search;
mod server;
mod store;
mod store_board;
mod wire;

pub use board::Board;
pub use environment::{Environment, MOST_RANKS, OVERRIDES_OF_MASTER_PORT};
pub use job::JobId;
pub use rendezvous::threads;
pub use store::Store;
pub use store_board::StoreBoard;

pub use crate::rank::BootstrapError;
pub use crate::rank::launcher::Launcher;
