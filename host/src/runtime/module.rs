//! Loaded kernels and their launch.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use oxtile_tile::launch::{BufferAccess, DeviceLimits, DeviceViewMut, Grid, Kernel, KernelArgs, KernelInfo, LaunchError, Signature};

use super::backend::{FunctionId, KernelLaunch, StreamId};
use super::device::Device;
use super::error::{Error, Result};
use super::event::Event;
use super::instances::Instances;
use super::limits;
use super::memory::{self, Memory};
use super::runtime::{Functions, Inner, lock};
use super::stream::{Stream, StreamInner};

/// A kernel instance, ready to be launched on every device of its runtime. Made by
/// [`Runtime::load`](super::Runtime::load).
pub struct Loaded<K: Signature> {
    runtime: Arc<Inner>,
    info: KernelInfo,
    functions: Functions,
    grid: GridOf<K>,
    /// One emulated thread.
    emulate: fn(&[u64]),
}

/// Checks a kernel's arguments, and derives the grid from them.
type GridOf<K> = fn(&<K as Signature>::Args<'_>, &DeviceLimits) -> std::result::Result<Grid, LaunchError>;

// Not of `Kernel`: of an instance that is not there the compiler reports that where it is loaded, and nothing more where it is launched.
impl<K: Signature> Loaded<K> {
    pub(crate) fn new(runtime: &Arc<Inner>) -> Result<Self>
    where
        K: Kernel,
    {
        let functions = runtime.functions(&K::INFO)?;
        Ok(Self { runtime: Arc::clone(runtime), info: K::INFO, functions, grid: K::grid, emulate: K::emulate })
    }

    /// Enqueues the kernel on the stream, with the grid that it derives from its arguments. A grid of no blocks
    /// enqueues nothing. The host does not wait; the kernel waits for earlier work on the same buffers, on any stream.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::ForeignMemory`], [`Error::WrongDevice`] and [`Error::Limit`] before anything is enqueued; then what
    /// loading the kernel on a new device may give; then driver errors. A fault in the kernel itself is
    /// reported by [`Stream::synchronize`].
    #[track_caller]
    pub fn launch(&self, stream: &Stream, args: K::Args<'_>) -> Result<()> {
        let grid = self.check(&stream.0, &args)?;
        self.launch_checked(&stream.0, grid, &args)
    }

    /// As [`launch`](Self::launch), after zeros in `raised`, memory of the arguments that the kernel raises to a maximum. What is refused before
    /// anything is enqueued leaves them as they were.
    #[track_caller]
    pub(crate) fn launch_on_zeros(&self, stream: &Stream, args: K::Args<'_>, raised: &[BufferAccess<'_>]) -> Result<()> {
        let grid = self.check(&stream.0, &args)?;
        let caller = Location::caller();
        for access in raised.iter().filter(|access| access.bytes != 0) {
            let fill = |id| self.runtime.backend.fill(id, access.address, 0, access.bytes, caller);
            enqueue(stream, self.info.name, std::slice::from_ref(access), fill)?;
        }
        self.launch_checked(&stream.0, grid, &args)
    }

    /// What can be refused before anything is enqueued.
    fn check(&self, stream: &Arc<StreamInner>, args: &K::Args<'_>) -> Result<Grid> {
        if !Arc::ptr_eq(&self.runtime, &stream.runtime) {
            return Err(Error::ForeignRuntime { what: "Loaded::launch" });
        }
        let limits = self.runtime.properties(stream.id.device).limits;
        let grid = (self.grid)(args, &limits).map_err(|error| Error::Argument { kernel: self.info.name, error })?;
        self.check_memory(stream, args)?;
        if grid.blocks() != 0 {
            limits::check(&self.info, grid, &limits)?;
            self.function(stream.id.device)?;
        }
        Ok(grid)
    }

    #[track_caller]
    fn launch_checked(&self, stream: &Arc<StreamInner>, grid: Grid, args: &K::Args<'_>) -> Result<()> {
        if grid.blocks() == 0 {
            return Ok(());
        }
        let function = self.function(stream.id.device)?;
        let (_enqueue, caller) = (self.runtime.enqueue(), Location::caller());
        order(stream, args)?;
        stream.note(self.info.name, Some(caller));
        let body = oxtile_emulator::replacement::of(self.info.name, self.info.family).unwrap_or(self.emulate);
        let launch = KernelLaunch { info: &self.info, function, body, grid, args, caller };
        self.runtime.backend.launch(stream.id, &launch)
    }

    /// Loads the kernel on a device, which the first launch there does else. Call it before another rank's kernel may wait for this one: loading may wait
    /// for kernels under way (CUDA C++ Programming Guide, "Lazy Loading").
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`]; as [`launch`](Self::launch), what loading may give.
    pub fn prepare(&self, device: &Device) -> Result<()> {
        if !Arc::ptr_eq(&self.runtime, &device.runtime) {
            return Err(Error::ForeignRuntime { what: "Loaded::prepare" });
        }
        self.function(device.index).map(drop)
    }

    /// The compile-time facts of the kernel.
    pub fn info(&self) -> &KernelInfo {
        &self.info
    }

    fn function(&self, device: u32) -> Result<FunctionId> {
        let slot = &self.functions[device as usize];
        if let Some(function) = slot.get() {
            return Ok(*function);
        }
        let function = self.runtime.backend.load(device, &self.info, &self.runtime.library)?;
        self.runtime.loads.fetch_add(1, Ordering::Relaxed);
        Ok(*slot.get_or_init(|| function))
    }

    fn check_memory(&self, stream: &StreamInner, args: &K::Args<'_>) -> Result<()> {
        let mut result = Ok(());
        args.accesses(&mut |access| {
            if result.is_ok() {
                result = self.check_access(stream, &access);
            }
        });
        result
    }

    fn check_access(&self, stream: &StreamInner, access: &BufferAccess<'_>) -> Result<()> {
        let kernel = self.info.name;
        // An argument that is left out: see `buffer::nothing`.
        if access.bytes == 0 && memory_of(access).is_none() {
            return Ok(());
        }
        let memory = memory_of(access).filter(|memory| Arc::ptr_eq(&memory.runtime, &self.runtime));
        let Some(memory) = memory else {
            return Err(Error::ForeignMemory { kernel, parameter: access.parameter });
        };
        memory.check_device(stream, || format!("kernel `{kernel}`, `{}`", access.parameter))
    }
}

/// Enqueues work of another library, in order with the other uses of the memory that it accesses.
pub(crate) fn enqueue(
    stream: &Stream,
    name: &'static str,
    accesses: &[BufferAccess<'_>],
    work: impl FnOnce(StreamId) -> Result<()>,
) -> Result<()> {
    let stream = &stream.0;
    let memories = accesses.iter().map(|access| {
        let memory = memory_of(access).filter(|memory| Arc::ptr_eq(&memory.runtime, &stream.runtime));
        let memory = memory.ok_or(Error::ForeignMemory { kernel: name, parameter: access.parameter })?;
        memory.check_device(stream, || format!("`{name}`, `{}`", access.parameter))?;
        Ok((memory, access.writes))
    });
    let memories = memories.collect::<Result<Vec<_>>>()?;
    let _enqueue = stream.runtime.enqueue();
    memory::order(stream, |wait_for| memories.iter().for_each(|(memory, writes)| memory.add_use(stream, *writes, wait_for)))?;
    stream.note(name, None);
    work(stream.id)
}

/// Fills a view with zero bytes, in stream order.
#[track_caller]
pub(crate) fn zero<T>(stream: &Stream, view: DeviceViewMut<'_, T>) -> Result<()> {
    fill(stream, view, 0)
}

/// Fills a view with a byte, in stream order.
#[track_caller]
pub(crate) fn fill<T>(stream: &Stream, view: DeviceViewMut<'_, T>, byte: u8) -> Result<()> {
    let (target, caller) = (view.access("filled"), Location::caller());
    let fill = |id| match target.bytes {
        0 => Ok(()),
        bytes => stream.0.runtime.backend.fill(id, target.address, byte, bytes, caller),
    };
    enqueue(stream, "fill", &[target], fill)
}

/// Later work of the stream comes after the earlier uses of some memory, and later uses of it on other streams after the stream's work so far. The runtime orders a use after
/// all work of the streams that used the memory before: so what is enqueued on those between this note and the use is not waited for.
pub(crate) fn note(stream: &Stream, accesses: &[BufferAccess<'_>]) -> Result<()> {
    enqueue(stream, "a use of memory", accesses, |_| Ok(()))
}

/// Notes that a stream uses memory after an event that it waits for already, and that comes after all earlier uses of it: uses on other streams come after the stream's work so far. A [`note`]
/// would wait for all that those streams hold, also what was enqueued after the event.
pub(crate) fn note_after(stream: &Stream, event: &Event, accesses: &[BufferAccess<'_>]) -> Result<()> {
    stream.wait(event)?;
    let memory = |access: &BufferAccess<'_>| {
        memory_of(access).cloned().ok_or(Error::ForeignMemory { kernel: "a use of memory", parameter: access.parameter })
    };
    let memories = accesses.iter().map(|access| Ok((memory(access)?, access.writes))).collect::<Result<Vec<_>>>()?;
    let _enqueue = stream.0.runtime.enqueue();
    let _order = lock(&stream.0.runtime.order);
    memories.iter().for_each(|(memory, writes)| memory.add_use(&stream.0, *writes, &mut Vec::new()));
    Ok(())
}

/// Makes the stream wait for earlier work on the arguments' memory.
fn order(stream: &Arc<StreamInner>, args: &dyn KernelArgs) -> Result<()> {
    memory::order(stream, |wait_for| {
        args.accesses(&mut |access| {
            if let Some(memory) = memory_of(&access) {
                memory.add_use(stream, access.writes, wait_for);
            }
        });
    })
}

/// The memory behind a view, if this crate lent it.
pub(crate) fn memory_of<'a>(access: &BufferAccess<'a>) -> Option<&'a Arc<Memory>> {
    let owner: &'a (dyn std::any::Any + Send + Sync) = access.owner;
    owner.downcast_ref().or_else(|| instances_of(access).map(|instances| &instances.memory))
}

/// All ranks' instances, where the view is of them.
pub(crate) fn instances_of<'a>(access: &BufferAccess<'a>) -> Option<&'a Instances> {
    let owner: &'a (dyn std::any::Any + Send + Sync) = access.owner;
    owner.downcast_ref()
}

impl<K: Signature> fmt::Debug for Loaded<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("kernel", &self.info.name).finish_non_exhaustive()
    }
}
