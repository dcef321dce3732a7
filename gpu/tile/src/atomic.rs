//! Atomics on device memory, at device scope.

use crate::arch::{Atomic, GlobalMemory, Target};
use crate::global::GlobalMut;

/// Raises element `index` to `value` if that is larger. Both are non-negative: then the order of
/// the bits is the order of the numbers. NaN must have been dropped before. Relaxed.
#[inline(always)]
#[track_caller]
pub fn max_non_negative(slot: &GlobalMut<f32>, index: u64, value: f32) {
    // SAFETY: `address_of` checked the index where this build checks.
    unsafe { <Target as Atomic>::max_u32(slot.address_of(index), value.to_bits()) };
}

/// Raises element `index` to `value` if that is larger. Relaxed.
#[inline(always)]
#[track_caller]
pub fn max_u32(slot: &GlobalMut<u32>, index: u64, value: u32) {
    // SAFETY: as above.
    unsafe { <Target as Atomic>::max_u32(slot.address_of(index), value) };
}

/// Adds `value` to element `index`; returns the old value. Relaxed.
#[inline(always)]
#[track_caller]
pub fn add_u32(slot: &GlobalMut<u32>, index: u64, value: u32) -> u32 {
    // SAFETY: as above.
    unsafe { <Target as Atomic>::add_u32(slot.address_of(index), value) }
}

/// Adds `value` to element `index`; returns the old value. Relaxed.
#[inline(always)]
#[track_caller]
pub fn add_u64(slot: &GlobalMut<u64>, index: u64, value: u64) -> u64 {
    // SAFETY: as above.
    unsafe { <Target as Atomic>::add_u64(slot.address_of(index), value) }
}

/// Adds `value` to element `index`; returns the old value. Relaxed; the order of additions varies. Subnormal addends and sums
/// are taken for zeros of their sign (PTX ISA, `atom.add.f32` on global memory).
#[inline(always)]
#[track_caller]
pub fn add_f32(slot: &GlobalMut<f32>, index: u64, value: f32) -> f32 {
    // SAFETY: as above.
    unsafe { <Target as Atomic>::add_f32(slot.address_of(index), value) }
}

/// Whether the device adds four elements by one instruction; elsewhere [`add_vector_f32`] is four, which a warp had better spread over neighbours.
pub const ADDS_VECTORS: bool = <Target as Atomic>::ADDS_VECTORS;

/// Adds to the four elements from `index` on, whose address is a multiple of 16. Each sum is atomic, not the four together; otherwise as
/// [`add_f32`].
#[inline(always)]
#[track_caller]
pub fn add_vector_f32(slot: &GlobalMut<f32>, index: u64, values: [f32; 4]) {
    // SAFETY: `range` checked the four where this build checks.
    unsafe { <Target as Atomic>::add_vector_f32(slot.range(index, 4), values) };
}

/// Takes the next ticket at element `index`: acquires what holders of earlier tickets released, and
/// releases this thread's writes to later ones.
#[inline(always)]
#[track_caller]
pub fn take_ticket(counter: &GlobalMut<u32>, index: u64) -> u32 {
    // SAFETY: as above.
    unsafe { Target::add_u32_acquire_release(counter.address_of(index), 1) }
}

/// Reads element `index` and acquires what was released there. PTX `ld.acquire.gpu`.
#[inline(always)]
#[track_caller]
pub fn load_acquire(flag: &GlobalMut<u32>, index: u64) -> u32 {
    // SAFETY: as above.
    unsafe { Target::load_acquire(flag.address_of(index)) }
}

/// Writes element `index` and releases this thread's earlier writes. PTX `st.release.gpu`.
#[inline(always)]
#[track_caller]
pub fn store_release(flag: &GlobalMut<u32>, index: u64, value: u32) {
    // SAFETY: as above.
    unsafe { Target::store_release(flag.address_of(index), value) };
}
