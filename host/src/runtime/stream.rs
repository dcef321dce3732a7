//! Streams: queues of device work that run in order, each independent of the others.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::backend::{Caller, EventId, StreamId};
use super::device::Device;
use super::error::{Error, Result};
use super::event::Event;
use super::graph::Capture;
use super::runtime::{Inner, Kind, lock};
use super::watch::{self, Watchers};

/// A queue of work on one device, in order. Cloning gives another handle on the same queue.
///
/// Every call enqueues and returns, unless its documentation states that it waits. Work of different streams is ordered by
/// [events](Event) alone; for buffers the runtime adds them by itself.
#[derive(Clone)]
pub struct Stream(pub(crate) Arc<StreamInner>);

/// The queue itself: alive while a handle, or a buffer that it used, is.
pub(crate) struct StreamInner {
    pub runtime: Arc<Inner>,
    pub id: StreamId,
    owned: bool,
    /// What keeps a stream of another library alive.
    _keep_alive: Option<Arc<dyn Any + Send + Sync>>,
    /// Records the queue's tail for another stream to wait on; made when first needed.
    tail: OnceLock<EventId>,
    /// Recorded just before a capture, for what must wait for earlier work while the queue itself is captured.
    before_capture: OnceLock<EventId>,
    /// Whether `capture` holds something: read on every launch.
    capturing: AtomicBool,
    capture: Mutex<Option<Arc<Capture>>>,
    /// What was enqueued last, and where: named by a wait that ends at its deadline.
    last: Mutex<Option<(&'static str, Option<Caller>)>>,
    /// What may end a host's wait for it.
    pub watchers: Arc<Watchers>,
}

impl Stream {
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let id = device.runtime.backend.create_stream(device.index)?;
        Ok(Self::from_id(device, id, true, None))
    }

    /// A stream whose work goes before that of others, but for a wait of theirs that shares a queue of the device with it.
    pub(crate) fn urgent(device: &Device) -> Result<Self> {
        let id = device.runtime.backend.create_urgent_stream(device.index)?;
        Ok(Self::from_id(device, id, true, None))
    }

    /// Borrows a stream of another library: on CUDA a `CUstream`. 0 and `CU_STREAM_LEGACY` are one stream, the legacy default stream, whose
    /// [`raw`](Self::raw) is `CU_STREAM_LEGACY`: so it stays the same in code that is compiled for default streams of threads.
    ///
    /// # Errors
    /// [`Error::Invalid`] for `CU_STREAM_PER_THREAD`, which names another stream in every thread, so that work on it could not be ordered.
    ///
    /// # Safety
    /// `raw` is a live stream of the device's primary context (of [`raw`](Self::raw) on the emulator) and outlives the
    /// handle, its clones and every buffer that was used on it.
    pub unsafe fn borrow_raw(device: &Device, raw: u64) -> Result<Self> {
        Self::borrowed(device, raw, None)
    }

    /// As [`borrow_raw`](Self::borrow_raw), with what keeps the stream alive: a handle of the other library, which then need not outlive the
    /// handle, its clones and the buffers that were used on it.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use oxtile::{Buffer, Result, Runtime, Stream};
    ///
    /// # fn main() -> Result<()> {
    /// let device = Runtime::checked(1)?.device(0)?;
    /// let theirs = device.stream()?;
    /// // SAFETY: a stream of the device, there as long as the handle that is kept.
    /// let ours = unsafe { Stream::lent(&device, theirs.raw(), Arc::new(theirs.clone()))? };
    /// drop(theirs);
    /// assert_eq!(Buffer::<u32>::zeros(&ours, 2)?.to_vec(&ours)?, [0, 0]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`borrow_raw`](Self::borrow_raw).
    ///
    /// # Safety
    /// `raw` is a live stream of the device's primary context (of [`raw`](Self::raw) on the emulator) for as long as `keep_alive` is not dropped. It is
    /// dropped with the last handle or buffer that was used on the stream, on any thread.
    pub unsafe fn lent(device: &Device, raw: u64, keep_alive: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        Self::borrowed(device, raw, Some(keep_alive))
    }

    /// A stream that the caller of `borrow_raw` or `lent` vouches for.
    fn borrowed(device: &Device, raw: u64, keep_alive: Option<Arc<dyn Any + Send + Sync>>) -> Result<Self> {
        let handle = if device.runtime.kind() == Kind::Cuda { one_name(raw)? } else { raw };
        Ok(Self::from_id(device, StreamId { device: device.index, handle }, false, keep_alive))
    }

    fn from_id(device: &Device, id: StreamId, owned: bool, keep_alive: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        let runtime = Arc::clone(&device.runtime);
        let (tail, before_capture) = (OnceLock::new(), OnceLock::new());
        let (capturing, capture, last, watchers) = (AtomicBool::new(false), Mutex::new(None), Mutex::new(None), Arc::default());
        Self(Arc::new(StreamInner {
            runtime,
            id,
            owned,
            _keep_alive: keep_alive,
            tail,
            before_capture,
            capturing,
            capture,
            last,
            watchers,
        }))
    }

    /// The handle to lend to another library: on CUDA its `CUstream`.
    pub fn raw(&self) -> u64 {
        self.0.id.handle
    }

    /// The device that runs the work.
    pub fn device(&self) -> Device {
        Device { runtime: Arc::clone(&self.0.runtime), index: self.0.id.device }
    }

    /// Waits until all work enqueued so far is done, at most for the runtime's [deadline](super::CudaOptions::deadline), and after a signal of
    /// another rank at most for that of the [arena](crate::symmetric::ArenaOptions::deadline).
    ///
    /// # Errors
    /// What went wrong in that work: a driver error, or the fault of an emulated kernel with its full text.
    /// [`Error::NotCapturable`] during a capture; [`Error::StreamDeadline`]; [`Error::Symmetric`], as a [`Ticket`](crate::symmetric::Ticket::wait).
    pub fn synchronize(&self) -> Result<()> {
        self.0.refuse_capture("waiting for a stream", "wait after the replay")?;
        self.0.synchronize()
    }

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// A driver error.
    pub fn record(&self) -> Result<Event> {
        Event::record(self, true)
    }

    /// As [`record`](Self::record), for callers that need no time.
    pub(crate) fn mark(&self) -> Result<Event> {
        Event::record(self, false)
    }

    /// Makes all later work of this stream wait for the work of another one so far. Unlike an [event](Self::mark) it cannot be kept, and takes nothing.
    pub(crate) fn follow(&self, other: &Self) -> Result<()> {
        let _enqueue = self.0.runtime.enqueue();
        super::memory::order(&self.0, |wait_for| wait_for.push(Arc::clone(&other.0)))
    }

    /// Makes all later work of this stream wait for the event, on any device of the runtime; for one of its own it need not. The host does not wait.
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`]; [`Error::NotCapturable`] if only one of the two belongs to a capture.
    pub fn wait(&self, event: &Event) -> Result<()> {
        if !Arc::ptr_eq(&self.0.runtime, &event.0.runtime) {
            return Err(Error::ForeignRuntime { what: "Stream::wait" });
        }
        if self.0.capture().map(|c| c.number) != event.0.capture {
            return Err(Error::NotCapturable {
                what: "an event between captured and other work",
                mend: "record and wait inside the same capture, or both outside; Graph::replay orders a graph after earlier work on its buffers",
            });
        }
        if event.is_of(self) {
            return Ok(());
        }
        self.0.note("a wait for an event", None);
        self.0.watchers.follow(&event.0.watchers);
        self.0.runtime.backend.wait(self.0.id, event.0.id)
    }

    /// Whether the stream's work is being captured into a [`Graph`](super::Graph).
    pub fn is_capturing(&self) -> bool {
        self.0.capturing.load(Ordering::Acquire)
    }
}

/// The handle that one stream always has here (`CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`: CUDA driver API, "Stream synchronization behavior").
fn one_name(raw: u64) -> Result<u64> {
    const LEGACY: u64 = 1;
    const PER_THREAD: u64 = 2;
    match raw {
        0 | LEGACY => Ok(LEGACY),
        PER_THREAD => {
            let why = "CU_STREAM_PER_THREAD names another stream in every thread: lend a stream that was created".to_owned();
            Err(Error::Invalid { what: "Stream::borrow_raw", why })
        }
        created => Ok(created),
    }
}

impl StreamInner {
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        if self.capturing.load(Ordering::Acquire) { lock(&self.capture).clone() } else { None }
    }

    /// Enters or leaves a capture; returns the one that was in force.
    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        self.capturing.store(capture.is_some(), Ordering::Release);
        *lock(&self.capture) = capture;
    }

    /// Whether several copies may be enqueued by one call: in no graph, and not on what may be the legacy default stream
    /// (CUDA driver API, `cuMemcpyBatchAsync`).
    pub(crate) fn takes_batches(&self) -> bool {
        self.owned && !self.capturing.load(Ordering::Acquire)
    }

    pub(crate) fn refuse_capture(&self, what: &'static str, mend: &'static str) -> Result<()> {
        if self.capturing.load(Ordering::Acquire) { Err(Error::NotCapturable { what, mend }) } else { Ok(()) }
    }

    /// Marks what was enqueued before a capture begins.
    pub(crate) fn record_before_capture(&self) -> Result<()> {
        self.runtime.backend.record(self.event(&self.before_capture)?, self.id)
    }

    /// Orders later work of this stream after what the others hold now: one event each.
    pub(crate) fn order_after(&self, others: &[Arc<Self>]) -> Result<()> {
        for other in others.iter().filter(|other| other.id != self.id) {
            self.watchers.follow(&other.watchers);
            let event = if other.is_captured_without(self) {
                other.event(&other.before_capture)?
            } else {
                let event = other.event(&other.tail)?;
                self.runtime.backend.record(event, other.id)?;
                event
            };
            self.runtime.backend.wait(self.id, event)?;
        }
        Ok(())
    }

    /// Whether all work enqueued before the capture under way is done; does not wait.
    pub(crate) fn is_done_before_capture(&self) -> Result<bool> {
        self.runtime.backend.is_done(self.event(&self.before_capture)?)
    }

    /// Waits until all work enqueued so far, or before the capture under way, is done.
    pub(crate) fn wait_on_host(&self) -> Result<()> {
        match self.capture() {
            None => self.synchronize(),
            Some(_) => self.runtime.synchronize_event(self.event(&self.before_capture)?, self.id, &self.watchers.present(), || self.last()),
        }
    }

    /// Remembers what is enqueued.
    pub(crate) fn note(&self, what: &'static str, caller: Option<Caller>) {
        *lock(&self.last) = Some((what, caller));
    }

    /// Waits until all work enqueued so far is done, at most for the runtime's deadline, and as long as the stream's watchers let it.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let (runtime, backend) = (&self.runtime, &*self.runtime.backend);
        let watchers = self.watchers.present();
        runtime.counts[self.id.device as usize].wait();
        if runtime.deadline.is_none() && watchers.is_empty() {
            return backend.synchronize(self.id);
        }
        if let Some(cluster) = backend.cluster() {
            let is_done = cluster.synchronize_within(self.id, runtime.deadline, &watchers)?;
            return runtime.in_time(is_done, self.id, || self.last()).and_then(|()| watch::check(&watchers));
        }
        let event = runtime.events.take(backend, self.id.device, false)?;
        let recorded = backend.record(event, self.id);
        let done = recorded.and_then(|()| runtime.synchronize_event(event, self.id, &watchers, || self.last()));
        match done {
            Ok(()) => runtime.events.give(backend, event, false),
            Err(_) => backend.destroy_event(event),
        }
        done
    }

    /// What was enqueued last.
    pub(crate) fn last(&self) -> String {
        match *lock(&self.last) {
            Some((what, Some(caller))) => format!("{what} (enqueued at {caller})"),
            Some((what, None)) => what.to_owned(),
            None => "what another library enqueued".to_owned(),
        }
    }

    /// An event recorded now would belong to a capture that `other` has no part in.
    fn is_captured_without(&self, other: &Self) -> bool {
        self.capturing.load(Ordering::Acquire) && !other.capturing.load(Ordering::Acquire)
    }

    fn event(&self, slot: &OnceLock<EventId>) -> Result<EventId> {
        if let Some(event) = slot.get() {
            return Ok(*event);
        }
        let event = self.runtime.backend.create_event(self.id.device, false)?;
        // Another thread may have been faster: one of the two events is then not needed.
        if slot.set(event).is_err() {
            self.runtime.backend.destroy_event(event);
        }
        Ok(*slot.get_or_init(|| event))
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        for event in [self.tail.take(), self.before_capture.take()].into_iter().flatten() {
            self.runtime.backend.destroy_event(event);
        }
        if self.owned {
            self.runtime.backend.destroy_stream(self.id);
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.0.id.device).field("raw", &self.0.id.handle).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Runtime;

    #[test]
    fn a_stream_has_one_name() {
        assert_eq!([0, 1, 0x7f00].map(|raw| one_name(raw).unwrap()), [1, 1, 0x7f00]);
        assert!(matches!(one_name(2), Err(Error::Invalid { what: "Stream::borrow_raw", .. })));
        let device = Runtime::emulated(1).unwrap().device(0).unwrap();
        let stream = device.stream().unwrap();
        // SAFETY: a stream of the device that outlives the handle.
        let borrowed = unsafe { Stream::borrow_raw(&device, stream.raw()) }.unwrap();
        assert_eq!((borrowed.raw(), borrowed.0.id), (stream.raw(), stream.0.id));
    }
}
