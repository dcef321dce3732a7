//! The back end `nvshmem`: NVSHMEM's symmetric heap, through its host library alone.
//!
//! The library allocates and maps; gets, puts and signals are the driver's, as everywhere. Ranks are processes, each of which joins NVSHMEM's
//! world once and stays in it. The library's calls have no deadline: one thread makes them, and a call that does not return in time is an error
//! ([`caller`]). NVLink multicast stays off, NVSHMEM's own and that of the NCCL which it loads: without `NVSHMEM_DISABLE_NVLS=1`, and
//! `NVSHMEM_DISABLE_NCCL=1` or `NCCL_NVLS_ENABLE=0`, there is no arena.
//!
//! It has run on two GPUs: two processes that do all that an arena does, and two that wait in vain. With more ranks it has not run. Its host
//! logic is tested on a stand-in for the library.
//!
//! | file | what it holds |
//! |---|---|
//! | `world` | how a process joins NVSHMEM's world and gets memory |
//! | `caller` | a deadline for calls that have none |
//! | `library` | NVSHMEM's host library |
//! | `fake` | a stand-in for tests |

mod caller;
#[cfg(test)]
mod fake;
mod library;
mod world;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::world::{Enter, Heap, Request, World};
use super::backend::{ArenaMemory, Capabilities, SymmetricBackend, clear};
use crate::comm::Meeting;
use crate::rank::{BackendName, SymmetricError};
use crate::runtime::{Result, Stream, lock};

/// A rank's arena in NVSHMEM's heap.
pub(super) struct NvshmemMemory {
    world: &'static World,
    opened: Mutex<Option<(Heap, Duration)>>,
}

impl NvshmemMemory {
    /// # Errors
    /// [`Error::NoLibrary`](crate::Error::NoLibrary); [`SymmetricError::Unavailable`] where multicast is not off.
    pub fn find() -> Result<Self> {
        let world = World::of_process()?;
        check_multicast_is_off(|name| std::env::var(name).ok())?;
        Ok(Self { world, opened: Mutex::default() })
    }
}

#[cfg(test)]
impl NvshmemMemory {
    /// The back end of a stand-in for the library.
    pub fn on_a_stand_in() -> Self {
        Self { world: fake::leaked(), opened: Mutex::default() }
    }
}

fn unavailable(why: impl Into<String>) -> SymmetricError {
    SymmetricError::Unavailable { backend: BackendName::Nvshmem, why: why.into() }
}

/// NVSHMEM makes multicast objects for its teams where it can. So does NCCL: where NVSHMEM finds NCCL, it makes a communicator for each team
/// (`nvshmemi_team_init_nccl_comm`).
fn check_multicast_is_off(variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    let is = |name, value| variable(name).as_deref() == Some(value);
    let (library, mend) = if !is("NVSHMEM_DISABLE_NVLS", "1") {
        ("NVSHMEM", "NVSHMEM_DISABLE_NVLS=1")
    } else if !is("NVSHMEM_DISABLE_NCCL", "1") && !is("NCCL_NVLS_ENABLE", "0") {
        ("NVSHMEM's NCCL", "NVSHMEM_DISABLE_NCCL=1")
    } else {
        return Ok(());
    };
    Err(unavailable(format!("{library} would use NVLink multicast: set {mend} on every rank before it starts, or use vmm")).into())
}

fn enter(stream: &Stream) -> Enter {
    let (runtime, device) = (Arc::clone(&stream.0.runtime), stream.0.id.device);
    Arc::new(move || runtime.backend.make_current(device))
}

impl SymmetricBackend for NvshmemMemory {
    fn name(&self) -> BackendName {
        BackendName::Nvshmem
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { processes: true, contiguous: false, multicast: false }
    }

    fn is_collective(&self) -> bool {
        true
    }

    fn open(&self, stream: &Stream, meeting: &Meeting, memory: ArenaMemory) -> Result<u64> {
        let ArenaMemory { bytes, zeros, deadline, .. } = memory;
        let request = Request { bytes, device: stream.0.id.device, deadline, enter: enter(stream) };
        let heap = self.world.open(meeting, &request, |address| clear(stream, address, zeros))?;
        let own = heap.own;
        *lock(&self.opened) = Some((heap, deadline));
        Ok(own)
    }

    fn peers(&self, _: &Meeting, _: Duration) -> Result<Vec<u64>> {
        Ok(lock(&self.opened).as_ref().map(|(heap, _)| heap.peers.clone()).unwrap_or_default())
    }

    fn close(&self, stream: &Stream) -> Result<()> {
        let opened = lock(&self.opened).take();
        opened.map_or(Ok(()), |(heap, deadline)| self.world.close(&heap, deadline, enter(stream)))
    }
}

impl fmt::Debug for NvshmemMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvshmemMemory").field("opened", &*lock(&self.opened)).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multicast_has_to_be_off() {
        let check = |variables: &[(&str, &str)]| {
            check_multicast_is_off(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        let off = ("NVSHMEM_DISABLE_NVLS", "1");
        for nccl in [("NVSHMEM_DISABLE_NCCL", "1"), ("NCCL_NVLS_ENABLE", "0")] {
            check(&[off, nccl]).unwrap();
            for own in [&[nccl][..], &[nccl, (off.0, "0")], &[nccl, (off.0, "")]] {
                let error = check(own).unwrap_err();
                assert!(error.to_string().contains("NVSHMEM_DISABLE_NVLS=1"), "{error}");
            }
        }
        for nccl in [&[off][..], &[off, ("NVSHMEM_DISABLE_NCCL", "0")], &[off, ("NCCL_NVLS_ENABLE", "1")]] {
            let error = check(nccl).unwrap_err();
            assert!(error.to_string().contains("NVSHMEM_DISABLE_NCCL=1"), "{error}");
        }
    }
}
