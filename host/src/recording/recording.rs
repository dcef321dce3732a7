//! What was recorded: spans on one clock.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::error::TimelineError;
use super::span::{Lane, Span};

/// What a unit of time means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// Microseconds of the GPUs' own clocks, from device events.
    Device,
    /// Operations that the scheduler of a virtual cluster has done, of all its streams. They are not times.
    Steps,
}

impl Clock {
    /// Its name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Steps => "steps",
        }
    }
}

/// Spans of the ranks of one program, sorted by lane and start. Those of a lane do not overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// The unit of times.
    pub clock: Clock,
    /// When it began, in nanoseconds since 1970 by the host's clock. Recordings of several processes are aligned by it.
    pub start_ns: u64,
    /// The spans.
    pub spans: Vec<Span>,
    /// Spans that were left out because there were too many.
    pub dropped: u64,
}

/// More spans than this are counted and not kept: some 200 MiB of them.
pub(crate) const MOST_SPANS: usize = 1 << 20;

impl Recording {
    /// Sorts the spans. Device events of one stream may be half a microsecond off: a span that begins before its predecessor has
    /// ended is cut to begin with that end.
    pub(crate) fn new(clock: Clock, start_ns: u64, mut spans: Vec<Span>, dropped: u64) -> Self {
        spans.sort_by(|a, b| a.lane().cmp(&b.lane()).then(a.start.total_cmp(&b.start)));
        let mut ends = BTreeMap::new();
        for span in &mut spans {
            let end = ends.entry(span.lane()).or_insert(0.0_f64);
            span.start = span.start.max(*end);
            span.end = span.end.max(span.start);
            *end = span.end;
        }
        Self { clock, start_ns, spans, dropped }
    }

    /// The spans by lane.
    pub fn lanes(&self) -> BTreeMap<Lane, Vec<&Span>> {
        let mut lanes: BTreeMap<_, Vec<_>> = BTreeMap::new();
        self.spans.iter().for_each(|span| lanes.entry(span.lane()).or_default().push(span));
        lanes
    }

    /// The ranks that it has spans of.
    pub fn ranks(&self) -> BTreeSet<u32> {
        self.spans.iter().map(|span| span.rank).collect()
    }

    /// When the last span ends.
    pub fn end(&self) -> f64 {
        self.spans.iter().map(|span| span.end).fold(0.0, f64::max)
    }

    /// Adds the recording of other ranks. On the clock of devices both are moved to the earlier beginning; steps of two virtual
    /// clusters have nothing to do with one another and stay as they are.
    ///
    /// # Errors
    /// [`TimelineError::Clocks`], [`TimelineError::SameRank`].
    pub fn merge(self, other: Self) -> Result<Self, TimelineError> {
        if self.clock != other.clock {
            return Err(TimelineError::Clocks);
        }
        if let Some(rank) = self.ranks().intersection(&other.ranks()).next() {
            return Err(TimelineError::SameRank { rank: *rank });
        }
        let start_ns = self.start_ns.min(other.start_ns);
        let dropped = self.dropped.saturating_add(other.dropped);
        let moved = |recording: Self| {
            let by = match recording.clock {
                Clock::Device => (recording.start_ns - start_ns) as f64 / 1e3,
                Clock::Steps => 0.0,
            };
            recording.spans.into_iter().map(move |span| Span { start: span.start + by, end: span.end + by, ..span })
        };
        let clock = self.clock;
        Ok(Self::new(clock, start_ns, moved(self).chain(moved(other)).collect(), dropped))
    }

    /// Adds a later recording of the same process: its streams get other numbers, and its steps count on.
    pub(crate) fn append(self, later: Self) -> Self {
        let streams = self.spans.iter().map(|span| span.stream).max().unwrap_or(0);
        let end = self.end();
        let moved = later.spans.into_iter().map(|span| Span {
            stream: span.stream + streams,
            start: span.start + end,
            end: span.end + end,
            ..span
        });
        let dropped = self.dropped.saturating_add(later.dropped);
        Self::new(self.clock, self.start_ns, self.spans.into_iter().chain(moved).collect(), dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Activity;

    fn span(rank: u32, stream: u64, start: f64, end: f64) -> Span {
        let (name, bytes, at) = ("copy".to_owned(), None, None);
        Span { rank, device: 0, stream, activity: Activity::Copy, name, start, end, bytes, at, is_finished: true }
    }

    fn recording(clock: Clock, start_ns: u64, spans: &[Span]) -> Recording {
        Recording::new(clock, start_ns, spans.to_vec(), 1)
    }

    #[test]
    fn events_that_are_a_little_off_do_not_make_spans_overlap() {
        let found = recording(Clock::Device, 0, &[span(0, 1, 1.9, 3.0), span(0, 1, 0.0, 2.0), span(0, 2, 1.0, 5.0)]);
        assert_eq!(found.spans, [span(0, 1, 0.0, 2.0), span(0, 1, 2.0, 3.0), span(0, 2, 1.0, 5.0)]);
        assert_eq!(found.end(), 5.0);
    }

    #[test]
    fn processes_are_aligned_by_the_hosts_clock() {
        let early = recording(Clock::Device, 1_000_000, &[span(0, 1, 0.0, 2.0)]);
        let late = recording(Clock::Device, 1_005_000, &[span(1, 1, 0.0, 2.0)]);
        let merged = late.clone().merge(early.clone()).unwrap();
        assert_eq!((merged.start_ns, merged.dropped), (1_000_000, 2));
        assert_eq!(merged.spans, [span(0, 1, 0.0, 2.0), span(1, 1, 5.0, 7.0)]);
        assert!(matches!(early.clone().merge(early), Err(TimelineError::SameRank { rank: 0 })));
        assert!(matches!(late.merge(recording(Clock::Steps, 0, &[])), Err(TimelineError::Clocks)));
    }

    #[test]
    fn what_comes_afterwards_gets_lanes_of_its_own() {
        let first = recording(Clock::Steps, 0, &[span(0, 1, 0.0, 2.0), span(0, 3, 1.0, 4.0)]);
        let both = first.append(recording(Clock::Steps, 9, &[span(0, 1, 1.0, 2.0)]));
        assert_eq!(both.spans, [span(0, 1, 0.0, 2.0), span(0, 3, 1.0, 4.0), span(0, 4, 5.0, 6.0)]);
    }
}
