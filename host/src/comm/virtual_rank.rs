//! A rank as the virtual cluster knows it.

use crate::runtime::emulated::Cluster;
use crate::runtime::{Device, Error, Result};

/// A rank that some thread drives on a virtual cluster. By it a thread that waits there knows whether another thread may still enqueue what is missing,
/// or all are stuck.
pub(super) struct VirtualRank {
    device: Device,
    handle: u64,
}

impl VirtualRank {
    /// A rank on a virtual device, until it is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a GPU.
    pub fn new(device: &Device) -> Result<Self> {
        let why = || "the runtime has GPUs, not a virtual cluster: use Runtime::emulated".to_owned();
        Self::on(device).ok_or_else(|| Error::Invalid { what: "EmulatedCommunicator", why: why() })
    }

    /// The same; none for a GPU.
    pub fn on(device: &Device) -> Option<Self> {
        let handle = device.runtime.backend.cluster()?.add_rank();
        Some(Self { device: device.clone(), handle })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn cluster(&self) -> &Cluster {
        self.device.runtime.backend.cluster().expect("a device stays with its back end")
    }

    /// The calling thread drives the rank.
    pub fn drive(&self) {
        self.cluster().drive(self.handle);
    }
}

impl Drop for VirtualRank {
    fn drop(&mut self) {
        self.cluster().remove_rank(self.handle);
    }
}
