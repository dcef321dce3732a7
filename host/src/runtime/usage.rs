//! What the buffers of a device take, and how often the host waits for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a device since its runtime was made, of this library's calls alone. From [`Device::usage`](super::Device::usage).
///
/// Memory of arenas is not among the buffers: it is what [`ArenaOptions`](crate::symmetric::ArenaOptions) says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceUsage {
    /// How often a buffer was allocated.
    pub allocations: u64,
    /// Bytes of the buffers that are there.
    pub bytes: u64,
    /// The most bytes of buffers that were there at once.
    pub peak_bytes: u64,
    /// How often the host has waited for a stream or an event; a copy from or to pageable memory is one wait or two.
    pub host_waits: u64,
}

/// The counts, as threads change them.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    allocations: AtomicU64,
    bytes: AtomicU64,
    peak_bytes: AtomicU64,
    host_waits: AtomicU64,
}

impl Counts {
    /// A buffer was allocated; one of no bytes is none.
    pub fn take(&self, bytes: u64) {
        if bytes > 0 {
            self.allocations.fetch_add(1, Ordering::Relaxed);
            let now = bytes + self.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.peak_bytes.fetch_max(now, Ordering::Relaxed);
        }
    }

    /// A buffer is freed.
    pub fn give_back(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The host waits.
    pub fn wait(&self) {
        self.host_waits.fetch_add(1, Ordering::Relaxed);
    }

    pub fn now(&self) -> DeviceUsage {
        let [allocations, bytes, peak_bytes, host_waits] =
            [&self.allocations, &self.bytes, &self.peak_bytes, &self.host_waits].map(|count| count.load(Ordering::Relaxed));
        DeviceUsage { allocations, bytes, peak_bytes, host_waits }
    }
}

#[cfg(test)]
mod tests {
    use crate::runtime::{Buffer, DeviceUsage, Runtime};

    #[test]
    fn buffers_and_waits_are_counted() {
        let runtime = Runtime::emulated(2).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let usage = |device: u32| runtime.device(device).unwrap().usage();
        assert_eq!(usage(0), DeviceUsage::default());
        let first = Buffer::<u32>::uninitialised(&stream, 10).unwrap();
        let second = Buffer::<u32>::uninitialised(&stream, 5).unwrap();
        drop((first, Buffer::<u32>::uninitialised(&stream, 0).unwrap()));
        assert_eq!(usage(0), DeviceUsage { allocations: 2, bytes: 20, peak_bytes: 60, host_waits: 0 });
        stream.synchronize().unwrap();
        stream.record().unwrap().synchronize().unwrap();
        drop(second);
        assert_eq!(usage(0), DeviceUsage { allocations: 2, bytes: 0, peak_bytes: 60, host_waits: 2 });
        assert_eq!(usage(1), DeviceUsage::default(), "of another device");
    }
}
