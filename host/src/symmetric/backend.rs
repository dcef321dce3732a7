//! Where symmetric memory comes from.

use std::fmt;
use std::panic::Location;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::nccl::NcclMemory;
use super::nvshmem::NvshmemMemory;
use super::vmm::{self, Vmm};
use crate::comm::{Meeting, NcclCommunicator};
use crate::rank::{BackendName, Rank, SymmetricError};
use crate::runtime::emulated::Place;
use crate::runtime::{Error, Result, Stream};

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
    /// All ranks' arenas lie one after another in one range of addresses: there are [views](super::SymmetricBuffer::contiguous) of all.
    pub contiguous: bool,
    /// The devices have NVLink multicast. Nothing uses it.
    pub multicast: bool,
}

/// What an arena asks of its back end.
#[derive(Clone, Copy, Debug)]
pub struct ArenaMemory {
    /// Its size; the same on every rank.
    pub bytes: u64,
    /// How many bytes at its beginning are zero before another rank reaches it.
    pub zeros: u64,
    /// A hash of what the memory is divided into.
    pub layout: u64,
    /// Whether ranks may be on one device.
    pub share_devices: bool,
    /// How long ranks wait for each other.
    pub deadline: Duration,
}

/// Makes one rank's arena and gives it back.
pub trait SymmetricBackend: fmt::Debug + Send + Sync {
    /// Its name.
    fn name(&self) -> BackendName;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Whether [`open`](Self::open) waits for all ranks.
    fn is_collective(&self) -> bool;

    /// Whether another rank's mapping keeps the memory after its owner has given it back. Then an arena that ended in a failure is given
    /// back too, once this rank's own streams are done.
    fn is_kept_by_mappings(&self) -> bool {
        false
    }

    /// Allocates memory of the stream's device and makes it known to the ranks of the meeting. Returns its address here.
    ///
    /// # Errors
    /// Out of memory; an error of the driver; of another rank, if it is collective.
    fn open(&self, stream: &Stream, meeting: &Meeting, memory: ArenaMemory) -> Result<u64>;

    /// Where the ranks' arenas lie here, in the order of ranks, once all are there.
    ///
    /// # Errors
    /// [`SymmetricError::Missing`]; another rank's failure; an error of the driver.
    fn peers(&self, meeting: &Meeting, deadline: Duration) -> Result<Vec<u64>>;

    /// The bytes from one rank's arena to the next rank's, where they all lie in one range of addresses, as
    /// [`capabilities`](Self::capabilities) tell of an open arena.
    fn stride(&self) -> Option<u64> {
        None
    }

    /// The communicator that the memory is registered with, if there is one.
    fn communicator(&self) -> Option<NcclCommunicator> {
        None
    }

    /// Gives the memory back. No stream and no rank uses it any more.
    ///
    /// # Errors
    /// An error of the driver.
    fn close(&self, stream: &Stream) -> Result<()>;
}

/// The back end of a name, for the runtime of the stream.
pub(super) fn find(name: BackendName, stream: &Stream) -> Result<Box<dyn SymmetricBackend>> {
    let unavailable = |why: &str| Err(SymmetricError::Unavailable { backend: name, why: why.to_owned() }.into());
    let backend = &stream.0.runtime.backend;
    match (name, backend.cluster()) {
        (BackendName::Emulated, Some(_)) => Ok(Box::new(Emulated::default())),
        (BackendName::Emulated, None) => unavailable("the runtime has GPUs, not a virtual cluster: use vmm"),
        (_, Some(_)) => unavailable("the runtime is a virtual cluster without GPUs: use emulated"),
        (name, None) => match backend.virtual_memory(stream.0.id.device) {
            None => unavailable("the devices have no virtual memory management"),
            Some(_) if name == BackendName::Nvshmem => Ok(Box::new(NvshmemMemory::find()?)),
            Some(driver) if name == BackendName::Nccl => Ok(Box::new(NcclMemory::find(driver)?)),
            Some(driver) => Ok(Box::new(Vmm::new(driver))),
        },
    }
}

/// Makes the first bytes of an arena zero, and waits for that.
pub(super) fn clear(stream: &Stream, address: u64, bytes: u64) -> Result<()> {
    stream.0.runtime.backend.fill(stream.0.id, address, 0, bytes, Location::caller())?;
    stream.synchronize()
}

/// The virtual cluster: one process holds all memory, and an address means the same to every rank.
#[derive(Debug, Default)]
pub(super) struct Emulated {
    /// Where it lies, and the stride.
    own: OnceLock<(Export, Option<u64>)>,
}

/// The name of the note with a rank's address.
const EXPORT: &str = "export";

/// Where a rank's arena lies: an address is valid within one process, in one runtime.
#[derive(Debug, Serialize, Deserialize)]
struct Export {
    process: String,
    runtime: u64,
    address: u64,
}

impl Export {
    fn of(stream: &Stream, address: u64) -> Result<Self> {
        let unnamed = |error: std::io::Error| Error::Invalid { what: "Arena", why: format!("this process cannot name itself: {error}") };
        let runtime = Arc::as_ptr(&stream.0.runtime).addr() as u64;
        Ok(Self { process: vmm::process().map_err(unnamed)?, runtime, address })
    }

    /// Its address for another rank.
    fn reached_by(&self, own: &Self, rank: Rank, other: Rank) -> Result<u64> {
        let why = if self.process != own.process {
            format!(
                "{other} is another process than {rank}, and the virtual cluster is memory of one: let ranks be its threads, or use vmm on GPUs"
            )
        } else if self.runtime != own.runtime {
            format!("{other} has another Runtime than {rank}: make both ranks' devices of one (a clone of a Runtime is the same runtime)")
        } else {
            return Ok(self.address);
        };
        Err(SymmetricError::Unavailable { backend: BackendName::Emulated, why }.into())
    }
}

impl SymmetricBackend for Emulated {
    fn name(&self) -> BackendName {
        BackendName::Emulated
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { processes: false, contiguous: self.stride().is_some(), multicast: false }
    }

    fn is_collective(&self) -> bool {
        false
    }

    fn open(&self, stream: &Stream, meeting: &Meeting, memory: ArenaMemory) -> Result<u64> {
        let (address, stride) = allocate(stream, meeting, memory.bytes)?;
        clear(stream, address, memory.zeros)?;
        let export = Export::of(stream, address)?;
        // A structure of numbers and strings: its conversion to text cannot fail.
        meeting.publish(EXPORT, serde_json::to_vec(&export).unwrap_or_default())?;
        Ok(self.own.get_or_init(|| (export, stride)).0.address)
    }

    fn stride(&self) -> Option<u64> {
        self.own.get()?.1
    }

    fn peers(&self, meeting: &Meeting, deadline: Duration) -> Result<Vec<u64>> {
        let invalid = |what: &dyn fmt::Display| Error::Invalid { what: "Arena", why: format!("no export of an address: {what}") };
        let (own, _) = self.own.get().ok_or_else(|| invalid(&"it is not open"))?;
        let reach = |(other, note): (Rank, Vec<u8>)| {
            let export: Export = serde_json::from_slice(&note).map_err(|error| invalid(&error))?;
            export.reached_by(own, meeting.rank(), other)
        };
        meeting.world().ranks().zip(meeting.gather(EXPORT, deadline)?).map(reach).collect()
    }

    fn close(&self, stream: &Stream) -> Result<()> {
        self.own.get().map_or(Ok(()), |(own, _)| stream.0.runtime.backend.free(stream.0.id, own.address))
    }
}

/// A rank's part of a range that holds the parts of all ranks of the meeting, with the stride between them; memory of its own where ranks cannot know each other's, as ranks
/// over a [`StoreBoard`](crate::bootstrap::StoreBoard).
fn allocate(stream: &Stream, meeting: &Meeting, bytes: u64) -> Result<(u64, Option<u64>)> {
    const NAME: &str = "arena";
    let (backend, id) = (&stream.0.runtime.backend, stream.0.id);
    match (backend.cluster(), meeting.process_wide_name()) {
        (Some(cluster), Some(range)) => {
            let place = Place { range: &range, index: meeting.rank().index(), count: meeting.world().get() };
            cluster.allocate_in(&place, id, NAME, bytes).map(|(address, stride)| (address, Some(stride)))
        }
        _ => Ok((backend.allocate(id, NAME, bytes)?, None)),
    }
}
