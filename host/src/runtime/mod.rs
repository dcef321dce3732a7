//! Devices, streams, events, buffers, kernels and graphs, on GPUs or on the CPU emulator.
//!
//! Work is enqueued eagerly on explicit [`Stream`]s and runs in their order. A [`Buffer`] remembers the streams that
//! use it, so that programs need events only for memory that is not a buffer. No call waits unless its documentation states it,
//! and no destructor waits.
//!
//! The same program runs on both kinds of device. On the emulator, streams are queues that a seeded scheduler empties
//! in any order that streams and events allow, when a thread waits. Uses of memory that nothing orders are reported with both
//! uses and where they were enqueued ([`StreamRace`]). Emulated kernels run one at a time, each to its end: one that polls for the signal of another stream's kernel ends with a fault.
//!
//! | file | what it holds |
//! |---|---|
//! | `runtime` | the devices of one kind and the kernels for them |
//! | `device`, `stream` | where work is enqueued |
//! | `event`, `event_pool` | points in a stream, and their reuse |
//! | `graph` | work captured once and replayed with one call (CUDA graphs) |
//! | `buffer`, `element`, `pinned` | memory of devices and of the host, and its elements |
//! | `scoped` | memory of another library, lent to one stream for a scope |
//! | `memory` | which streams used a buffer last, and what must wait for that use |
//! | `usage` | what buffers take, and how often the host waits |
//! | `instances` | one range of every rank's memory as one view |
//! | `library`, `pack` | where compiled kernels are found, in folders and inside the program |
//! | `architecture`, `facts` | which code runs on which device; what a kernel was compiled with |
//! | `module`, `limits` | how kernels are loaded and launched, what a launch may ask for |
//! | `bound` | an operation on given memory, ready to be enqueued |
//! | `error` | what can go wrong |
//! | `patience`, `watch` | how a host waits, its deadline, and what else may end its wait |
//! | `recorder`, `trace` | work timed between events, and the file of `OXTILE_TRACE` |
//! | `backend` | the trait that both kinds of device implement |
//! | `matmul`, `virtual_memory` | what only GPUs do: cuBLASLt's products, and memory mapped by hand |
//! | `cuda` | GPUs |
//! | `emulated` | the virtual cluster |

mod architecture;
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
mod facts;
pub(crate) mod graph;
pub(crate) mod instances;
mod library;
mod limits;
pub(crate) mod matmul;
pub(crate) mod memory;
pub(crate) mod module;
mod pack;
pub(crate) mod patience;
mod pinned;
pub(crate) mod recorder;
#[allow(clippy::module_inception, reason = "the noun")]
pub(crate) mod runtime;
mod scoped;
pub(crate) mod stream;
pub(crate) mod trace;
mod usage;
pub(crate) mod virtual_memory;
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
pub use library::{KernelImage, KernelLibrary, KernelPlace};
pub use module::Loaded;
pub use pinned::PinnedBuffer;
pub use runtime::{AutoRuntime, CudaOptions, Kind, Runtime};
pub use stream::Stream;
pub use usage::DeviceUsage;

pub(crate) use memory::{Memory, Owner, order};
pub(crate) use oxtile_tile::flag::POISON;
pub(crate) use runtime::lock;

pub use oxtile_emulator::{Fault, FaultKind, Mode};
