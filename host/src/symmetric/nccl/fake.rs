//! A stand-in for NCCL's allocations and windows: files in memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::AcqRel;

use crate::comm::Windows;
use crate::runtime::Result;
use crate::runtime::runtime::lock;
use crate::symmetric::vmm::{Driver, Handle, Memfd};

/// What the library has given, and the files that hold it, by address.
pub static MEMORY: Mutex<BTreeMap<u64, (u64, Handle)>> = Mutex::new(BTreeMap::new());
pub static FREED: AtomicU32 = AtomicU32::new(0);
/// More than the library has.
pub const TOO_MANY: usize = 1 << 40;

unsafe extern "C" fn mem_alloc(place: *mut *mut c_void, bytes: usize) -> c_int {
    if bytes >= TOO_MANY {
        return 1;
    }
    let (driver, bytes) = (Memfd::new([0; 16]), bytes as u64);
    let (handle, address) = (driver.create(bytes).unwrap(), driver.reserve(bytes).unwrap());
    driver.map(address, bytes, handle).and_then(|()| driver.set_access(address, bytes)).unwrap();
    lock(&MEMORY).insert(address, (bytes, handle));
    // SAFETY: the caller gives a valid place.
    unsafe { *place = std::ptr::with_exposed_provenance_mut(address as usize) };
    0
}

unsafe extern "C" fn mem_free(address: *mut c_void) -> c_int {
    let driver = Memfd::new([0; 16]);
    let address = address.expose_provenance() as u64;
    let (bytes, handle) = lock(&MEMORY).remove(&address).expect("freed once");
    driver.unmap(address, bytes).and_then(|()| driver.unreserve(address, bytes)).and_then(|()| driver.release(handle)).unwrap();
    FREED.fetch_add(1, AcqRel);
    0
}

unsafe extern "C" fn register(_: *mut c_void, _: *mut c_void, _: usize, _: *mut *mut c_void, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn deregister(_: *mut c_void, _: *mut c_void) -> c_int {
    0
}

pub static WINDOWS: Windows = Windows { mem_alloc, mem_free, register, deregister };

/// Files in memory that also know what the library above has allocated.
#[derive(Debug)]
pub struct Device(pub Memfd);

impl Driver for Device {
    fn handle_of(&self, address: u64) -> Result<Handle> {
        let (_, handle) = lock(&MEMORY)[&address];
        // A handle of its own, as the driver gives.
        self.0.import(self.0.export(handle)?)
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn device(&self) -> Result<[u8; 16]> {
        self.0.device()
    }

    fn check_reaches(&self, device: [u8; 16]) -> Result<()> {
        self.0.check_reaches(device)
    }

    fn has_multicast(&self) -> bool {
        self.0.has_multicast()
    }

    fn granularity(&self) -> Result<u64> {
        self.0.granularity()
    }

    fn create(&self, _: u64) -> Result<Handle> {
        panic!("the memory is NCCL's")
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        self.0.export(handle)
    }

    fn import(&self, descriptor: OwnedFd) -> Result<Handle> {
        self.0.import(descriptor)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        self.0.release(handle)
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.0.reserve(bytes)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        self.0.unreserve(address, bytes)
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<()> {
        self.0.map(address, bytes, handle)
    }

    fn set_access(&self, address: u64, bytes: u64) -> Result<()> {
        self.0.set_access(address, bytes)
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        self.0.unmap(address, bytes)
    }
}
