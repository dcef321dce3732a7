//! A device: where streams and buffers live.

use std::fmt;
use std::sync::Arc;

use oxtile_tile::launch::DeviceLimits;

use super::error::Result;
use super::runtime::{Inner, Runtime};
use super::stream::Stream;
use super::usage::DeviceUsage;

/// The compute capability of the devices that the kernels on wgmma run on.
pub(crate) const HOPPER: (u32, u32) = (9, 0);

/// One GPU, real or emulated. A cheap handle.
#[derive(Clone)]
pub struct Device {
    pub(crate) runtime: Arc<Inner>,
    pub(crate) index: u32,
}

impl Device {
    /// Its number in the runtime, from 0.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The runtime that it is of.
    pub fn runtime(&self) -> Runtime {
        Runtime(Arc::clone(&self.runtime))
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.runtime.properties(self.index).name
    }

    /// Major and minor compute capability: `(9, 0)` for an H100 or H200, which the emulator follows.
    pub fn capability(&self) -> (u32, u32) {
        self.runtime.properties(self.index).capability
    }

    /// Whether the kernels on wgmma run on it.
    pub(crate) fn is_hopper(&self) -> bool {
        self.capability() == HOPPER
    }

    /// What a kernel's grid may depend on.
    pub fn limits(&self) -> DeviceLimits {
        self.runtime.properties(self.index).limits
    }

    /// A new stream. It does not wait for the legacy default stream.
    ///
    /// # Errors
    /// A driver error.
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(self)
    }

    /// A new stream whose work goes before that of others where both could run: for copies and signals that other ranks wait for.
    ///
    /// # Errors
    /// A driver error.
    pub fn urgent_stream(&self) -> Result<Stream> {
        Stream::urgent(self)
    }

    /// What the buffers of the device take, and how often the host has waited for it: to show that a step allocates nothing and waits for nothing.
    pub fn usage(&self) -> DeviceUsage {
        self.runtime.counts[self.index as usize].now()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.runtime, &other.runtime) && self.index == other.index
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("index", &self.index).field("name", &self.name()).finish()
    }
}
