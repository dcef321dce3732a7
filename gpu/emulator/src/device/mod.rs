//! What a kernel may do: free functions that act for the emulated thread now running.
//!
//! Each must be called from a kernel body under a [`GridRun`](crate::GridRun); elsewhere it panics. A misuse
//! ends the run with a [`Fault`](crate::Fault) that names the caller's source line.
//!
//! A run that ends early unwinds its threads, and their destructors may call these functions: they do nothing then.
//! Reads and votes give zero, shuffles and reductions the caller's value, a test of an mbarrier succeeds.
//!
//! | file | what it holds |
//! |---|---|
//! | `place` | which thread, block and lane, and when |
//! | `memory` | global and shared memory, atomics, fences |
//! | `copies` | copies that run beside the thread: `cp.async`, bulk copies |
//! | `barrier` | barriers of clusters and blocks, mbarriers, sleep |
//! | `warp`, `matrix` | operations of a warp; matrix multiplication |
//! | `checks` | what ends a run |

mod barrier;
mod checks;
mod copies;
mod matrix;
mod memory;
mod place;
mod warp;

pub use {barrier::*, checks::*, copies::*, matrix::*, memory::*, place::*, warp::*};
