//! `cp.async` and bulk copies (TMA).

use core::arch::asm;

use super::Nvptx;
use super::memory::evict_last;
use crate::arch::families::{AsyncCopy, BulkCopy};

/// Where a bulk load puts its bytes: always in the block's own memory. Only PTX ISA 8.6 (sm_100 and later) has a name for
/// that; before it, a block names itself as one of its cluster. ptxas pays for the older name on sm_120 with a check of the
/// address, a call and a stack frame.
#[cfg(target_feature = "sm_100")]
macro_rules! own_block {
    () => {
        ".shared::cta"
    };
}
#[cfg(not(target_feature = "sm_100"))]
macro_rules! own_block {
    () => {
        ".shared::cluster"
    };
}

impl AsyncCopy for Nvptx {
    #[inline(always)]
    unsafe fn copy_16(shared: u32, global: u64, valid: u32) {
        // SAFETY: the caller vouches for both ranges.
        unsafe {
            asm!("cp.async.cg.shared.global [{0}], [{1}], 16, {2};", in(reg32) shared, in(reg64) global, in(reg32) valid, options(nostack))
        };
    }

    #[inline(always)]
    unsafe fn copy_16_lasting(shared: u32, global: u64) {
        // SAFETY: the caller vouches for both ranges.
        unsafe {
            asm!("cp.async.cg.shared.global.L2::cache_hint [{0}], [{1}], 16, {2};",
                in(reg32) shared, in(reg64) global, in(reg64) evict_last(), options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn copy_4(shared: u32, global: u64) {
        // SAFETY: the caller vouches for both ranges.
        unsafe { asm!("cp.async.ca.shared.global [{0}], [{1}], 4;", in(reg32) shared, in(reg64) global, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn copy_8(shared: u32, global: u64) {
        // SAFETY: the caller vouches for both ranges.
        unsafe { asm!("cp.async.ca.shared.global [{0}], [{1}], 8;", in(reg32) shared, in(reg64) global, options(nostack)) };
    }

    #[inline(always)]
    fn commit() {
        // SAFETY: closes the group of this thread's copies.
        unsafe { asm!("cp.async.commit_group;", options(nostack)) };
    }

    #[inline(always)]
    fn wait<const PENDING: u32>() {
        // SAFETY: waits; the missing `nomem` keeps later loads below it.
        unsafe { asm!("cp.async.wait_group {0};", const PENDING, options(nostack)) };
    }
}

// SAFETY (all of this block): the caller vouches for the ranges, the map and the mbarrier.
impl BulkCopy for Nvptx {
    #[inline(always)]
    unsafe fn load(shared: u32, global: u64, bytes: u32, mbarrier: u32) {
        // SAFETY: see above.
        unsafe {
            asm!(concat!("cp.async.bulk", own_block!(), ".global.mbarrier::complete_tx::bytes [{0}], [{1}], {2}, [{3}];"),
                in(reg32) shared, in(reg64) global, in(reg32) bytes, in(reg32) mbarrier, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn store(global: u64, shared: u32, bytes: u32) {
        // SAFETY: see above.
        unsafe {
            asm!("cp.async.bulk.global.shared::cta.bulk_group [{0}], [{1}], {2};",
                in(reg64) global, in(reg32) shared, in(reg32) bytes, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn prefetch(global: u64, bytes: u32) {
        // SAFETY: see above.
        unsafe { asm!("cp.async.bulk.prefetch.L2.global [{0}], {1};", in(reg64) global, in(reg32) bytes, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn prefetch_map(map: u64) {
        // SAFETY: see above.
        unsafe { asm!("prefetch.global.L2::evict_last [{0}]; prefetch.tensormap [{0}];", in(reg64) map, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn add_f32(global: u64, shared: u32, bytes: u32) {
        // SAFETY: see above.
        unsafe {
            asm!("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{0}], [{1}], {2};",
                in(reg64) global, in(reg32) shared, in(reg32) bytes, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn load_tensor<const RANK: usize>(shared: u32, map: u64, at: [u32; RANK], mbarrier: u32) {
        macro_rules! load {
            ($form:literal, $coordinates:literal, [$($index:literal)*]) => {
                // SAFETY: see above.
                unsafe {
                    asm!(concat!("cp.async.bulk.tensor.", $form, own_block!(), ".global.mbarrier::complete_tx::bytes [{shared}], [{map}, {{",
                            $coordinates, "}}], [{mbarrier}];"),
                        $(in(reg32) at[$index],)* shared = in(reg32) shared, map = in(reg64) map, mbarrier = in(reg32) mbarrier, options(nostack))
                }
            };
        }
        match RANK {
            2 => load!("2d", "{0}, {1}", [0 1]),
            3 => load!("3d", "{0}, {1}, {2}", [0 1 2]),
            4 => load!("4d", "{0}, {1}, {2}, {3}", [0 1 2 3]),
            _ => load!("5d", "{0}, {1}, {2}, {3}, {4}", [0 1 2 3 4]),
        }
    }

    #[inline(always)]
    unsafe fn store_tensor<const RANK: usize>(map: u64, at: [u32; RANK], shared: u32) {
        macro_rules! store {
            ($form:literal, $coordinates:literal, [$($index:literal)*]) => {
                // SAFETY: see above.
                unsafe {
                    asm!(concat!("cp.async.bulk.tensor.", $form, ".global.shared::cta.bulk_group [{map}, {{", $coordinates, "}}], [{shared}];"),
                        $(in(reg32) at[$index],)* shared = in(reg32) shared, map = in(reg64) map, options(nostack))
                }
            };
        }
        match RANK {
            2 => store!("2d", "{0}, {1}", [0 1]),
            3 => store!("3d", "{0}, {1}, {2}", [0 1 2]),
            4 => store!("4d", "{0}, {1}, {2}, {3}", [0 1 2 3]),
            _ => store!("5d", "{0}, {1}, {2}, {3}, {4}", [0 1 2 3 4]),
        }
    }

    #[inline(always)]
    fn commit() {
        // SAFETY: closes the group of this thread's bulk copies.
        unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) };
    }

    #[inline(always)]
    fn wait<const PENDING: u32>() {
        // SAFETY: waits; the missing `nomem` keeps later accesses below it.
        unsafe { asm!("cp.async.bulk.wait_group {0};", const PENDING, options(nostack)) };
    }

    #[inline(always)]
    fn wait_read<const PENDING: u32>() {
        // SAFETY: as `wait`.
        unsafe { asm!("cp.async.bulk.wait_group.read {0};", const PENDING, options(nostack)) };
    }
}
