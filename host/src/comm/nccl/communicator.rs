//! Collectives of NCCL on streams and buffers of the runtime.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::panic::Location;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oxtile_tile::num::Pod;

use super::bootstrap::exchange_id;
use super::handle::Handle;
use super::library::{Comm, CudaStream, Functions, Nccl as Library, NcclVersion, SUCCESS, UniqueId};
use crate::comm::bootstrap::{Environment, Store};
use crate::comm::sequence::Sequence;
use crate::comm::{Board, Communicator, DType, Rank, ReduceOp, Reducible, WorldSize};
use crate::runtime::emulated::{Call, Reduction};
use crate::runtime::recorder::{self, Group};
use crate::runtime::{Buffer, Device, Error, Kind, Memory, Result, Stream, lock, order};
use crate::timeline::{Activity, Work};

/// A world of ranks that NCCL connects, seen from one of them. Cloning gives another handle on the same.
///
/// Calls enqueue on a stream and return; the first of a kind also connects the ranks and waits for all to come to it.
/// Every wait ends by the [deadline](NcclOptions::deadline): then, and after any other failure, the communicator is aborted and each
/// later call returns the same error. A peer that died is noticed by that deadline alone, since NCCL does not report the death
/// of a peer on the same host.
///
/// Ranks are processes of a GPU each, or threads of one process. Threads use a [`Runtime`](crate::Runtime) each: a replay of a graph
/// excludes other work of its runtime from being enqueued, so that ranks that share one could wait for each other.
#[derive(Clone)]
pub struct NcclCommunicator {
    handle: Arc<Handle>,
    device: Device,
    /// What barriers reduce.
    token: Arc<Mutex<Buffer<u8>>>,
    /// What is recorded of the group under way.
    group: Arc<Group>,
}

/// Options of [`NcclCommunicator::join`].
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// How long any call, or the work before a point that is [waited](NcclCommunicator::synchronize) for, may take.
    pub deadline: Duration,
    /// Whether every collective is compared with those of the other ranks before it is made: one that differs in kind, reduction, size
    /// or root is then [`Error::Mismatch`] on all of them. A call costs a meeting of all hosts; [`exchange`](Communicator::exchange) is
    /// not compared. Of communicators made by [`connect`](NcclCommunicator::connect) and [`from_store`](NcclCommunicator::from_store) and
    /// of their parts; the same on all ranks. The board of these notes is in rank 0's process: rank 0 of the world keeps a communicator until
    /// the others have made their last call, also where they go on in parts without it.
    pub compare_calls: bool,
}

impl Default for NcclOptions {
    /// Five minutes: the slowest rank of a large job may still be loading its weights. Calls are compared in debug builds.
    fn default() -> Self {
        Self { deadline: Duration::from_secs(300), compare_calls: cfg!(debug_assertions) }
    }
}

impl NcclCommunicator {
    /// Which NCCL this process uses.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] with what was looked for.
    pub fn version() -> Result<NcclVersion> {
        Ok(Library::load()?.version.clone())
    }

    /// What all ranks of a new world need to [join](Self::join) it: one rank calls this and sends it to the others.
    ///
    /// # Errors
    /// [`Error::NoLibrary`]; [`Error::Nccl`] where no network interface is found.
    pub fn unique_id() -> Result<UniqueId> {
        let nccl = &Library::load()?.functions;
        let mut id = UniqueId::from_bytes([0; UniqueId::BYTES]);
        // SAFETY: a valid place for the id.
        match unsafe { (nccl.get_unique_id)(&raw mut id) } {
            SUCCESS => Ok(id),
            code => Err(Error::Nccl {
                call: "ncclGetUniqueId",
                who: "NCCL".into(),
                code,
                meaning: nccl.describe(code),
                detail: nccl.last_error(ptr::null_mut()),
            }),
        }
    }

    /// The world of a job, on this process's device: the ranks come together by the launcher's variables, and rank 0's id goes to all of
    /// them. Waits for all ranks.
    ///
    /// # Errors
    /// As [`Store::connect`] and [`from_store`](Self::from_store).
    pub fn connect(environment: &Environment, device: &Device, options: &NcclOptions) -> Result<Self> {
        Self::from_store(Store::connect(environment, options.deadline)?, device, options)
    }

    /// The world of the ranks that a store connects. Every rank calls it.
    ///
    /// # Errors
    /// As [`join`](Self::join), on every rank with who has no library, or another version; [`Error::Bootstrap`].
    pub fn from_store(mut store: Store, device: &Device, options: &NcclOptions) -> Result<Self> {
        let (rank, world) = (store.rank(), store.world());
        let id = exchange_id(&mut store, Self::version(), Self::unique_id)?;
        if !options.compare_calls {
            let joined = Self::join(device, id, rank, world, options)?;
            store.close()?;
            return Ok(joined);
        }
        let board: Arc<dyn Board> = Arc::new(store.into_board()?);
        let mut handle = Self::join_handle(device, id, rank, world, options)?;
        handle.sequence = Some(Sequence::new(board, "the world", rank, world.ranks().collect(), options.deadline));
        Self::new(handle, device)
    }

    /// Joins a world as one of its ranks, on a device; returns when all ranks have joined.
    ///
    /// # Errors
    /// [`Error::NoLibrary`]; [`Error::Invalid`] for an emulated device; [`Error::Deadline`] if a rank does not come;
    /// [`Error::Nccl`].
    pub fn join(device: &Device, id: UniqueId, rank: Rank, world: WorldSize, options: &NcclOptions) -> Result<Self> {
        Self::new(Self::join_handle(device, id, rank, world, options)?, device)
    }

    fn join_handle(device: &Device, id: UniqueId, rank: Rank, world: WorldSize, options: &NcclOptions) -> Result<Handle> {
        if device.runtime.kind() != Kind::Cuda {
            let why = "the device is emulated: use a Runtime::cuda, or the communicator of the virtual cluster".to_owned();
            return Err(Error::Invalid { what: "NcclCommunicator::join", why });
        }
        if rank.index() >= world.get() {
            return Err(Error::Invalid { what: "NcclCommunicator::join", why: format!("{rank} is not of a world of {}", world.get()) });
        }
        let functions = &Library::load()?.functions;
        device.runtime.backend.make_current(device.index)?;
        Handle::join(functions, id, rank, world, options.deadline)
    }

    fn new(handle: Handle, device: &Device) -> Result<Self> {
        let stream = device.stream()?;
        let token = Buffer::zeros(&stream, 1)?;
        stream.synchronize()?;
        Ok(Self { handle: Arc::new(handle), device: device.clone(), token: Arc::new(Mutex::new(token)), group: Arc::default() })
    }

    /// A communicator of the ranks that name the same colour, ordered by `key` and then by their ranks here; none for a rank
    /// that names none. Every rank calls it.
    ///
    /// # Errors
    /// As a collective's.
    pub fn split(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>> {
        self.device.runtime.backend.make_current(self.device.index)?;
        self.handle.split(colour, key)?.map(|part| Self::new(part, &self.device)).transpose()
    }

    /// The calls of `body` as one: their transfers run together, and sends and receives in it do not wait for one another.
    /// Calls on other communicators do not belong into the body.
    ///
    /// # Errors
    /// What the body returns, and what NCCL says at its end.
    pub fn group(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: no arguments; the matching end follows, whatever the body returns.
        self.handle.call("ncclGroupStart", |nccl, _| unsafe { (nccl.group_start)() })?;
        let end = GroupEnd(&self.handle);
        self.group.begin();
        let done = body();
        let ended = end.run();
        let recorded = self.group.end(&*self.device.runtime.backend);
        done.and(ended).and(recorded)
    }

    /// Waits until all work of the stream is done, at most as long as the deadline.
    ///
    /// # Errors
    /// [`Error::Deadline`] and what NCCL reports, after which the communicator is aborted; what went wrong in the stream's work.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream, "NcclCommunicator::synchronize")?;
        let event = stream.record()?;
        self.handle.wait("work on a stream", || event.is_done())
    }

    /// What went wrong behind the calls, as far as NCCL has noticed.
    ///
    /// # Errors
    /// The first failure, after which the communicator is aborted.
    pub fn check(&self) -> Result<()> {
        self.handle.check()
    }

    /// Ends this rank's part in everything under way; the others' ends by their deadlines. All ranks of a process should be aborted together.
    /// Later calls return [`Error::Aborted`] with `why`.
    pub fn abort(&self, why: &str) {
        self.handle.abort(why);
    }

    /// One call of NCCL on this communicator.
    pub(super) fn call(&self, name: &'static str, call: impl FnOnce(Comm) -> c_int) -> Result<()> {
        self.device.runtime.backend.make_current(self.device.index)?;
        self.handle.call(name, |_, comm| call(comm))
    }

    fn peer(&self, what: &'static str, rank: Rank) -> Result<c_int> {
        let world = self.handle.world.get();
        if rank.index() < world {
            return Ok(rank.index() as c_int);
        }
        Err(Error::Invalid { what, why: format!("{rank} is not of this world, which has ranks 0 to {}", world - 1) })
    }

    fn check_stream(&self, stream: &Stream, what: &'static str) -> Result<()> {
        let found = stream.device();
        if found == self.device {
            return Ok(());
        }
        let why = format!("the stream is on {found:?}, the communicator on {:?}: use a stream of that device", self.device);
        Err(Error::Invalid { what, why })
    }

    /// Orders a call after the other uses of what it reads and writes, and makes it.
    #[track_caller]
    fn enqueue(
        &self,
        stream: &Stream,
        what: &'static str,
        compared: Option<Call>,
        reads: &[&Arc<Memory>],
        writes: &[&Arc<Memory>],
        call: impl FnOnce(&Functions, Comm, CudaStream) -> c_int,
    ) -> Result<()> {
        self.check_stream(stream, what)?;
        reads.iter().chain(writes).try_for_each(|memory| memory.check_stream(&stream.0, what))?;
        if let Some(compared) = compared {
            self.handle.agree(|| compared.to_string())?;
        }
        let raw = ptr::with_exposed_provenance_mut(stream.raw() as usize);
        let _enqueue = stream.0.runtime.enqueue();
        order(&stream.0, |wait_for| {
            reads.iter().for_each(|memory| memory.add_use(&stream.0, false, wait_for));
            writes.iter().for_each(|memory| memory.add_use(&stream.0, true, wait_for));
        })?;
        let (backend, caller) = (&*stream.0.runtime.backend, Location::caller());
        let moved = || if writes.is_empty() { reads } else { writes }.iter().map(|memory| memory.bytes).sum();
        let name = what.trim_start_matches("Communicator::");
        let open = self.group.call(backend, stream.0.id, || Work::new(Activity::Collective, name, Some(moved()), Some(caller)))?;
        // The memory was checked to be the device's, and is freed behind the stream's work; the callers checked the lengths.
        let done = self.handle.call(what, |nccl, comm| call(nccl, comm, raw));
        done.and(open.map_or(Ok(()), |open| recorder::end(backend, open)))
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> Rank {
        self.handle.rank
    }

    fn world(&self) -> WorldSize {
        self.handle.world
    }

    fn all_reduce<T: Reducible>(&self, stream: &Stream, buffer: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        let (at, count) = (address(buffer), count(buffer)?);
        let call = Call::AllReduce { reduction: Reduction { op, dtype: T::DTYPE }, bytes: byte_count(buffer)? as u64 };
        self.enqueue(stream, "Communicator::all_reduce", Some(call), &[], &[buffer.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.all_reduce)(at, at, count, data_type(T::DTYPE), operator(op), comm, stream) }
        })
    }

    fn all_gather<T: Pod>(&self, stream: &Stream, shard: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        const WHAT: &str = "Communicator::all_gather";
        self.check_whole(WHAT, shard.len(), output.len())?;
        let (from, to, bytes) = (address(shard), address(output), byte_count(shard)?);
        let call = Call::AllGather { shard_bytes: bytes as u64 };
        self.enqueue(stream, WHAT, Some(call), &[shard.memory()], &[output.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.all_gather)(from, to, bytes, U8, comm, stream) }
        })
    }

    fn reduce_scatter<T: Reducible>(&self, stream: &Stream, input: &Buffer<T>, shard: &mut Buffer<T>, op: ReduceOp) -> Result<()> {
        const WHAT: &str = "Communicator::reduce_scatter";
        self.check_whole(WHAT, shard.len(), input.len())?;
        let (from, to, count) = (address(input), address(shard), count(shard)?);
        let call = Call::ReduceScatter { reduction: Reduction { op, dtype: T::DTYPE }, shard_bytes: byte_count(shard)? as u64 };
        self.enqueue(stream, WHAT, Some(call), &[input.memory()], &[shard.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.reduce_scatter)(from, to, count, data_type(T::DTYPE), operator(op), comm, stream) }
        })
    }

    fn broadcast<T: Pod>(&self, stream: &Stream, buffer: &mut Buffer<T>, root: Rank) -> Result<()> {
        const WHAT: &str = "Communicator::broadcast";
        let (from, at, bytes) = (self.peer(WHAT, root)?, address(buffer), byte_count(buffer)?);
        let call = Call::Broadcast { root, bytes: bytes as u64 };
        self.enqueue(stream, WHAT, Some(call), &[], &[buffer.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { (nccl.broadcast)(at, at, bytes, U8, from, comm, stream) }
        })
    }

    fn all_to_all<T: Pod>(&self, stream: &Stream, input: &Buffer<T>, output: &mut Buffer<T>) -> Result<()> {
        const WHAT: &str = "Communicator::all_to_all";
        let world = self.handle.world.get() as usize;
        self.check_whole(WHAT, input.len() / world as u64, input.len())?;
        self.check_whole(WHAT, input.len() / world as u64, output.len())?;
        let (from, to, part) = (address(input), address(output), byte_count(input)? / world);
        let messages = (0..world).flat_map(|peer| {
            let at = peer * part;
            // Within the buffers: there are as many parts as ranks.
            [
                Message::Send(from.wrapping_byte_add(at), part, peer as c_int),
                Message::Receive(to.wrapping_byte_add(at), part, peer as c_int),
            ]
        });
        let call = Call::AllToAll { bytes: byte_count(input)? as u64 };
        self.enqueue(stream, WHAT, Some(call), &[input.memory()], &[output.memory()], |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { transfer(messages, nccl, comm, stream) }
        })
    }

    fn exchange<T: Pod>(&self, stream: &Stream, sends: &[(Rank, &Buffer<T>)], receives: &mut [(Rank, &mut Buffer<T>)]) -> Result<()> {
        const WHAT: &str = "Communicator::exchange";
        let mut messages = Vec::with_capacity(sends.len() + receives.len());
        for (to, buffer) in sends {
            messages.push(Message::Send(address(buffer), byte_count(buffer)?, self.peer(WHAT, *to)?));
        }
        for (from, buffer) in receives.iter() {
            messages.push(Message::Receive(address(buffer), byte_count(buffer)?, self.peer(WHAT, *from)?));
        }
        let reads: Vec<_> = sends.iter().map(|(_, buffer)| buffer.memory()).collect();
        let writes: Vec<_> = receives.iter().map(|(_, buffer)| buffer.memory()).collect();
        self.enqueue(stream, WHAT, None, &reads, &writes, |nccl, comm, stream| {
            // SAFETY: `enqueue` vouches for the memory, the stream and the communicator.
            unsafe { transfer(messages, nccl, comm, stream) }
        })
    }

    /// A reduction of one byte of every rank.
    fn barrier(&self, stream: &Stream) -> Result<()> {
        self.all_reduce(stream, &mut lock(&self.token), ReduceOp::Max)
    }
}

impl NcclCommunicator {
    /// Fails unless `whole` is one `shard` of every rank.
    fn check_whole(&self, what: &'static str, shard: u64, whole: u64) -> Result<()> {
        let expected = shard.checked_mul(u64::from(self.handle.world.get()));
        if expected == Some(whole) { Ok(()) } else { Err(Error::Length { what, expected: expected.unwrap_or(u64::MAX), found: whole }) }
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("rank", &self.handle.rank)
            .field("world", &self.handle.world)
            .field("device", &self.device)
            .finish()
    }
}

/// The end of a group, also when its body panics.
struct GroupEnd<'a>(&'a Handle);

impl GroupEnd<'_> {
    fn run(self) -> Result<()> {
        let handle = self.0;
        std::mem::forget(self);
        // SAFETY: no arguments; the matching start came before.
        handle.call("ncclGroupEnd", |nccl, _| unsafe { (nccl.group_end)() })
    }
}

impl Drop for GroupEnd<'_> {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = self.0.call("ncclGroupEnd", |nccl, _| unsafe { (nccl.group_end)() });
    }
}

/// `ncclUint8`, which also carries bytes of any meaning.
const U8: c_int = 1;

/// The number of an element type in `ncclDataType_t`.
fn data_type(of: DType) -> c_int {
    match of {
        DType::U8 => U8,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}

/// The number of an operator in `ncclRedOp_t`.
fn operator(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
    }
}

/// One end of a message: address, bytes, peer.
enum Message {
    Send(*const c_void, usize, c_int),
    Receive(*mut c_void, usize, c_int),
}

/// Enqueues messages as one group, which is ended whatever happens; the first code that is not success.
///
/// # Safety
/// The communicator and the stream are live, the peers of its world, and the memory there until the stream's work is done.
unsafe fn transfer(messages: impl IntoIterator<Item = Message>, nccl: &Functions, comm: Comm, stream: CudaStream) -> c_int {
    // SAFETY: the caller vouches for all of it.
    let one = |message| unsafe {
        match message {
            Message::Send(from, bytes, to) => (nccl.send)(from, bytes, U8, to, comm, stream),
            Message::Receive(to, bytes, from) => (nccl.receive)(to, bytes, U8, from, comm, stream),
        }
    };
    // SAFETY: no arguments; the end follows.
    let start = unsafe { (nccl.group_start)() };
    let first = messages.into_iter().map(one).find(|code| *code != SUCCESS).unwrap_or(SUCCESS);
    // SAFETY: no arguments; the start came before.
    let end = unsafe { (nccl.group_end)() };
    [start, first, end].into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
}

/// Where a buffer lies; null for an empty one.
fn address<T: Pod>(buffer: &Buffer<T>) -> *mut c_void {
    ptr::with_exposed_provenance_mut(buffer.address() as usize)
}

fn count<T: Pod>(buffer: &Buffer<T>) -> Result<usize> {
    usize::try_from(buffer.len()).map_err(|_| too_large(buffer))
}

fn byte_count<T: Pod>(buffer: &Buffer<T>) -> Result<usize> {
    count(buffer)?.checked_mul(size_of::<T>()).ok_or_else(|| too_large(buffer))
}

fn too_large<T: Pod>(buffer: &Buffer<T>) -> Error {
    Error::TooLarge { what: "NcclCommunicator", count: buffer.len(), element_bytes: size_of::<T>() as u64 }
}
