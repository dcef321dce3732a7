//! The block of threads (CTA): its place in the grid, reductions over its threads.

use core::fmt::{self, Write};

use crate::arch::{Barrier, Identity, Target};
use crate::shared::{SharedArray, SharedStorage};
use crate::warp;

/// The block's index in the grid: x, y, z.
#[inline(always)]
#[track_caller]
pub fn index() -> [u32; 3] {
    Target::block()
}

/// Blocks of the grid: x, y, z.
#[inline(always)]
#[track_caller]
pub fn count() -> [u32; 3] {
    Target::blocks()
}

/// Threads of the block.
#[inline(always)]
#[track_caller]
pub fn threads() -> u32 {
    Target::threads()
}

/// Waits for all threads of the block and orders their shared and global accesses.
///
/// All threads must call it at the same place.
#[inline(always)]
#[track_caller]
pub fn sync() {
    Target::sync(0, threads());
}

/// The shared memory of a block reduction: one word a warp.
#[derive(Clone, Copy)]
pub struct ReduceStorage {
    partial: SharedArray<u32, 32>,
}

impl SharedStorage for ReduceStorage {
    const SIZE: u32 = <SharedArray<u32, 32> as SharedStorage>::SIZE;
    const ALIGN: u32 = <SharedArray<u32, 32> as SharedStorage>::ALIGN;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        // SAFETY: passed on to the caller; this is that array.
        Self { partial: unsafe { SharedArray::at(address) } }
    }

    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        <SharedArray<u32, 32> as SharedStorage>::name_part(offset, bytes, name)
    }
}

/// The maximum of `value` over the block, in every lane of warp 0; other warps get their own warp's.
///
/// All threads of the block call it; contains one block barrier. The storage may be used again after
/// the next block barrier. Unsigned order is also the order of the bits of non-negative floats.
#[inline(always)]
#[track_caller]
pub fn max_u32(value: u32, storage: ReduceStorage) -> u32 {
    let of_warp = warp::max_u32(value);
    let (this_warp, lane) = (crate::thread::warp(), crate::thread::lane());
    if lane == 0 {
        storage.partial.store(this_warp, of_warp);
    }
    sync();
    if this_warp != 0 {
        return of_warp;
    }
    let warps = threads().div_ceil(warp::LANES);
    let partial = if lane < warps { storage.partial.load(lane) } else { 0 };
    warp::max_u32(partial)
}

/// The sum of `value` over the block, in every thread: of each warp by [`warp::sum_f32`], then of the warps' sums by the same, so that the bits are
/// the same every run, on every target. A NaN in any thread gives NaN.
///
/// All threads of the block call it; contains one block barrier. The storage may be used again after the next block barrier. Blocks are of whole
/// warps.
#[inline(always)]
#[track_caller]
pub fn sum_f32(value: f32, storage: ReduceStorage) -> f32 {
    warp::sum_f32(of_warps(warp::sum_f32(value), 0.0, storage))
}

/// The maximum of `value` over the block, in every thread, by [`num::max`](crate::num::max): a NaN loses to a number, all NaN give 0x7FFFFFFF, and
/// +0 is above -0.
///
/// All threads of the block call it; contains one block barrier. The storage may be used again after the next block barrier. Blocks are of whole
/// warps.
#[inline(always)]
#[track_caller]
pub fn max_f32(value: f32, storage: ReduceStorage) -> f32 {
    warp::max_f32(of_warps(warp::max_f32(value), f32::NAN, storage))
}

/// In lane `i` of every warp the value of warp `i`, or `none` where there is no such warp.
#[inline(always)]
#[track_caller]
fn of_warps(of_warp: f32, none: f32, storage: ReduceStorage) -> f32 {
    let lane = crate::thread::lane();
    if lane == 0 {
        storage.partial.store(crate::thread::warp(), of_warp.to_bits());
    }
    sync();
    if lane < threads().div_ceil(warp::LANES) { f32::from_bits(storage.partial.load(lane)) } else { none }
}
