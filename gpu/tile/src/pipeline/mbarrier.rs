//! The mbarrier: arrivals and bytes that complete a phase.

use crate::arch::{BulkCopy, Fence, Mbarrier as _, Target};
use crate::global::Global;
use crate::num::Pod;
use crate::shared::{SharedArray, SharedStorage};

/// One mbarrier in shared memory.
#[derive(Clone, Copy)]
pub struct Mbarrier {
    address: u32,
}

impl SharedStorage for Mbarrier {
    const SIZE: u32 = 8;
    const ALIGN: u32 = 8;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address }
    }
}

impl Mbarrier {
    /// Readies it for `arrivals` a phase. One thread calls it, then [`publish_barriers`], then the block
    /// meets at a barrier.
    #[inline(always)]
    #[track_caller]
    pub fn init(self, arrivals: u32) {
        // SAFETY: the derive gave this handle 8 aligned bytes of the arena to itself.
        unsafe { Target::init(self.address, arrivals) };
    }

    /// Arrives at the current phase.
    #[inline(always)]
    #[track_caller]
    pub fn arrive(self) {
        // SAFETY: as `init`; that it was initialised is what the emulator checks.
        unsafe { <Target as crate::arch::Mbarrier>::arrive(self.address) };
    }

    /// Arrives if `predicate` holds, without a branch: for one lane of a warp in a hot loop.
    #[inline(always)]
    #[track_caller]
    pub fn arrive_if(self, predicate: bool) {
        // SAFETY: as `arrive`.
        unsafe { <Target as crate::arch::Mbarrier>::arrive_if(self.address, predicate) };
    }

    /// Arrives and announces `bytes` that copies will complete in this phase.
    #[inline(always)]
    #[track_caller]
    pub fn arrive_expect(self, bytes: u32) {
        // SAFETY: as `arrive`.
        unsafe { Target::arrive_expect(self.address, bytes) };
    }

    /// Waits until the phase of this parity is complete; then its copies and the arrivers' writes are visible.
    #[inline(always)]
    #[track_caller]
    pub fn wait(self, parity: u32) {
        // SAFETY: as `arrive`.
        unsafe { <Target as crate::arch::Mbarrier>::wait(self.address, parity) };
    }

    /// Whether the phase of this parity is complete, as [`wait`](Self::wait) but after a bounded time.
    #[inline(always)]
    #[track_caller]
    pub fn try_wait(self, parity: u32) -> bool {
        // SAFETY: as `arrive`.
        unsafe { <Target as crate::arch::Mbarrier>::try_wait(self.address, parity) }
    }

    /// States that the lanes of this warp have met since each waited here, so that one may arrive elsewhere for all. Costs nothing;
    /// the emulator reports where it is not so.
    #[inline(always)]
    #[track_caller]
    pub(super) fn met_since_wait(self) {
        // SAFETY: as `arrive`.
        unsafe { Target::met_since_wait(self.address) };
    }

    /// Gives its memory back for other use. One thread calls it, after the block has met after the last wait.
    #[inline(always)]
    #[track_caller]
    pub fn invalidate(self) {
        // SAFETY: as `arrive`; the emulator checks that no thread waits.
        unsafe { Target::invalidate(self.address) };
    }

    /// Its shared address, for copies that complete on it.
    #[inline(always)]
    pub const fn address(self) -> u32 {
        self.address
    }

    /// Starts a bulk copy of the whole of `target` from element `start`; it completes its bytes here.
    ///
    /// One thread calls it. Start address and size are multiples of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub fn load<T: Pod, const N: usize>(self, target: SharedArray<T, N>, source: &Global<T>, start: u64) {
        self.load_part(target, source, start, N as u32);
    }

    /// Starts a bulk copy of `count` elements, which both sides have; otherwise as [`load`](Self::load).
    #[inline(always)]
    #[track_caller]
    pub fn load_part<T: Pod, const N: usize>(self, target: SharedArray<T, N>, source: &Global<T>, start: u64, count: u32) {
        let (shared, global) = (target.range(0, count), source.range(start, count.into()));
        // SAFETY: `range` checked both sides where this build checks; that the bytes were announced is what the emulator checks.
        unsafe { <Target as BulkCopy>::load(shared, global, count * size_of::<T>() as u32, self.address) };
    }
}

/// Makes initialised mbarriers visible to TMA. The initialising thread calls it before the block barrier.
#[inline(always)]
#[track_caller]
pub fn publish_barriers() {
    Target::mbarrier_init();
}
