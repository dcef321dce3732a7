//! The driver calls that symmetric memory is made of.

use std::fmt;
use std::os::fd::OwnedFd;

use super::error::{Error, Result};

/// A physical allocation, as its [`Driver`] names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// Virtual memory management of one device: on GPUs the CUDA driver's (driver API, "Virtual Memory Management"), on a host without any
/// [`Memfd`](crate::symmetric::vmm::Memfd).
///
/// A [`FlatView`](crate::symmetric::vmm::FlatView) is the only caller: it gives sizes and addresses in multiples of the granularity, and undoes each call
/// once, in the order opposite to that in which they were done.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Whether the device can do what follows.
    ///
    /// # Errors
    /// What is missing.
    fn check(&self) -> Result<()>;

    /// Which device it is, the same in all processes.
    fn device(&self) -> Result<[u8; 16]>;

    /// Whether this device reaches the memory of another, where this process can tell.
    ///
    /// # Errors
    /// That it does not.
    fn check_reaches(&self, device: [u8; 16]) -> Result<()>;

    /// Whether the device takes part in NVLink multicast. Nothing uses it.
    fn has_multicast(&self) -> bool;

    /// What sizes and addresses are multiples of.
    fn granularity(&self) -> Result<u64>;

    /// Allocates memory of the device (`cuMemCreate`).
    fn create(&self, bytes: u64) -> Result<Handle>;

    /// A descriptor that another process can import (`cuMemExportToShareableHandle`); it is closed on `exec`.
    fn export(&self, handle: Handle) -> Result<OwnedFd>;

    /// The allocation that is mapped at an address, as a handle of its own (`cuMemRetainAllocationHandle`).
    fn handle_of(&self, address: u64) -> Result<Handle> {
        Err(Error::Invalid { what: "Driver::handle_of", why: format!("{self:?} cannot tell what lies at {address:#x}") })
    }

    /// The allocation behind a descriptor of another process (`cuMemImportFromShareableHandle`).
    fn import(&self, descriptor: OwnedFd) -> Result<Handle>;

    /// Gives a handle back; mappings keep the memory (`cuMemRelease`).
    fn release(&self, handle: Handle) -> Result<()>;

    /// Sets a range of addresses aside (`cuMemAddressReserve`).
    fn reserve(&self, bytes: u64) -> Result<u64>;

    /// Gives a range back in which nothing is mapped (`cuMemAddressFree`).
    fn unreserve(&self, address: u64, bytes: u64) -> Result<()>;

    /// Maps an allocation into a reserved range (`cuMemMap`).
    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<()>;

    /// Lets the device read and write a mapping (`cuMemSetAccess`).
    fn set_access(&self, address: u64, bytes: u64) -> Result<()>;

    /// Ends a mapping (`cuMemUnmap`).
    fn unmap(&self, address: u64, bytes: u64) -> Result<()>;
}
