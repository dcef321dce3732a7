//! A CPU emulator of a CUDA grid: SIMT scheduler, asynchronous engine, race detector.
//!
//! One coroutine runs each CUDA thread. A kernel calls the free functions of [`device`]; the host side
//! allocates a [`Memory`], describes a [`Launch`] and runs it as a [`GridRun`], either fast (bounds checks
//! only, blocks on a worker pool) or checked (one OS thread, seeded interleaving, every detector on).
//!
//! ```
//! use oxtile_emulator::{GridRun, Launch, Memory, Options, ReadOrder, WriteOrder, device};
//!
//! fn double(arguments: &[u64]) {
//!     let at = u64::from(device::block_index()[0] * 64 + device::thread_index()[0]) * 4;
//!     let value = u32::from_le_bytes(device::global_read(arguments[0] + at, ReadOrder::ReadOnly));
//!     device::global_write(arguments[1] + at, (2 * value).to_le_bytes(), WriteOrder::Weak);
//! }
//!
//! let memory = Memory::new();
//! let (input, output) = (memory.allocate("input", 1024, 0), memory.allocate("output", 1024, 0));
//! memory.write(input, &[1; 1024])?;
//! let launch = Launch::new("double", 4, 64, double).arguments(&[input, output]);
//! GridRun::new(&memory, launch, Options::check(7))?.run()?;
//! let mut result = [0; 1024];
//! memory.read(output, &mut result)?;
//! assert_eq!(result, [2; 1024]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate knows nothing of tiles or tensors: addresses, bytes, barriers and lanes are all it sees.
//!
//! | file | what it holds |
//! |---|---|
//! | `device` | what a kernel may do |
//! | `launch`, `grid_run` | a launch as a value, and its run |
//! | `grid`, `cluster`, `block`, `thread`, `worker` | what is under way, from the grid to a thread; the share of one operating system thread |
//! | `scheduler`, `random` | which warp goes on |
//! | `schedule`, `replay`, `story` | the turns of a run, to give them to another one and to tell them in words |
//! | `warp`, `collective`, `mma`, `wgmma`, `operand`, `format` | operations that several threads carry out together; matrix products, their operands in shared memory and their numbers |
//! | `barrier`, `mbarrier`, `meeting`, `copy_group` | what threads wait for |
//! | `access`, `async_copy`, `atomic`, `order` | loads and stores, copies that finish later, atomics, memory orders |
//! | `tensor_map`, `swizzle` | descriptors of TMA, and permutations of 16-byte chunks |
//! | `memory`, `reservation`, `words` | device memory, its addresses and bytes |
//! | `detector`, `shadow`, `clock`, `history`, `initialisation` | races and bytes that were never written, within a grid and across grids |
//! | `known`, `streams` | streams that copy and signal beside grids |
//! | `shared_layout` | what pieces of shared memory are called |
//! | `divergence` | threads that part before a collective |
//! | `fault`, `site`, `report`, `cost`, `phases` | what a run reports: errors, source lines, counts, costs of accesses, phases of mbarriers |
//! | `mutation`, `replacement` | kernels broken on purpose; kernels compiled after the program |
//! | `stack`, `stack_overflow`, `panic_hook` | the stacks of coroutines, and how they end |
#![deny(missing_docs)]

mod access;
mod async_copy;
mod atomic;
mod barrier;
mod block;
mod clock;
mod cluster;
mod collective;
mod copy_group;
mod cost;
mod detector;
pub mod device;
mod divergence;
mod fault;
mod format;
mod grid;
mod grid_run;
mod history;
mod initialisation;
mod known;
mod launch;
mod mbarrier;
mod meeting;
mod memory;
mod mma;
pub mod mutation;
mod operand;
mod order;
mod panic_hook;
mod phases;
mod random;
pub mod replacement;
mod replay;
mod report;
mod reservation;
mod schedule;
mod scheduler;
mod shadow;
mod shared_layout;
mod site;
mod stack;
#[cfg(unix)]
mod stack_overflow;
mod story;
mod streams;
mod swizzle;
pub mod tensor_map;
mod thread;
mod warp;
pub mod wgmma;
mod words;
mod worker;

pub use atomic::Atomic;
pub use cost::LineCost;
pub use fault::{Fault, FaultKind, Involved};
pub use format::Format;
pub use grid::Progress;
pub use grid_run::GridRun;
pub use known::{Agent, Known};
pub use launch::{Launch, Mode, Options, Policy, TensorName};
pub use memory::{Found, Memory, MemoryError};
pub use order::{AtomicOp, AtomicOrder, Group, ReadOrder, ReduceOp, Scope, ShuffleMode, Space, VoteMode, WriteOrder};
pub use panic_hook::quietly;
pub use phases::Phase;
pub use report::{BoxCopy, Report, SiteUse, SyncSite};
pub use reservation::Reservation;
pub use schedule::{Actor, Schedule, Sentence, Turn};
pub use shared_layout::{SharedField, SharedLayout};
