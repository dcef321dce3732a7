//! Events: points in a stream that other streams and the host can wait for.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::backend::{EventId, StreamId};
use super::error::{Error, Result};
use super::runtime::Inner;
use super::stream::{Stream, StreamInner};
use super::watch::Watchers;

/// A point in a stream: done when all work enqueued before it is. Made by [`Stream::record`].
#[derive(Clone)]
pub struct Event(pub(crate) Arc<EventInner>);

pub(crate) struct EventInner {
    pub runtime: Arc<Inner>,
    pub id: EventId,
    is_timed: bool,
    /// Where it was recorded.
    of: StreamId,
    stream: Weak<StreamInner>,
    /// What watches that stream.
    pub watchers: Arc<Watchers>,
    /// The capture it was recorded in, if any: it then names a node of the graph, not a moment.
    pub capture: Option<u64>,
    /// Whether that is a capture, of this library or of another that shares the stream.
    is_captured: bool,
}

impl Event {
    pub(crate) fn record(stream: &Stream, is_timed: bool) -> Result<Self> {
        let stream = &stream.0;
        let (runtime, capture) = (Arc::clone(&stream.runtime), stream.capture().map(|c| c.number));
        let is_captured = capture.is_some() || runtime.backend.is_capturing(stream.id)?;
        let id = runtime.events.take(&*runtime.backend, stream.id.device, is_timed)?;
        let (of, watchers) = (Arc::downgrade(stream), Arc::clone(&stream.watchers));
        let inner = EventInner { runtime, id, is_timed, of: stream.id, stream: of, watchers, capture, is_captured };
        stream.runtime.backend.record(id, stream.id)?;
        Ok(Self(Arc::new(inner)))
    }

    /// Whether it was recorded on the stream, all later work of which is then after it anyway. Another stream with the handle of one that is gone
    /// is another.
    pub(crate) fn is_of(&self, stream: &Stream) -> bool {
        std::ptr::eq(self.0.stream.as_ptr(), Arc::as_ptr(&stream.0))
    }

    /// Waits on the host until the event is done, at most as long as [`Stream::synchronize`] does.
    ///
    /// # Errors
    /// What went wrong before it; [`Error::NotCapturable`] for an event of a capture; [`Error::StreamDeadline`]; [`Error::Symmetric`].
    pub fn synchronize(&self) -> Result<()> {
        self.refuse_captured()?;
        let last = || self.0.stream.upgrade().map_or_else(|| "the last of it".to_owned(), |stream| stream.last());
        self.0.runtime.synchronize_event(self.0.id, self.0.of, &self.0.watchers.present(), last)
    }

    /// Whether the event is done; does not wait. On the emulator it runs an operation of any stream that can go on, or, where none can, lets other threads enqueue some for 200 us.
    ///
    /// # Errors
    /// What went wrong before it; [`Error::NotCapturable`] for an event of a capture.
    pub fn is_done(&self) -> Result<bool> {
        self.refuse_captured()?;
        self.0.runtime.backend.is_done(self.0.id)
    }

    /// The time from an earlier event to this one; waits for both. On the GPU it is device time with a resolution of
    /// about half a microsecond; on the emulator it is what the emulation took.
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`]; what went wrong before either event; [`Error::NotCapturable`].
    pub fn elapsed_since(&self, earlier: &Self) -> Result<Duration> {
        if !Arc::ptr_eq(&self.0.runtime, &earlier.0.runtime) {
            return Err(Error::ForeignRuntime { what: "Event::elapsed_since" });
        }
        earlier.synchronize()?;
        self.synchronize()?;
        let seconds = self.0.runtime.backend.elapsed_seconds(earlier.0.id, self.0.id)?;
        Ok(Duration::from_secs_f64(seconds.max(0.0)))
    }

    fn refuse_captured(&self) -> Result<()> {
        match self.0.capture {
            None => Ok(()),
            Some(_) => Err(Error::NotCapturable {
                what: "asking for an event of a graph",
                mend: "record an event on the stream after Graph::replay",
            }),
        }
    }
}

impl Drop for EventInner {
    fn drop(&mut self) {
        let backend = &*self.runtime.backend;
        if self.is_captured {
            // A node of a graph is no record to begin anew from.
            backend.destroy_event(self.id);
        } else {
            self.runtime.events.give(backend, self.id, self.is_timed);
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.0.id.device).finish_non_exhaustive()
    }
}
