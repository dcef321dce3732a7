//! Barriers, warp exchange, mbarriers, fences.

use core::arch::asm;

use super::{Nvptx, intrinsics};
use crate::arch::families::{Barrier, Fence, Mbarrier, Warp};

/// The `c` operand of `shfl`: whole-warp segments, clamped at lane 31 (at lane 0 for `up`).
const LAST_LANE: u32 = 31;

impl Barrier for Nvptx {
    #[inline(always)]
    fn sync(id: u32, threads: u32) {
        // SAFETY: the intrinsic touches no memory of its own; that all named threads come is the kernel's contract, which the emulator checks.
        unsafe { intrinsics::barrier_sync(id, threads) }
    }

    #[inline(always)]
    fn arrive(id: u32, threads: u32) {
        // SAFETY: as `sync`.
        unsafe { intrinsics::barrier_arrive(id, threads) }
    }

    #[inline(always)]
    fn sync_warp(mask: u32) {
        // SAFETY: as `sync`.
        unsafe { intrinsics::warp_sync(mask) }
    }
}

// SAFETY (all of this block): register-only intrinsics; that the lanes of the mask come together is
// the kernel's contract, which the emulator checks.
impl Warp for Nvptx {
    #[inline(always)]
    fn shuffle_xor(mask: u32, value: u32, flip: u32) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::shuffle_xor(mask, value, flip, LAST_LANE) }
    }

    #[inline(always)]
    fn shuffle_index(mask: u32, value: u32, source: u32) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::shuffle_index(mask, value, source, LAST_LANE) }
    }

    #[inline(always)]
    fn shuffle_up(mask: u32, value: u32, delta: u32) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::shuffle_up(mask, value, delta, 0) }
    }

    #[inline(always)]
    fn shuffle_down(mask: u32, value: u32, delta: u32) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::shuffle_down(mask, value, delta, LAST_LANE) }
    }

    #[inline(always)]
    fn any(mask: u32, predicate: bool) -> bool {
        // SAFETY: see above.
        unsafe { intrinsics::vote_any(mask, predicate) }
    }

    #[inline(always)]
    fn all(mask: u32, predicate: bool) -> bool {
        // SAFETY: see above.
        unsafe { intrinsics::vote_all(mask, predicate) }
    }

    #[inline(always)]
    fn ballot(mask: u32, predicate: bool) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::vote_ballot(mask, predicate) }
    }

    #[inline(always)]
    fn elect(mask: u32) -> bool {
        // SAFETY: see above.
        unsafe { intrinsics::elect(mask).1 }
    }

    #[inline(always)]
    fn max_u32(mask: u32, value: u32) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::reduce_max_u32(value, mask) }
    }

    #[inline(always)]
    fn add_u32(mask: u32, value: u32) -> u32 {
        // SAFETY: see above.
        unsafe { intrinsics::reduce_add_u32(value, mask) }
    }
}

// SAFETY (all of this block): the caller vouches that `address` holds an mbarrier of this block.
impl Mbarrier for Nvptx {
    #[inline(always)]
    unsafe fn init(address: u32, arrivals: u32) {
        // SAFETY: see above.
        unsafe { asm!("mbarrier.init.shared::cta.b64 [{0}], {1};", in(reg32) address, in(reg32) arrivals, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn invalidate(address: u32) {
        // SAFETY: see above.
        unsafe { asm!("mbarrier.inval.shared::cta.b64 [{0}];", in(reg32) address, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn arrive(address: u32) {
        // SAFETY: see above.
        unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{0}];", in(reg32) address, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn arrive_if(address: u32, predicate: bool) {
        // SAFETY: see above.
        unsafe {
            asm!("{{ .reg .pred p; setp.ne.u32 p, {1}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{0}]; }}",
                in(reg32) address, in(reg32) u32::from(predicate), options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn arrive_expect(address: u32, bytes: u32) {
        // SAFETY: see above.
        unsafe { asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};", in(reg32) address, in(reg32) bytes, options(nostack)) };
    }

    #[inline(always)]
    #[allow(named_asm_labels, reason = "PTX scopes them by the braces, so the loop may be expanded any number of times")]
    unsafe fn wait(address: u32, parity: u32) {
        // SAFETY: see above.
        unsafe {
            asm!("{{", ".reg .pred done;", "SPIN:", "mbarrier.try_wait.parity.shared::cta.b64 done, [{0}], {1};",
                "@done bra DONE;", "bra SPIN;", "DONE:", "}}",
                in(reg32) address, in(reg32) parity, options(nostack));
        }
    }

    #[inline(always)]
    unsafe fn try_wait(address: u32, parity: u32) -> bool {
        let done: u32;
        // SAFETY: see above.
        unsafe {
            asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{1}], {2}; selp.u32 {0}, 1, 0, p; }}",
                out(reg32) done, in(reg32) address, in(reg32) parity, options(nostack));
        }
        done != 0
    }

    #[inline(always)]
    unsafe fn met_since_wait(_: u32) {}
}

macro_rules! fences {
    ($($name:ident => $text:literal;)*) => {
        impl Fence for Nvptx { $(
            #[inline(always)]
            fn $name() {
                // SAFETY: orders memory accesses; `asm!` without `nomem` keeps LLVM from moving any across.
                unsafe { asm!($text, options(nostack)) };
            }
        )* }
    };
}

fences! {
    block => "fence.acq_rel.cta;";
    device => "fence.acq_rel.gpu;";
    system => "fence.acq_rel.sys;";
    proxy_async_shared => "fence.proxy.async.shared::cta;";
    proxy_async_global => "fence.proxy.async.global;";
    mbarrier_init => "fence.mbarrier_init.release.cluster;";
}
