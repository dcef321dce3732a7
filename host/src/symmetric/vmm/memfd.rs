//! Memory of the host in place of a GPU's.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use super::{Driver, Handle};
use crate::runtime::{Error, Result};

/// Anonymous files of the kernel (memfd_create(2)) in place of device memory: what a [`FlatView`](super::FlatView) maps can be read and
/// written by the program itself, so that rendezvous, descriptors and failures run as real processes on a machine without a GPU.
#[derive(Debug)]
pub struct Memfd {
    device: [u8; 16],
}

impl Memfd {
    /// Sizes are multiples of the largest page of any host.
    const GRANULARITY: u64 = 1 << 16;

    /// The memory of a device of this name.
    pub fn new(device: [u8; 16]) -> Self {
        Self { device }
    }
}

impl Handle {
    /// # Safety
    /// A handle of a [`Memfd`] that is not released.
    unsafe fn descriptor<'a>(self) -> BorrowedFd<'a> {
        // SAFETY: the handle is the number of an open descriptor, which the caller vouches for.
        unsafe { BorrowedFd::borrow_raw(self.0 as RawFd) }
    }
}

fn failed(call: &'static str) -> impl Fn(Errno) -> Error {
    move |error| Error::Invalid { what: call, why: error.to_string() }
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Driver for Memfd {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn device(&self) -> Result<[u8; 16]> {
        Ok(self.device)
    }

    fn check_reaches(&self, _: [u8; 16]) -> Result<()> {
        Ok(())
    }

    fn has_multicast(&self) -> bool {
        false
    }

    fn granularity(&self) -> Result<u64> {
        Ok(Self::GRANULARITY)
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        let file = memfd_create("oxtile", MemfdFlags::CLOEXEC).map_err(failed("memfd_create"))?;
        ftruncate(&file, bytes).map_err(failed("ftruncate"))?;
        Ok(Handle(file.into_raw_fd() as u64))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        // SAFETY: the view exports what it has created and not released.
        fcntl_dupfd_cloexec(unsafe { handle.descriptor() }, 0).map_err(failed("fcntl"))
    }

    fn import(&self, descriptor: OwnedFd) -> Result<Handle> {
        fstat(descriptor.as_fd()).map_err(failed("fstat"))?;
        Ok(Handle(descriptor.into_raw_fd() as u64))
    }

    fn release(&self, handle: Handle) -> Result<()> {
        // SAFETY: the view releases each handle once: the descriptor is this handle's own.
        drop(unsafe { OwnedFd::from_raw_fd(handle.0 as RawFd) });
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a range of its own, where the kernel likes; nothing can be read or written there.
        let range = unsafe { mmap_anonymous(ptr::null_mut(), bytes as usize, ProtFlags::empty(), flags) };
        Ok(range.map_err(failed("mmap"))?.expose_provenance() as u64)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: the range that `reserve` gave; nothing is mapped there any more.
        unsafe { munmap(pointer(address), bytes as usize) }.map_err(failed("munmap"))
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the handle is not released.
        let file = unsafe { handle.descriptor() };
        if fstat(file).map_err(failed("fstat"))?.st_size as u64 != bytes {
            return Err(Error::Invalid { what: "mmap", why: format!("the file has not {bytes} bytes") });
        }
        // SAFETY: the addresses lie in a range that `reserve` gave, where nothing is mapped.
        let mapped = unsafe { mmap(pointer(address), bytes as usize, ProtFlags::empty(), flags, file, 0) };
        mapped.map(drop).map_err(failed("mmap"))
    }

    fn set_access(&self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: what `map` mapped.
        unsafe { mprotect(pointer(address), bytes as usize, MprotectFlags::READ | MprotectFlags::WRITE) }.map_err(failed("mprotect"))
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: what `map` mapped, which nothing uses any more: the range is set aside again.
        let range = unsafe { mmap_anonymous(pointer(address), bytes as usize, ProtFlags::empty(), flags) };
        range.map(drop).map_err(failed("mmap"))
    }
}
