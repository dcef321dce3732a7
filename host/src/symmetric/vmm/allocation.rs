//! What owns the results of a [`Driver`]'s calls.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::runtime::Result;
use crate::runtime::virtual_memory::{Driver, Handle};

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
        // From here on it is unmapped if the access is refused.
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
