//! The back end `nccl`: memory of `ncclMemAlloc`, registered as a window of a communicator of the arena's own.
//!
//! All ranks of the host map it as they do that of [`vmm`](super::vmm), by the same rendezvous, so that gets, puts and signals are the same.
//! What is won are collectives on buffers in the arena ([`Arena::communicator`](super::Arena::communicator)): NCCL takes its kernels for
//! symmetric memory. NVLink multicast stays off: without `NCCL_NVLS_ENABLE=0` there is no arena.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::backend::{ArenaMemory, BackendName, Capabilities, SymmetricBackend, clear};
use super::error::SymmetricError;
use super::vmm::{Driver, FlatOptions, FlatView, Handle};
use crate::comm::{Meeting, NcclCommunicator, NcclOptions, Rank, UniqueId, Window, Windows};
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result, Stream};

/// A driver whose memory NCCL allocates.
#[derive(Debug)]
struct Allocator {
    driver: Arc<dyn Driver>,
    windows: &'static Windows,
    /// Addresses by handle.
    memory: Mutex<BTreeMap<u64, u64>>,
}

impl Allocator {
    fn new(driver: Arc<dyn Driver>, windows: &'static Windows) -> Self {
        Self { driver, windows, memory: Mutex::default() }
    }

    /// Where NCCL put the memory. A view creates one.
    fn address(&self) -> Option<u64> {
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

/// A rank's arena in memory of NCCL.
#[derive(Debug)]
pub(super) struct NcclMemory {
    allocator: Arc<Allocator>,
    opened: Mutex<Option<Opened>>,
}

#[derive(Debug)]
struct Opened {
    /// Where NCCL put this rank's memory.
    own: u64,
    window: Window,
    view: FlatView,
}

impl NcclMemory {
    /// # Errors
    /// [`Error::NoLibrary`]; [`SymmetricError::Unavailable`] for a library without windows, and where multicast is not off.
    pub fn find(driver: Arc<dyn Driver>) -> Result<Self> {
        let windows = Windows::load()?.map_err(|error| unavailable(error.to_string()))?;
        check_multicast_is_off(std::env::var("NCCL_NVLS_ENABLE").ok().as_deref())?;
        Ok(Self { allocator: Arc::new(Allocator::new(driver, windows)), opened: Mutex::default() })
    }
}

fn unavailable(why: String) -> SymmetricError {
    SymmetricError::Unavailable { backend: BackendName::Nccl, why }
}

/// NCCL takes multicast for windows where it finds it, and has no other switch.
fn check_multicast_is_off(variable: Option<&str>) -> Result<()> {
    if variable == Some("0") {
        return Ok(());
    }
    let why = "NCCL would use NVLink multicast for windows: set NCCL_NVLS_ENABLE=0 on every rank before it starts, or use vmm";
    Err(unavailable(why.to_owned()).into())
}

/// Why NCCL registers nothing, where it says that all went well.
const NO_WINDOW: &str = "NCCL registers no window here: each GPU has to reach the memory of each other one (nvidia-smi topo -p2p r), and neither \
    NCCL_WIN_ENABLE nor NCCL_CUMEM_ENABLE may be 0; or use vmm";

/// What rank 0's note with NCCL's id is called.
const ID: &str = "nccl id";

/// A communicator of the ranks that meet, on the stream's device.
fn connect(stream: &Stream, meeting: &Meeting, deadline: Duration) -> Result<NcclCommunicator> {
    if meeting.rank() == Rank::ZERO {
        meeting.publish(ID, NcclCommunicator::unique_id()?.as_bytes().to_vec())?;
    }
    let invalid = |_| Error::Invalid { what: "Arena", why: "an id of NCCL that is none".to_owned() };
    let id = meeting.read(Rank::ZERO, ID, deadline)?.try_into().map(UniqueId::from_bytes).map_err(invalid)?;
    let options = NcclOptions { deadline, compare_calls: false };
    NcclCommunicator::join(&stream.device(), id, meeting.rank(), meeting.world(), &options)
}

impl SymmetricBackend for NcclMemory {
    fn name(&self) -> BackendName {
        BackendName::Nccl
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { processes: true, contiguous: false, multicast: self.allocator.has_multicast() }
    }

    fn is_collective(&self) -> bool {
        true
    }

    fn open(&self, stream: &Stream, meeting: &Meeting, memory: ArenaMemory) -> Result<u64> {
        let ArenaMemory { bytes, zeros, layout, share_devices, deadline } = memory;
        // NCCL allocates on the current device.
        stream.0.runtime.backend.make_current(stream.0.id.device)?;
        let options = FlatOptions { bytes, layout, share_devices, deadline };
        let driver: Arc<dyn Driver> = Arc::clone(&self.allocator) as _;
        let view = FlatView::open(&driver, meeting, options, |address| clear(stream, address, zeros))?;
        let own = self.allocator.address().ok_or_else(|| unavailable("NCCL allocated nothing".to_owned()))?;
        let window = Window::register(connect(stream, meeting, deadline)?, self.allocator.windows, own, view.stride())?;
        let window = window.ok_or_else(|| unavailable(NO_WINDOW.to_owned()))?;
        *lock(&self.opened) = Some(Opened { own, window, view });
        Ok(own)
    }

    /// This rank's own at its one address: what the device writes here and what it waits for have one name.
    fn peers(&self, meeting: &Meeting, _: Duration) -> Result<Vec<u64>> {
        let opened = lock(&self.opened);
        let address = |opened: &Opened, rank| if rank == meeting.rank() { opened.own } else { opened.view.address(rank) };
        Ok(opened.iter().flat_map(|opened| meeting.world().ranks().map(move |rank| address(opened, rank))).collect())
    }

    fn communicator(&self) -> Option<NcclCommunicator> {
        lock(&self.opened).as_ref().map(|opened| opened.window.communicator().clone())
    }

    fn close(&self, stream: &Stream) -> Result<()> {
        let Some(Opened { window, view, .. }) = lock(&self.opened).take() else { return Ok(()) };
        stream.0.runtime.backend.make_current(stream.0.id.device)?;
        let done = window.deregister();
        match done {
            // The stream's work is done: the arena was drained before.
            Ok(()) => drop(view),
            // Memory that NCCL may still know stays.
            Err(_) => std::mem::forget(view),
        }
        done
    }
}

/// An arena that was not closed keeps its memory, which others, or its own streams, may still use.
impl Drop for NcclMemory {
    fn drop(&mut self) {
        std::mem::forget(lock(&self.opened).take());
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_int, c_void};
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::{AcqRel, Acquire};

    use super::super::Step;
    use super::super::vmm::Memfd;
    use super::*;
    use crate::comm::{Board, LocalBoard, WorldSize};

    /// What the library has given, and files behind it by address.
    static MEMORY: Mutex<BTreeMap<u64, (u64, Handle)>> = Mutex::new(BTreeMap::new());
    static FREED: AtomicU32 = AtomicU32::new(0);
    /// More than the library has.
    const TOO_MANY: usize = 1 << 40;

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

    static WINDOWS: Windows = Windows { mem_alloc, mem_free, register, deregister };

    /// Files in memory that also know what the library above has allocated.
    #[derive(Debug)]
    struct Device(Memfd);

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

    #[test]
    fn multicast_has_to_be_off() {
        check_multicast_is_off(Some("0")).unwrap();
        for variable in [None, Some("1"), Some("")] {
            let error = check_multicast_is_off(variable).unwrap_err();
            assert!(matches!(&error, Error::Symmetric(SymmetricError::Unavailable { .. })), "{error}");
            assert!(error.to_string().contains("NCCL_NVLS_ENABLE=0"), "{error}");
        }
    }
}
