//! Global and shared memory, atomics and fences.

use crate::{
    access,
    atomic::Atomic,
    fault::FaultKind,
    mbarrier,
    order::{ReadOrder, Scope, Space, WriteOrder},
    shared_layout::SharedLayout,
    thread::acting,
};
use std::panic::Location;

/// Loads `N` (1, 2, 4, 8, 16 or 32) bytes at a global address that is a multiple of `N` (`ld.global`).
#[track_caller]
#[inline]
pub fn global_read<const N: usize>(address: u64, order: ReadOrder) -> [u8; N] {
    let Some(thread) = acting() else { return [0; N] };
    access::global_read(thread, address, order, Location::caller())
}

/// Stores `N` (1, 2, 4, 8, 16 or 32) bytes at a global address that is a multiple of `N` (`st.global`).
#[track_caller]
#[inline]
pub fn global_write<const N: usize>(address: u64, value: [u8; N], order: WriteOrder) {
    let Some(thread) = acting() else { return };
    access::global_write(thread, address, value, order, Location::caller());
}

/// The kernel goes on after a wait that was not answered: from here on what the launch reads is garbage, and no fault.
#[inline]
pub fn pardon() {
    if let Some(thread) = acting() {
        thread.worker().grid().options.pardon();
    }
}

/// Takes the block's shared memory for this layout: reports name its pieces from here on. A report where the launch has less memory.
#[track_caller]
#[inline]
pub fn claim_shared(layout: SharedLayout) {
    let Some(thread) = acting() else { return };
    let SharedLayout { name, bytes, .. } = layout;
    let there = thread.block().shared_bytes();
    if bytes > there {
        let message = format!("the kernel claims `{name}`, {bytes} bytes of shared memory; its launch has {there}");
        let mend = "name the layout in the kernel's attribute: #[kernel(shared = ..)]";
        thread.fail(FaultKind::OutOfBounds, Location::caller(), message, mend);
    }
    thread.worker().shared.claim(layout);
}

/// Loads `N` (1, 2, 4, 8 or 16) bytes at an offset into the block's shared memory (`ld.shared`).
#[track_caller]
#[inline]
pub fn shared_read<const N: usize>(offset: u32) -> [u8; N] {
    let Some(thread) = acting() else { return [0; N] };
    access::shared_read(thread, offset, Location::caller())
}

/// Stores `N` (1, 2, 4, 8 or 16) bytes at an offset into the block's shared memory (`st.shared`).
#[track_caller]
#[inline]
pub fn shared_write<const N: usize>(offset: u32, value: [u8; N]) {
    let Some(thread) = acting() else { return };
    access::shared_write(thread, offset, value, Location::caller());
}

/// Stores `N` (1, 2, 4, 8 or 16) bytes at an offset into the shared memory of the block of `rank` in this cluster (`mapa`, `st.shared::cluster`).
#[track_caller]
#[inline]
pub fn cluster_write<const N: usize>(offset: u32, rank: u32, value: [u8; N]) {
    let Some(thread) = acting() else { return };
    access::cluster_write(thread, offset, rank, value, Location::caller());
}

/// Reads, modifies and writes a word in one step; returns what was there (`atom`). Sums of `f32` in global memory take subnormal numbers for
/// zeros of their sign, as the hardware does; those in shared memory keep them.
#[track_caller]
#[inline]
pub fn atomic(space: Space, address: u64, operation: Atomic) -> u64 {
    let Some(thread) = acting() else { return 0 };
    access::atomic(thread, space, address, &operation, Location::caller())
}

/// Adds to four `f32` that begin at a multiple of 16 bytes of global memory, each by itself (`red.v4.f32`).
#[track_caller]
#[inline]
pub fn add_vector(address: u64, values: [f32; 4]) {
    let Some(thread) = acting() else { return };
    access::add_vector(thread, address, values, Location::caller());
}

/// `fence.acq_rel.scope`.
#[track_caller]
#[inline]
pub fn fence(scope: Scope) {
    let Some(thread) = acting() else { return };
    access::fence(thread, scope, Location::caller());
}

/// `fence.proxy.async.{shared::cta, global}`: orders generic accesses before later asynchronous ones.
#[track_caller]
#[inline]
pub fn fence_proxy_async(space: Space) {
    let Some(thread) = acting() else { return };
    access::fence_proxy_async(thread, space, Location::caller());
}

/// `fence.mbarrier_init.release.cluster`: makes initialised mbarriers visible to the asynchronous proxy.
#[track_caller]
#[inline]
pub fn fence_mbarrier_init() {
    let Some(thread) = acting() else { return };
    mbarrier::fence_init(thread, Location::caller());
}
