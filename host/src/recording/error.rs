//! What can be wrong with a recording that was written down.

use std::path::PathBuf;

/// A file that is no recording, or recordings that do not belong together.
#[derive(Debug, thiserror::Error)]
pub enum TimelineError {
    /// The system refuses.
    #[error("{}: cannot {action}: {error}", .file.display())]
    Io {
        /// Which file.
        file: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// Why not.
        error: std::io::Error,
    },
    /// Not JSON, or not what a recording is made of.
    #[error("not a recording: {0}; `OXTILE_TRACE=FILE` and `Recording::write` make one")]
    Malformed(#[from] serde_json::Error),
    /// An event that makes no sense.
    #[error("event {index} of `traceEvents`: {why}; record it again, the file has been changed")]
    Event {
        /// Its place in the array, from 0.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// Device time and the steps of a scheduler.
    #[error("one counts microseconds of a GPU, the other steps of a virtual cluster: they have no common axis, draw them apart")]
    Clocks,
    /// A rank that is in two recordings.
    #[error("rank {rank} is in two recordings: merge one file a rank, of one run")]
    SameRank {
        /// Which.
        rank: u32,
    },
}
