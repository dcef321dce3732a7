//! The emulator's side: every operation goes to [`oxtile_emulator::device`], with the source line of
//! the kernel that asked for it (`#[track_caller]` all the way up).
//!
//! | file | what it holds |
//! |---|---|
//! | `memory`, `copy` | global and shared memory, atomics; `cp.async` and bulk copies |
//! | `synchronise`, `cluster` | barriers, warp operations, mbarriers, fences; clusters |
//! | `matrix` | matrix instructions |
//! | `convert`, `approximate` | number formats |

extern crate std;

mod approximate;
mod cluster;
mod convert;
mod copy;
mod matrix;
mod memory;
mod synchronise;

use oxtile_emulator::device;

use super::families::{Control, Identity};

/// The CPU emulator.
pub struct Emulated;

impl Identity for Emulated {
    #[inline(always)]
    #[track_caller]
    fn thread() -> u32 {
        device::thread_index()[0]
    }

    #[inline(always)]
    #[track_caller]
    fn threads() -> u32 {
        device::block_dimensions()[0]
    }

    #[inline(always)]
    #[track_caller]
    fn lane() -> u32 {
        device::lane()
    }

    #[inline(always)]
    #[track_caller]
    fn block() -> [u32; 3] {
        device::block_index()
    }

    #[inline(always)]
    #[track_caller]
    fn blocks() -> [u32; 3] {
        device::grid_dimensions()
    }

    #[inline(always)]
    #[track_caller]
    fn timer() -> u64 {
        device::step_clock()
    }
}

impl Control for Emulated {
    const CHECKED: bool = true;

    #[inline(always)]
    #[track_caller]
    fn trap() -> ! {
        device::trap()
    }

    #[inline(always)]
    #[track_caller]
    fn sleep(nanoseconds: u32) {
        device::nanosleep(nanoseconds);
    }

    #[cold]
    #[track_caller]
    fn out_of_bounds(address: u64, index: u64, length: u64) -> ! {
        device::view_out_of_bounds(address, index, length)
    }

    #[cold]
    #[track_caller]
    fn out_of_bounds_shared(address: u32, bytes: u32, index: u64, length: u64) -> ! {
        device::shared_out_of_bounds(address, bytes, index, length)
    }
}
