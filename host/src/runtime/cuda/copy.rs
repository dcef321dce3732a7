//! Copies, one or many in one call.

use std::ffi::c_void;
use std::{iter, ptr};

use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D, CUDA_MEMCPY3D_BATCH_OP, CUextent3D, CUmemLocation, CUmemLocationType, CUmemcpy3DOperand,
    CUmemcpy3DOperand_st__bindgen_ty_1 as Operand, CUmemcpy3DOperand_st__bindgen_ty_1__bindgen_ty_1 as Pointer, CUmemcpy3DOperandType,
    CUmemcpyAttributes, CUmemcpyFlags, CUmemcpySrcAccessOrder, CUmemorytype, CUstream,
};

use super::driver::check;
use crate::recording::{Activity, Work};
use crate::runtime::backend::{Copy, CopyRows, Direction};
use crate::runtime::error::Result;

/// What a recording calls it.
pub(super) fn work(copy: &Copy) -> Work {
    Work::new(Activity::Copy, copy.direction.name(), Some(copy.total()), Some(copy.caller))
}

/// What a recording calls them.
pub(super) fn work_of(copies: &[Copy]) -> Work {
    let bytes = copies.iter().map(Copy::total).sum();
    Work::new(Activity::Copy, format!("{} copies", copies.len()), Some(bytes), copies.first().map(|copy| copy.caller))
}

/// Enqueues a copy.
///
/// # Safety
/// A live stream; both ends hold the bytes of all rows and stay until the copy is done.
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
        Direction::DeviceToDevice if copy.rows != CopyRows::ONE => {
            let rows = rows_of(&copy);
            // SAFETY: as above; the parameters are read in the call.
            check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const rows, stream) })
        }
        Direction::DeviceToDevice => {
            // SAFETY: as above.
            check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(copy.target, copy.source, bytes, stream) })
        }
    }
}

/// The parameters of a copy of rows: addresses that all devices share tell the driver which device each end is of (CUDA driver API, "Unified Addressing").
fn rows_of(copy: &Copy) -> CUDA_MEMCPY2D {
    let unified = CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: unified,
        srcHost: ptr::null(),
        srcDevice: copy.source,
        srcArray: ptr::null_mut(),
        srcPitch: copy.rows.source_pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: unified,
        dstHost: ptr::null_mut(),
        dstDevice: copy.target,
        dstArray: ptr::null_mut(),
        dstPitch: copy.rows.target_pitch as usize,
        WidthInBytes: copy.bytes as usize,
        Height: copy.rows.count as usize,
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
    // Rows and single ranges are calls of their own.
    let mut parts = copies.chunk_by(|one, next| (one.rows == CopyRows::ONE) == (next.rows == CopyRows::ONE));
    parts.try_for_each(|part| match part {
        // SAFETY: passed on to the caller; these have one row each.
        [one, ..] if one.rows == CopyRows::ONE => unsafe { enqueue_ranges(stream, part) },
        // SAFETY: as above.
        _ => unsafe { enqueue_rows(stream, part) },
    })
}

/// Enqueues copies of one row each.
///
/// # Safety
/// As [`enqueue_all`].
unsafe fn enqueue_ranges(stream: CUstream, copies: &[Copy]) -> Result<()> {
    let (mut targets, mut sources, mut sizes) = ([0; MOST], [0; MOST], [0; MOST]);
    for (at, copy) in iter::zip(0..MOST, copies) {
        (targets[at], sources[at], sizes[at]) = (copy.target, copy.source, copy.bytes as usize);
    }
    let mut attributes = CUmemcpyAttributes {
        srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        srcLocHint: NOWHERE,
        dstLocHint: NOWHERE,
        flags: HINTS,
    };
    let (mut first, count) = (0, copies.len().min(MOST));
    let [targets, sources] = [&mut targets, &mut sources].map(|addresses| addresses.as_mut_ptr());
    // SAFETY: the arrays have the number of targets, sources and sizes that is passed, and one set of attributes for all; the caller vouches for the rest.
    let result =
        unsafe { sys::cuMemcpyBatchAsync_v2(targets, sources, sizes.as_mut_ptr(), count, &raw mut attributes, &raw mut first, 1, stream) };
    check("cuMemcpyBatchAsync", result)
}

/// No hint (CUDA driver API, `CUmemcpyFlags`): with the one to prefer overlap, products beside puts were slower on two and on four H200s (1.036 and 1.041 times their time alone, without it 1.014 and 1.023),
/// and copies within a device run by engines without it too.
const HINTS: u32 = CUmemcpyFlags::CU_MEMCPY_FLAG_DEFAULT as u32;

/// No hint of where memory lies: hints are for managed memory.
const NOWHERE: CUmemLocation = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };

/// Enqueues copies of several rows each (CUDA driver API, `cuMemcpy3DBatchAsync`).
///
/// # Safety
/// As [`enqueue_all`].
unsafe fn enqueue_rows(stream: CUstream, copies: &[Copy]) -> Result<()> {
    let mut operations: [CUDA_MEMCPY3D_BATCH_OP; MOST] = std::array::from_fn(|at| box_of(copies.get(at).unwrap_or(&copies[0])));
    let count = copies.len().min(MOST);
    // SAFETY: the array has the number of operations that is passed; the caller vouches for the rest.
    let result = unsafe { sys::cuMemcpy3DBatchAsync_v2(count, operations.as_mut_ptr(), 0, stream) };
    check("cuMemcpy3DBatchAsync", result)
}

/// The rows of a copy as a box of one layer, whose elements are bytes.
fn box_of(copy: &Copy) -> CUDA_MEMCPY3D_BATCH_OP {
    let (width, height) = (copy.bytes as usize, copy.rows.count as usize);
    let operand = |ptr, pitch: u64| CUmemcpy3DOperand {
        type_: CUmemcpy3DOperandType::CU_MEMCPY_OPERAND_TYPE_POINTER,
        op: Operand { ptr: Pointer { ptr, rowLength: pitch as usize, layerHeight: height, locHint: NOWHERE } },
    };
    CUDA_MEMCPY3D_BATCH_OP {
        src: operand(copy.source, copy.rows.source_pitch),
        dst: operand(copy.target, copy.rows.target_pitch),
        extent: CUextent3D { width, height, depth: 1 },
        srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        flags: HINTS,
    }
}
