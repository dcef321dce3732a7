//! Named barriers and fences.

use crate::arch::{Barrier, Fence, Target};

/// One of the 15 named barriers of a block beside [`block::sync`](crate::block::sync)'s, for a fixed
/// number of threads. Give each use a constant of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedBarrier {
    id: u32,
    threads: u32,
}

impl NamedBarrier {
    /// Barrier `id` (1 to 15) for `threads` threads (a multiple of 32).
    ///
    /// # Panics
    /// At compile time, if used in a constant: an id or a count that hardware does not have.
    pub const fn new(id: u32, threads: u32) -> Self {
        assert!(id >= 1 && id <= 15, "named barriers have the ids 1 to 15; 0 is the block's own");
        assert!(threads > 0 && threads.is_multiple_of(32) && threads <= 1024, "a barrier waits for whole warps, at most 32 of them");
        Self { id, threads }
    }

    /// Arrives and waits for the others. All lanes of a warp call it together.
    #[inline(always)]
    #[track_caller]
    pub fn sync(self) {
        Target::sync(self.id, self.threads);
    }

    /// Arrives and goes on. All lanes of a warp call it together.
    #[inline(always)]
    #[track_caller]
    pub fn arrive(self) {
        Target::arrive(self.id, self.threads);
    }
}

/// Orders this thread's accesses for the threads of the block. PTX `fence.acq_rel.cta`.
#[inline(always)]
#[track_caller]
pub fn fence_block() {
    <Target as Fence>::block();
}

/// Orders this thread's accesses for all threads of the device. PTX `fence.acq_rel.gpu`.
#[inline(always)]
#[track_caller]
pub fn fence_device() {
    <Target as Fence>::device();
}

/// Orders this thread's accesses for all devices and the host. PTX `fence.acq_rel.sys`.
#[inline(always)]
#[track_caller]
pub fn fence_system() {
    Target::system();
}

/// Makes this thread's stores to shared memory visible to later bulk copies. Each writing thread calls
/// it before the barrier that precedes the copy. PTX `fence.proxy.async.shared::cta`.
#[inline(always)]
#[track_caller]
pub fn fence_proxy_async() {
    Target::proxy_async_shared();
}

/// Makes what this thread wrote to global memory, or has acquired of others, visible to the bulk copies that it issues later. After a flag was
/// waited for, and before a copy of what the flag stands for. PTX `fence.proxy.async.global`.
#[inline(always)]
#[track_caller]
pub fn fence_proxy_async_global() {
    Target::proxy_async_global();
}
