//! The runtime: devices of one kind and the kernels for them.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use oxtile_emulator::Mode;
use oxtile_tile::launch::{Kernel, KernelInfo, Signature};

use super::backend::{Backend, DeviceProperties, EventId, FunctionId, StreamId};
use super::cuda;
use super::device::Device;
use super::emulated::{Cluster, EmulatedOptions};
use super::error::{Error, Result};
use super::event_pool::EventPool;
use super::library::KernelLibrary;
use super::module::Loaded;
use super::patience;
use super::trace::Trace;
use super::usage::Counts;
use super::watch::{self, Watch};

/// The devices that run kernels: the machine's GPUs, or virtual ones. A clone is another handle on the same runtime.
#[derive(Clone)]
pub struct Runtime(pub(crate) Arc<Inner>);

/// Which devices a [`Runtime`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// GPUs, through the CUDA driver.
    Cuda,
    /// Virtual GPUs on the CPU.
    Emulated,
}

/// The runtime that [`Runtime::auto`] opens.
#[derive(Clone, Debug)]
pub struct AutoRuntime {
    /// The runtime.
    pub runtime: Runtime,
    /// Why this one, in a sentence for the user.
    pub reason: String,
}

/// Options of [`Runtime::cuda_with`].
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Folders with compiled kernels, looked through before the [usual ones](KernelLibrary).
    pub kernels: Vec<PathBuf>,
    /// Compiled kernels inside the program, `include_bytes!` of the packs that `oxtile-pack` writes.
    pub packs: Vec<&'static [u8]>,
    /// How long a host waits for a stream, in [`Stream::synchronize`](super::Stream::synchronize), in copies to and from the host and in every other call that waits,
    /// before it gets [`Error::StreamDeadline`]. `None` takes `OXTILE_DEADLINE`, in seconds, or no deadline without that variable.
    pub deadline: Option<Duration>,
}

pub(crate) struct Inner {
    pub backend: Arc<dyn Backend>,
    pub library: KernelLibrary,
    /// The deadline of the host's waits for streams.
    pub deadline: Option<Duration>,
    kind: Kind,
    /// Held from the note of a use of memory to the enqueue of the work: shared by work that borrows what it uses, alone
    /// by a graph's replay, whose buffers others may use meanwhile.
    enqueue: RwLock<()>,
    /// Held while uses of memory are noted and the waits that follow from them are enqueued.
    pub order: Mutex<()>,
    /// By device.
    pub counts: Vec<Counts>,
    /// To be recorded again.
    pub events: EventPool,
    /// The kernels found so far, by package and entry: loading one again is a look-up.
    kernels: Mutex<HashMap<(&'static str, &'static str), Functions>>,
    /// Kernels that were loaded on devices so far.
    pub loads: AtomicU64,
    /// The file that what is done is recorded for, if any.
    trace: Option<Trace>,
}

/// One kernel by device, loaded when first launched there.
pub(crate) type Functions = Arc<[OnceLock<FunctionId>]>;

impl Runtime {
    /// The machine's GPUs. Needs a driver (580 or newer, for CUDA 13) and no toolkit; kernels are looked for as
    /// [`KernelLibrary`] says when they are first loaded.
    ///
    /// # Errors
    /// [`Error::NoCuda`] with what is missing; a driver error.
    pub fn cuda() -> Result<Self> {
        Self::cuda_with(CudaOptions::default())
    }

    /// As [`cuda`](Self::cuda), with options.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda).
    pub fn cuda_with(options: CudaOptions) -> Result<Self> {
        let library = KernelLibrary::new(options.kernels).holding(&options.packs)?;
        Self::new(cuda::platform()?, library, Kind::Cuda, options.deadline)
    }

    /// One virtual GPU for tests of kernels: every access, barrier and copy of a kernel is checked, for races, for reads of what was never written and for all
    /// that [`FaultKind`](super::FaultKind) lists, and so are the host's reads. The seed determines the interleaving of threads and streams: what it finds,
    /// it finds again. [`testing::seeds`](crate::testing::seeds) tries several.
    ///
    /// # Errors
    /// As [`emulated_with`](Self::emulated_with).
    pub fn checked(seed: u64) -> Result<Self> {
        Self::emulated_with(EmulatedOptions { seed: Some(seed), ..EmulatedOptions::default() })
    }

    /// As [`checked`](Self::checked), `devices` virtual GPUs and the seed of `OXTILE_SEED`, or 0.
    ///
    /// # Errors
    /// As [`emulated_with`](Self::emulated_with).
    pub fn emulated(devices: u32) -> Result<Self> {
        Self::emulated_with(EmulatedOptions { devices, ..EmulatedOptions::default() })
    }

    /// `devices` virtual GPUs that run kernels fast, on all cores. Bounds, alignment, divergence and deadlocks are checked, races and reads of
    /// what was never written are not.
    ///
    /// # Errors
    /// As [`emulated_with`](Self::emulated_with).
    pub fn emulated_fast(devices: u32) -> Result<Self> {
        Self::emulated_with(EmulatedOptions { devices, mode: Mode::Fast, ..EmulatedOptions::default() })
    }

    /// Virtual GPUs, with options.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no devices, or an `OXTILE_SEED` or `OXTILE_DEADLINE` that is not a number, and without the feature `emulator`.
    pub fn emulated_with(options: EmulatedOptions) -> Result<Self> {
        if !cfg!(feature = "emulator") {
            let why = "kernels were compiled for GPUs alone: enable the feature `emulator` of `oxtile`".to_owned();
            return Err(Error::Invalid { what: "the CPU emulator", why });
        }
        let deadline = options.deadline;
        Self::new(Arc::new(Cluster::new(options)?), KernelLibrary::default(), Kind::Emulated, deadline)
    }

    fn new(backend: Arc<dyn Backend>, library: KernelLibrary, kind: Kind, deadline: Option<Duration>) -> Result<Self> {
        let deadline = deadline.map_or_else(patience::from_environment, |deadline| Ok(Some(deadline)))?;
        let trace = Trace::from_environment(&*backend)?;
        let (enqueue, order, kernels) = (RwLock::default(), Mutex::default(), Mutex::default());
        let events = EventPool::new(backend.devices().len());
        let counts = backend.devices().iter().map(|_| Counts::default()).collect();
        let loads = AtomicU64::new(0);
        Ok(Self(Arc::new(Inner { backend, library, deadline, kind, enqueue, order, counts, events, kernels, loads, trace })))
    }

    /// The GPUs if there are any and compiled kernels that run on the first, else one virtual GPU that runs kernels
    /// [fast](Self::emulated_fast).
    ///
    /// # Errors
    /// As [`emulated_with`](Self::emulated_with); a GPU that is not usable is a reason, not an error.
    pub fn auto() -> Result<AutoRuntime> {
        let without_cuda = match Self::cuda() {
            Ok(runtime) => match runtime.check_kernels() {
                Ok(()) => {
                    let reason = format!("CUDA: {}", runtime.0.properties(0).name);
                    return Ok(AutoRuntime { runtime, reason });
                }
                Err(why) => format!("there is a GPU, {}, but {why}", runtime.0.properties(0).name),
            },
            Err(error) => error.to_string(),
        };
        if !cfg!(feature = "emulator") {
            let why = format!("{without_cuda}; the CPU emulator needs the feature `emulator` of `oxtile`");
            return Err(Error::Invalid { what: "a runtime", why });
        }
        Ok(AutoRuntime {
            runtime: Self::emulated_fast(1)?,
            reason: format!("the CPU emulator, fast (Runtime::checked looks for races), since {without_cuda}"),
        })
    }

    /// Whether there are any compiled kernels that run on the first device; virtual GPUs need none.
    ///
    /// # Errors
    /// A sentence that says what was found instead, and the command that mends it.
    pub fn check_kernels(&self) -> Result<(), String> {
        match self.kind() {
            Kind::Cuda => self.0.library.check_any(self.0.properties(0).capability),
            Kind::Emulated => Ok(()),
        }
    }

    /// Which devices these are.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }

    /// How many times a kernel was loaded on a device: once each, when it is [prepared](Loaded::prepare) or first launched there.
    #[doc(hidden)]
    pub fn loads(&self) -> u64 {
        self.0.loads.load(Ordering::Relaxed)
    }

    /// How many devices there are; at least one.
    pub fn device_count(&self) -> u32 {
        self.0.backend.devices().len() as u32
    }

    /// A device by its number.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    pub fn device(&self, index: u32) -> Result<Device> {
        let count = self.device_count();
        if index < count { Ok(Device { runtime: Arc::clone(&self.0), index }) } else { Err(Error::NoDevice { index, count }) }
    }

    /// Makes a kernel instance ready to be launched. The first time it is read from disk, again
    /// in memory.
    ///
    /// # Errors
    /// On CUDA what [`KernelLibrary::find`] may give; on the emulator none.
    pub fn load<K: Kernel + Signature>(&self) -> Result<Loaded<K>> {
        Loaded::new(&self.0)
    }
}

impl Inner {
    pub fn properties(&self, device: u32) -> &DeviceProperties {
        &self.backend.devices()[device as usize]
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Guards work that borrows the memory it uses, until it is enqueued.
    pub fn enqueue(&self) -> RwLockReadGuard<'_, ()> {
        self.enqueue.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Guards work on memory that others may use at the same time, until it is enqueued.
    pub fn enqueue_alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.enqueue.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until an event of a stream is done, at most for the deadline, and as long as the stream's watchers let it.
    pub fn synchronize_event(
        &self,
        event: EventId,
        of: StreamId,
        watchers: &[Arc<dyn Watch>],
        last: impl FnOnce() -> String,
    ) -> Result<()> {
        self.counts[of.device as usize].wait();
        if self.deadline.is_none() && watchers.is_empty() {
            return self.backend.synchronize_event(event);
        }
        let is_done = match self.backend.cluster() {
            Some(cluster) => cluster.synchronize_event_within(event, self.deadline, watchers)?,
            None => watch::wait_until(watchers, self.deadline, || self.backend.is_done(event))?,
        };
        self.in_time(is_done, of, last).and_then(|()| watch::check(watchers))
    }

    /// That a wait for a stream is over by the deadline.
    pub fn in_time(&self, is_done: bool, of: StreamId, last: impl FnOnce() -> String) -> Result<()> {
        if is_done {
            return Ok(());
        }
        let limit = self.deadline.unwrap_or_default();
        Err(Error::StreamDeadline { stream: of.handle, device: of.device, last: last(), limit })
    }

    /// The kernel by device; fails early where it cannot be found.
    pub fn functions(&self, info: &KernelInfo) -> Result<Functions> {
        let mut kernels = lock(&self.kernels);
        if let Some(functions) = kernels.get(&(info.package, info.name)) {
            return Ok(Arc::clone(functions));
        }
        if let (Kind::Cuda, [device, ..]) = (self.kind, self.backend.devices()) {
            self.library.find(info, device.capability)?;
        }
        let functions: Functions = self.backend.devices().iter().map(|_| OnceLock::new()).collect();
        kernels.insert((info.package, info.name), Arc::clone(&functions));
        Ok(functions)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(trace) = &self.trace {
            trace.write(&*self.backend);
        }
        self.events.clear(&*self.backend);
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("kind", &self.0.kind).field("devices", &self.device_count()).finish()
    }
}

/// Locks a mutex; data that a panicking thread has left is still whole, since nothing here panics half-way.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The seed in `OXTILE_SEED`.
pub(crate) fn seed_from_environment() -> Result<Option<u64>> {
    let Ok(text) = std::env::var("OXTILE_SEED") else { return Ok(None) };
    let parsed = text.trim().parse().map(Some);
    parsed.map_err(|_| Error::Invalid { what: "OXTILE_SEED", why: format!("`{text}` is not a number from 0 to 2^64 - 1") })
}
