//! Words that streams write and wait for, many in one call.

use std::iter;

use cudarc::driver::sys::{
    self, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as WaitParameters,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 as WaitValue,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as WriteParameters,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as WriteValue, CUstreamBatchMemOpType,
    CUstreamWaitValue_flags, CUstreamWriteValue_flags,
};

use super::driver::check;
use crate::recording::{Activity, Work};
use crate::runtime::backend::WordOperation;
use crate::runtime::error::Result;

/// What one call takes: the driver would take 255 (CUDA driver API, `cuStreamBatchMemOp`).
pub(super) const MOST: usize = 64;

/// The write comes after a fence of system scope for the stream's earlier work (CUDA driver API, `cuStreamWriteValue64`). The address is any that
/// the device reaches, a peer's mapping too.
pub(super) const WRITE: u32 = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;

/// `(int64_t)(*address - value) >= 0` (CUDA driver API, `cuStreamWaitValue64`): the words of signals grow from 0 to less than 2^63, so that it means
/// what it says. No flush: it is for writes of third devices, not for peers'.
pub(super) const WAIT: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;

/// What a recording calls them. What takes the time is the waiting.
pub(super) fn work(operations: &[WordOperation]) -> Work {
    let waits = operations.iter().filter(|operation| matches!(operation, WordOperation::Wait { .. })).count();
    let (activity, name) = match (waits, operations.len() - waits) {
        (0, signals) => (Activity::Signal, format!("{signals} signals")),
        (waits, 0) => (Activity::Wait, format!("{waits} waits")),
        (waits, signals) => (Activity::Wait, format!("{waits} waits and {signals} signals")),
    };
    Work::new(activity, name, None, operations.first().map(WordOperation::caller))
}

/// Enqueues at most [`MOST`], which the device does in their order.
///
/// # Safety
/// A live stream, and aligned words of live memory until its work is done; what is waited for is of the stream's own device.
pub(super) unsafe fn enqueue(stream: CUstream, operations: &[WordOperation]) -> Result<()> {
    let mut parameters = [CUstreamBatchMemOpParams { pad: [0; 6] }; MOST];
    iter::zip(&mut parameters, operations).for_each(|(parameters, operation)| *parameters = parameters_of(operation));
    let count = operations.len().min(MOST) as u32;
    // SAFETY: the array has the number of parameters that is passed, of a stream and words that the caller vouches for.
    check("cuStreamBatchMemOp", unsafe { sys::cuStreamBatchMemOp_v2(stream, count, parameters.as_mut_ptr(), 0) })
}

/// Copies words to the device in stream order. The driver takes them before it returns, and waits for no work (CUDA runtime API, "API synchronization
/// behavior": asynchronous copies from pageable memory to the device). `cuStreamBatchMemOp` would do the same by words, but refuses memory of
/// stream-ordered pools.
///
/// # Safety
/// A live stream that is not being captured, and aligned words of live memory until its work is done.
pub(super) unsafe fn write(stream: CUstream, address: u64, words: &[u64]) -> Result<()> {
    // SAFETY: the words are read before the call returns; the caller vouches for the rest.
    check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(address, words.as_ptr().cast(), size_of_val(words), stream) })
}

fn parameters_of(operation: &WordOperation) -> CUstreamBatchMemOpParams {
    match *operation {
        WordOperation::Write { address, value: value64, .. } => {
            let (operation, value) = (CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64, WriteValue { value64 });
            let write = WriteParameters { operation, address, __bindgen_anon_1: value, flags: WRITE, alias: 0 };
            CUstreamBatchMemOpParams { writeValue: write }
        }
        WordOperation::Wait { address, value: value64, .. } => {
            let (operation, value) = (CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64, WaitValue { value64 });
            let wait = WaitParameters { operation, address, __bindgen_anon_1: value, flags: WAIT, alias: 0 };
            CUstreamBatchMemOpParams { waitValue: wait }
        }
    }
}
