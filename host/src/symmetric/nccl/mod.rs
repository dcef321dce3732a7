//! The back end `nccl`: memory of `ncclMemAlloc`, registered as a window of a communicator of the arena's own.
//!
//! All ranks of the host map it as they do that of [`vmm`](super::vmm), by the same rendezvous, so that gets, puts and signals are the same.
//! What it adds are collectives on buffers in the arena ([`Arena::communicator`](super::Arena::communicator)): NCCL takes its kernels for
//! symmetric memory. NVLink multicast stays off: without `NCCL_NVLS_ENABLE=0` there is no arena.

mod allocator;
#[cfg(test)]
mod fake;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::allocator::Allocator;
use super::backend::{ArenaMemory, Capabilities, SymmetricBackend, clear};
use super::vmm::{Driver, FlatOptions, FlatView};
use crate::comm::{Meeting, NcclCommunicator, NcclOptions, Rank, UniqueId, Window, Windows};
use crate::rank::{BackendName, SymmetricError};
use crate::runtime::runtime::lock;
use crate::runtime::{Error, Result, Stream};

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

#[cfg(test)]
impl NcclMemory {
    /// The back end of a stand-in for the library.
    pub fn on_a_stand_in() -> Self {
        let driver = Arc::new(fake::Device(super::vmm::Memfd::new([0; 16])));
        Self { allocator: Arc::new(Allocator::new(driver, &fake::WINDOWS)), opened: Mutex::default() }
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

/// Why NCCL registers nothing although it reports success.
const NO_WINDOW: &str = "NCCL registers no window here: each GPU has to reach the memory of each other one (nvidia-smi topo -p2p r), and neither \
    NCCL_WIN_ENABLE nor NCCL_CUMEM_ENABLE may be 0; or use vmm";

/// The name of rank 0's note with NCCL's id.
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

    /// This rank's own memory is at the address that NCCL gave, so that the device writes and waits at the same one.
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
            // Memory that may still be registered with NCCL is kept.
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
    use super::*;

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
