//! The report of a stream race.

use std::fmt;
use std::panic::Location;

/// Two operations on the same bytes that no stream, event, signal or wait orders, one of which is a write; or memory freed while, or
/// before, it is used.
#[derive(Clone, Debug)]
pub struct StreamRace {
    /// What sort of misuse it is.
    pub kind: RaceKind,
    /// The buffer's name.
    pub memory: String,
    /// The device that it is on.
    pub device: u32,
    /// The first byte that both use, from the buffer's start.
    pub offset: u64,
    /// How many they share.
    pub bytes: u64,
    /// The use that this schedule did first.
    pub first: StreamUse,
    /// The other.
    pub second: StreamUse,
    /// The seed that replays it.
    pub seed: u64,
}

/// What sort of misuse a [`StreamRace`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RaceKind {
    /// Nothing orders the two.
    Unordered,
    /// Nothing orders the free after the use.
    FreedInUse,
    /// The use came after the free.
    UsedAfterFree,
    /// Two streams write one signal word, and nothing orders them: one of the two may be lost.
    Signal,
}

/// One of the two operations.
#[derive(Clone, Debug)]
pub struct StreamUse {
    /// What it does, such as ``kernel `copy_words` writes `target` ``.
    pub what: String,
    /// The stream's number.
    pub stream: u64,
    /// The stream's device.
    pub device: u32,
    /// Where it was enqueued; unknown for what a destructor enqueued.
    pub at: Option<&'static Location<'static>>,
}

impl fmt::Display for StreamRace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, mend) = match self.kind {
            RaceKind::Unordered => (
                "two streams use it, one writes, and nothing orders them",
                "let the second stream wait for an event, ticket or signal that follows the first use",
            ),
            RaceKind::FreedInUse => {
                ("it is freed and nothing orders that after a use", "keep the buffer until its last user's event, or close it collectively")
            }
            RaceKind::UsedAfterFree => {
                ("it is used after it was freed", "keep the buffer until its last user's event, or close it collectively")
            }
            RaceKind::Signal => (
                "two streams write one signal word and nothing orders them",
                "give each writer a word of its own, with epochs that only grow",
            ),
        };
        let (first, last) = (self.offset, self.offset + self.bytes);
        writeln!(f, "stream race on bytes {first}..{last} of `{}` (device {}): {what}", self.memory, self.device)?;
        writeln!(f, "  first: {}", self.first)?;
        writeln!(f, "  then:  {}", self.second)?;
        writeln!(f, "  mend: {mend}")?;
        write!(f, "  replay: OXTILE_SEED={}", self.seed)
    }
}

impl fmt::Display for StreamUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, stream {} of device {}, ", self.what, self.stream, self.device)?;
        match self.at {
            Some(at) => write!(f, "enqueued at {at}"),
            None => write!(f, "enqueued when the last handle was dropped"),
        }
    }
}
