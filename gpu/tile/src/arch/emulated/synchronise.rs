//! Barriers, warp exchange, mbarriers, fences.

use oxtile_emulator::{ReduceOp, Scope, ShuffleMode, Space, VoteMode, device};

use super::Emulated;
use crate::arch::families::{Barrier, Fence, Mbarrier, Warp};

impl Barrier for Emulated {
    #[inline(always)]
    #[track_caller]
    fn sync(id: u32, threads: u32) {
        device::barrier_sync(id, threads);
    }

    #[inline(always)]
    #[track_caller]
    fn arrive(id: u32, threads: u32) {
        device::barrier_arrive(id, threads);
    }

    #[inline(always)]
    #[track_caller]
    fn sync_warp(mask: u32) {
        device::warp_sync(mask);
    }
}

impl Warp for Emulated {
    #[inline(always)]
    #[track_caller]
    fn shuffle_xor(mask: u32, value: u32, flip: u32) -> u32 {
        device::shuffle(mask, ShuffleMode::Butterfly, value, flip, 31)
    }

    #[inline(always)]
    #[track_caller]
    fn shuffle_index(mask: u32, value: u32, source: u32) -> u32 {
        device::shuffle(mask, ShuffleMode::Index, value, source, 31)
    }

    #[inline(always)]
    #[track_caller]
    fn shuffle_up(mask: u32, value: u32, delta: u32) -> u32 {
        device::shuffle(mask, ShuffleMode::Up, value, delta, 0)
    }

    #[inline(always)]
    #[track_caller]
    fn shuffle_down(mask: u32, value: u32, delta: u32) -> u32 {
        device::shuffle(mask, ShuffleMode::Down, value, delta, 31)
    }

    #[inline(always)]
    #[track_caller]
    fn any(mask: u32, predicate: bool) -> bool {
        device::vote(mask, VoteMode::Any, predicate) != 0
    }

    #[inline(always)]
    #[track_caller]
    fn all(mask: u32, predicate: bool) -> bool {
        device::vote(mask, VoteMode::All, predicate) != 0
    }

    #[inline(always)]
    #[track_caller]
    fn ballot(mask: u32, predicate: bool) -> u32 {
        device::vote(mask, VoteMode::Ballot, predicate)
    }

    #[inline(always)]
    #[track_caller]
    fn elect(mask: u32) -> bool {
        // The lanes of the mask meet, as the instruction asks for; the vote says nothing else.
        device::vote(mask, VoteMode::Any, true);
        crate::thread::lane() == mask.trailing_zeros()
    }

    #[inline(always)]
    #[track_caller]
    fn max_u32(mask: u32, value: u32) -> u32 {
        device::reduce(mask, ReduceOp::Max, value)
    }

    #[inline(always)]
    #[track_caller]
    fn add_u32(mask: u32, value: u32) -> u32 {
        device::reduce(mask, ReduceOp::Add, value)
    }
}

impl Mbarrier for Emulated {
    #[inline(always)]
    #[track_caller]
    unsafe fn init(address: u32, arrivals: u32) {
        device::mbarrier_init(address, arrivals);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn invalidate(address: u32) {
        device::mbarrier_invalidate(address);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn arrive(address: u32) {
        device::mbarrier_arrive(address);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn arrive_if(address: u32, predicate: bool) {
        if predicate {
            device::mbarrier_arrive(address);
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn arrive_expect(address: u32, bytes: u32) {
        device::mbarrier_arrive_expect_transaction(address, bytes);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn wait(address: u32, parity: u32) {
        device::mbarrier_wait_parity(address, parity);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn try_wait(address: u32, parity: u32) -> bool {
        device::mbarrier_try_wait_parity(address, parity)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn met_since_wait(address: u32) {
        device::warp_met_since_wait(address);
    }
}

impl Fence for Emulated {
    #[inline(always)]
    #[track_caller]
    fn block() {
        device::fence(Scope::Block);
    }

    #[inline(always)]
    #[track_caller]
    fn device() {
        device::fence(Scope::Device);
    }

    #[inline(always)]
    #[track_caller]
    fn system() {
        device::fence(Scope::System);
    }

    #[inline(always)]
    #[track_caller]
    fn proxy_async_shared() {
        device::fence_proxy_async(Space::Shared);
    }

    #[inline(always)]
    #[track_caller]
    fn proxy_async_global() {
        device::fence_proxy_async(Space::Global);
    }

    #[inline(always)]
    #[track_caller]
    fn mbarrier_init() {
        device::fence_mbarrier_init();
    }
}
