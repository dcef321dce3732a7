//! A world of ranks that NCCL connects, from its creation to its end.

use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::bootstrap::exchange_id;
use super::handle::Handle;
use super::library::{Comm, Nccl as Library, NcclVersion, SUCCESS, UniqueId};
use crate::bootstrap::{Environment, Store};
use crate::comm::group;
use crate::comm::sequence::Sequence;
use crate::comm::{Board, Rank, WorldSize};
use crate::runtime::{Buffer, Device, Error, Kind, Result, Stream};

/// A world of ranks that NCCL connects, seen from one of them. Cloning gives another handle on the same.
///
/// Calls enqueue on a stream and return; the first of a kind also connects the ranks and waits for all to come to it.
/// Every wait ends by the [deadline](NcclOptions::deadline): then, and after any other failure, the communicator is aborted and each
/// later call returns the same error. A peer that died is noticed only by that deadline, since NCCL does not report the death
/// of a peer on the same host.
///
/// Ranks are processes of a GPU each, or threads of one process. Threads use a [`Runtime`](crate::Runtime) each: a replay of a graph
/// excludes other work of its runtime from being enqueued, so that ranks that share one could wait for each other.
#[derive(Clone)]
pub struct NcclCommunicator {
    pub(super) handle: Arc<Handle>,
    pub(super) device: Device,
    /// What barriers reduce.
    pub(super) token: Arc<Mutex<Buffer<u8>>>,
}

/// Options of [`NcclCommunicator::join`].
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// How long any call, or the work before a point that is [waited](NcclCommunicator::synchronize) for, may take.
    pub deadline: Duration,
    /// Whether every collective is compared with those of the other ranks before it is made: one that differs in kind, reduction, size
    /// or root is then [`Error::Mismatch`] on all of them. A call costs a meeting of all hosts; [`exchange`](crate::comm::Communicator::exchange), `send`
    /// and `recv`, which some ranks make and not all, are not compared. Of communicators made by [`connect`](NcclCommunicator::connect) and [`from_store`](NcclCommunicator::from_store) and
    /// of their parts; the same on all ranks. The board of these notes is in rank 0's process, which serves it until the others have dropped
    /// their communicators or have called nothing for the deadline: a process that ends in order waits for that.
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
                communicator: "NCCL".into(),
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
    /// As [`join`](Self::join), on every rank with the rank that has no library, an emulated device, another version or another
    /// [`compare_calls`](NcclOptions::compare_calls); [`Error::Bootstrap`].
    pub fn from_store(mut store: Store, device: &Device, options: &NcclOptions) -> Result<Self> {
        let (rank, world) = (store.rank(), store.world());
        let version = check_device(device, "NcclCommunicator::from_store").and_then(|()| Self::version());
        let id = exchange_id(&mut store, version, options.compare_calls, Self::unique_id)?;
        if !options.compare_calls {
            let joined = Self::join(device, id, rank, world, options)?;
            store.close()?;
            return Ok(joined);
        }
        let board: Arc<dyn Board> = Arc::new(store.into_board()?.outliving_rank_0(options.deadline));
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
        check_device(device, "NcclCommunicator::join")?;
        if rank.index() >= world.get() {
            return Err(Error::Invalid { what: "NcclCommunicator::join", why: format!("{rank} is not of a world of {}", world.get()) });
        }
        let functions = &Library::load()?.functions;
        device.runtime.backend.make_current(device.index)?;
        Handle::join(functions, id, rank, world, options.deadline)
    }

    pub(super) fn new(handle: Handle, device: &Device) -> Result<Self> {
        let stream = device.stream()?;
        let token = Buffer::zeros(&stream, 1)?;
        stream.synchronize()?;
        Ok(Self { handle: Arc::new(handle), device: device.clone(), token: Arc::new(Mutex::new(token)) })
    }

    /// A number that all handles of this communicator share, and no other one has.
    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.handle) as usize
    }

    pub(super) fn split_off(&self, colour: Option<u32>, key: u32) -> Result<Option<Self>> {
        group::refuse("Communicator::split", "a group is under way on this thread: split before it or after it")?;
        self.device.runtime.backend.make_current(self.device.index)?;
        self.handle.split(colour, key)?.map(|part| Self::new(part, &self.device)).transpose()
    }

    pub(super) fn run_group<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let open = group::begin(self.id())?;
        self.handle.open_group()?;
        let mut end = GroupEnd { communicator: self, open: Some(open) };
        let done = body();
        let ended = end.run();
        done.and_then(|done| ended.map(|()| done))
    }

    /// Waits until all work of the stream is done, at most as long as the deadline.
    ///
    /// # Errors
    /// [`Error::Deadline`] and what NCCL reports, after which the communicator is aborted; what went wrong in the stream's work.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        const WHAT: &str = "NcclCommunicator::synchronize";
        self.check_stream(stream, WHAT)?;
        group::refuse(WHAT, "a group is under way on this thread, whose calls are not enqueued yet: wait after it")?;
        let event = stream.mark()?;
        self.handle.wait("work on a stream", || event.is_done())
    }

    /// What went wrong after the calls, as far as NCCL has noticed.
    ///
    /// # Errors
    /// The first failure, after which the communicator is aborted.
    pub fn check(&self) -> Result<()> {
        self.handle.check()
    }

    /// Ends this rank's part in everything under way, once [groups](crate::comm::Communicator::group) that are open on it have ended and a
    /// call that is being made has returned. The other ranks' part ends by their deadlines. All ranks of a process should be aborted together.
    /// Later calls return [`Error::Aborted`] with `why`.
    pub fn abort(&self, why: &str) {
        self.handle.abort(why);
    }

    /// One call of NCCL on this communicator.
    pub(super) fn call(&self, name: &'static str, call: impl FnOnce(Comm) -> c_int) -> Result<()> {
        self.device.runtime.backend.make_current(self.device.index)?;
        self.handle.call(name, |_, comm| call(comm))
    }

    pub(super) fn check_stream(&self, stream: &Stream, what: &'static str) -> Result<()> {
        let found = stream.device();
        if found == self.device {
            return Ok(());
        }
        let why = format!("the stream is on {found:?}, the communicator on {:?}: use a stream of that device", self.device);
        Err(Error::Invalid { what, why })
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

/// NCCL has no ranks on the virtual cluster.
fn check_device(device: &Device, what: &'static str) -> Result<()> {
    if device.runtime.kind() == Kind::Cuda {
        return Ok(());
    }
    let why = "the device is emulated: use a Runtime::cuda, or the communicator of the virtual cluster".to_owned();
    Err(Error::Invalid { what, why })
}

/// The end of a group, also when its body panics or the communicator is broken: a thread that left one open would launch nothing any more.
struct GroupEnd<'a> {
    communicator: &'a NcclCommunicator,
    /// Set until the group ends: it keeps the memory of the calls until they are enqueued.
    open: Option<group::Open>,
}

impl GroupEnd<'_> {
    fn run(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        // SAFETY: this thread opened the group just before this was made, and `open` is taken once.
        let ended = unsafe { self.communicator.handle.end_group() };
        let backend = &*self.communicator.device.runtime.backend;
        let recorded = open.end_recorded(backend.recorder(), backend);
        ended.and(recorded)
    }
}

impl Drop for GroupEnd<'_> {
    fn drop(&mut self) {
        let _ = self.run();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use std::sync::atomic::Ordering::{Acquire, Release};
    use std::time::Instant;

    use super::super::fake::{FUNCTIONS, Fake, depth};
    use super::*;
    use crate::comm::{Communicator, bootstrap};
    use crate::runtime::Runtime;

    fn communicator(limit: Duration) -> (&'static Fake, NcclCommunicator) {
        let (fake, id) = Fake::leaked();
        let device = Runtime::emulated(1).unwrap().device(0).unwrap();
        let handle = Handle::join(&FUNCTIONS, id, Rank::ZERO, WorldSize::ONE, limit).unwrap();
        (fake, NcclCommunicator::new(handle, &device).unwrap())
    }

    fn send(communicator: &NcclCommunicator) -> Result<()> {
        // SAFETY: the fake looks at the communicator alone.
        communicator.call("ncclSend", |comm| unsafe { (FUNCTIONS.send)(ptr::null(), 0, 1, 0, comm, ptr::null_mut()) })
    }

    /// A group that a thread left open would keep all its later calls from being made.
    #[test]
    fn a_group_ends_on_its_thread_whatever_happens_in_it_and_nothing_is_aborted_before() {
        type Body = fn(&'static Fake, &NcclCommunicator) -> Result<()>;
        let failed = || Error::Invalid { what: "a body", why: "it fails".into() };
        let cases: [(&str, Body, u32); 5] = [
            ("success", |_, _| Ok(()), 0),
            ("an error of the body", |_, _| Err(Error::Invalid { what: "a body", why: "it fails".into() }), 0),
            ("a panic", |_, _| panic!("a body that panics"), 0),
            (
                "an abort by another thread",
                |fake, communicator| {
                    std::thread::scope(|scope| scope.spawn(|| communicator.abort("enough")).join().unwrap());
                    assert!(matches!(send(communicator), Err(Error::Aborted { .. })), "seen at once");
                    assert_eq!(fake.aborted.load(Acquire), 0, "while a call is queued");
                    Ok(())
                },
                1,
            ),
            (
                "a call that fails",
                |fake, communicator| {
                    fake.code.store(6, Release);
                    let error = send(communicator).unwrap_err();
                    fake.code.store(SUCCESS, Release);
                    assert_eq!(fake.aborted.load(Acquire), 0, "while a call is queued");
                    Err(error)
                },
                1,
            ),
        ];
        for (name, body, aborted) in cases {
            let (fake, communicator) = communicator(Duration::from_secs(10));
            let group = || communicator.group(|| send(&communicator).and_then(|()| body(fake, &communicator)));
            let result = catch_unwind(AssertUnwindSafe(group)).unwrap_or_else(|_| Err(failed()));
            assert_eq!(result.is_ok(), name == "success", "{name}: {result:?}");
            assert_eq!((depth(), fake.queued.load(Acquire)), (0, 0), "{name}");
            assert_eq!((fake.aborted.load(Acquire), fake.torn.load(Acquire)), (aborted, 0), "{name}");
            assert_eq!(communicator.group(|| Ok(())).is_err(), aborted == 1, "{name}");
            assert_eq!(depth(), 0, "{name}, and another");
        }
    }

    /// Another thread's call meanwhile, to which no other rank comes, delays the group no longer than the deadline.
    #[test]
    fn a_deadline_within_a_group_aborts_behind_its_end() {
        let (fake, communicator) = communicator(Duration::from_millis(60));
        let begin = Instant::now();
        let (mine, theirs) = std::thread::scope(|scope| {
            let mut theirs = None;
            let mine = communicator.group(|| {
                send(&communicator)?;
                let calls = fake.calls.load(Acquire);
                fake.blocks.store(true, Release);
                theirs = Some(scope.spawn(|| send(&communicator)));
                while fake.calls.load(Acquire) == calls {
                    std::thread::yield_now();
                }
                let error = send(&communicator).unwrap_err();
                // Time for an abort that does not wait.
                std::thread::sleep(Duration::from_millis(60));
                assert_eq!(fake.aborted.load(Acquire), 0, "while a call is queued");
                Err::<(), _>(error)
            });
            (mine.unwrap_err().to_string(), theirs.unwrap().join().unwrap().unwrap_err().to_string())
        });
        assert!(mine.contains("ncclSend (call 3) did not end"), "{mine}");
        assert_eq!(mine, theirs, "the call that was late");
        assert_eq!((depth(), fake.aborted.load(Acquire), fake.torn.load(Acquire)), (0, 1, 0));
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }

    /// The end of a group waits for the ranks to be connected.
    #[test]
    fn an_end_that_blocks_is_ended_by_the_deadline() {
        let (fake, communicator) = communicator(Duration::from_millis(60));
        fake.blocks.store(true, Release);
        let error = communicator.group(|| send(&communicator)).unwrap_err().to_string();
        assert!(error.contains("ncclGroupEnd (call 3) did not end"), "{error}");
        assert_eq!((depth(), fake.aborted.load(Acquire), fake.torn.load(Acquire)), (0, 1, 0));
    }

    #[test]
    fn a_group_ends_with_its_body_also_by_a_panic_and_other_threads_are_not_of_it() {
        let (_, communicator) = communicator(Duration::from_secs(10));
        let stream = communicator.device.stream().unwrap();
        let group = |body: &dyn Fn() -> Result<()>| communicator.group(body);
        catch_unwind(AssertUnwindSafe(|| group(&|| panic!("a body that panics")))).unwrap_err();
        group(&|| {
            assert!(communicator.synchronize(&stream).is_err() && group(&|| Ok(())).is_err());
            std::thread::scope(|scope| scope.spawn(|| communicator.synchronize(&stream).and_then(|()| group(&|| Ok(())))).join().unwrap())
        })
        .unwrap();
        communicator.synchronize(&stream).unwrap();
    }

    /// No rank waits for one that cannot come.
    #[test]
    fn an_emulated_device_is_refused_before_the_ranks_join() {
        let device = Runtime::emulated(1).unwrap().device(0).unwrap();
        let stores = bootstrap::threads(WorldSize::new(2).unwrap(), Duration::from_secs(10)).unwrap();
        std::thread::scope(|scope| {
            let join = |store| NcclCommunicator::from_store(store, &device, &NcclOptions::default()).unwrap_err();
            let threads: Vec<_> = stores.into_iter().map(|store| scope.spawn(move || join(store))).collect();
            for error in threads.into_iter().map(|thread| thread.join().unwrap()) {
                assert!(
                    matches!(&error, Error::Invalid { what: "NcclCommunicator::from_store", why } if why.contains("emulated")),
                    "{error}"
                );
            }
        });
    }
}
