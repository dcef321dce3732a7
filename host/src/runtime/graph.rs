//! Graphs: work captured once and replayed with one call.

use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::backend::GraphId;
use super::error::{Error, Result};
use super::memory::{self, Memory, Owner, Release, Uses};
use super::runtime::{Inner, lock};
use super::stream::{Stream, StreamInner};

/// A captured sequence of launches, fills and copies between buffers, on one or more streams.
///
/// It keeps the buffers that it uses alive, and the arenas and communicators. Each replay counts as one use of each of them.
pub struct Graph {
    runtime: Arc<Inner>,
    id: GraphId,
    memory: Vec<(Arc<Memory>, bool)>,
    /// What its work needs besides: dropped when it is destroyed.
    kept: Vec<Arc<dyn Owner>>,
}

impl Graph {
    /// Captures what `body` enqueues on `streams`; none of it runs. All streams start together and the graph ends when
    /// all have ended; between them, buffers and events order the work as they do outside.
    ///
    /// Waiting, allocating and copying from or to the host are refused with [`Error::NotCapturable`] before anything
    /// is enqueued. Nothing else may use the streams meanwhile.
    ///
    /// # Errors
    /// What `body` returned; [`Error::Invalid`] for no stream, a stream twice or one that is already captured; a driver
    /// error.
    pub fn capture<E: From<Error>>(streams: &[&Stream], body: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let session = Session::begin(streams)?;
        body()?;
        Ok(session.end()?)
    }

    /// Enqueues the whole graph, after earlier work on its buffers.
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`], [`Error::NotCapturable`] inside another capture, what ended a communicator or an arena that its work needs,
    /// [`Error::NotReady`] for the place of a gather whose epoch the stream was not given, a driver error.
    #[track_caller]
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        let stream = &stream.0;
        if !Arc::ptr_eq(&self.runtime, &stream.runtime) {
            return Err(Error::ForeignRuntime { what: "Graph::replay" });
        }
        if stream.id.device != self.id.device {
            let why = format!("it was captured on device {}, the stream is on device {}", self.id.device, stream.id.device);
            return Err(Error::Invalid { what: "Graph::replay", why });
        }
        stream.refuse_capture("the replay of a graph", "capture its work again in place of it")?;
        self.memory.iter().try_for_each(|(memory, _)| memory.check_admitted(stream, || "Graph::replay".to_owned()))?;
        let _begun: Vec<_> = self.kept.iter().map(|owner| owner.begin()).collect::<Result<_>>()?;
        let _enqueue = self.runtime.enqueue_alone();
        memory::order(stream, |wait_for| self.memory.iter().for_each(|(memory, writes)| memory.add_use(stream, *writes, wait_for)))?;
        self.kept.iter().for_each(|owner| owner.used_on(stream));
        stream.note("the replay of a graph", Some(Location::caller()));
        self.runtime.backend.launch_graph(stream.id, self.id, Location::caller())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.runtime.backend.destroy_graph(self.id);
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("buffers", &self.memory.len()).finish_non_exhaustive()
    }
}

/// What is being captured: the uses of memory inside it, which say nothing of the moment they are recorded in.
pub(crate) struct Capture {
    /// Different for every capture of the process.
    pub number: u64,
    memory: Mutex<Vec<Captured>>,
    kept: Mutex<Vec<Arc<dyn Owner>>>,
    releases: Mutex<Vec<Release>>,
    /// What is undone if there is no graph in the end.
    undos: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

struct Captured {
    memory: Arc<Memory>,
    writes: bool,
    uses: Uses,
}

impl Capture {
    fn new() -> Arc<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { number, memory: Mutex::default(), kept: Mutex::default(), releases: Mutex::default(), undos: Mutex::default() })
    }

    pub fn add_use(&self, memory: &Arc<Memory>, stream: &Arc<StreamInner>, writes: bool, wait_for: &mut Vec<Arc<StreamInner>>) {
        let mut all = lock(&self.memory);
        let at = all.iter().position(|c| c.memory.shares_uses(memory)).unwrap_or_else(|| {
            all.push(Captured { memory: Arc::clone(memory), writes: false, uses: Uses::default() });
            all.len() - 1
        });
        all[at].writes |= writes;
        all[at].uses.add(stream, writes, wait_for);
    }

    /// Keeps what the graph's work needs for as long as there is the graph.
    pub fn keep(&self, owner: Arc<dyn Owner>) {
        let mut kept = lock(&self.kept);
        // Of trait objects the addresses alone say whether they are one.
        if !kept.iter().any(|other| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&owner))) {
            kept.push(owner);
        }
    }

    /// Calls this if the capture fails, or is given up: what was counted in it has not come about.
    pub fn if_given_up(&self, undo: impl FnOnce() + Send + 'static) {
        lock(&self.undos).push(Box::new(undo));
    }

    /// Keeps memory until the capture has ended.
    pub fn release_later(&self, release: Release) {
        lock(&self.releases).push(release);
    }
}

/// A capture under way; ends it even if the body fails or panics.
struct Session {
    streams: Vec<Arc<StreamInner>>,
    capture: Arc<Capture>,
}

impl Session {
    fn begin(streams: &[&Stream]) -> Result<Self> {
        let streams: Vec<_> = streams.iter().map(|stream| Arc::clone(&stream.0)).collect();
        let Some((origin, others)) = streams.split_first() else {
            return Err(invalid("it needs at least one stream"));
        };
        for (i, stream) in streams.iter().enumerate() {
            if !Arc::ptr_eq(&stream.runtime, &origin.runtime) {
                return Err(Error::ForeignRuntime { what: "Graph::capture" });
            }
            if stream.capture().is_some() || streams[..i].iter().any(|earlier| earlier.id == stream.id) {
                return Err(invalid("a stream is named twice, or is captured already"));
            }
        }
        streams.iter().try_for_each(|stream| stream.record_before_capture())?;
        let capture = Capture::new();
        origin.runtime.backend.begin_capture(origin.id)?;
        origin.set_capture(Some(Arc::clone(&capture)));
        // From here on dropping the session ends the capture.
        let session = Self { capture, streams: vec![Arc::clone(origin)] };
        session.fork(others)
    }

    fn fork(mut self, others: &[Arc<StreamInner>]) -> Result<Self> {
        for other in others {
            other.set_capture(Some(Arc::clone(&self.capture)));
            other.order_after(&self.streams[..1]).inspect_err(|_| other.set_capture(None))?;
            self.streams.push(Arc::clone(other));
        }
        Ok(self)
    }

    fn end(mut self) -> Result<Graph> {
        let streams = std::mem::take(&mut self.streams);
        let (id, runtime) = (self.close(&streams)?, Arc::clone(&streams[0].runtime));
        let memory = lock(&self.capture.memory).drain(..).map(|c| (c.memory, c.writes)).collect();
        let kept = std::mem::take(&mut *lock(&self.capture.kept));
        lock(&self.capture.undos).clear();
        Ok(Graph { runtime, id, memory, kept })
    }

    /// Joins the streams, ends the capture and frees what was dropped during it.
    fn close(&self, streams: &[Arc<StreamInner>]) -> Result<GraphId> {
        let (origin, others) = (&streams[0], &streams[1..]);
        let joined = origin.order_after(others);
        let graph = origin.runtime.backend.end_capture(origin.id);
        streams.iter().for_each(|stream| stream.set_capture(None));
        let releases = std::mem::take(&mut *lock(&self.capture.releases));
        releases.into_iter().for_each(Release::run);
        let graph = graph?;
        joined.inspect_err(|_| origin.runtime.backend.destroy_graph(graph))?;
        Ok(graph)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        // An error of the end itself adds nothing to the one that led here.
        if let Some(origin) = streams.first()
            && let Ok(graph) = self.close(&streams)
        {
            origin.runtime.backend.destroy_graph(graph);
        }
        let undos = std::mem::take(&mut *lock(&self.capture.undos));
        undos.into_iter().rev().for_each(|undo| undo());
    }
}

fn invalid(why: &str) -> Error {
    Error::Invalid { what: "Graph::capture", why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use crate::runtime::{Buffer, Runtime};

    /// No other thread sees a use noted before the wait that follows from it is enqueued.
    #[test]
    fn uses_are_noted_one_thread_at_a_time() {
        let runtime = Runtime::emulated(1).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let mut buffer = Buffer::<u32>::zeros(&stream, 4).unwrap();
        let filled = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let order = crate::runtime::runtime::lock(&runtime.0.order);
            scope.spawn(|| {
                buffer.fill_zero(&stream).unwrap();
                filled.store(true, Ordering::Release);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!filled.load(Ordering::Acquire), "a use was noted while another thread ordered its own");
            drop(order);
        });
        assert!(filled.load(Ordering::Acquire));
    }

    #[test]
    fn a_replay_waits_for_work_that_is_being_enqueued() {
        let runtime = Runtime::emulated(1).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let mut buffer = Buffer::<u32>::zeros(&stream, 4).unwrap();
        let graph = Graph::capture(&[&stream], || buffer.fill_zero(&stream)).unwrap();
        let replayed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let enqueue = runtime.0.enqueue();
            scope.spawn(|| {
                graph.replay(&stream).unwrap();
                replayed.store(true, Ordering::Release);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!replayed.load(Ordering::Acquire), "the replay came between a use and its work");
            drop(enqueue);
        });
        assert!(replayed.load(Ordering::Acquire));
    }
}
