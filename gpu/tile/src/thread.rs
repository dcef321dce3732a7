//! The calling thread.

use crate::arch::{Control, Identity, Target};

/// Its index in the block.
#[inline(always)]
#[track_caller]
pub fn index() -> u32 {
    Target::thread()
}

/// Its lane in the warp, 0 to 31.
#[inline(always)]
#[track_caller]
pub fn lane() -> u32 {
    Target::lane()
}

/// Its warp in the block.
#[inline(always)]
#[track_caller]
pub fn warp() -> u32 {
    index() / crate::warp::LANES
}

/// Sleeps for about `nanoseconds`, at most about a millisecond: the back-off of a bounded spin.
#[inline(always)]
#[track_caller]
pub fn sleep(nanoseconds: u32) {
    Target::sleep(nanoseconds);
}

/// Nanoseconds on the device's clock, which ticks in steps of up to a microsecond; on the emulator the number of its steps.
/// PTX `%globaltimer`.
#[inline(always)]
#[track_caller]
pub fn timer() -> u64 {
    Target::timer()
}

/// Ends the whole grid with an error.
#[inline(always)]
#[track_caller]
pub fn trap() -> ! {
    Target::trap()
}
