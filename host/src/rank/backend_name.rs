//! The ways to make symmetric memory, by name.

use std::fmt;

/// A way to make memory that other ranks reach, by name. What is asked for is used or is an error: nothing falls back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BackendName {
    /// Physical allocations of the CUDA driver, passed between processes as file descriptors.
    Vmm,
    /// `ncclMemAlloc` and registered windows.
    Nccl,
    /// The virtual cluster.
    Emulated,
    /// NVSHMEM's symmetric heap.
    Nvshmem,
}

impl BackendName {
    pub(crate) const ALL: [(Self, &'static str); 4] =
        [(Self::Vmm, "vmm"), (Self::Nccl, "nccl"), (Self::Emulated, "emulated"), (Self::Nvshmem, "nvshmem")];
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(backend, _)| backend == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}
