//! The devices and their primary contexts.

use std::ffi::c_int;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUdevice_attribute as Attribute, CUmemPool_attribute};
use oxtile_tile::launch::DeviceLimits;

use super::driver::check;
use crate::runtime::backend::DeviceProperties;
use crate::runtime::error::Result;

/// The primary context of one device: shared with every other library of the process that uses the runtime API.
#[derive(Debug)]
pub(super) struct Context {
    device: c_int,
    /// Retained when first used, since a context takes memory; never released, since that would wait for the device
    /// and the driver does it at the end of the process.
    handle: OnceLock<Handle>,
}

#[derive(Clone, Copy, Debug)]
struct Handle(CUcontext);

// SAFETY: a context may be made current on any thread (CUDA driver API, "Context management").
unsafe impl Send for Handle {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Handle {}

impl Context {
    pub fn new(index: u32) -> Result<(Self, DeviceProperties)> {
        let mut device = 0;
        // SAFETY: a valid place for the device; the index is below the count.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index.cast_signed()) })?;
        let capability = (
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let limits = DeviceLimits {
            multiprocessors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_per_block: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        };
        let properties = DeviceProperties { name: name(device)?, capability, limits };
        Ok((Self { device, handle: OnceLock::new() }, properties))
    }

    /// The device by the driver's number.
    pub fn device(&self) -> c_int {
        self.device
    }

    /// Makes the context current on this thread: two cheap driver calls at most, no system call. Another library may
    /// have changed it meanwhile, so that it is asked for every time.
    pub fn make_current(&self) -> Result<()> {
        let Handle(context) = match self.handle.get() {
            Some(handle) => *handle,
            None => self.retain()?,
        };
        let mut current = ptr::null_mut();
        // SAFETY: a valid place for the context; the driver was initialised before this value was made.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        if current == context {
            return Ok(());
        }
        // SAFETY: the context is retained for the rest of the process.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })
    }

    #[cold]
    fn retain(&self) -> Result<Handle> {
        let mut context = ptr::null_mut();
        // SAFETY: a valid place for the context and a valid device.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, self.device) })?;
        self.keep_freed_memory()?;
        // A second retain by another thread does no harm: neither is released.
        Ok(*self.handle.get_or_init(|| Handle(context)))
    }

    /// Lets the device's pool keep what is freed: else each synchronisation gives it back to the system, and the next
    /// allocation is slow (CUDA C++ Programming Guide, "Stream Ordered Memory Allocator").
    fn keep_freed_memory(&self) -> Result<()> {
        let mut pool = ptr::null_mut();
        // SAFETY: a valid place for the pool and a valid device.
        check("cuDeviceGetDefaultMemPool", unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, self.device) })?;
        let mut threshold = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool was just returned, and the value of this attribute is a cuuint64_t.
        check("cuMemPoolSetAttribute", unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) })
    }
}

pub(super) fn attribute(device: c_int, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: a valid place for the value and a valid device.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn name(device: c_int) -> Result<String> {
    let mut bytes = [0_u8; 128];
    // SAFETY: the driver writes at most that many bytes, the terminating zero included.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(bytes.as_mut_ptr().cast(), bytes.len() as c_int, device) })?;
    let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}
