//! Global and shared memory, atomics.

use core::arch::{asm, global_asm};
use core::mem::transmute_copy;

use super::Nvptx;
use crate::arch::families::{Atomic, GlobalMemory, SharedMemory};
use crate::num::Pod;
use crate::shared::SharedStorage;

global_asm!(".extern .shared .align 1024 .b8 oxtile_arena[];");

/// A load of `size_of::<T>()` bytes; the branch is resolved at compile time.
macro_rules! load {
    ($op:literal, $address:expr, $class:ident, $options:ident) => {{
        let address = $address;
        // SAFETY: the caller vouches for the address; each arm reads exactly the bytes of `T`.
        unsafe {
            match size_of::<T>() {
                1 => {
                    let value: u16;
                    asm!(concat!($op, ".b8 {0}, [{1}];"), out(reg16) value, in($class) address, options(nostack, $options));
                    transmute_copy(&(value as u8))
                }
                2 => {
                    let value: u16;
                    asm!(concat!($op, ".b16 {0}, [{1}];"), out(reg16) value, in($class) address, options(nostack, $options));
                    transmute_copy(&value)
                }
                4 => {
                    let value: u32;
                    asm!(concat!($op, ".b32 {0}, [{1}];"), out(reg32) value, in($class) address, options(nostack, $options));
                    transmute_copy(&value)
                }
                _ => {
                    const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "elements in memory have 1, 2, 4 or 8 bytes") };
                    let value: u64;
                    asm!(concat!($op, ".b64 {0}, [{1}];"), out(reg64) value, in($class) address, options(nostack, $options));
                    transmute_copy(&value)
                }
            }
        }
    }};
}

macro_rules! store {
    ($op:literal, $address:expr, $value:expr, $class:ident) => {{
        let (address, value) = ($address, $value);
        // SAFETY: the caller vouches for the address; each arm writes exactly the bytes of `T`.
        unsafe {
            match size_of::<T>() {
                1 => asm!(concat!($op, ".b8 [{1}], {0};"), in(reg16) u16::from(transmute_copy::<T, u8>(&value)), in($class) address, options(nostack)),
                2 => asm!(concat!($op, ".b16 [{1}], {0};"), in(reg16) transmute_copy::<T, u16>(&value), in($class) address, options(nostack)),
                4 => asm!(concat!($op, ".b32 [{1}], {0};"), in(reg32) transmute_copy::<T, u32>(&value), in($class) address, options(nostack)),
                _ => {
                    const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "elements in memory have 1, 2, 4 or 8 bytes") };
                    asm!(concat!($op, ".b64 [{1}], {0};"), in(reg64) transmute_copy::<T, u64>(&value), in($class) address, options(nostack));
                }
            }
        }
    }};
}

macro_rules! load_vector {
    ($op:literal, $address:expr, $class:ident, $options:ident) => {{
        let (a, b, c, d);
        // SAFETY: the caller vouches for 16 aligned bytes at the address.
        unsafe {
            asm!(concat!($op, ".v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];"),
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in($class) $address, options(nostack, $options));
        }
        [a, b, c, d]
    }};
}

macro_rules! store_vector {
    ($op:literal, $address:expr, $value:expr, $class:ident) => {{
        let [a, b, c, d] = $value;
        // SAFETY: the caller vouches for 16 aligned bytes at the address.
        unsafe {
            asm!(concat!($op, ".v4.b32 [{4}], {{{0}, {1}, {2}, {3}}};"),
                in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, in($class) $address, options(nostack));
        }
    }};
}

// Read-only loads are `nomem`: nothing the kernel does can change what they read. They are not
// `pure`, so they keep their order, also after the wait for the launches ahead, and many are in flight before the first use.
impl GlobalMemory for Nvptx {
    #[inline(always)]
    unsafe fn load_read_only<T: Pod>(address: u64) -> T {
        load!("ld.global.nc", address, reg64, nomem)
    }

    #[inline(always)]
    unsafe fn load_read_only_vector(address: u64) -> [u32; 4] {
        load_vector!("ld.global.nc", address, reg64, nomem)
    }

    #[inline(always)]
    unsafe fn prefetch_line(address: u64) {
        // SAFETY: the caller vouches for the address.
        unsafe { asm!("prefetch.global.L2 [{0}];", in(reg64) address, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn load_read_only_lasting<T: Pod>(address: u64) -> T {
        // SAFETY: the caller vouches for the address; each arm reads exactly the bytes of `T`.
        unsafe {
            if size_of::<T>() == 4 {
                let value: u32;
                asm!("ld.global.nc.L2::cache_hint.b32 {0}, [{1}], {2};",
                    out(reg32) value, in(reg64) address, in(reg64) evict_last(), options(nostack, nomem));
                transmute_copy(&value)
            } else {
                const { assert!(matches!(size_of::<T>(), 4 | 8), "loads with a policy have 4, 8 or 16 bytes") };
                let value: u64;
                asm!("ld.global.nc.L2::cache_hint.b64 {0}, [{1}], {2};",
                    out(reg64) value, in(reg64) address, in(reg64) evict_last(), options(nostack, nomem));
                transmute_copy(&value)
            }
        }
    }

    #[inline(always)]
    unsafe fn load_read_only_vector_lasting(address: u64) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller vouches for 16 aligned bytes at the address.
        unsafe {
            asm!("ld.global.nc.L2::cache_hint.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}], {5};",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, in(reg64) evict_last(), options(nostack, nomem));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn load<T: Pod>(address: u64) -> T {
        load!("ld.global", address, reg64, readonly)
    }

    #[inline(always)]
    unsafe fn load_vector(address: u64) -> [u32; 4] {
        load_vector!("ld.global", address, reg64, readonly)
    }

    #[inline(always)]
    unsafe fn store<T: Pod>(address: u64, value: T) {
        store!("st.global", address, value, reg64)
    }

    #[inline(always)]
    unsafe fn store_pair(address: u64, [a, b]: [u32; 2]) {
        // SAFETY: the caller vouches for 8 aligned bytes at the address.
        unsafe { asm!("st.global.v2.b32 [{2}], {{{0}, {1}}};", in(reg32) a, in(reg32) b, in(reg64) address, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn store_vector(address: u64, value: [u32; 4]) {
        store_vector!("st.global", address, value, reg64)
    }

    #[inline(always)]
    unsafe fn load_acquire(address: u64) -> u32 {
        let value: u32;
        // SAFETY: the caller vouches for the address; not `readonly`: later accesses must stay below it.
        unsafe { asm!("ld.acquire.gpu.global.b32 {0}, [{1}];", out(reg32) value, in(reg64) address, options(nostack)) };
        value
    }

    #[inline(always)]
    unsafe fn store_release(address: u64, value: u32) {
        // SAFETY: the caller vouches for the address.
        unsafe { asm!("st.release.gpu.global.b32 [{1}], {0};", in(reg32) value, in(reg64) address, options(nostack)) };
    }

    #[inline(always)]
    unsafe fn load_relaxed_system(address: u64) -> u64 {
        let value: u64;
        // SAFETY: the caller vouches for the address; not `readonly`: others write it, and each call reads anew.
        unsafe { asm!("ld.relaxed.sys.global.b64 {0}, [{1}];", out(reg64) value, in(reg64) address, options(nostack)) };
        value
    }

    #[inline(always)]
    unsafe fn load_relaxed_system_vector(address: u64) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller vouches for 16 aligned bytes at the address; not `readonly`: others write them, and each call reads anew.
        unsafe {
            asm!("ld.relaxed.sys.global.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, options(nostack));
        }
        [a, b, c, d]
    }

    #[inline(always)]
    unsafe fn store_relaxed_system_vector(address: u64, value: [u32; 4]) {
        store_vector!("st.relaxed.sys.global", address, value, reg64)
    }

    #[inline(always)]
    unsafe fn load_acquire_system(address: u64) -> u64 {
        let value: u64;
        // SAFETY: the caller vouches for the address; not `readonly`: later accesses must stay below it.
        unsafe { asm!("ld.acquire.sys.global.b64 {0}, [{1}];", out(reg64) value, in(reg64) address, options(nostack)) };
        value
    }

    #[inline(always)]
    unsafe fn store_release_system(address: u64, value: u64) {
        // SAFETY: the caller vouches for the address.
        unsafe { asm!("st.release.sys.global.b64 [{1}], {0};", in(reg64) value, in(reg64) address, options(nostack)) };
    }
}

/// The policy of lines that outlive others in the L2 cache: a constant, made once a thread.
#[inline(always)]
pub(super) fn evict_last() -> u64 {
    let policy: u64;
    // SAFETY: touches no memory.
    unsafe { asm!("createpolicy.fractional.L2::evict_last.b64 {0}, 1.0;", out(reg64) policy, options(pure, nomem, nostack)) };
    policy
}

impl SharedMemory for Nvptx {
    #[inline(always)]
    fn arena() -> u32 {
        let address: u32;
        // SAFETY: the address of a symbol that this file declares.
        unsafe { asm!("mov.u32 {0}, oxtile_arena;", out(reg32) address, options(pure, nomem, nostack)) };
        address
    }

    #[inline(always)]
    fn claim<S: SharedStorage>(_: &'static str) -> u32 {
        Self::arena()
    }

    #[inline(always)]
    unsafe fn load<T: Pod>(address: u32) -> T {
        load!("ld.shared", address, reg32, readonly)
    }

    #[inline(always)]
    unsafe fn store<T: Pod>(address: u32, value: T) {
        store!("st.shared", address, value, reg32)
    }

    #[inline(always)]
    unsafe fn load_vector(address: u32) -> [u32; 4] {
        load_vector!("ld.shared", address, reg32, readonly)
    }

    #[inline(always)]
    unsafe fn store_vector(address: u32, value: [u32; 4]) {
        store_vector!("st.shared", address, value, reg32)
    }
}

macro_rules! atomic {
    ($op:literal, $class:ident, $ty:ty, $address:expr, $value:expr) => {{
        let old: $ty;
        // SAFETY: the caller vouches for the address.
        unsafe { asm!(concat!("atom.", $op, " {0}, [{1}], {2};"), out($class) old, in(reg64) $address, in($class) $value, options(nostack)) };
        old
    }};
}

impl Atomic for Nvptx {
    #[inline(always)]
    unsafe fn max_u32(address: u64, value: u32) -> u32 {
        atomic!("relaxed.gpu.global.max.u32", reg32, u32, address, value)
    }

    #[inline(always)]
    unsafe fn add_u32(address: u64, value: u32) -> u32 {
        atomic!("relaxed.gpu.global.add.u32", reg32, u32, address, value)
    }

    #[inline(always)]
    unsafe fn add_u32_acquire_release(address: u64, value: u32) -> u32 {
        atomic!("acq_rel.gpu.global.add.u32", reg32, u32, address, value)
    }

    #[inline(always)]
    unsafe fn add_u64(address: u64, value: u64) -> u64 {
        atomic!("relaxed.gpu.global.add.u64", reg64, u64, address, value)
    }

    #[inline(always)]
    unsafe fn add_f32(address: u64, value: f32) -> f32 {
        atomic!("relaxed.gpu.global.add.f32", reg32, f32, address, value)
    }

    const ADDS_VECTORS: bool = cfg!(target_feature = "sm_90");

    #[cfg(target_feature = "sm_90")]
    #[inline(always)]
    unsafe fn add_vector_f32(address: u64, [a, b, c, d]: [f32; 4]) {
        // SAFETY: the caller vouches for the address.
        unsafe {
            asm!("red.relaxed.gpu.global.add.v4.f32 [{0}], {{{1}, {2}, {3}, {4}}};",
                 in(reg64) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack))
        }
    }

    #[cfg(not(target_feature = "sm_90"))]
    #[inline(always)]
    unsafe fn add_vector_f32(address: u64, values: [f32; 4]) {
        for (i, value) in values.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { Self::add_f32(address + 4 * i as u64, value) };
        }
    }
}
