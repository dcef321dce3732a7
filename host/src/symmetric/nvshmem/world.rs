//! NVSHMEM's world: how a process joins it, once, and gets memory from it together with the other ranks.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use super::caller::Caller;
use super::library::{Functions, Nvshmem, UniqueId};
use super::unavailable;
use crate::comm::{Meeting, Rank, WorldSize};
use crate::rank::{Step, SymmetricError};
use crate::runtime::{Error, Result};

/// The name of the ranks' notes from before any of them calls the library.
const HERE: &str = "nvshmem";
/// The name of rank 0's note with the id.
const ID: &str = "nvshmem id";
/// The name of the notes on whether a rank has its memory.
const ALLOCATED: &str = "nvshmem heap";
/// The name of the notes that a rank's signals are zero.
const CLEARED: &str = "nvshmem cleared";

/// Makes a rank's device that of the calling thread.
pub(super) type Enter = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// This process, as NVSHMEM knows it.
pub(super) struct World {
    functions: &'static Functions,
    version: String,
    caller: Caller,
    joined: Mutex<Option<Place>>,
}

/// Which rank it is, on which device.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    rank: Rank,
    world: WorldSize,
    device: u32,
}

/// What an arena asks for.
pub(super) struct Request {
    pub bytes: u64,
    pub device: u32,
    pub deadline: Duration,
    pub enter: Enter,
}

/// Memory of the symmetric heap.
#[derive(Clone, Debug)]
pub(super) struct Heap {
    /// Its address here.
    pub own: u64,
    /// The addresses of the ranks' instances here.
    pub peers: Vec<u64>,
}

impl World {
    /// The world of the library in use.
    ///
    /// # Errors
    /// [`Error::NoLibrary`].
    pub fn of_process() -> Result<&'static Self> {
        static WORLD: OnceLock<Result<World>> = OnceLock::new();
        let find = || Nvshmem::load().and_then(|library| Self::new(&library.functions, library.version.clone()));
        WORLD.get_or_init(find).as_ref().map_err(Clone::clone)
    }

    pub fn new(functions: &'static Functions, version: String) -> Result<Self> {
        Ok(Self { functions, version, caller: Caller::start()?, joined: Mutex::default() })
    }

    /// Allocates memory on every rank of the meeting; all ranks call. `clear` makes signals zero before another rank reaches them.
    ///
    /// # Errors
    /// [`SymmetricError::Unavailable`] for a process that is another rank already, for what the library refuses, and for devices that do not reach
    /// each other; [`SymmetricError::Rendezvous`] for another version on another rank; [`SymmetricError::Step`] with a rank that got no memory;
    /// [`Error::Deadline`]; another rank's failure. The heap has a fixed size, and giving memory back takes all ranks: memory that a rank got before another one
    /// failed stays taken until the process ends.
    pub fn open(&self, meeting: &Meeting, request: &Request, clear: impl FnOnce(u64) -> Result<()>) -> Result<Heap> {
        self.join(meeting, request)?;
        let Request { bytes, deadline, ref enter, .. } = *request;
        let (functions, enter) = (self.functions, Arc::clone(enter));
        let own = self.caller.call("nvshmem_malloc", deadline, move || enter().map(|()| functions.allocate(bytes)))??;
        meeting.publish(ALLOCATED, vec![own.is_some().into()])?;
        let all = meeting.gather(ALLOCATED, deadline)?;
        let missing = meeting.world().ranks().zip(all).find(|(_, has)| *has != [1]);
        let (None, Some(own)) = (missing.as_ref(), own) else {
            let rank = missing.map_or(meeting.rank(), |(rank, _)| rank);
            let why = format!("nvshmem_malloc has no {bytes} bytes: raise NVSHMEM_SYMMETRIC_SIZE or NVSHMEM_MAX_MEMORY_PER_GPU");
            return Err(SymmetricError::Step { rank, step: Step::Create, why }.into());
        };
        let far = |rank: Rank| {
            let why = format!("{} does not reach the memory of {rank} by loads and stores (nvidia-smi topo -p2p r)", meeting.rank());
            Error::from(unavailable(why))
        };
        let (world, me, enter) = (meeting.world(), meeting.rank(), Arc::clone(&request.enter));
        let peer = move |rank| if rank == me { Some(own) } else { functions.peer(own, rank) };
        let find = move || enter().map(|()| world.ranks().map(peer).collect::<Vec<_>>());
        let found = self.caller.call("nvshmem_ptr", deadline, find)??;
        let peers = world.ranks().zip(found).map(|(rank, peer)| peer.ok_or_else(|| far(rank))).collect::<Result<_>>()?;
        clear(own)?;
        meeting.publish(CLEARED, Vec::new())?;
        meeting.gather(CLEARED, deadline)?;
        Ok(Heap { own, peers })
    }

    /// Gives memory back; all ranks call, and none uses it any more.
    ///
    /// # Errors
    /// [`Error::Deadline`].
    pub fn close(&self, heap: &Heap, deadline: Duration, enter: Enter) -> Result<()> {
        let (functions, own) = (self.functions, heap.own);
        self.caller.call("nvshmem_free", deadline, move || enter().map(|()| functions.give_back(own)))?
    }

    fn join(&self, meeting: &Meeting, request: &Request) -> Result<()> {
        let Request { device, deadline, ref enter, .. } = *request;
        let place = Place { rank: meeting.rank(), world: meeting.world(), device };
        let mut joined = match self.joined.try_lock() {
            Ok(joined) => joined,
            Err(TryLockError::Poisoned(joined)) => PoisonError::into_inner(joined),
            Err(TryLockError::WouldBlock) => {
                return Err(unavailable("another thread of this process is joining: start a process a rank").into());
            }
        };
        if joined.is_some_and(|before| before != place) {
            let why = "this process is another rank, of another world or on another device, in NVSHMEM, which a process joins once: start a \
                       process a rank, and open all arenas with the same ranks";
            return Err(unavailable(why).into());
        }
        self.compare(meeting, joined.is_some(), deadline)?;
        if joined.is_some() {
            return Ok(());
        }
        let functions = self.functions;
        if place.rank == Rank::ZERO {
            let id = self.caller.call("nvshmemx_get_uniqueid", deadline, || functions.unique_id())?;
            let id = id.map_err(|code| failed("nvshmemx_get_uniqueid", code))?;
            meeting.publish(ID, id.bytes().to_vec())?;
        }
        let invalid = |_| unavailable("rank 0 brings an id that is none");
        let id = meeting.read(Rank::ZERO, ID, deadline)?.try_into().map(UniqueId::from_bytes).map_err(invalid)?;
        let enter = Arc::clone(enter);
        let init = move || enter().map(|()| functions.join(&id, place.rank, place.world));
        let result = self.caller.call("nvshmemx_hostlib_init_attr", deadline, init)??;
        result.map_err(|(call, code)| failed(call, code))?;
        *joined = Some(place);
        Ok(())
    }

    /// All ranks are here, with one version, and have all joined before or none has.
    fn compare(&self, meeting: &Meeting, is_joined: bool, deadline: Duration) -> Result<()> {
        let since = if is_joined { "joined before" } else { "not joined before" };
        let mine = format!("NVSHMEM {}, {since}", self.version);
        meeting.publish(HERE, mine.clone().into_bytes())?;
        let all = meeting.gather(HERE, deadline)?;
        let differs = meeting.world().ranks().zip(&all).find(|(_, note)| **note != mine.as_bytes());
        let error = |(other, note): (Rank, &Vec<u8>)| {
            let expected = String::from_utf8_lossy(note).into_owned();
            SymmetricError::Rendezvous { rank: meeting.rank(), found: mine.clone(), other, expected }
        };
        differs.map_or(Ok(()), |differs| Err(error(differs).into()))
    }
}

fn failed(call: &str, code: c_int) -> SymmetricError {
    unavailable(format!("{call} failed with code {code}: NVSHMEM_DEBUG=INFO makes it say why"))
}
