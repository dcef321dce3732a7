//! Work recorded between two events each, for devices that keep their own time.
//!
//! The recorder does not wait for the events of the work: it reads those that are done when more work is recorded or a recording is asked for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::backend::{Backend, EventId, StreamId};
use super::error::Result;
use super::runtime::lock;
use crate::rank::launcher::process_rank;
use crate::recording::{Clock, MOST_SPANS, Recording, Span, Work, now_ns};

/// Records the work of a back end's streams, of whatever runtime.
#[derive(Default)]
pub(crate) struct Recorder {
    on: AtomicBool,
    log: Mutex<Option<Log>>,
}

/// Work that began to be enqueued after an event.
pub(crate) struct Open {
    pub stream: StreamId,
    start: EventId,
    pub work: Work,
}

/// Enqueues work: between two events, if it is recorded.
#[inline]
pub(crate) fn record(
    backend: &dyn Backend,
    stream: StreamId,
    work: impl FnOnce() -> Work,
    enqueue: impl FnOnce() -> Result<()>,
) -> Result<()> {
    match begin(backend, stream, work)? {
        None => enqueue(),
        Some(open) => {
            let done = enqueue();
            done.and(end(backend, open))
        }
    }
}

/// Notes that work follows; none if it is not recorded, or captured: then its replay is.
#[inline]
pub(crate) fn begin(backend: &dyn Backend, stream: StreamId, work: impl FnOnce() -> Work) -> Result<Option<Open>> {
    match backend.recorder() {
        Some(recorder) if recorder.is_on() => recorder.begin(backend, stream, work()),
        _ => Ok(None),
    }
}

/// Notes that the work is enqueued.
pub(crate) fn end(backend: &dyn Backend, open: Open) -> Result<()> {
    backend.recorder().map_or(Ok(()), |recorder| recorder.end(backend, open))
}

impl Recorder {
    #[inline]
    fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub fn start(&self) -> bool {
        let mut log = lock(&self.log);
        let starts = log.is_none();
        log.get_or_insert_with(Log::new);
        // What it guards is guarded by the lock.
        self.on.store(true, Ordering::Relaxed);
        starts
    }

    pub fn stop(&self, backend: &dyn Backend) {
        let log = lock(&self.log).take();
        self.on.store(false, Ordering::Relaxed);
        log.iter().flat_map(Log::events).for_each(|event| backend.destroy_event(event));
    }

    pub fn recording(&self, backend: &dyn Backend) -> Result<Recording> {
        match &mut *lock(&self.log) {
            Some(log) => log.recording(backend),
            None => Log::new().recording(backend),
        }
    }

    #[cold]
    fn begin(&self, backend: &dyn Backend, stream: StreamId, work: Work) -> Result<Option<Open>> {
        if backend.is_capturing(stream)? {
            return Ok(None);
        }
        let mut log = lock(&self.log);
        let Some(log) = log.as_mut() else { return Ok(None) };
        let start = log.event(backend, stream.device)?;
        backend.record(start, stream)?;
        Ok(Some(Open { stream, start, work }))
    }

    fn end(&self, backend: &dyn Backend, open: Open) -> Result<()> {
        match &mut *lock(&self.log) {
            Some(log) => log.end(backend, open),
            None => {
                // The recording ended meanwhile.
                backend.destroy_event(open.start);
                Ok(())
            }
        }
    }
}

/// The calls of a group, which run together after the last of them: they are one piece of work on each stream.
#[derive(Default)]
pub(crate) struct Together(Vec<Open>);

impl Together {
    /// Notes a call.
    pub fn call(
        &mut self,
        recorder: Option<&Recorder>,
        backend: &dyn Backend,
        stream: StreamId,
        work: impl FnOnce() -> Work,
    ) -> Result<()> {
        let Some(recorder) = recorder.filter(|recorder| recorder.is_on()) else { return Ok(()) };
        match self.0.iter_mut().find(|open| open.stream == stream) {
            Some(open) => open.work.join(work()),
            None => self.0.extend(recorder.begin(backend, stream, work())?),
        }
        Ok(())
    }

    /// Notes that the calls are enqueued.
    pub fn end(&mut self, recorder: Option<&Recorder>, backend: &dyn Backend) -> Result<()> {
        let Some(recorder) = recorder else { return Ok(()) };
        self.0.drain(..).try_for_each(|open| recorder.end(backend, open))
    }
}

struct Log {
    rank: Option<u32>,
    started: Instant,
    start_ns: u64,
    clocks: BTreeMap<u32, DeviceClock>,
    /// Their places are their numbers, from 1.
    streams: Vec<StreamId>,
    /// Events to be used again.
    idle: Vec<EventId>,
    /// Work in the order in which it was enqueued, with the events before and after it.
    pending: VecDeque<(Open, EventId)>,
    spans: Vec<Span>,
    dropped: u64,
    /// How far from a device's clock times are read.
    longest: f64,
}

/// A moment of a device: an event, and when it was in the recording, in microseconds.
#[derive(Clone, Copy)]
struct DeviceClock {
    event: EventId,
    at: f64,
}

/// The driver gives times as f32 milliseconds: beyond this many microseconds they are taken from a later event, so that their
/// grain stays below a tenth of one.
const LONGEST: f64 = 1e6;

impl Log {
    fn new() -> Self {
        Self {
            rank: process_rank(),
            started: Instant::now(),
            start_ns: now_ns(),
            clocks: BTreeMap::new(),
            streams: Vec::new(),
            idle: Vec::new(),
            pending: VecDeque::new(),
            spans: Vec::new(),
            dropped: 0,
            longest: LONGEST,
        }
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * 1e6
    }

    /// An event of a device whose clock is known.
    fn event(&mut self, backend: &dyn Backend, device: u32) -> Result<EventId> {
        if !self.clocks.contains_key(&device) {
            let clock = self.set_clock(backend, device)?;
            self.clocks.insert(device, clock);
        }
        match self.idle.iter().rposition(|event| event.device == device) {
            Some(at) => Ok(self.idle.swap_remove(at)),
            None => backend.create_event(device, true),
        }
    }

    /// The only wait, once for each device: for an event on a stream with no other work.
    fn set_clock(&self, backend: &dyn Backend, device: u32) -> Result<DeviceClock> {
        let (stream, event) = (backend.create_stream(device)?, backend.create_event(device, true)?);
        let known = backend.record(event, stream).and_then(|()| backend.synchronize_event(event));
        let at = self.now();
        backend.destroy_stream(stream);
        known.map(|()| DeviceClock { event, at })
    }

    fn end(&mut self, backend: &dyn Backend, open: Open) -> Result<()> {
        if backend.is_capturing(open.stream)? {
            // The work was a wait, by which the stream takes part in a capture: an event after it would be captured too.
            self.idle.push(open.start);
            return Ok(());
        }
        let end = self.event(backend, open.stream.device)?;
        backend.record(end, open.stream)?;
        self.pending.push_back((open, end));
        self.read_done(backend)
    }

    /// Reads the events of work that is done, up to the first that is not.
    fn read_done(&mut self, backend: &dyn Backend) -> Result<()> {
        while let Some((_, end)) = self.pending.front()
            && backend.is_done(*end)?
            && let Some((open, end)) = self.pending.pop_front()
        {
            let start = self.time(backend, open.start)?;
            let duration = backend.elapsed_seconds(open.start, end)? * 1e6;
            self.idle.push(end);
            if let Some(clock) = self.clocks.get_mut(&open.stream.device).filter(|clock| start - clock.at > self.longest) {
                self.idle.push(std::mem::replace(clock, DeviceClock { event: open.start, at: start }).event);
            } else {
                self.idle.push(open.start);
            }
            if self.spans.len() < MOST_SPANS {
                let span = self.span(open.stream, open.work, [start, start + duration], true);
                self.spans.push(span);
            } else {
                self.dropped += 1;
            }
        }
        Ok(())
    }

    /// When an event that is done was. It may be a little earlier than the clock's: times are signed.
    fn time(&self, backend: &dyn Backend, event: EventId) -> Result<f64> {
        match self.clocks.get(&event.device) {
            Some(clock) => Ok(clock.at + backend.elapsed_seconds(clock.event, event)? * 1e6),
            None => Ok(0.0),
        }
    }

    fn span(&mut self, stream: StreamId, work: Work, times: [f64; 2], is_finished: bool) -> Span {
        let at = self.streams.iter().position(|known| *known == stream).unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        });
        work.spanning(self.rank.unwrap_or(stream.device), stream.device, at as u64 + 1, times, is_finished)
    }

    fn recording(&mut self, backend: &dyn Backend) -> Result<Recording> {
        self.read_done(backend)?;
        let mut spans = self.spans.clone();
        // What follows work that is not done may be done, or under way.
        let pending: Vec<_> = self.pending.iter().map(|(open, end)| (open.stream, open.start, open.work.clone(), *end)).collect();
        for (stream, start, work, end) in pending {
            if backend.is_done(start)? {
                let is_finished = backend.is_done(end)?;
                let start = self.time(backend, start)?;
                let end = if is_finished { self.time(backend, end)? } else { self.now() };
                spans.push(self.span(stream, work, [start, end], is_finished));
            }
        }
        Ok(Recording::new(Clock::Device, self.start_ns, spans, self.dropped))
    }

    fn events(&self) -> impl Iterator<Item = EventId> {
        let pending = self.pending.iter().flat_map(|(open, end)| [open.start, *end]);
        self.idle.iter().copied().chain(pending).chain(self.clocks.values().map(|clock| clock.event))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::recording::Activity;
    use crate::runtime::Runtime;

    fn work(name: &str) -> Work {
        Work::new(Activity::Wait, name, None, Some(Location::caller()))
    }

    /// The emulator's events have times too, which the same code can read.
    fn recorder() -> (Runtime, Recorder) {
        let recorder = Recorder::default();
        assert!(recorder.start() && !recorder.start());
        (Runtime::emulated(2).unwrap(), recorder)
    }

    #[test]
    fn spans_lie_between_their_events() {
        for longest in [LONGEST, 0.0] {
            let (runtime, recorder) = recorder();
            let backend = &*runtime.0.backend;
            lock(&recorder.log).as_mut().unwrap().longest = longest;
            let streams = [1, 0, 1].map(|device| backend.create_stream(device).unwrap());
            for number in 0..90 {
                let open = recorder.begin(backend, streams[number % 3], work(&number.to_string())).unwrap().unwrap();
                recorder.end(backend, open).unwrap();
            }
            streams.iter().try_for_each(|stream| backend.synchronize(*stream)).unwrap();
            let recording = recorder.recording(backend).unwrap();
            let lanes = recording.lanes();
            assert_eq!(lanes.keys().map(|lane| lane.rank).collect::<Vec<_>>(), [0, 1, 1]);
            for spans in lanes.values() {
                assert!(spans.len() == 30 && spans.is_sorted_by(|a, b| a.end <= b.start), "{spans:?}");
                assert!(spans.is_sorted_by_key(|span| span.name.parse::<u32>().unwrap()) && spans.iter().all(|span| span.is_finished));
            }
            // Events are used again.
            let events = lock(&recorder.log).as_ref().unwrap().events().count();
            assert!(events <= 182, "{events} events for 90 spans");
            recorder.stop(backend);
            assert_eq!(recorder.recording(backend).unwrap().spans, []);
        }
    }

    #[test]
    fn what_is_under_way_is_not_finished_and_what_is_behind_it_not_begun() {
        let (runtime, recorder) = recorder();
        let backend = &*runtime.0.backend;
        let [held, other] = [0, 0].map(|device| backend.create_stream(device).unwrap());
        let word = backend.allocate(held, "word", 8).unwrap();
        backend.fill(held, word, 0, 8, Location::caller()).unwrap();
        backend.synchronize(held).unwrap();
        for name in ["held", "after"] {
            let open = recorder.begin(backend, held, work(name)).unwrap().unwrap();
            backend.wait_value(held, word, 1, Location::caller()).unwrap();
            recorder.end(backend, open).unwrap();
        }
        let found = |recording: Recording| recording.spans.iter().map(|s| (s.name.clone(), s.is_finished)).collect::<Vec<_>>();
        assert_eq!(found(recorder.recording(backend).unwrap()), [("held".to_owned(), false)]);
        backend.write_value(other, word, 1, Location::caller()).unwrap();
        backend.synchronize(held).unwrap();
        assert_eq!(found(recorder.recording(backend).unwrap()), [("held".to_owned(), true), ("after".to_owned(), true)]);
    }

    #[test]
    fn a_wait_that_joins_a_capture_is_no_span() {
        let (runtime, recorder) = recorder();
        let backend = &*runtime.0.backend;
        let [origin, other] = [0, 0].map(|device| backend.create_stream(device).unwrap());
        let event = backend.create_event(0, false).unwrap();
        backend.begin_capture(origin).unwrap();
        backend.record(event, origin).unwrap();
        let open = recorder.begin(backend, other, work("wait")).unwrap().unwrap();
        backend.wait(other, event).unwrap();
        assert!(backend.is_capturing(other).unwrap());
        recorder.end(backend, open).unwrap();
        assert!(recorder.begin(backend, other, work("captured")).unwrap().is_none());
        backend.record(event, other).unwrap();
        backend.wait(origin, event).unwrap();
        let graph = backend.end_capture(origin).unwrap();
        let open = recorder.begin(backend, other, work("after")).unwrap().unwrap();
        recorder.end(backend, open).unwrap();
        backend.synchronize(other).unwrap();
        let names: Vec<_> = recorder.recording(backend).unwrap().spans.into_iter().map(|span| span.name).collect();
        assert_eq!(names, ["after"]);
        backend.destroy_graph(graph);
    }

    #[test]
    fn a_group_is_one_span_a_stream() {
        let (runtime, recorder) = recorder();
        let backend = &*runtime.0.backend;
        let streams = [0, 0].map(|device| backend.create_stream(device).unwrap());
        let mut together = Together::default();
        // A back end without a recorder: nothing to note, and nothing to end.
        together.call(None, backend, streams[0], || panic!("the name is not asked for")).unwrap();
        together.end(None, backend).unwrap();
        for (stream, name, bytes) in [(0, "all_gather", 8), (1, "broadcast", 2), (0, "all_reduce", 4)] {
            let work = || Work::new(Activity::Collective, name, Some(bytes), None);
            together.call(Some(&recorder), backend, streams[stream], work).unwrap();
        }
        assert_eq!(recorder.recording(backend).unwrap().spans, []);
        together.end(Some(&recorder), backend).unwrap();
        streams.iter().try_for_each(|stream| backend.synchronize(*stream)).unwrap();
        let spans = recorder.recording(backend).unwrap().spans;
        let found: Vec<_> = spans.iter().map(|span| (span.name.as_str(), span.bytes)).collect();
        assert_eq!(found, [("all_gather + all_reduce", Some(12)), ("broadcast", Some(2))]);
    }
}
