//! How a launch can fail.

use std::{ffi::OsString, fmt, io, process::ExitCode, time::Duration};

use signal_hook::low_level::signal_name;

use super::{lines::Stream, rank::Ended};

/// A launch that did not end well.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No port, no random number, no thread.
    #[error("cannot prepare the launch: {0}; raise the limits of open files and processes (ulimit -n, -u) if they are reached")]
    Prepare(io::Error),
    /// The program.
    #[error("cannot start {program:?} as rank {rank}: {error}; {}", mend_of(.error))]
    Start {
        /// The first that could not be started; those before it were ended.
        rank: u32,
        /// Its name.
        program: OsString,
        /// The system's answer.
        error: io::Error,
    },
    /// A rank that failed.
    #[error("{}{}", listed(.failed), and_others(*.others))]
    Ranks {
        /// The first that failed, and those that failed with it.
        failed: Vec<Failed>,
        /// How many others had to be ended for it.
        others: usize,
    },
    /// A signal to the launcher.
    #[error("ended by {}, and all ranks with it", name_of(*.0))]
    Signal(i32),
    /// The launcher is done, and something is left.
    #[error("{}{}", .cause.as_ref().map(|cause| format!("{cause}; ")).unwrap_or_default(), listed(.left))]
    Left {
        /// What ended the ranks, if they did not end well.
        cause: Option<Box<LaunchError>>,
        /// What is left, at least one.
        left: Vec<Left>,
    },
}

/// A rank that ended, and not well.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("rank {rank} (process {process}) {}", how(.ended))]
pub struct Failed {
    /// Its number.
    pub rank: u32,
    /// Its process.
    pub process: u32,
    /// How.
    pub ended: Ended,
}

/// What the launcher could not bring to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Left {
    /// A rank that SIGKILL did not end.
    #[error("rank {rank} (process {process}) is there {} s after SIGKILL: it waits in the kernel, or a debugger holds it", .limit.as_secs_f32())]
    Rank {
        /// Its number.
        rank: u32,
        /// Its process.
        process: u32,
        /// How long it was waited for.
        limit: Duration,
    },
    /// Something that a rank had started, and that SIGKILL did not end.
    #[error(
        "process {process} ({name}), which a rank left behind, is there {} s after SIGKILL: it waits in the kernel, a debugger holds it, \
         or it is another user's",
        .limit.as_secs_f32()
    )]
    Process {
        /// Its id.
        process: u32,
        /// Its program's name.
        name: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// Output that was not read.
    #[error("the last output of ranks is lost: {}", unread(*.limit, *.waited))]
    Output {
        /// What ended the wait for its reader.
        limit: Limit,
        /// How long that had lasted: since the reader last took something with [`Limit::Drain`], since the ranks' end else.
        waited: Duration,
    },
    /// Output that could not be written.
    #[error("output of ranks is lost, of rank {rank} first: the launcher's {stream} takes nothing: {why}")]
    Unwritten {
        /// Which of the launcher's streams.
        stream: Stream,
        /// Whose line was the first.
        rank: u32,
        /// The system's answer.
        why: String,
    },
}

/// What ends the wait for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The time to drain.
    Drain,
    /// The grace, after a signal that came while ranks ran.
    Grace,
    /// A signal that came after their end.
    Signal,
}

impl Left {
    /// The process, where it is one.
    pub fn process(&self) -> Option<u32> {
        match self {
            Self::Rank { process, .. } | Self::Process { process, .. } => Some(*process),
            Self::Output { .. } | Self::Unwritten { .. } => None,
        }
    }
}

impl LaunchError {
    /// The status of the launcher: that of the first rank that failed, 128 and the signal that ended it, else 1.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(u8::try_from(self.status()).ok().filter(|&status| status != 0).unwrap_or(1))
    }

    fn status(&self) -> i32 {
        let ended = match self {
            Self::Ranks { failed, .. } => failed.first().map(|failed| failed.ended),
            Self::Signal(signal) => Some(Ended::Killed(*signal)),
            Self::Left { cause: Some(cause), .. } => return cause.status(),
            Self::Left { cause: None, .. } | Self::Prepare(_) | Self::Start { .. } => None,
        };
        ended.map_or(1, |ended| match ended {
            Ended::Exited(code) => code,
            Ended::Killed(signal) => 128 + signal,
        })
    }

    /// The outcome of a launch of which this is left, nothing in the best case.
    pub(super) fn with_left(outcome: Result<(), Self>, left: Vec<Left>) -> Result<(), Self> {
        if left.is_empty() { outcome } else { Err(Self::Left { cause: outcome.err().map(Box::new), left }) }
    }
}

fn listed(all: &[impl fmt::Display]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn mend_of(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => {
            "a rank takes the launcher two descriptors, and some more while it starts: raise their limit (ulimit -n), or start fewer ranks"
        }
        Some(libc::EAGAIN | libc::ENOMEM) => {
            "a rank takes a process, and three threads of the launcher: raise their limit (ulimit -u, or the container's), or start fewer ranks"
        }
        Some(libc::EACCES | libc::ENOEXEC) => "name a program that this user may execute",
        _ => "name a program that the shell finds, or its path",
    }
}

fn unread(limit: Limit, waited: Duration) -> String {
    let waited = (waited.as_secs_f64() * 10.0).round() / 10.0;
    match limit {
        Limit::Drain => format!("its reader took nothing for {waited} s (--drain SECONDS)"),
        Limit::Grace => {
            format!("its reader did not take it within {waited} s of the end of the ranks, which a signal asked for (--grace SECONDS)")
        }
        Limit::Signal => format!("a signal ended the wait for its reader after {waited} s"),
    }
}

fn how(ended: &Ended) -> String {
    match ended {
        Ended::Exited(code) => format!("exited with status {code}"),
        Ended::Killed(signal) => format!("was ended by {}", name_of(*signal)),
    }
}

fn and_others(count: usize) -> String {
    match count {
        0 => String::new(),
        1 => "; the other that ran was ended".into(),
        count => format!("; the {count} others that ran were ended"),
    }
}

fn name_of(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), |name| format!("{name} (signal {signal})"))
}
