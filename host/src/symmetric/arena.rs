//! One arena a rank: the memory that others reach.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard};
use std::time::Instant;

use oxtile_tile::num::Pod;

use super::awaited::{Awaited, Expected, hardware_queues};
use super::backend::{self, ArenaMemory, Capabilities, SymmetricBackend};
use super::batch::Batch;
use super::buffer::SymmetricBuffer;
use super::declared::Declared;
use super::layout::{Item, Layout};
use super::options::ArenaOptions;
use super::signal::{Channel, Epoch};
use super::watcher::Watcher;
use crate::comm::{ArenaRank, Meeting, Member, NcclCommunicator, Rank, WorldSize};
use crate::runtime::backend::{Caller, WordOperation};
use crate::runtime::instances::Lent;
use crate::runtime::runtime::lock;
use crate::runtime::stream::StreamInner;
use crate::runtime::watch::Watch;
use crate::runtime::{Buffer, Device, Error, Kind, Owner, Result, Stream};

/// A rank's arena: memory of one size on every rank, which all may read and write, and signal words. Buffers and channels are taken
/// from it in one order on every rank, so that their places agree; that is checked when a peer is first used.
#[derive(Clone)]
pub struct Arena(pub(super) Arc<Inner>);

pub(super) struct Inner {
    /// No other arena of this process has it.
    pub id: u64,
    pub rank: Rank,
    pub world: WorldSize,
    pub options: ArenaOptions,
    pub layout: Layout,
    pub backend: Box<dyn SymmetricBackend>,
    pub meeting: Meeting,
    /// Where this rank's memory lies.
    pub base: u64,
    /// Where the ranks' arenas lie, in the order of ranks, once all are there.
    pub peers: OnceLock<Vec<u64>>,
    /// The stream that allocates, reads words and writes poison; nothing else waits on it.
    pub control: Stream,
    /// Every stream that used a peer.
    pub streams: Mutex<BTreeMap<u64, Stream>>,
    /// What streams wait for.
    pub awaited: Mutex<Awaited>,
    /// The names of flags, and the channels that they take.
    pub flags: Mutex<Vec<(&'static str, Range<u64>)>>,
    /// How many tickets it has given. Gathers count their own.
    pub tickets: AtomicU64,
    /// The gathers that it has declared.
    pub declared: Mutex<Declared>,
    /// When its words were looked at by a call of an operation last.
    pub looked: Mutex<Option<Instant>>,
    /// What ended it.
    pub failure: Mutex<Option<Error>>,
    /// Shared by the threads that enqueue waits; see [`Inner::enqueuing`].
    pub enqueuing: RwLock<()>,
    /// Through which a host's wait for a stream sees that the arena has ended.
    pub watcher: Arc<Watcher>,
    /// Whether this rank gave it up in order.
    pub closed: Mutex<bool>,
}

impl Arena {
    /// Opens this rank's arena. Every rank opens the same number of arenas, in one order. `vmm` waits for all ranks here; on the virtual cluster, whose
    /// ranks one thread may drive, they are met when a peer is first used. Either way at most for [`ArenaOptions::rendezvous`].
    ///
    /// # Errors
    /// [`SymmetricError::Unavailable`](super::SymmetricError::Unavailable), [`Error::NoLibrary`]; out of memory. The others then get
    /// [`SymmetricError::Aborted`](super::SymmetricError::Aborted), [`SymmetricError::Step`](super::SymmetricError::Step), or [`SymmetricError::Rendezvous`](super::SymmetricError::Rendezvous) where they opened something else.
    pub fn open(rank: &impl ArenaRank, options: ArenaOptions) -> Result<Self> {
        let meeting = rank.next_meeting();
        options.publish(&meeting)?;
        Self::allocate(rank.device(), options, meeting.clone()).inspect_err(|error| meeting.give_up(&error.to_string()))
    }

    fn allocate(device: &Device, options: ArenaOptions, meeting: Meeting) -> Result<Self> {
        let control = Stream::urgent(device)?;
        let backend = backend::find(options.backend, &control)?;
        Self::over(backend, control, options, meeting)
    }

    /// An arena of a back end, which allocates and reads signals on the stream.
    pub(super) fn over(backend: Box<dyn SymmetricBackend>, control: Stream, options: ArenaOptions, meeting: Meeting) -> Result<Self> {
        let (rank, world) = (meeting.rank(), meeting.world());
        let layout = Layout::new(world, options.channels, options.bytes)?;
        if backend.is_collective() {
            options.compare(&meeting)?;
        }
        let (share_devices, deadline) = (options.share_devices, options.rendezvous_deadline());
        let memory = ArenaMemory { bytes: layout.bytes(), zeros: layout.heap(), layout: layout.heap(), share_devices, deadline };
        // The words of signals are zero, and the host has seen that: a rank that is told of the arena finds them zero.
        let base = backend.open(&control, &meeting, memory)?;
        let (peers, streams, awaited, declared) = (OnceLock::new(), Mutex::default(), Mutex::default(), Mutex::default());
        let (failure, enqueuing, closed) = (Mutex::default(), RwLock::default(), Mutex::new(false));
        static ARENAS: AtomicU64 = AtomicU64::new(0);
        let inner = Inner {
            id: ARENAS.fetch_add(1, Ordering::Relaxed),
            rank,
            world,
            options,
            layout,
            backend,
            meeting,
            base,
            peers,
            control,
            streams,
            awaited,
            flags: Mutex::default(),
            tickets: AtomicU64::new(0),
            declared,
            looked: Mutex::default(),
            failure,
            enqueuing,
            watcher: Arc::default(),
            closed,
        };
        let inner = Arc::new(inner);
        inner.watcher.begin(&inner);
        Ok(Self(inner))
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.0.world
    }

    /// Whether work of the arena may be enqueued on the stream.
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`]; [`Error::Invalid`].
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<()> {
        self.0.check_stream(stream)
    }

    /// Fails unless the member is this rank, in a team of this world.
    pub(crate) fn check_member(&self, what: &'static str, member: &Member) -> Result<()> {
        if member.team().world() == self.world() && member.world_rank() == self.rank() {
            return Ok(());
        }
        Err(Error::Invalid { what, why: format!("{member:?} is not of {} in an arena of {}", self.rank(), self.world()) })
    }

    /// Bytes that buffers may still take.
    pub(crate) fn room(&self) -> u64 {
        self.0.layout.room()
    }

    /// What the memory can do.
    pub fn capabilities(&self) -> Capabilities {
        self.0.backend.capabilities()
    }

    /// Whether kernels of several ranks may share the multiprocessors of a GPU: one that waits for another rank then may keep that one's from running.
    pub(crate) fn may_share_devices(&self) -> bool {
        self.0.options.share_devices && self.0.control.0.runtime.kind() == Kind::Cuda
    }

    /// A communicator of all ranks that knows the arena, with the back end `nccl`: its collectives on buffers of the arena, the same on every
    /// rank, take NCCL's kernels for symmetric memory.
    pub fn communicator(&self) -> Option<NcclCommunicator> {
        self.0.backend.communicator()
    }

    /// Takes a buffer of `len` elements, not written yet. Every rank takes the same, in one order. The memory stays taken until the
    /// arena is closed.
    ///
    /// # Errors
    /// [`SymmetricError::Full`](super::SymmetricError::Full); [`Error::TooLarge`].
    pub fn buffer<T: Pod>(&self, len: u64) -> Result<SymmetricBuffer<T>> {
        let bytes = len.checked_mul(size_of::<T>() as u64);
        let bytes = bytes.ok_or(Error::TooLarge { what: "Arena::buffer", count: len, element_bytes: size_of::<T>() as u64 })?;
        let (number, offset) = self.0.layout.take(Item::Buffer { bytes })?;
        self.0.publish_layout(number)?;
        let arena = Arc::new(self.clone());
        // SAFETY: the layout gave these bytes of the arena to this buffer alone, at a multiple of 256; the arena is not closed before it is
        // dropped, and then waits for the streams that it was told of.
        let local = unsafe { Buffer::of_owner(&self.0.control.device(), self.0.base + offset, len, Arc::clone(&arena) as _)? };
        Ok(SymmetricBuffer::of(arena, (number, offset), local, Lent::default()))
    }

    /// Takes a signal channel: a word for each rank that writes, on every rank. Every rank takes the same, in one order.
    ///
    /// # Errors
    /// [`SymmetricError::NoChannel`](super::SymmetricError::NoChannel).
    pub fn channel(&self) -> Result<Channel> {
        let (number, index) = self.0.layout.take(Item::Channel)?;
        self.0.publish_layout(number)?;
        Ok(Channel { arena: self.0.id, number, index })
    }

    /// Sets this rank's word of the channel on `to`, once all earlier work of the stream is visible there.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a channel of another arena or a stream of another device; [`Error::ForeignRuntime`]; a failure of the rendezvous or of the
    /// arena; an error of the driver.
    #[track_caller]
    pub fn signal(&self, stream: &Stream, channel: Channel, to: Rank, epoch: Epoch) -> Result<()> {
        let operation = self.0.signal(channel, to, epoch, Location::caller())?;
        self.0.word_operation(stream, operation, None)
    }

    /// Later work of the stream waits until `from` has set its word of the channel here to `epoch` or a later one.
    ///
    /// # Errors
    /// As [`signal`](Self::signal).
    #[track_caller]
    pub fn wait(&self, stream: &Stream, channel: Channel, from: Rank, epoch: Epoch) -> Result<()> {
        let (operation, expected) = self.0.wait(channel, from, epoch, Location::caller())?;
        self.0.word_operation(stream, operation, Some(expected))
    }

    /// Puts, signals and waits for `stream`, to be enqueued together.
    pub fn batch<'a>(&'a self, stream: &'a Stream) -> Batch<'a> {
        Batch::new(self, stream)
    }
}

impl Inner {
    pub fn check(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    /// Whether work of the arena may be enqueued on the stream: it is of the arena's device, whose words a stream waits for.
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`]; [`Error::Invalid`].
    pub fn check_stream(&self, stream: &Stream) -> Result<()> {
        let (of, own) = (&stream.0, &self.control.0);
        if !Arc::ptr_eq(&of.runtime, &own.runtime) {
            return Err(Error::ForeignRuntime { what: "Arena" });
        }
        if of.id.device != own.id.device {
            let (found, expected) = (of.id.device, own.id.device);
            let why =
                format!("the stream is on device {found}, the arena of {} on {expected}: use a stream of device {expected}", self.rank);
            return Err(Error::Invalid { what: "Arena", why });
        }
        Ok(())
    }

    /// Remembers a stream that has to be drained before the memory is freed: whatever enqueues work of the arena calls this first. A graph that captures
    /// such work keeps the arena.
    ///
    /// # Errors
    /// As [`check_stream`](Self::check_stream).
    pub fn use_on(self: &Arc<Self>, stream: &Stream) -> Result<()> {
        self.check_stream(stream)?;
        self.used_on(&stream.0);
        if let Some(capture) = stream.0.capture() {
            capture.keep(Arc::clone(self) as _);
        }
        Ok(())
    }

    /// The write of this rank's word on `to`.
    pub fn signal(&self, channel: Channel, to: Rank, epoch: Epoch, caller: Caller) -> Result<WordOperation> {
        let word = self.word_of(channel, self.rank)?;
        let address = self.peer(to, channel.number)? + word;
        Ok(WordOperation::Write { address, value: epoch.0, caller })
    }

    /// The wait for the word of `from`, to be noted where it is enqueued.
    pub fn wait(&self, channel: Channel, from: Rank, epoch: Epoch, caller: Caller) -> Result<(WordOperation, Expected)> {
        self.check()?;
        let word = self.word_of(channel, from)?;
        let expected = Expected { word, from, epoch: Some(epoch) };
        Ok((WordOperation::Wait { address: self.base + word, value: epoch.0, caller }, expected))
    }

    /// The write of 0 to a word of this rank.
    pub fn reset(&self, word: u64, caller: Caller) -> WordOperation {
        WordOperation::Write { address: self.base + word, value: Epoch::ZERO.0, caller }
    }

    /// Holds a stream where a kernel's wait was not answered, until the arena is ended.
    pub fn wait_for_no_verdict(&self, caller: Caller) -> WordOperation {
        WordOperation::Wait { address: self.base + self.layout.verdict(), value: 0, caller }
    }

    /// The word of a channel that `source` writes. A channel of another arena would name a word of this arena, and a rank of another world a word
    /// after the last one: both are refused.
    pub fn word_of(&self, channel: Channel, source: Rank) -> Result<u64> {
        if channel.arena != self.id {
            let why = format!("it is of another arena than this one of {}: use one that this arena gave (Arena::channel)", self.rank);
            return Err(Error::Invalid { what: "Channel", why });
        }
        if source.index() >= self.world.get() {
            return Err(Error::Invalid { what: "Arena", why: format!("{source} is not of this world of {}", self.world) });
        }
        Ok(self.layout.word(channel.index, source))
    }

    /// The number of the next ticket.
    pub fn next_ticket(&self) -> u64 {
        1 + self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes what the stream is about to wait for. As many streams that wait as there are hardware queues may delay the one that is to signal.
    pub fn await_on(&self, stream: &Stream, expected: Expected) {
        let count = lock(&self.awaited).note(stream.raw(), expected);
        if count.is_some_and(|count| count == hardware_queues()) {
            let (rank, streams) = (self.rank.index(), hardware_queues());
            tracing::warn!(
                rank,
                streams,
                "as many streams wait as the device has hardware queues: use fewer, or raise CUDA_DEVICE_MAX_CONNECTIONS"
            );
        }
    }

    /// Enqueues one, and notes what is waited for.
    pub fn word_operation(self: &Arc<Self>, stream: &Stream, operation: WordOperation, expected: Option<Expected>) -> Result<()> {
        let _enqueuing = self.enqueuing()?;
        self.use_on(stream)?;
        expected.into_iter().for_each(|expected| self.await_on(stream, expected));
        let (backend, id) = (&stream.0.runtime.backend, stream.0.id);
        stream.0.note(operation.name(), Some(operation.caller()));
        match operation {
            WordOperation::Write { address, value, caller } => backend.write_value(id, address, value, caller),
            WordOperation::Wait { address, value, caller } => backend.wait_value(id, address, value, caller),
        }
    }

    /// Waits for a stream, on GPUs at most for the deadline. On the virtual cluster a stream that cannot go on is an error by itself.
    pub fn settle(&self, stream: &Stream) -> Result<()> {
        if stream.0.runtime.kind() == Kind::Emulated {
            return stream.synchronize();
        }
        let (end, start, limit) = (stream.mark()?, Instant::now(), self.options.deadline);
        while !end.is_done()? {
            if start.elapsed() > limit {
                let mend = "see what signal of which rank a stream of the arena still waits for";
                return Err(Error::Deadline { what: format!("{}: the work of a stream of its arena", self.rank), limit, mend });
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Owner for Inner {
    fn begin(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        self.enqueuing().map(Some)
    }

    fn used_on(&self, stream: &Arc<StreamInner>) {
        let mut streams = lock(&self.streams);
        let known = streams.get(&stream.id.handle);
        // A stream of another library has another handle each time that it is borrowed.
        if known.is_some_and(|known| Arc::ptr_eq(&known.0, stream)) {
            return;
        }
        let (is_new, watcher): (_, Arc<dyn Watch>) = (known.is_none(), Arc::clone(&self.watcher) as _);
        stream.watchers.add(&watcher);
        if is_new {
            streams.insert(stream.id.handle, Stream(Arc::clone(stream)));
        }
    }
}

/// A handle of the arena for each buffer, which the buffer's memory shares.
impl Owner for Arena {
    fn used_on(&self, stream: &Arc<StreamInner>) {
        self.0.used_on(stream);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("rank", &self.0.rank).field("world", &self.0.world).finish_non_exhaustive()
    }
}
