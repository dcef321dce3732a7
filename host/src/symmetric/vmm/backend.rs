//! The back end `vmm`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Driver;
use super::flat::{FlatOptions, FlatView};
use crate::comm::Meeting;
use crate::rank::BackendName;
use crate::runtime::runtime::lock;
use crate::runtime::{Result, Stream};
use crate::symmetric::backend::{ArenaMemory, Capabilities, SymmetricBackend, clear};

/// A rank's arena in a [`FlatView`].
#[derive(Debug)]
pub(in crate::symmetric) struct Vmm {
    driver: Arc<dyn Driver>,
    view: Mutex<Option<FlatView>>,
}

impl Vmm {
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, view: Mutex::default() }
    }
}

impl SymmetricBackend for Vmm {
    fn name(&self) -> BackendName {
        BackendName::Vmm
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { processes: true, contiguous: true, multicast: self.driver.has_multicast() }
    }

    fn is_collective(&self) -> bool {
        true
    }

    fn is_kept_by_mappings(&self) -> bool {
        true
    }

    fn open(&self, stream: &Stream, meeting: &Meeting, memory: ArenaMemory) -> Result<u64> {
        let ArenaMemory { bytes, zeros, layout, share_devices, deadline } = memory;
        let options = FlatOptions { bytes, layout, share_devices, deadline };
        let view = FlatView::open(&self.driver, meeting, options, |address| clear(stream, address, zeros))?;
        let own = view.address(meeting.rank());
        *lock(&self.view) = Some(view);
        Ok(own)
    }

    fn peers(&self, meeting: &Meeting, _: Duration) -> Result<Vec<u64>> {
        let view = lock(&self.view);
        Ok(view.iter().flat_map(|view| meeting.world().ranks().map(|rank| view.address(rank))).collect())
    }

    fn stride(&self) -> Option<u64> {
        lock(&self.view).as_ref().map(FlatView::stride)
    }

    fn close(&self, _: &Stream) -> Result<()> {
        // The stream's work is done: the arena was drained before.
        drop(lock(&self.view).take());
        Ok(())
    }
}

/// An arena that was not closed keeps its memory, which its own streams may still use.
impl Drop for Vmm {
    fn drop(&mut self) {
        std::mem::forget(lock(&self.view).take());
    }
}
