//! `oxtile launch`: the ranks of one host, as processes that live and end together.
//!
//! Each rank is a process group of its own, so that what it starts ends with it. A rank that fails is named, and the others are
//! asked to end (SIGTERM) and then made to (SIGKILL); a signal to the launcher goes to all. Should the launcher itself be killed,
//! the kernel kills the ranks.

mod lines;
mod rank;

use std::{
    ffi::OsString,
    io,
    net::TcpListener,
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use oxtile::comm::bootstrap::JobId;
use signal_hook::{
    consts::{SIGKILL, SIGTERM},
    low_level::signal_name,
};

use crate::{arguments::Launch, interrupt, text::seconds};
use lines::Lines;
use rank::{Ended, RankProcess};

/// A launch that did not end well.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No port, no random number, no thread.
    #[error("cannot prepare the launch: {0}")]
    Prepare(io::Error),
    /// The program.
    #[error("cannot start {program:?}: {error}; name a program that the shell finds, or its path")]
    Start {
        /// Its name.
        program: OsString,
        /// The system's answer.
        error: io::Error,
    },
    /// A rank that failed.
    #[error("rank {rank} (process {process}) {}{}", how(.ended), and_others(*.others))]
    Rank {
        /// The first that failed.
        rank: u32,
        /// Its process.
        process: u32,
        /// How.
        ended: Ended,
        /// How many others had to be ended for it.
        others: usize,
    },
    /// A signal to the launcher.
    #[error("ended by {}, and all ranks with it", name_of(*.0))]
    Signal(i32),
}

impl LaunchError {
    /// The status of the launcher: that of the rank that failed, 128 and the signal that ended it, else 1.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Rank { ended: Ended::Exited(code), .. } => {
                ExitCode::from(u8::try_from(*code).ok().filter(|&code| code != 0).unwrap_or(1))
            }
            Self::Rank { ended: Ended::Killed(signal), .. } | Self::Signal(signal) => {
                ExitCode::from(u8::try_from(128 + signal).unwrap_or(1))
            }
            _ => ExitCode::FAILURE,
        }
    }
}

/// What the launcher waits for.
enum Event {
    /// A rank's process has ended.
    Ended(u32),
    /// Somebody signalled the launcher.
    Signal(i32),
}

/// Runs a program as so many ranks, and returns when all have ended.
///
/// # Errors
/// [`LaunchError`]; none of the processes is left.
pub fn run(request: &Launch) -> Result<(), LaunchError> {
    let begin = Instant::now();
    let (events, inbox) = mpsc::channel();
    let signals = events.clone();
    // From here on a signal is an event, and does not end the launcher.
    let _forwarding = interrupt::forward(move |signal| drop(signals.send(Event::Signal(signal))));
    let job = JobId::random().map_err(LaunchError::Prepare)?;
    let port = free_port().map_err(LaunchError::Prepare)?;
    let lines = Lines::new(request.ranks);
    let mut ranks = Vec::new();
    for rank in 0..request.ranks {
        let variables = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", request.ranks.to_string()),
            ("LOCAL_WORLD_SIZE", request.ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.to_string()),
            ("OXTILE_JOB_ID", job.as_str().into()),
        ];
        let ended = events.clone();
        let started = RankProcess::start(rank, request, &variables, &lines, move || drop(ended.send(Event::Ended(rank))));
        match started {
            Ok(process) => ranks.push(process),
            // Those that run are killed as they are dropped.
            Err(error) => return Err(LaunchError::Start { program: request.program.clone(), error }),
        }
    }
    drop(events);
    let result = Job { ranks, grace: request.grace, first: None, kill_at: None, signal: None }.watch(&inbox);
    if result.is_ok() && request.verbose {
        eprintln!("oxtile: {} ranks ended well after {}", request.ranks, seconds(begin.elapsed().as_secs_f64()));
    }
    result
}

/// A port that nobody listens at now. Rank 0 takes it a moment later; should another program be faster, rank 0 says so.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Ranks that run.
struct Job {
    ranks: Vec<RankProcess>,
    grace: Duration,
    /// The rank that failed first, how, and how many others ran then.
    first: Option<(u32, Ended, usize)>,
    /// When what still runs is killed.
    kill_at: Option<Instant>,
    signal: Option<i32>,
}

impl Job {
    fn watch(mut self, inbox: &Receiver<Event>) -> Result<(), LaunchError> {
        while self.ranks.iter().any(RankProcess::is_running) {
            let patience = self.kill_at.map_or(Duration::from_secs(3600), |at| at.saturating_duration_since(Instant::now()));
            match inbox.recv_timeout(patience) {
                Ok(Event::Ended(rank)) => self.ended(rank),
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Err(RecvTimeoutError::Timeout) if self.kill_at.is_some() => {
                    self.send(SIGKILL);
                    self.kill_at = None;
                }
                Err(_) => {}
            }
        }
        let process = |rank: u32| self.ranks[rank as usize].process;
        let failure = match (self.first, self.signal) {
            (_, Some(signal)) => Some(LaunchError::Signal(signal)),
            (Some((rank, ended, others)), None) => Some(LaunchError::Rank { rank, process: process(rank), ended, others }),
            (None, None) => None,
        };
        // Each waits for the last of its output.
        drop(self.ranks);
        failure.map_or(Ok(()), Err)
    }

    fn ended(&mut self, rank: u32) {
        let how = self.ranks[rank as usize].reap();
        let others = self.ranks.iter().filter(|rank| rank.is_running()).count();
        if how != Ended::Exited(0) && self.first.is_none() {
            self.first = Some((rank, how, others));
            self.end(SIGTERM);
        }
    }

    /// The first signal goes to all ranks; with the second there is no grace.
    fn signalled(&mut self, signal: i32) {
        match self.signal {
            None => {
                self.signal = Some(signal);
                self.end(signal);
            }
            Some(_) => self.send(SIGKILL),
        }
    }

    /// Asks all to end, and sets the time when they are made to.
    fn end(&mut self, signal: i32) {
        self.send(signal);
        self.kill_at.get_or_insert(Instant::now() + self.grace);
    }

    fn send(&self, signal: i32) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
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
