//! Copies, one or many in one call.

use std::ffi::c_void;
use std::{iter, ptr};

use cudarc::driver::sys::{self, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpyFlags, CUmemcpySrcAccessOrder, CUstream};

use super::driver::check;
use crate::recording::{Activity, Work};
use crate::runtime::backend::{Copy, Direction};
use crate::runtime::error::Result;

/// What a recording calls it.
pub(super) fn work(copy: &Copy) -> Work {
    Work::new(Activity::Copy, copy.direction.name(), Some(copy.bytes), Some(copy.caller))
}

/// What a recording calls them.
pub(super) fn work_of(copies: &[Copy]) -> Work {
    let bytes = copies.iter().map(|copy| copy.bytes).sum();
    Work::new(Activity::Copy, format!("{} copies", copies.len()), Some(bytes), copies.first().map(|copy| copy.caller))
}

/// # Safety
/// A live stream; both ends hold so many bytes and stay until the copy is done.
pub(super) unsafe fn enqueue(stream: CUstream, copy: Copy) -> Result<()> {
    let bytes = copy.bytes as usize;
    match copy.direction {
        Direction::HostToDevice => {
            let source = ptr::with_exposed_provenance::<c_void>(copy.source as usize);
            // SAFETY: the caller vouches for stream and memory.
            check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(copy.target, source, bytes, stream) })
        }
        Direction::DeviceToHost { .. } => {
            let target = ptr::with_exposed_provenance_mut::<c_void>(copy.target as usize);
            // SAFETY: as above.
            check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(target, copy.source, bytes, stream) })
        }
        Direction::DeviceToDevice => {
            // SAFETY: as above.
            check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(copy.target, copy.source, bytes, stream) })
        }
    }
}

/// What one call of [`enqueue_all`] takes: no memory of the heap is needed for it.
pub(super) const MOST: usize = 16;

/// Enqueues at most [`MOST`] copies of some bytes each, after the stream's earlier work and in any order among themselves
/// (CUDA driver API, `cuMemcpyBatchAsync`). An engine does one after another, without the 4 us between two calls.
///
/// # Safety
/// As [`enqueue`]; the stream is neither captured nor the legacy default stream, and the ends of the copies are of devices.
pub(super) unsafe fn enqueue_all(stream: CUstream, copies: &[Copy]) -> Result<()> {
    let (mut targets, mut sources, mut sizes) = ([0; MOST], [0; MOST], [0; MOST]);
    for (at, copy) in iter::zip(0..MOST, copies) {
        (targets[at], sources[at], sizes[at]) = (copy.target, copy.source, copy.bytes as usize);
    }
    let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
    let mut attributes = CUmemcpyAttributes {
        srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        srcLocHint: nowhere,
        dstLocHint: nowhere,
        flags: CUmemcpyFlags::CU_MEMCPY_FLAG_DEFAULT as u32,
    };
    let (mut first, count) = (0, copies.len().min(MOST));
    let [targets, sources] = [&mut targets, &mut sources].map(|addresses| addresses.as_mut_ptr());
    // SAFETY: the arrays have the number of targets, sources and sizes that is passed, and one set of attributes for all; the caller vouches for the rest.
    let result =
        unsafe { sys::cuMemcpyBatchAsync_v2(targets, sources, sizes.as_mut_ptr(), count, &raw mut attributes, &raw mut first, 1, stream) };
    check("cuMemcpyBatchAsync", result)
}
