//! A driver whose memory NCCL allocates.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::comm::Windows;
use crate::runtime::Result;
use crate::runtime::runtime::lock;
use crate::symmetric::vmm::{Driver, Handle};

/// A driver whose memory NCCL allocates.
#[derive(Debug)]
pub struct Allocator {
    driver: Arc<dyn Driver>,
    pub windows: &'static Windows,
    /// Addresses by handle.
    memory: Mutex<BTreeMap<u64, u64>>,
}

impl Allocator {
    pub fn new(driver: Arc<dyn Driver>, windows: &'static Windows) -> Self {
        Self { driver, windows, memory: Mutex::default() }
    }

    /// Where NCCL put the memory. A view creates one allocation.
    pub fn address(&self) -> Option<u64> {
        lock(&self.memory).values().next().copied()
    }
}

impl Driver for Allocator {
    fn create(&self, bytes: u64) -> Result<Handle> {
        let address = self.windows.allocate(bytes)?;
        let handle = self.driver.handle_of(address).or_else(|error| self.windows.free(address).and(Err(error)))?;
        lock(&self.memory).insert(handle.0, address);
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let address = lock(&self.memory).remove(&handle.0);
        let released = self.driver.release(handle);
        address.map_or(Ok(()), |address| self.windows.free(address)).and(released)
    }

    fn check(&self) -> Result<()> {
        self.driver.check()
    }

    fn device(&self) -> Result<[u8; 16]> {
        self.driver.device()
    }

    fn check_reaches(&self, device: [u8; 16]) -> Result<()> {
        self.driver.check_reaches(device)
    }

    fn has_multicast(&self) -> bool {
        self.driver.has_multicast()
    }

    fn granularity(&self) -> Result<u64> {
        self.driver.granularity()
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd> {
        self.driver.export(handle)
    }

    fn import(&self, descriptor: OwnedFd) -> Result<Handle> {
        self.driver.import(descriptor)
    }

    fn handle_of(&self, address: u64) -> Result<Handle> {
        self.driver.handle_of(address)
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.driver.reserve(bytes)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        self.driver.unreserve(address, bytes)
    }

    fn map(&self, address: u64, bytes: u64, handle: Handle) -> Result<()> {
        self.driver.map(address, bytes, handle)
    }

    fn set_access(&self, address: u64, bytes: u64) -> Result<()> {
        self.driver.set_access(address, bytes)
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        self.driver.unmap(address, bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Acquire;
    use std::time::Duration;

    use super::super::fake::{Device, FREED, MEMORY, TOO_MANY, WINDOWS};
    use super::*;
    use crate::bootstrap::board::LocalBoard;
    use crate::comm::{Board, Meeting, Rank, WorldSize};
    use crate::runtime::Error;
    use crate::symmetric::vmm::{FlatOptions, FlatView, Memfd};
    use crate::symmetric::{Step, SymmetricError};

    /// Two ranks, a thread each, with what `bytes` says of each.
    fn open<R: Send>(bytes: [u64; 2], then: impl Fn(Rank, Result<FlatView>, &Allocator) -> R + Sync) -> Vec<R> {
        let (world, board) = (WorldSize::new(2).unwrap(), Arc::new(LocalBoard::default()));
        let rank = |rank: Rank| {
            let board: Arc<dyn Board> = board.clone();
            let allocator = Arc::new(Allocator::new(Arc::new(Device(Memfd::new([rank.index() as u8; 16]))), &WINDOWS));
            let driver: Arc<dyn Driver> = Arc::clone(&allocator) as _;
            let bytes = bytes[rank.index() as usize];
            let options = FlatOptions { bytes, layout: 0, share_devices: false, deadline: Duration::from_secs(10) };
            let view = FlatView::open(&driver, &Meeting::new(board, rank, world, "test"), options, |_| Ok(()));
            then(rank, view, &allocator)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = world.ranks().map(|of| scope.spawn(move || rank(of))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn word(address: u64) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(address as usize)
    }

    #[test]
    fn ranks_reach_what_the_library_allocated_and_it_is_freed_once() {
        let barrier = std::sync::Barrier::new(2);
        let before = FREED.load(Acquire);
        let own = open([1000; 2], |rank, view, allocator| {
            let (view, own) = (view.unwrap(), allocator.address().unwrap());
            let other = Rank::new(1 - rank.index(), WorldSize::new(2).unwrap()).unwrap();
            // SAFETY: mapped memory; the other rank writes another word, and the barriers order the reads.
            unsafe { word(view.address(other)).write_volatile(100 + u64::from(rank.index())) };
            barrier.wait();
            // SAFETY: as above.
            assert_eq!(unsafe { word(own).read_volatile() }, 100 + u64::from(other.index()), "at the address of the library");
            // SAFETY: as above.
            assert_eq!(unsafe { word(view.address(rank)).read_volatile() }, 100 + u64::from(other.index()), "at that of the view");
            barrier.wait();
            drop(view);
            assert_eq!(allocator.address(), None);
            own
        });
        assert!(own.iter().all(|own| !lock(&MEMORY).contains_key(own)));
        assert!(FREED.load(Acquire) >= before + 2);
    }

    #[test]
    fn what_the_library_does_not_allocate_is_an_error_of_all() {
        for error in open([1000, TOO_MANY as u64], |_, view, _| view.expect_err("a refusal")) {
            let Error::Symmetric(SymmetricError::Step { rank, step, why }) = &error else { panic!("{error}") };
            assert_eq!((rank.index(), *step), (1, Step::Create), "{error}");
            assert!(why.contains("ncclMemAlloc"), "{why}");
        }
    }
}
