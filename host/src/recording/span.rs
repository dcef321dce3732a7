//! What one piece of work did, and when.

use std::fmt;
use std::panic::Location;
use std::str::FromStr;

/// Where a program enqueued work.
pub(crate) type Caller = &'static Location<'static>;

/// A piece of work of one stream, from when it could begin until it was done.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The rank: `RANK` where the process has it, else the device's number.
    pub rank: u32,
    /// The device, by its number in the runtime.
    pub device: u32,
    /// The stream, by its number in the recording.
    pub stream: u64,
    /// What sort of work.
    pub activity: Activity,
    /// The kernel's name, the collective's, or what is copied, signalled or waited for.
    pub name: String,
    /// When it began, in the units of the recording's [`Clock`](super::Clock).
    pub start: f64,
    /// When it was done, or, if it was not, when the recording was asked for.
    pub end: f64,
    /// Bytes moved. Of a collective: what the rank gets, or what it gives if it gets nothing.
    pub bytes: Option<u64>,
    /// Where it was enqueued, as `file:line:column`; unknown for what the runtime enqueues by itself.
    pub at: Option<String>,
    /// Whether it was done when the recording was asked for. A program that hangs may hang in a span that was not.
    pub is_finished: bool,
}

impl Span {
    /// How long it took.
    pub fn duration(&self) -> f64 {
        self.end - self.start
    }

    /// Whether the two were under way at the same time.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Its stream's lane.
    pub fn lane(&self) -> Lane {
        Lane { rank: self.rank, stream: self.stream }
    }
}

/// A stream of a rank: its spans come one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane {
    /// The rank.
    pub rank: u32,
    /// The stream.
    pub stream: u64,
}

/// What sort of work a [`Span`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// A launch.
    Kernel,
    /// A copy, a get or a put.
    Copy,
    /// Memory set to one value.
    Fill,
    /// A part in a collective or an exchange, the wait for the other ranks included.
    Collective,
    /// A signal to a rank.
    Signal,
    /// A stream's wait for an event, a signal or a graph.
    Wait,
    /// The replay of a graph.
    Graph,
}

impl Activity {
    /// All, in the order of legends.
    pub const ALL: [Self; 7] = [Self::Kernel, Self::Copy, Self::Fill, Self::Collective, Self::Signal, Self::Wait, Self::Graph];

    /// Its name in files and pictures.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Copy => "copy",
            Self::Fill => "fill",
            Self::Collective => "collective",
            Self::Signal => "signal",
            Self::Wait => "wait",
            Self::Graph => "graph",
        }
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Activity {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|activity| activity.name() == name).ok_or_else(|| format!("`{name}` is none of {}", names()))
    }
}

/// What a span says of its work, known when that is enqueued.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub activity: Activity,
    pub name: String,
    pub bytes: Option<u64>,
    pub caller: Option<Caller>,
}

impl Work {
    pub fn new(activity: Activity, name: impl Into<String>, bytes: Option<u64>, caller: Option<Caller>) -> Self {
        Self { activity, name: name.into(), bytes, caller }
    }

    /// Work that runs together with this.
    pub fn join(&mut self, other: Self) {
        self.name = format!("{} + {}", self.name, other.name);
        self.bytes = self.bytes.zip(other.bytes).map(|(a, b)| a + b);
    }

    pub fn spanning(self, rank: u32, device: u32, stream: u64, [start, end]: [f64; 2], is_finished: bool) -> Span {
        let Self { activity, name, bytes, caller } = self;
        Span { rank, device, stream, activity, name, start, end, bytes, at: caller.map(ToString::to_string), is_finished }
    }
}
