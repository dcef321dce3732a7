//! Recordings as Chrome's trace events, which Perfetto and `chrome://tracing` show: a process a rank, a thread a stream.
//!
//! Trace Event Format, "Complete Events" and "Metadata Events"; times are microseconds there, so a step is drawn as one microsecond.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::TimelineError;
use super::recording::{Clock, Recording};
use super::span::{Lane, Span};

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    trace_events: Vec<Event>,
    other_data: OtherData,
}

/// The part of the document that the format leaves to programs.
#[derive(Serialize, Deserialize)]
struct OtherData {
    clock: Clock,
    start_ns: u64,
    dropped: u64,
}

#[derive(Serialize, Deserialize)]
struct Event {
    /// `X`: complete; `M`: a name.
    ph: String,
    name: String,
    #[serde(default)]
    cat: String,
    ts: f64,
    dur: f64,
    pid: u32,
    tid: u64,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Args {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Where it was enqueued.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unfinished: bool,
}

/// How every recording begins.
const BEGIN: &str = "{\"otherData\":";

/// Nanoseconds: what times are rounded to.
const GRAIN: f64 = 1e-3;

impl Recording {
    /// One JSON document in the Trace Event Format, an event a line.
    pub fn to_json(&self) -> String {
        let data = OtherData { clock: self.clock, start_ns: self.start_ns, dropped: self.dropped };
        let names = self.ranks().into_iter().map(rank_name).chain(self.lanes().into_iter().map(|(lane, spans)| lane_name(lane, spans[0])));
        let lines: Vec<_> = names.chain(self.spans.iter().map(event)).map(|event| text(&event)).collect();
        format!("{BEGIN}{},\n\"traceEvents\":[\n{}\n]}}\n", text(&data), lines.join(",\n"))
    }

    /// Writes [`to_json`](Self::to_json) to a file, which it replaces in one step: a failure leaves the file of before.
    ///
    /// # Errors
    /// [`TimelineError::Io`].
    pub fn write(&self, file: &Path) -> Result<(), TimelineError> {
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
        let wrong = |error| io(file, "write it", error);
        // What a link leads to is replaced, not the link.
        let file = &file.canonicalize().unwrap_or_else(|_| file.to_owned());
        let before = std::fs::metadata(file).ok();
        if before.as_ref().is_some_and(|metadata| !metadata.is_file()) {
            return Err(wrong(std::io::Error::other("it is no regular file")));
        }
        let mut name = file.as_os_str().to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        // A file of its own: what stands there under that name, a link too, is left alone. Who may not read the file of before may not read this one.
        let mode = if before.is_some() { 0o600 } else { 0o666 };
        let mut to = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&name).map_err(wrong)?;
        let written = to.write_all(self.to_json().as_bytes()).and_then(|()| match &before {
            Some(before) => to.set_permissions(std::fs::Permissions::from_mode(before.permissions().mode() & 0o777)),
            None => Ok(()),
        });
        written.and_then(|()| to.sync_all()).and_then(|()| std::fs::rename(&name, file)).map_err(|error| {
            let _ = std::fs::remove_file(&name);
            wrong(error)
        })
    }

    /// Whether a file may be replaced by a recording: it is not there, or is a regular file that is empty or begins as one.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check_target(file: &Path) -> Result<(), String> {
        let metadata = match std::fs::metadata(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata.map_err(|error| error.to_string())?,
        };
        if !metadata.is_file() {
            return Err("it is no regular file".to_owned());
        }
        let mut begin = Vec::new();
        let read = std::fs::File::open(file).and_then(|file| file.take(BEGIN.len() as u64).read_to_end(&mut begin));
        read.map_err(|error| error.to_string())?;
        if begin.is_empty() || begin == BEGIN.as_bytes() {
            Ok(())
        } else {
            Err("it is there and is no recording, which would be lost".to_owned())
        }
    }

    /// Reads what [`to_json`](Self::to_json) wrote.
    ///
    /// # Errors
    /// [`TimelineError::Malformed`]; [`TimelineError::Event`] for an event without a meaning here, a time that is none, or events of
    /// one stream that overlap.
    pub fn from_json(text: &str) -> Result<Self, TimelineError> {
        let file: File = serde_json::from_str(text)?;
        let (mut spans, mut ends) = (Vec::new(), BTreeMap::new());
        for (index, event) in file.trace_events.into_iter().enumerate() {
            let wrong = |why| TimelineError::Event { index, why };
            if event.ph == "M" {
                continue;
            }
            let span = span(event).map_err(wrong)?;
            let end = ends.entry(span.lane()).or_insert(0.0);
            if span.start < *end - GRAIN {
                return Err(wrong(format!("it begins at {}, before the event before it in its stream ends, at {end}", span.start)));
            }
            *end = span.end;
            spans.push(span);
        }
        let OtherData { clock, start_ns, dropped } = file.other_data;
        Ok(Self::new(clock, start_ns, spans, dropped))
    }

    /// Reads a file that [`write`](Self::write) wrote.
    ///
    /// # Errors
    /// [`TimelineError::Io`], and as [`from_json`](Self::from_json).
    pub fn read(file: &Path) -> Result<Self, TimelineError> {
        let text = std::fs::read_to_string(file).map_err(|error| io(file, "read it", error))?;
        Self::from_json(&text)
    }
}

fn io(file: &Path, action: &'static str, error: std::io::Error) -> TimelineError {
    TimelineError::Io { file: file.into(), action, error }
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers and texts are JSON")
}

fn rounded(time: f64) -> f64 {
    (time / GRAIN).round() * GRAIN
}

fn event(span: &Span) -> Event {
    let args = Args { name: None, device: Some(span.device), bytes: span.bytes, at: span.at.clone(), unfinished: !span.is_finished };
    let (start, end) = (rounded(span.start), rounded(span.end));
    Event {
        ph: "X".into(),
        name: span.name.clone(),
        cat: span.activity.name().into(),
        ts: start,
        dur: end - start,
        pid: span.rank,
        tid: span.stream,
        args,
    }
}

fn span(event: Event) -> Result<Span, String> {
    if event.ph != "X" {
        return Err(format!("its `ph` is `{}`, not `X` or `M`", event.ph));
    }
    for (key, time) in [("ts", event.ts), ("dur", event.dur)] {
        if !(0.0..1e15).contains(&time) {
            return Err(format!("its `{key}` is {time}"));
        }
    }
    let activity = event.cat.parse().map_err(|why| format!("its `cat` {why}"))?;
    let Event { name, ts, dur, pid, tid, args, .. } = event;
    let device = args.device.ok_or("its `args` have no `device`")?;
    let (bytes, at, is_finished) = (args.bytes, args.at, !args.unfinished);
    Ok(Span { rank: pid, device, stream: tid, activity, name, start: ts, end: ts + dur, bytes, at, is_finished })
}

fn rank_name(rank: u32) -> Event {
    name("process_name", Lane { rank, stream: 0 }, format!("rank {rank}"))
}

fn lane_name(lane: Lane, span: &Span) -> Event {
    let of = if span.device == lane.rank { String::new() } else { format!(" of device {}", span.device) };
    name("thread_name", lane, format!("stream {}{of}", lane.stream))
}

fn name(key: &str, lane: Lane, name: String) -> Event {
    let args = Args { name: Some(name), ..Args::default() };
    Event { ph: "M".into(), name: key.into(), cat: String::new(), ts: 0.0, dur: 0.0, pid: lane.rank, tid: lane.stream, args }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Activity;

    fn recording() -> Recording {
        let span = |rank, stream, activity, start, end| Span {
            rank,
            device: 0,
            stream,
            activity,
            name: "a \"name\"\n".into(),
            start,
            end,
            bytes: (activity == Activity::Copy).then_some(1 << 60),
            at: Some("file.rs:1:2".into()),
            is_finished: activity != Activity::Wait,
        };
        let spans = vec![
            span(0, 1, Activity::Copy, 0.0, 0.125),
            span(0, 1, Activity::Wait, 0.125, 2.5),
            span(1, 1, Activity::Kernel, 1e9, 1e9 + 0.25),
        ];
        Recording::new(Clock::Device, 1_700_000_000_123_456_789, spans, 3)
    }

    #[test]
    fn what_is_written_can_be_read() {
        let recording = recording();
        assert_eq!(Recording::from_json(&recording.to_json()).unwrap(), recording);
    }

    #[test]
    fn every_event_is_whole() {
        let document: serde_json::Value = serde_json::from_str(&recording().to_json()).unwrap();
        let events = document["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 2 + 2 + 3, "two ranks, two lanes, three spans");
        for event in events {
            assert!(matches!(event["ph"].as_str(), Some("X" | "M")), "{event}");
            assert!(["ts", "dur"].iter().all(|key| event[*key].as_f64().is_some_and(|time| time >= 0.0)), "{event}");
            assert!(["pid", "tid"].iter().all(|key| event[*key].is_u64()), "{event}");
        }
    }

    /// The message for a document in which one text is replaced by another.
    fn refused(old: &str, new: &str) -> String {
        let text = recording().to_json();
        assert!(text.contains(old), "{old} is not in {text}");
        Recording::from_json(&text.replacen(old, new, 1)).unwrap_err().to_string()
    }

    #[test]
    fn errors_say_which_event_and_why() {
        assert!(refused("\"dur\":0.125", "\"dur\":-1").contains("event 4 of `traceEvents`: its `dur` is -1"));
        assert!(refused("\"cat\":\"copy\"", "\"cat\":\"tea\"").contains("its `cat` `tea` is none of kernel, copy, "));
        assert!(refused("\"ph\":\"X\"", "\"ph\":\"B\"").contains("its `ph` is `B`"));
        assert!(refused("\"dur\":0.125", "\"dur\":0.5").contains("event 5 of `traceEvents`: it begins at 0.125, before"));
        assert!(refused("\"ts\":0.0,\"dur\":0.125,", "\"dur\":0.125,").contains("missing field `ts` at line "));
        assert!(refused("\"clock\":\"device\"", "\"clock\":\"sand\"").contains("unknown variant `sand`"));
        assert!(Recording::from_json("{\"traceEvents\":[").unwrap_err().to_string().contains("not a recording: EOF"));
    }

    mod parsed {
        use proptest::prelude::*;

        use super::*;

        /// A span of a stream, and how long after the span before it it begins.
        fn span() -> impl Strategy<Value = (f64, Span)> {
            let time = || prop_oneof![4 => 0.0..1e4f64, 1 => Just(0.0), 1 => 0.0..1e9f64, 1 => 0.0..1e-6f64];
            let words = (".{0,9}", prop::option::of(".{0,9}"), prop::option::of(any::<u64>()), any::<bool>());
            let place = (0u32..3, any::<u32>(), 0u64..3, prop::sample::select(&Activity::ALL[..]));
            (time(), time(), place, words).prop_map(|(gap, duration, (rank, device, stream, activity), (name, at, bytes, is_finished))| {
                (gap, Span { rank, device, stream, activity, name, start: 0.0, end: duration, bytes, at, is_finished })
            })
        }

        fn recording() -> impl Strategy<Value = Recording> {
            let clock = prop_oneof![Just(Clock::Device), Just(Clock::Steps)];
            (clock, any::<u64>(), prop::collection::vec(span(), 0..9), any::<u64>()).prop_map(|(clock, start_ns, spans, dropped)| {
                let mut ends = BTreeMap::new();
                let place = |(gap, mut span): (f64, Span)| {
                    let end: &mut f64 = ends.entry(span.lane()).or_default();
                    (span.start, span.end) = (*end + gap, *end + gap + span.end);
                    *end = span.end;
                    span
                };
                Recording::new(clock, start_ns, spans.into_iter().map(place).collect(), dropped)
            })
        }

        proptest! {
            #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

            /// All but the times, which are rounded once.
            #[test]
            fn what_is_written_is_read(recording in recording()) {
                let written = recording.to_json();
                let mut again = Recording::from_json(&written).unwrap();
                prop_assert_eq!(again.to_json(), written);
                prop_assert_eq!(again.spans.len(), recording.spans.len());
                for (span, was) in again.spans.iter_mut().zip(&recording.spans) {
                    prop_assert!((span.start - was.start).abs() <= GRAIN && (span.end - was.end).abs() <= 2.0 * GRAIN, "{:?} was {:?}", span, was);
                    (span.start, span.end) = (was.start, was.end);
                }
                prop_assert_eq!(again, recording);
            }

            /// A recording with characters that are changed is an error on one line, or is read as it is written then.
            #[test]
            fn what_is_changed_is_refused_or_read(recording in recording(), changes in prop::collection::vec((any::<prop::sample::Index>(), "[-0-9eE.\\[\\]{}\":,nX\u{1b}]"), 1..4)) {
                let mut text: Vec<String> = recording.to_json().chars().map(String::from).collect();
                for (at, by) in changes {
                    let at = at.index(text.len());
                    text[at] = by;
                }
                match Recording::from_json(&text.concat()) {
                    Ok(read) => prop_assert_eq!(Recording::from_json(&read.to_json()).unwrap().to_json(), read.to_json()),
                    Err(error) => prop_assert!(!error.to_string().contains('\u{1b}'), "{:?}", error.to_string()),
                }
            }
        }
    }
}
