//! A CPU emulator of a CUDA grid: SIMT scheduler, asynchronous engine, race detector.
//!
//! One coroutine runs each CUDA thread. A kernel calls the free functions of [`device`]; the host side
//! allocates a [`Memory`], describes a [`Launch`] and runs it as a [`GridRun`], either fast (bounds checks
//! only, blocks on a worker pool) or checked (one OS thread, seeded interleaving, every detector on).
//!
//! The crate knows nothing of tiles or tensors: addresses, bytes, barriers and lanes are all it sees.
#![warn(missing_docs)]

pub mod device;
mod order;
pub mod tensor_map;

pub use order::{AtomicOp, AtomicOrder, Group, ReadOrder, ReduceOp, Scope, ShuffleMode, Space, VoteMode, WriteOrder};
