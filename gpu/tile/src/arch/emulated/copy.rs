//! `cp.async` and bulk copies (TMA).

use oxtile_emulator::device;

use super::Emulated;
use crate::arch::families::{AsyncCopy, BulkCopy};

impl AsyncCopy for Emulated {
    #[inline(always)]
    #[track_caller]
    unsafe fn copy_16(shared: u32, global: u64, valid: u32) {
        device::copy_async(shared, global, 16, valid);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn copy_16_lasting(shared: u32, global: u64) {
        device::copy_async(shared, global, 16, 16);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn copy_4(shared: u32, global: u64) {
        device::copy_async(shared, global, 4, 4);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn copy_8(shared: u32, global: u64) {
        device::copy_async(shared, global, 8, 8);
    }

    #[inline(always)]
    #[track_caller]
    fn commit() {
        device::copy_async_commit();
    }

    #[inline(always)]
    #[track_caller]
    fn wait<const PENDING: u32>() {
        device::copy_async_wait(PENDING);
    }
}

impl BulkCopy for Emulated {
    #[inline(always)]
    #[track_caller]
    unsafe fn load(shared: u32, global: u64, bytes: u32, mbarrier: u32) {
        device::bulk_load(shared, global, bytes, mbarrier);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store(global: u64, shared: u32, bytes: u32) {
        device::bulk_store(global, shared, bytes);
    }

    /// The emulator has no cache.
    #[inline(always)]
    unsafe fn prefetch(_: u64, _: u32) {}

    /// The emulator has no cache.
    #[inline(always)]
    unsafe fn prefetch_map(_: u64) {}

    #[inline(always)]
    #[track_caller]
    unsafe fn add_f32(global: u64, shared: u32, bytes: u32) {
        device::bulk_reduce_add_f32(global, shared, bytes);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_tensor<const RANK: usize>(shared: u32, map: u64, coordinates: [u32; RANK], mbarrier: u32) {
        device::tensor_load(shared, map, coordinates.map(u32::cast_signed), mbarrier);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn store_tensor<const RANK: usize>(map: u64, coordinates: [u32; RANK], shared: u32) {
        device::tensor_store(map, coordinates.map(u32::cast_signed), shared);
    }

    #[inline(always)]
    #[track_caller]
    fn commit() {
        device::bulk_commit();
    }

    #[inline(always)]
    #[track_caller]
    fn wait<const PENDING: u32>() {
        device::bulk_wait(PENDING, false);
    }

    #[inline(always)]
    #[track_caller]
    fn wait_read<const PENDING: u32>() {
        device::bulk_wait(PENDING, true);
    }
}
