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

/// The indices in `0..width` at which this thread's pieces of `step` elements begin, when the block's threads take them in turn:
/// `index() * step`, and on by `step` times the threads of the block. The last piece may end after `width`.
///
/// ```no_run
/// use oxtile_tile::prelude::*;
///
/// fn sum_of_row(row: &Global<bf16>) -> f32 {
///     let mut sum = 0.0;
///     for at in thread::stride(row.len(), 8) {
///         sum += row.load_vector(at).to_f32().iter().sum::<f32>();
///     }
///     warp::sum_f32(sum)
/// }
/// ```
#[inline(always)]
#[track_caller]
pub fn stride(width: u64, step: u32) -> Stride {
    Stride { at: u64::from(index()) * u64::from(step), width, step: u64::from(Target::threads()) * u64::from(step) }
}

/// What [`stride`] gives.
#[derive(Debug, Clone)]
pub struct Stride {
    at: u64,
    width: u64,
    step: u64,
}

impl Iterator for Stride {
    type Item = u64;

    #[inline(always)]
    fn next(&mut self) -> Option<u64> {
        let at = self.at;
        self.at += self.step;
        (at < self.width).then_some(at)
    }
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
