//! Physical allocations and their mappings, for symmetric memory. No multicast object is ever made.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUuuid,
};

use super::context::{Context, attribute};
use super::driver::check;
use crate::runtime::error::{Error, Result};
use crate::runtime::virtual_memory::{Driver, Handle};

const DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Held by every call that makes, maps or unmaps memory: ranks that are threads of one process do that at the same moment, to the same allocation each from
/// its own range. The driver (580.159.04) then ended the process now and then, in `cuMemUnmap`, by "double free or corruption".
static CALLS: Mutex<()> = Mutex::new(());

/// The CUDA driver's virtual memory management, for one device.
#[derive(Debug)]
pub(super) struct VirtualMemory {
    context: Arc<Context>,
}

impl VirtualMemory {
    pub fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context) }
    }

    fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.context.device() }
    }

    /// Pinned memory of the device that can be passed on as a descriptor, and registered with network cards where those can read it.
    fn properties(&self) -> Result<CUmemAllocationProp> {
        // SAFETY: plain numbers and a pointer, for which zero is a value.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = DESCRIPTOR;
        properties.location = self.location();
        let network = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
        properties.allocFlags.gpuDirectRDMACapable = u8::from(network != 0);
        Ok(properties)
    }

    /// The device's context is current, and no other thread calls.
    fn alone(&self) -> Result<MutexGuard<'static, ()>> {
        self.context.make_current()?;
        Ok(CALLS.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn attribute(&self, name: Attribute) -> Result<u32> {
        attribute(self.context.device(), name)
    }
}

fn uuid(device: c_int) -> Result<[u8; 16]> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: a valid place for the number and a valid device.
    check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

impl Driver for VirtualMemory {
    fn check(&self) -> Result<()> {
        let needed = [
            (Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
            (Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory that is shared by file descriptors"),
            (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "signals of 64 bits on streams"),
        ];
        for (name, what) in needed {
            if self.attribute(name)? == 0 {
                return Err(Error::Invalid { what: "symmetric memory", why: format!("the device has no {what}: use NCCL") });
            }
        }
        Ok(())
    }

    fn device(&self) -> Result<[u8; 16]> {
        uuid(self.context.device())
    }

    /// A device that this process does not see is not asked for: then the mapping itself fails.
    fn check_reaches(&self, other: [u8; 16]) -> Result<()> {
        let mut count = 0;
        // SAFETY: a valid place for the count.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        let mine = self.context.device();
        for device in (0..count).filter(|device| *device != mine) {
            let mut reaches = 0;
            if uuid(device)? != other {
                continue;
            }
            // SAFETY: a valid place for the answer, and two valid devices.
            check("cuDeviceCanAccessPeer", unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, mine, device) })?;
            if reaches == 0 {
                let why = format!("device {mine} does not reach device {device}: neither NVLink nor PCIe peer access is there");
                return Err(Error::Invalid { what: "symmetric memory", why });
            }
        }
        Ok(())
    }

    fn has_multicast(&self) -> bool {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED).is_ok_and(|has| has != 0)
    }

    fn granularity(&self) -> Result<u64> {
        let (mut granularity, properties) = (0, self.properties()?);
        // The recommended one, which NCCL's windows ask for too (NCCL User Guide, "User Buffer Registration").
        let which = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: a valid place for the number, and filled properties.
        let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, which) };
        check("cuMemGetAllocationGranularity", result)?;
        Ok(granularity as u64)
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        let _alone = self.alone()?;
        let (mut handle, properties) = (0, self.properties()?);
        // SAFETY: a valid place for the handle, and filled properties. No flags.
        check("cuMemCreate", unsafe { sys::cuMemCreate(&raw mut handle, bytes as usize, &raw const properties, 0) })?;
        Ok(Handle(handle))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        let _alone = self.alone()?;
        let mut descriptor: RawFd = -1;
        // SAFETY: for this type of handle the driver writes an int; the handle is one that `create` gave.
        let result = unsafe { sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle.0, DESCRIPTOR, 0) };
        check("cuMemExportToShareableHandle", result)?;
        // SAFETY: the driver made the descriptor for this function, which closes it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let closed_on_exec = rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC);
        closed_on_exec.map_err(|error| Error::Invalid { what: "fcntl", why: error.to_string() })?;
        Ok(descriptor)
    }

    fn handle_of(&self, address: u64) -> Result<Handle> {
        let _alone = self.alone()?;
        let (mut handle, pointer) = (0, ptr::with_exposed_provenance_mut::<c_void>(address as usize));
        // SAFETY: a valid place for the handle; the driver looks the address up.
        check("cuMemRetainAllocationHandle", unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, pointer) })?;
        Ok(Handle(handle))
    }

    fn import(&self, descriptor: OwnedFd) -> Result<Handle> {
        let _alone = self.alone()?;
        let mut handle = 0;
        // For this type of handle the pointer is the number itself. The descriptor is closed when this returns.
        let number = ptr::without_provenance_mut::<c_void>(descriptor.as_raw_fd() as usize);
        // SAFETY: a valid place for the handle, and an open descriptor.
        let result = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, DESCRIPTOR) };
        check("cuMemImportFromShareableHandle", result)?;
        Ok(Handle(handle))
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let _alone = self.alone()?;
        // SAFETY: a handle of `create` or `import`, released once.
        check("cuMemRelease", unsafe { sys::cuMemRelease(handle.0) })
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        let _alone = self.alone()?;
        let (mut address, alignment) = (0, self.granularity()?);
        // SAFETY: a valid place for the address; where it lies is the driver's choice. No flags.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, alignment as usize, 0, 0) };
        check("cuMemAddressReserve", result)?;
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        let _alone = self.alone()?;
        // SAFETY: a range of `reserve`, given back once, in which nothing is mapped any more.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address, bytes as usize) })
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<()> {
        let _alone = self.alone()?;
        // SAFETY: a part of a reserved range where nothing is mapped, and a live handle. The offset has to be 0, and there are no flags.
        check("cuMemMap", unsafe { sys::cuMemMap(address, bytes as usize, 0, handle.0, 0) })
    }

    fn set_access(&self, address: u64, bytes: u64) -> Result<()> {
        let _alone = self.alone()?;
        let access = CUmemAccessDesc { location: self.location(), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: a mapping of `map`, and one description.
        check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(address, bytes as usize, &raw const access, 1) })
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        let _alone = self.alone()?;
        // SAFETY: a mapping of `map`, whole; nothing uses it any more.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(address, bytes as usize) })
    }
}
