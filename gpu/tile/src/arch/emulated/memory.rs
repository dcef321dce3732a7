//! Global and shared memory, atomics.

extern crate std;

use core::mem::transmute_copy;
use std::borrow::ToOwned;
use std::string::String;

use oxtile_emulator::{Atomic as Operation, AtomicOp, AtomicOrder, ReadOrder, Scope, SharedLayout, Space, WriteOrder, device};

use super::Emulated;
use crate::arch::families::{Atomic, GlobalMemory, SharedMemory};
use crate::num::Pod;
use crate::shared::SharedStorage;

/// Reads the bytes of a `T`; the branch is resolved at compile time.
macro_rules! read {
    ($read:ident, $address:expr $(, $order:expr)?) => {
        // SAFETY: the byte array has the size of `T`, and every bit pattern of a `Pod` is valid.
        unsafe {
            match size_of::<T>() {
                1 => transmute_copy(&device::$read::<1>($address $(, $order)?)),
                2 => transmute_copy(&device::$read::<2>($address $(, $order)?)),
                4 => transmute_copy(&device::$read::<4>($address $(, $order)?)),
                _ => {
                    const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "elements in memory have 1, 2, 4 or 8 bytes") };
                    transmute_copy(&device::$read::<8>($address $(, $order)?))
                }
            }
        }
    };
}

macro_rules! write {
    ($write:ident, $address:expr, $value:expr $(, $order:expr)?) => {{
        let value = $value;
        // SAFETY: the byte array has the size of `T`, and a `Pod` has no padding.
        unsafe {
            match size_of::<T>() {
                1 => device::$write::<1>($address, transmute_copy(&value) $(, $order)?),
                2 => device::$write::<2>($address, transmute_copy(&value) $(, $order)?),
                4 => device::$write::<4>($address, transmute_copy(&value) $(, $order)?),
                _ => {
                    const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "elements in memory have 1, 2, 4 or 8 bytes") };
                    device::$write::<8>($address, transmute_copy(&value) $(, $order)?)
                }
            }
        }
    }};
}

#[inline(always)]
fn words(bytes: [u8; 16]) -> [u32; 4] {
    // SAFETY: same size, any bit pattern is valid.
    unsafe { core::mem::transmute(bytes) }
}

#[inline(always)]
pub(super) fn bytes(words: [u32; 4]) -> [u8; 16] {
    // SAFETY: same size, any bit pattern is valid.
    unsafe { core::mem::transmute(words) }
}

impl GlobalMemory for Emulated {
    #[inline(always)]
    #[track_caller]
    unsafe fn load_read_only<T: Pod>(address: u64) -> T {
        read!(global_read, address, ReadOrder::ReadOnly)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_read_only_vector(address: u64) -> [u32; 4] {
        words(device::global_read(address, ReadOrder::ReadOnly))
    }

    /// The emulator has no cache.
    #[inline(always)]
    unsafe fn prefetch_line(_: u64) {}

    #[inline(always)]
    #[track_caller]
    unsafe fn load_read_only_lasting<T: Pod>(address: u64) -> T {
        const { assert!(matches!(size_of::<T>(), 4 | 8), "loads with a policy have 4, 8 or 16 bytes") };
        read!(global_read, address, ReadOrder::ReadOnly)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_read_only_vector_lasting(address: u64) -> [u32; 4] {
        words(device::global_read(address, ReadOrder::ReadOnly))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load<T: Pod>(address: u64) -> T {
        read!(global_read, address, ReadOrder::Weak)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_vector(address: u64) -> [u32; 4] {
        words(device::global_read(address, ReadOrder::Weak))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store<T: Pod>(address: u64, value: T) {
        write!(global_write, address, value, WriteOrder::Weak);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_pair(address: u64, [a, b]: [u32; 2]) {
        device::global_write(address, (u64::from(a) | u64::from(b) << 32).to_le_bytes(), WriteOrder::Weak);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_vector(address: u64, value: [u32; 4]) {
        device::global_write(address, bytes(value), WriteOrder::Weak);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_acquire(address: u64) -> u32 {
        u32::from_le_bytes(device::global_read(address, ReadOrder::Acquire(Scope::Device)))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_release(address: u64, value: u32) {
        device::global_write(address, value.to_le_bytes(), WriteOrder::Release(Scope::Device));
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_relaxed_system(address: u64) -> u64 {
        u64::from_le_bytes(device::global_read(address, ReadOrder::Relaxed(Scope::System)))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_relaxed_system_vector(address: u64) -> [u32; 4] {
        words(device::global_read(address, ReadOrder::Relaxed(Scope::System)))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_relaxed_system_vector(address: u64, value: [u32; 4]) {
        device::global_write(address, bytes(value), WriteOrder::Relaxed(Scope::System));
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_acquire_system(address: u64) -> u64 {
        u64::from_le_bytes(device::global_read(address, ReadOrder::Acquire(Scope::System)))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_release_system(address: u64, value: u64) {
        device::global_write(address, value.to_le_bytes(), WriteOrder::Release(Scope::System));
        // Below zero it is a verdict (`crate::arrivals`): what the kernel reads from here on may not have arrived.
        if value.cast_signed() < 0 {
            device::pardon();
        }
    }
}

/// Names a part of the layout, for reports.
fn piece<S: SharedStorage>(offset: u32, bytes: u32) -> String {
    let mut name = String::new();
    S::name_part(offset, bytes, &mut name).expect("a string takes all");
    name.trim_start_matches('.').to_owned()
}

impl SharedMemory for Emulated {
    #[inline(always)]
    fn arena() -> u32 {
        0
    }

    #[inline]
    #[track_caller]
    fn claim<S: SharedStorage>(name: &'static str) -> u32 {
        device::claim_shared(SharedLayout { name, bytes: S::SIZE, piece: piece::<S> });
        Self::arena()
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load<T: Pod>(address: u32) -> T {
        read!(shared_read, address)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store<T: Pod>(address: u32, value: T) {
        write!(shared_write, address, value);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_vector(address: u32) -> [u32; 4] {
        words(device::shared_read(address))
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_vector(address: u32, value: [u32; 4]) {
        device::shared_write(address, bytes(value));
    }
}

#[inline(always)]
#[track_caller]
fn atomic(address: u64, op: AtomicOp, width: u8, operand: u64, order: AtomicOrder) -> u64 {
    device::atomic(Space::Global, address, Operation { order, ..Operation::relaxed(op, width, operand) })
}

impl Atomic for Emulated {
    #[inline(always)]
    #[track_caller]
    unsafe fn max_u32(address: u64, value: u32) -> u32 {
        atomic(address, AtomicOp::Max, 4, value.into(), AtomicOrder::Relaxed) as u32
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add_u32(address: u64, value: u32) -> u32 {
        atomic(address, AtomicOp::Add, 4, value.into(), AtomicOrder::Relaxed) as u32
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add_u32_acquire_release(address: u64, value: u32) -> u32 {
        atomic(address, AtomicOp::Add, 4, value.into(), AtomicOrder::AcquireRelease) as u32
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add_u64(address: u64, value: u64) -> u64 {
        atomic(address, AtomicOp::Add, 8, value, AtomicOrder::Relaxed)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add_f32(address: u64, value: f32) -> f32 {
        f32::from_bits(atomic(address, AtomicOp::AddF32, 4, value.to_bits().into(), AtomicOrder::Relaxed) as u32)
    }

    const ADDS_VECTORS: bool = true;

    #[inline(always)]
    #[track_caller]
    unsafe fn add_vector_f32(address: u64, values: [f32; 4]) {
        device::add_vector(address, values);
    }
}
