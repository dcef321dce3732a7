//! Barriers of clusters and blocks, mbarriers, and sleep.

use crate::{access, barrier, cluster, mbarrier, meeting, thread::acting};
use std::panic::Location;

/// Waits for all threads of the cluster and orders their accesses (`barrier.cluster.arrive.release`,
/// `barrier.cluster.wait.acquire`).
#[track_caller]
#[inline]
pub fn cluster_sync() {
    let Some(thread) = acting() else { return };
    cluster::sync(thread, Location::caller());
}

/// Waits until `threads` (a multiple of 32) threads arrived at named barrier `id` (0..16) (`barrier.sync`).
#[track_caller]
#[inline]
pub fn barrier_sync(id: u32, threads: u32) {
    let Some(thread) = acting() else { return };
    barrier::meet(thread, id, threads, true, Location::caller());
}

/// Arrives at named barrier `id` and goes on (`barrier.arrive`).
#[track_caller]
#[inline]
pub fn barrier_arrive(id: u32, threads: u32) {
    let Some(thread) = acting() else { return };
    barrier::meet(thread, id, threads, false, Location::caller());
}

/// Makes an mbarrier of `count` arrivals a phase at a shared offset, a multiple of 8 (`mbarrier.init`).
#[track_caller]
#[inline]
pub fn mbarrier_init(offset: u32, count: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::init(thread, offset, count, Location::caller());
}

/// Ends an mbarrier; its bytes are plain memory again (`mbarrier.inval`).
#[track_caller]
#[inline]
pub fn mbarrier_invalidate(offset: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::invalidate(thread, offset, Location::caller());
}

/// Arrives once at the current phase (`mbarrier.arrive`, release at block scope).
#[track_caller]
#[inline]
pub fn mbarrier_arrive(offset: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::arrive(thread, offset, Location::caller());
}

/// Arrives once at the mbarrier at the same offset of the block of `rank` in this cluster
/// (`mapa`, `mbarrier.arrive.shared::cluster`).
#[track_caller]
#[inline]
pub fn mbarrier_arrive_remote(offset: u32, rank: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::arrive_remote(thread, offset, rank, Location::caller());
}

/// Announces `bytes` of asynchronous copies and arrives (`mbarrier.arrive.expect_tx`).
#[track_caller]
#[inline]
pub fn mbarrier_arrive_expect_transaction(offset: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::expect(thread, offset, bytes, true, Location::caller());
}

/// Announces `bytes` of asynchronous copies without arriving (`mbarrier.expect_tx`).
#[track_caller]
#[inline]
pub fn mbarrier_expect_transaction(offset: u32, bytes: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::expect(thread, offset, bytes, false, Location::caller());
}

/// Whether the phase of `parity` is complete; acquires if so (`mbarrier.try_wait.parity`).
#[track_caller]
#[inline]
pub fn mbarrier_try_wait_parity(offset: u32, parity: u32) -> bool {
    let Some(thread) = acting() else { return true };
    mbarrier::poll(thread, offset, parity, Location::caller())
}

/// Waits until the phase of `parity` is complete and acquires.
#[track_caller]
#[inline]
pub fn mbarrier_wait_parity(offset: u32, parity: u32) {
    let Some(thread) = acting() else { return };
    mbarrier::wait(thread, offset, parity, Location::caller());
}

/// States that the lanes of this warp have met since each of them waited at an mbarrier; no instruction. A lane that arrives
/// elsewhere for its warp relies on it.
#[track_caller]
#[inline]
pub fn warp_met_since_wait(offset: u32) {
    let Some(thread) = acting() else { return };
    meeting::check_since_wait(thread, offset, Location::caller());
}

/// Sleeps for about `nanoseconds` of emulated time (`nanosleep`).
#[track_caller]
#[inline]
pub fn nanosleep(nanoseconds: u32) {
    let Some(thread) = acting() else { return };
    access::nanosleep(thread, nanoseconds, Location::caller());
}
