//! What can go wrong between ranks.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::backend_name::BackendName;
use super::world::Rank;

/// A flag, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagName {
    /// What the flags are called that it is one of.
    pub operation: &'static str,
    /// Its number among them.
    pub flag: u32,
}

impl fmt::Display for FlagName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flag {} of `{}`", self.flag, self.operation)
    }
}

/// An error of symmetric memory. After one that another rank caused, the arena is unusable; a new one can be opened.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SymmetricError {
    /// No back end has this name.
    #[error("there is no symmetric memory called `{name}`: use vmm, nccl, emulated or nvshmem")]
    UnknownBackend {
        /// The name asked for.
        name: String,
    },
    /// The back end cannot be used here. Nothing else is taken in its place.
    #[error("symmetric memory `{backend}` is not available: {why}")]
    Unavailable {
        /// The back end asked for.
        backend: BackendName,
        /// What is missing, and how to mend it.
        why: String,
    },
    /// Two ranks opened one arena in different ways.
    #[error("{rank} opens an arena with {found}, {other} with {expected}: every rank opens the same")]
    Rendezvous {
        /// One rank.
        rank: Rank,
        /// What it asked for.
        found: String,
        /// Another.
        other: Rank,
        /// What that one asked for.
        expected: String,
    },
    /// A rank failed while memory was mapped, or is gone. Every rank gets this error, and nothing is left mapped.
    #[error("{rank} failed at {step}: {why}")]
    Step {
        /// The rank.
        rank: Rank,
        /// The step.
        step: Step,
        /// Why.
        why: String,
    },
    /// Ranks did not come in time.
    #[error("{what}: {} did not come within {waited:?}", list(ranks))]
    Missing {
        /// What they were waited for.
        what: String,
        /// The ranks that are missing.
        ranks: Vec<Rank>,
        /// The deadline.
        waited: Duration,
    },
    /// A rank gave up.
    #[error("{rank} gave up: {why}")]
    Aborted {
        /// The rank.
        rank: Rank,
        /// Why.
        why: String,
    },
    /// Two ranks took different things from their arenas.
    #[error("allocation {number} is {found} on {rank} and {expected} on {other}: every rank takes the same from its arena, in one order")]
    Layout {
        /// Which allocation, from 0.
        number: usize,
        /// One rank.
        rank: Rank,
        /// What it took.
        found: String,
        /// Another.
        other: Rank,
        /// What that one took.
        expected: String,
    },
    /// The arena is full.
    #[error("the arena has {left} bytes left where {needed} are needed: open it with more (ArenaOptions::bytes)")]
    Full {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// All signal channels are taken.
    #[error("all {channels} channels are taken: open the arena with more (ArenaOptions::channels)")]
    NoChannel {
        /// How many there are.
        channels: u32,
    },
    /// A wait of a stream was not answered in time. The arena is unusable from here on.
    #[error("{rank}: {operation}, number {sequence}: no signal from {}{}{} within {waited:?}", if *is_guess { "one or more of " } else { "" }, list(missing), flag.map_or_else(String::new, |flag| format!(" ({flag})")))]
    Deadline {
        /// The rank that waited.
        rank: Rank,
        /// For what.
        operation: &'static str,
        /// Which one, from 1: of a gather or an [`Exchange`](crate::symmetric::Exchange) its epoch, of all else among the arena's tickets of gets and streams.
        sequence: u64,
        /// The ranks that did not signal.
        missing: Vec<Rank>,
        /// Whether some of them may have signalled: a [`Handover`](crate::symmetric::Handover)'s flag that was reset looks like one that was not set.
        is_guess: bool,
        /// The flag that did not come, where the arena knows it: the first that a kernel waited for in vain, or one of the only rank that is missing.
        flag: Option<FlagName>,
        /// The deadline.
        waited: Duration,
    },
    /// The arena is in use.
    #[error(
        "the arena cannot be closed: {handles} of its buffers, tickets and graphs are still there: drop them, then close it again (CloseError::arena)"
    )]
    InUse {
        /// How many handles there are.
        handles: usize,
    },
}

/// What a rank does, in this order, until all ranks have each other's memory mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Step {
    /// Any step up to [`Agree`](Self::Agree), of a rank that is gone.
    Prepare,
    /// Asking its device what it can do.
    Check,
    /// Allocating.
    Create,
    /// Setting addresses aside.
    Reserve,
    /// Mapping memory, and getting access to it.
    Map,
    /// Making the signals zero.
    Clear,
    /// Listening for descriptors.
    Listen,
    /// Comparing what the ranks have.
    Agree,
    /// Making a descriptor.
    Export,
    /// Sending it.
    Send,
    /// Waiting for those of the others.
    Receive,
    /// Making memory of a descriptor.
    Import,
    /// Any step after [`Agree`](Self::Agree), of a rank that is gone.
    Commit,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prepare => "preparing its memory",
            Self::Check => "the check of its device",
            Self::Create => "allocating",
            Self::Reserve => "reserving addresses",
            Self::Map => "mapping memory",
            Self::Clear => "clearing its signals",
            Self::Listen => "listening for descriptors",
            Self::Agree => "the comparison of all ranks' memory",
            Self::Export => "exporting its memory",
            Self::Send => "sending its descriptor",
            Self::Receive => "the exchange of descriptors",
            Self::Import => "importing memory",
            Self::Commit => "mapping the others' memory",
        })
    }
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}
