//! Copies that run beside the thread.

use crate::{
    async_copy::{self, Direction},
    copy_group, tensor_map,
    thread::acting,
};
use std::panic::Location;

/// Queues a copy of `bytes` (4, 8 or 16), of which `valid_bytes` are read and the rest zero (`cp.async`).
#[track_caller]
#[inline]
pub fn copy_async(destination: u32, source: u64, bytes: u32, valid_bytes: u32) {
    let Some(thread) = acting() else { return };
    async_copy::copy_async(thread, destination, source, bytes, valid_bytes, Location::caller());
}

/// Closes this thread's group of `cp.async` (`cp.async.commit_group`).
#[track_caller]
#[inline]
pub fn copy_async_commit() {
    let Some(thread) = acting() else { return };
    copy_group::commit(thread, copy_group::Kind::Copy, Location::caller());
}

/// Waits until at most `pending` of this thread's groups are in flight (`cp.async.wait_group`).
#[track_caller]
#[inline]
pub fn copy_async_wait(pending: u32) {
    let Some(thread) = acting() else { return };
    copy_group::wait(thread, copy_group::Kind::Copy, pending, false, Location::caller());
}

/// Arrives at an mbarrier once this thread's `cp.async` so far are done (`cp.async.mbarrier.arrive.noinc`).
#[track_caller]
#[inline]
pub fn copy_async_mbarrier_arrive(offset: u32) {
    let Some(thread) = acting() else { return };
    async_copy::arrive(thread, offset, Location::caller());
}

/// Queues a bulk copy from global to shared memory; completes `bytes` on the mbarrier
/// (`cp.async.bulk.shared::cta.global.mbarrier`). Addresses and size are multiples of 16.
#[track_caller]
#[inline]
pub fn bulk_load(destination: u32, source: u64, bytes: u32, mbarrier: u32) {
    let Some(thread) = acting() else { return };
    async_copy::bulk(thread, Direction::Load, destination, source, bytes, Some(mbarrier), Location::caller());
}

/// Queues a bulk copy from shared to global memory in this thread's bulk group (`cp.async.bulk.global.shared::cta`).
#[track_caller]
#[inline]
pub fn bulk_store(destination: u64, source: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    async_copy::bulk(thread, Direction::Store, source, destination, bytes, None, Location::caller());
}

/// Queues a bulk sum of `f32` into global memory, subnormal numbers taken for zeros (`cp.reduce.async.bulk.add.f32`).
#[track_caller]
#[inline]
pub fn bulk_reduce_add_f32(destination: u64, source: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    async_copy::bulk(thread, Direction::ReduceAddF32, source, destination, bytes, None, Location::caller());
}

/// Queues a tiled copy of one box to shared memory; elements out of range are zero (`cp.async.bulk.tensor`).
/// `map` is the global address of an encoded tensor map, `coordinates` are innermost first.
#[track_caller]
#[inline]
pub fn tensor_load<const R: usize>(destination: u32, map: u64, coordinates: [i32; R], mbarrier: u32) {
    let Some(thread) = acting() else { return };
    tensor_map::copy(thread, Direction::Load, destination, map, &coordinates, Some(mbarrier), Location::caller());
}

/// Queues a tiled copy of one box to the same shared memory of every block of the cluster that `blocks` has a bit for; each
/// copy completes on the mbarrier of its own block (`cp.async.bulk.tensor...multicast::cluster`).
#[track_caller]
#[inline]
pub fn tensor_load_multicast<const R: usize>(destination: u32, map: u64, coordinates: [i32; R], mbarrier: u32, blocks: u16) {
    let Some(thread) = acting() else { return };
    tensor_map::multicast(thread, destination, map, &coordinates, mbarrier, blocks, Location::caller());
}

/// Queues a tiled copy of one box to global memory; elements out of range are not written.
#[track_caller]
#[inline]
pub fn tensor_store<const R: usize>(map: u64, coordinates: [i32; R], source: u32) {
    let Some(thread) = acting() else { return };
    tensor_map::copy(thread, Direction::Store, source, map, &coordinates, None, Location::caller());
}

/// Closes this thread's bulk group (`cp.async.bulk.commit_group`).
#[track_caller]
#[inline]
pub fn bulk_commit() {
    let Some(thread) = acting() else { return };
    copy_group::commit(thread, copy_group::Kind::Bulk, Location::caller());
}

/// Waits until at most `pending` bulk groups are in flight; with `read_only` until their sources were read
/// (`cp.async.bulk.wait_group[.read]`).
#[track_caller]
#[inline]
pub fn bulk_wait(pending: u32, read_only: bool) {
    let Some(thread) = acting() else { return };
    copy_group::wait(thread, copy_group::Kind::Bulk, pending, read_only, Location::caller());
}
