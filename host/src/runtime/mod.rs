//! Devices, streams, events, buffers, kernels and graphs, on GPUs or on the CPU emulator.
//!
//! Work is enqueued eagerly on explicit [`Stream`]s and runs in their order. A [`Buffer`] remembers the streams that
//! use it, so that programs need events only for what is not a buffer. Nothing waits unless its documentation says so,
//! and nothing waits in a destructor.
//!
//! The same program runs on both kinds of device. On the emulator, streams are queues that a seeded scheduler empties
//! in any order that streams and events allow, when somebody waits. Uses of memory that nothing orders are reported with both
//! uses and where they were enqueued ([`StreamRace`]). Emulated kernels run one at a time, each to its end: one that polls for the signal of another stream's kernel ends with a fault.

pub(crate) mod backend;
mod bound;
mod buffer;
mod cuda;
mod device;
mod element;
pub(crate) mod emulated;
mod error;
mod event;
mod event_pool;
mod graph;
pub(crate) mod instances;
mod library;
mod limits;
pub(crate) mod matmul;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod patience;
mod pinned;
pub(crate) mod recorder;
#[allow(clippy::module_inception, reason = "the noun")]
pub(crate) mod runtime;
pub(crate) mod stream;
pub(crate) mod watch;

pub use bound::Bound;
pub use buffer::Buffer;
pub use device::Device;
pub(crate) use device::HOPPER;
pub use element::HostElement;
pub use emulated::{EmulatedOptions, Exploration, Explored, RaceKind, StreamRace, StreamUse, explore};
pub use error::{Error, Result};
pub use event::Event;
pub use graph::Graph;
pub use library::{KernelImage, KernelLibrary};
pub use module::Loaded;
pub use pinned::PinnedBuffer;
pub use runtime::{Choice, CudaOptions, Kind, Runtime};
pub use stream::Stream;

pub(crate) use buffer::{nothing, nothing_mut};
pub(crate) use memory::{Memory, Owner, order};
pub(crate) use oxtile_tile::flag::POISON;
pub(crate) use runtime::lock;

pub use oxtile_emulator::{Fault, FaultKind, Mode};
