//! Calls of the CUDA driver: their errors, and whether they can be made at all.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use super::shared_library::is_present;
use crate::runtime::error::{Error, Result};

/// The oldest driver that has every function called here: CUDA 13.0, release 580.
const OLDEST_DRIVER: i32 = 13_000;

/// Turns what a driver function returned into a result.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(call, result)) }
}

#[cold]
fn error(call: &'static str, result: CUresult) -> Error {
    Error::Cuda {
        call,
        code: result as u32,
        name: text(result, |result, name| {
            // SAFETY: `name` is a valid place for one pointer.
            unsafe { sys::cuGetErrorName(result, name) }
        }),
        description: text(result, |result, description| {
            // SAFETY: as above.
            unsafe { sys::cuGetErrorString(result, description) }
        }),
        mend: mend(result),
    }
}

fn text(result: CUresult, ask: impl FnOnce(CUresult, *mut *const c_char) -> CUresult) -> &'static str {
    let mut text = ptr::null();
    if ask(result, &raw mut text) != CUresult::CUDA_SUCCESS || text.is_null() {
        return "unknown";
    }
    // SAFETY: the driver returns a string with a terminating zero that lives as long as the process.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("unknown")
}

fn mend(result: CUresult) -> &'static str {
    match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "; use smaller buffers, drop some first, or see with nvidia-smi which processes hold the memory"
        }
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            "; the device is lost to this process: run the same program on the emulator in check mode, which names the line, or under compute-sanitizer"
        }
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "; compile the kernels for this device's architecture (`oxtile build --arch`, or `cargo xtask build-ptx --arch` for Oxtile's own), or update the driver"
        }
        CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            "; another library reset the device: do not call cudaDeviceReset while a Runtime lives"
        }
        CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => {
            "; name every stream that takes part in Graph::capture"
        }
        _ => "",
    }
}

/// Starts the driver and counts the devices; says what is missing otherwise.
pub(super) fn start() -> Result<u32> {
    let missing = |reason: &str| Err(Error::NoCuda { reason: reason.to_owned() });
    if !is_present(&["libcuda.so", "libcuda.so.1"]) {
        return missing("no driver (libcuda.so.1) was found: install NVIDIA's driver, release 580 or newer, or use the emulator");
    }
    let mut version = 0;
    // SAFETY: a valid place for the version; may be called before cuInit.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    if version < OLDEST_DRIVER {
        let (major, minor) = (version / 1000, version % 1000 / 10);
        return missing(&format!("the driver is for CUDA {major}.{minor}: install release 580 (CUDA 13.0) or newer"));
    }
    // SAFETY: no pointers.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return missing("the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        result => return Err(error("cuInit", result)),
    }
    let mut count: c_int = 0;
    // SAFETY: a valid place for the count.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => missing("the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"),
    }
}
