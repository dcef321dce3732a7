//! The device side.
//!
//! | file | what it holds |
//! |---|---|
//! | `memory`, `copy` | global and shared memory, atomics; `cp.async` and bulk copies |
//! | `synchronise`, `cluster` | barriers, warp operations, mbarriers, fences; clusters |
//! | `matrix` | matrix instructions |
//! | `convert`, `approximate` | number formats |
//! | `intrinsics` | LLVM's convergent intrinsics |

mod approximate;
mod cluster;
mod convert;
mod copy;
mod intrinsics;
mod matrix;
mod memory;
mod synchronise;

use core::arch::asm;

use super::families::{Control, Identity};

/// rustc's nvptx64.
pub struct Nvptx;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    Nvptx::trap()
}

macro_rules! special_register {
    ($register:literal) => {{
        let value: u32;
        // SAFETY: reading a special register has no precondition.
        unsafe { asm!(concat!("mov.u32 {0}, ", $register, ";"), out(reg32) value, options(pure, nomem, nostack, preserves_flags)) };
        value
    }};
}

impl Identity for Nvptx {
    #[inline(always)]
    fn thread() -> u32 {
        // SAFETY: reading a special register has no precondition.
        unsafe { core::arch::nvptx::_thread_idx_x() }
    }

    #[inline(always)]
    fn threads() -> u32 {
        // SAFETY: reading a special register has no precondition.
        unsafe { core::arch::nvptx::_block_dim_x() }
    }

    #[inline(always)]
    fn lane() -> u32 {
        special_register!("%laneid")
    }

    #[inline(always)]
    fn block() -> [u32; 3] {
        [special_register!("%ctaid.x"), special_register!("%ctaid.y"), special_register!("%ctaid.z")]
    }

    #[inline(always)]
    fn blocks() -> [u32; 3] {
        [special_register!("%nctaid.x"), special_register!("%nctaid.y"), special_register!("%nctaid.z")]
    }

    #[inline(always)]
    fn timer() -> u64 {
        let value: u64;
        // SAFETY: reading a special register has no precondition; it changes, so the asm is not pure.
        unsafe { asm!("mov.u64 {0}, %globaltimer;", out(reg64) value, options(nomem, nostack)) };
        value
    }
}

impl Control for Nvptx {
    const CHECKED: bool = cfg!(oxtile_checked);

    #[inline(always)]
    fn trap() -> ! {
        // SAFETY: ends the grid; control never comes back, but `trap` is not a terminator for LLVM.
        unsafe { asm!("trap;", options(nomem, nostack)) };
        loop {}
    }

    #[inline(always)]
    fn sleep(nanoseconds: u32) {
        // SAFETY: a hint without effect on memory.
        unsafe { asm!("nanosleep.u32 {0};", in(reg32) nanoseconds, options(nomem, nostack)) };
    }

    #[inline(always)]
    fn out_of_bounds(_: u64, _: u64, _: u64) -> ! {
        Self::trap()
    }

    #[inline(always)]
    fn out_of_bounds_shared(_: u32, _: u32, _: u64, _: u64) -> ! {
        Self::trap()
    }
}
