//! Where symmetric memory comes from.

use std::fmt;
use std::str::FromStr;

use super::error::SymmetricError;
use crate::runtime::{Error, Result, Stream};

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
    const ALL: [(Self, &'static str); 4] =
        [(Self::Vmm, "vmm"), (Self::Nccl, "nccl"), (Self::Emulated, "emulated"), (Self::Nvshmem, "nvshmem")];
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(backend, _)| backend == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for BackendName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(_, known)| *known == name);
        known.map(|(backend, _)| *backend).ok_or_else(|| SymmetricError::UnknownBackend { name: name.to_owned() }.into())
    }
}

/// What a back end can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Ranks may be processes.
    pub processes: bool,
    /// All ranks' arenas lie one after another in one range of addresses.
    pub contiguous: bool,
    /// NVLink multicast is there. Nothing uses it.
    pub multicast: bool,
}

/// Makes one rank's arena and gives it back.
pub trait SymmetricBackend: fmt::Debug + Send + Sync {
    /// Its name.
    fn name(&self) -> BackendName;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Memory of the stream's device, for `bytes`: what the other ranks need to reach it, and its address here.
    ///
    /// # Errors
    /// Out of memory; an error of the driver.
    fn allocate(&self, stream: &Stream, bytes: u64) -> Result<(u64, Vec<u8>)>;

    /// The address here of another rank's arena, from what that rank's [`allocate`](Self::allocate) told.
    ///
    /// # Errors
    /// An export that does not fit; an error of the driver.
    fn map(&self, export: &[u8]) -> Result<u64>;

    /// Gives the memory back once the stream's work is done. No rank uses it any more.
    ///
    /// # Errors
    /// An error of the driver.
    fn free(&self, stream: &Stream, address: u64) -> Result<()>;
}

/// The back end of a name, for the runtime of the stream.
pub(super) fn find(name: BackendName, stream: &Stream) -> Result<Box<dyn SymmetricBackend>> {
    let unavailable = |why: &str| Err(SymmetricError::Unavailable { backend: name, why: why.to_owned() }.into());
    match (name, stream.0.runtime.backend.cluster()) {
        (BackendName::Emulated, Some(_)) => Ok(Box::new(Emulated)),
        (BackendName::Emulated, None) => unavailable("the runtime has GPUs, not a virtual cluster: use vmm"),
        (_, Some(_)) => unavailable("the runtime is a virtual cluster without GPUs: use emulated"),
        (_, None) => unavailable("this version has no such memory on GPUs"),
    }
}

/// The virtual cluster: one process holds all memory, and an address means the same to every rank.
#[derive(Debug)]
struct Emulated;

impl SymmetricBackend for Emulated {
    fn name(&self) -> BackendName {
        BackendName::Emulated
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { processes: false, contiguous: false, multicast: false }
    }

    fn allocate(&self, stream: &Stream, bytes: u64) -> Result<(u64, Vec<u8>)> {
        let address = stream.0.runtime.backend.allocate(stream.0.id, "arena", bytes)?;
        Ok((address, address.to_le_bytes().to_vec()))
    }

    fn map(&self, export: &[u8]) -> Result<u64> {
        let bytes = export.try_into().map_err(|_| Error::Invalid { what: "Arena", why: "an export that is not an address".to_owned() })?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn free(&self, stream: &Stream, address: u64) -> Result<()> {
        stream.0.runtime.backend.free(stream.0.id, address)
    }
}
