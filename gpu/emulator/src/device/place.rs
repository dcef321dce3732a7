//! Where the thread is, and when.

use crate::thread::current;

/// This thread's index in its block (`%tid`).
#[track_caller]
#[inline]
pub fn thread_index() -> [u32; 3] {
    current().index
}

/// This block's index in the grid (`%ctaid`).
#[track_caller]
#[inline]
pub fn block_index() -> [u32; 3] {
    current().block().index
}

/// Threads of a block in each dimension (`%ntid`).
#[track_caller]
#[inline]
pub fn block_dimensions() -> [u32; 3] {
    current().worker().grid().launch.block
}

/// Blocks of the grid in each dimension (`%nctaid`).
#[track_caller]
#[inline]
pub fn grid_dimensions() -> [u32; 3] {
    current().worker().grid().launch.grid
}

/// This block's number in its cluster (`%cluster_ctarank`).
#[track_caller]
#[inline]
pub fn cluster_rank() -> u32 {
    current().block().rank
}

/// This thread's lane in its warp (`%laneid`).
#[track_caller]
#[inline]
pub fn lane() -> u32 {
    current().lane()
}

/// This thread's warp in its block.
#[track_caller]
#[inline]
pub fn warp() -> u32 {
    current().warp_number()
}

/// The emulator's clock, in nanoseconds of emulated time (`%globaltimer`): it grows with every scheduling step.
#[track_caller]
#[inline]
pub fn step_clock() -> u64 {
    current().worker().steps.get()
}
