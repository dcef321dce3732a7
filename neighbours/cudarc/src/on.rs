//! A stream of cudarc as one of Oxtile.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use oxtile::runtime::Kind;
use oxtile::{Device, Runtime, Stream};

use crate::error::{Error, Result};

/// The handle of the per-thread default stream, which names another stream in every thread (CUDA driver API, "Stream synchronization behavior").
const PER_THREAD: u64 = 2;

/// A stream of cudarc for the length of a closure: see [`on`]. It stays on its thread, whose default stream it may be.
pub struct On {
    /// The stream of Oxtile's work, as Oxtile sees it.
    stream: Stream,
    /// The same one as cudarc sees it.
    pub(crate) lane: Arc<CudaStream>,
    /// Raw pointers are neither `Send` nor `Sync`.
    stays: PhantomData<*const ()>,
}

/// Oxtile's device of a context: the same GPU, whose primary context both use.
///
/// # Errors
/// [`Error::Lend`] for a runtime of the emulator and for a context that is not the device's primary one; as [`Runtime::device`].
pub fn device(runtime: &Runtime, context: &CudaContext) -> Result<Device> {
    if runtime.kind() != Kind::Cuda {
        return Err(Error::Lend(
            "the runtime is the emulator, whose kernels have no access to a GPU's memory: use Runtime::cuda()".to_owned(),
        ));
    }
    if !context.is_primary() {
        return Err(Error::Lend(
            "the context is not its device's primary context, the one that Oxtile uses: make it by CudaContext::new".to_owned(),
        ));
    }
    let index = u32::try_from(context.ordinal()).map_err(|_| Error::Lend(format!("a GPU of the number {}", context.ordinal())))?;
    Ok(runtime.device(index)?)
}

/// Runs `body` with a stream of cudarc as a stream of Oxtile. What it enqueues comes after what the stream holds now, and before what is enqueued there next, whether it succeeds
/// or not. The host waits for nothing.
///
/// # Errors
/// What `body` returned; as [`device`]; [`Error::Cudarc`].
pub fn on<T, E: From<Error>>(
    runtime: &Runtime,
    stream: &Arc<CudaStream>,
    body: impl for<'a> FnOnce(&'a On) -> Result<T, E>,
) -> Result<T, E> {
    let on = On::begin(runtime, stream)?;
    let joined = OnEnd { lane: &on.lane, stream };
    let result = body(&on);
    joined.end()?;
    result
}

impl On {
    fn begin(runtime: &Runtime, theirs: &Arc<CudaStream>) -> Result<Self> {
        let device = device(runtime, theirs.context())?;
        let raw = theirs.cu_stream() as u64;
        if raw != PER_THREAD {
            // SAFETY: a stream of the device's primary context (`device`), which its handle keeps.
            let stream = unsafe { Stream::lent(&device, raw, Arc::clone(theirs) as _)? };
            return Ok(Self { stream, lane: Arc::clone(theirs), stays: PhantomData });
        }
        let stream = of_this_thread(&device)?;
        // SAFETY: a stream of the primary context, which `stream` keeps alive beside it; the two are dropped together.
        let lane = unsafe { theirs.context().wrap_borrowed_stream(stream.raw() as _) };
        lane.join(theirs)?;
        Ok(Self { stream, lane, stays: PhantomData })
    }

    /// The stream to enqueue on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Fails unless memory of the other stream is of this device and context.
    pub(crate) fn same_context(&self, other: &CudaStream) -> Result<()> {
        if other.context() == self.lane.context() {
            return Ok(());
        }
        let (found, expected) = (other.context().ordinal(), self.lane.context().ordinal());
        Err(Error::Lend(format!(
            "the slice is of GPU {found}, the stream of GPU {expected}, or their contexts differ: use a stream of the slice's own context"
        )))
    }
}

/// What makes the stream wait when the closure has ended, by a panic too.
struct OnEnd<'a> {
    lane: &'a CudaStream,
    stream: &'a CudaStream,
}

impl OnEnd<'_> {
    fn join(&self) -> Result<(), DriverError> {
        if self.lane == self.stream { Ok(()) } else { self.stream.join(self.lane) }
    }

    fn end(self) -> Result<()> {
        let joined = self.join();
        std::mem::forget(self);
        Ok(joined?)
    }
}

impl Drop for OnEnd<'_> {
    fn drop(&mut self) {
        self.stream.context().record_err(self.join());
    }
}

/// A stream of Oxtile's that takes the place of this thread's default stream; the same one each time.
fn of_this_thread(device: &Device) -> Result<Stream> {
    thread_local! {
        static STREAMS: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
    }
    STREAMS.with_borrow_mut(|streams| {
        let found = streams.iter().find(|stream| stream.device() == *device);
        if let Some(stream) = found {
            return Ok(stream.clone());
        }
        let made = device.stream()?;
        streams.push(made.clone());
        Ok(made)
    })
}

impl fmt::Debug for On {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("On").field("stream", &self.stream).finish_non_exhaustive()
    }
}
