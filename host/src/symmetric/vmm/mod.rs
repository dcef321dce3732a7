//! Symmetric memory of physical allocations that the ranks of a host map into each other's addresses.
//!
//! A [`FlatView`] is opened by all ranks together: each allocates, and passes its allocation on to the others, as a file descriptor to other processes
//! (`SCM_RIGHTS`) and as a handle within one; each maps all allocations into one range of addresses. It either succeeds on every rank or fails on
//! every rank with one error that names the rank that failed and the [`Step`](super::Step); nothing is left of it then.
//!
//! | file | what it holds |
//! |---|---|
//! | `flat` | all ranks' memory in one range of addresses |
//! | `record` | what ranks tell each other of their memory |
//! | `exchange` | file descriptors from process to process |
//! | `allocation` | what owns the results of the driver's calls |
//! | `memfd` | host memory in place of a GPU's |
//! | `backend` | the back end `vmm` |
//!
//! The calls of the CUDA driver are the trait [`Driver`]. [`Memfd`] does the same with files in memory:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use oxtile::comm::{Meeting, Rank, WorldSize, bootstrap};
//! use oxtile::symmetric::vmm::{Driver, FlatOptions, FlatView, Memfd};
//!
//! # fn main() -> oxtile::Result<()> {
//! let world = WorldSize::new(2).expect("not zero");
//! let options = FlatOptions { bytes: 1000, layout: 0, share_devices: false, deadline: Duration::from_secs(30) };
//! let rank = |store: bootstrap::Store| -> oxtile::Result<()> {
//!     let (rank, board) = (store.rank(), Arc::new(store.into_board()?));
//!     let driver: Arc<dyn Driver> = Arc::new(Memfd::new([rank.index() as u8; 16]));
//!     let view = FlatView::open(&driver, &Meeting::new(board.clone(), rank, world, "example"), options, |_| Ok(()))?;
//!     assert_eq!(view.address(rank) - view.address(Rank::ZERO), u64::from(rank.index()) * view.stride());
//!     board.close()
//! };
//! let stores = bootstrap::threads(world, Duration::from_secs(30))?;
//! std::thread::scope(|scope| {
//!     let threads: Vec<_> = stores.into_iter().map(|store| scope.spawn(|| rank(store))).collect();
//!     threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
//! })
//! # }
//! ```
//!
//! Sources: CUDA driver API, "Virtual Memory Management"; CUDA C++ Programming Guide, "Virtual Memory Management"; unix(7); NCCL `src/allocator.cc` and
//! `src/os/linux_ipcsocket.cc`.

mod allocation;
mod backend;
mod exchange;
mod flat;
mod memfd;
mod record;

pub(super) use backend::Vmm;
pub use flat::{FlatOptions, FlatView};
pub use memfd::Memfd;
pub(super) use record::process;

pub use crate::runtime::virtual_memory::{Driver, Handle};
