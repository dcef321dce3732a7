//! Copies that a thread starts, groups and waits for: 4 to 16 bytes into shared memory, and in bulk from it.

use crate::arch::{AsyncCopy, BulkCopy, Control, Target};
use crate::global::{Cursor, Global, GlobalMut, Lasting, elements_of};
use crate::layout::Swizzle;
use crate::num::Pod;
use crate::shared::{Chunk, SharedArray, SharedTile};

/// Starts a copy of 16 bytes from element `start` to element `index` by this thread (`cp.async.cg`); of
/// them `valid` bytes are read, the rest becomes zero. Both sides lie at multiples of 16 bytes; with nothing to
/// read, `start` may be anywhere.
#[inline(always)]
#[track_caller]
pub fn copy_async<T: Pod, const N: usize>(target: SharedArray<T, N>, index: u32, source: &Global<T>, start: u64, valid: u32) {
    let shared = target.range(index, elements_of::<T>(16));
    let global = if valid == 0 { source.address_of_nothing() } else { source.range(start, elements_of::<T>(valid).into()) };
    // SAFETY: `range` checked both sides where this build checks.
    unsafe { Target::copy_16(shared, global, valid) };
}

/// Starts a copy of 16 bytes from element `start` to word `index` by this thread (`cp.async.cg`), from lines that
/// [last](Global::lasting) in the L2 cache. Both sides lie at multiples of 16 bytes. ptxas 13.0 makes code of some
/// addresses that no device runs; a build that meets it is refused.
#[inline(always)]
#[track_caller]
pub fn copy_async_lasting<T: Pod, const N: usize>(target: SharedArray<u32, N>, index: u32, source: &Lasting<T>, start: u64) {
    // SAFETY: as `copy_async`.
    unsafe { Target::copy_16_lasting(target.range(index, 4), source.range(start, elements_of::<T>(16).into())) };
}

/// As [`copy_async`], to the 16 bytes of a tile from `row`, `column` on, in one row at a multiple of 16 bytes.
#[inline(always)]
#[track_caller]
pub fn copy_async_to_tile<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle>(
    target: SharedTile<T, ROWS, COLUMNS, S>,
    [row, column]: [u32; 2],
    source: &Global<T>,
    start: u64,
    valid: u32,
) {
    let shared = target.address_of(row, column);
    let global = if valid == 0 { source.address_of_nothing() } else { source.range(start, elements_of::<T>(valid).into()) };
    // SAFETY: `range` and `address_of` checked both sides where this build checks; swizzles move 16 bytes together.
    unsafe { Target::copy_16(shared, global, valid) };
}

/// Starts a copy of 16 bytes, of a place at a multiple of 16 bytes, to a chunk of a tile. If they are not `inside` the view, nothing is read, and
/// the chunk becomes zero.
#[inline(always)]
#[track_caller]
pub fn copy_async_to_chunk<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle>(
    target: SharedTile<T, ROWS, COLUMNS, S>,
    chunk: Chunk<T, ROWS, COLUMNS, S>,
    source: Cursor<T>,
    inside: bool,
) {
    let shared = target.address_of_chunk(chunk);
    // Hardware takes any address where it reads nothing.
    let nowhere = Target::CHECKED && !inside;
    let global = if nowhere { source.address_of_nothing() } else { source.range(elements_of::<T>(16).into()) };
    // SAFETY: `range` and `address_of_chunk` checked both sides where this build checks; nothing is read where it is not inside.
    unsafe { Target::copy_16(shared, global, if inside { 16 } else { 0 }) };
}

/// Starts a copy of 4 bytes from element `start` to element `index` by this thread (`cp.async.ca`); both lie at
/// multiples of 4 bytes.
#[inline(always)]
#[track_caller]
pub fn copy_async_word<T: Pod, const N: usize>(target: SharedArray<T, N>, index: u32, source: &Global<T>, start: u64) {
    let count = elements_of::<T>(4);
    // SAFETY: as `copy_async`.
    unsafe { Target::copy_4(target.range(index, count), source.range(start, count.into())) };
}

/// Starts a copy of 8 bytes from element `start` to element `index` by this thread (`cp.async.ca`); both lie at
/// multiples of 8 bytes.
#[inline(always)]
#[track_caller]
pub fn copy_async_pair<T: Pod, const N: usize>(target: SharedArray<T, N>, index: u32, source: &Global<T>, start: u64) {
    let count = elements_of::<T>(8);
    // SAFETY: as `copy_async`.
    unsafe { Target::copy_8(target.range(index, count), source.range(start, count.into())) };
}

/// Closes a group of this thread's [`copy_async`].
#[inline(always)]
#[track_caller]
pub fn commit_copies() {
    <Target as AsyncCopy>::commit();
}

/// Waits until at most `PENDING` of this thread's groups are under way; others' copies need a barrier too.
#[inline(always)]
#[track_caller]
pub fn wait_copies<const PENDING: u32>() {
    <Target as AsyncCopy>::wait::<PENDING>();
}

/// Starts a bulk copy of the first `count` elements of shared memory to device memory, by one thread; both sides have
/// them, at multiples of 16 bytes and in such a number. The shared memory was written before a [`fence_proxy_async`](crate::sync::fence_proxy_async) and a barrier.
#[inline(always)]
#[track_caller]
pub fn store_bulk<T: Pod, const N: usize>(target: &GlobalMut<T>, start: u64, source: SharedArray<T, N>, count: u32) {
    let (global, shared) = (target.range(start, count.into()), source.range(0, count));
    // SAFETY: `range` checked both sides where this build checks.
    unsafe { <Target as BulkCopy>::store(global, shared, count * size_of::<T>() as u32) };
}

/// Brings `count` elements from `start` on into the L2 cache, by one thread which does not wait: a hint. Nothing is brought unless the first
/// lies at a multiple of 16 bytes and they are such a number of bytes.
#[inline(always)]
#[track_caller]
pub fn prefetch<T: Pod>(source: &GlobalMut<T>, start: u64, count: u32) {
    let (global, bytes) = (source.range(start, count.into()), count * size_of::<T>() as u32);
    if (global as u32 | bytes).is_multiple_of(16) {
        // SAFETY: `range` checked the memory where this build checks, and the maker of the view vouched for it.
        unsafe { <Target as BulkCopy>::prefetch(global, bytes) };
    }
}

/// Closes a group of this thread's [`store_bulk`].
#[inline(always)]
#[track_caller]
pub fn commit_stores() {
    <Target as BulkCopy>::commit();
}

/// Waits until all but `PENDING` groups of bulk stores have landed in device memory.
#[inline(always)]
#[track_caller]
pub fn wait_stores<const PENDING: u32>() {
    <Target as BulkCopy>::wait::<PENDING>();
}

/// Waits until all but `PENDING` groups have read their shared memory, which may then be overwritten.
#[inline(always)]
#[track_caller]
pub fn wait_stores_read<const PENDING: u32>() {
    Target::wait_read::<PENDING>();
}
