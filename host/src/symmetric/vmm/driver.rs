//! The driver calls that symmetric memory is made of, and what owns their results.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::runtime::{Error, Result};

/// A physical allocation, as its [`Driver`] names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// Virtual memory management of one device: on GPUs the CUDA driver's (driver API, "Virtual Memory Management"), on a host without any
/// [`Memfd`](super::Memfd).
///
/// A [`FlatView`](super::FlatView) is the only caller: it gives sizes and addresses in multiples of the granularity, and undoes each call
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

/// An allocation, released when dropped.
#[derive(Debug)]
pub(super) struct Allocation {
    driver: Arc<dyn Driver>,
    pub handle: Handle,
}

impl Allocation {
    pub fn create(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        Ok(Self { handle: driver.create(bytes)?, driver: Arc::clone(driver) })
    }

    pub fn import(driver: &Arc<dyn Driver>, descriptor: OwnedFd) -> Result<Self> {
        Ok(Self { handle: driver.import(descriptor)?, driver: Arc::clone(driver) })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        log(self.driver.release(self.handle));
    }
}

/// A range of addresses, given back when dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    driver: Arc<dyn Driver>,
    pub address: u64,
    bytes: u64,
}

impl Reservation {
    pub fn new(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        Ok(Self { address: driver.reserve(bytes)?, bytes, driver: Arc::clone(driver) })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        log(self.driver.unreserve(self.address, self.bytes));
    }
}

/// Memory at an address, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    driver: Arc<dyn Driver>,
    address: u64,
    bytes: u64,
}

impl Mapping {
    /// Maps an allocation for the driver's device; the mapping outlives the handle.
    pub fn new(driver: &Arc<dyn Driver>, address: u64, bytes: u64, allocation: &Allocation) -> Result<Self> {
        driver.map(address, bytes, allocation.handle)?;
        // From here on it is unmapped should the access be refused.
        let mapping = Self { driver: Arc::clone(driver), address, bytes };
        driver.set_access(address, bytes)?;
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        log(self.driver.unmap(self.address, self.bytes));
    }
}

/// Logs what a destructor cannot report.
fn log(result: Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "symmetric memory was not given back");
    }
}
