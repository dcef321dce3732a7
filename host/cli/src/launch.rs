//! `oxtile launch`: the ranks of one host, as processes that live and end together.
//!
//! Each rank is a process group of its own, so that what it starts ends with it. A rank that fails is named, with those that fail within
//! a tenth of a second: a rank that lost another may be seen to end before it. The others are
//! asked to end (SIGTERM) and then made to (SIGKILL); a signal to the launcher goes to all. What they started and left behind is
//! killed when the last has ended. Should the launcher itself be killed, the kernel kills the ranks.

mod lines;
mod orphans;
mod rank;

use std::{
    ffi::OsString,
    io,
    net::TcpListener,
    process::ExitCode,
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use oxtile::comm::bootstrap::JobId;
use signal_hook::{
    consts::{SIGKILL, SIGTERM, SIGUSR1, SIGUSR2},
    low_level::signal_name,
};

use crate::{arguments::Launch, interrupt, text::seconds};
use lines::Lines;
use rank::{Ended, RankProcess};

/// How long after the first failure others are named too.
const TOGETHER: Duration = Duration::from_millis(100);
/// How often the system's table is rid of processes that ranks left behind and that have ended.
const TIDY: Duration = Duration::from_secs(60);

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
    #[error("{}{}", .failed.iter().map(Failed::to_string).collect::<Vec<_>>().join("; "), and_others(*.others))]
    Ranks {
        /// The first that failed, and those that failed with it.
        failed: Vec<Failed>,
        /// How many others had to be ended for it.
        others: usize,
    },
    /// A signal to the launcher.
    #[error("ended by {}, and all ranks with it", name_of(*.0))]
    Signal(i32),
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

impl LaunchError {
    /// The status of the launcher: that of the first rank that failed, 128 and the signal that ended it, else 1.
    pub fn exit_code(&self) -> ExitCode {
        let ended = match self {
            Self::Ranks { failed, .. } => failed.first().map(|failed| failed.ended),
            Self::Signal(signal) => Some(Ended::Killed(*signal)),
            Self::Prepare(_) | Self::Start { .. } => None,
        };
        let status = ended.map_or(1, |ended| match ended {
            Ended::Exited(code) => code,
            Ended::Killed(signal) => 128 + signal,
        });
        ExitCode::from(u8::try_from(status).ok().filter(|&status| status != 0).unwrap_or(1))
    }
}

/// What the launcher waits for.
enum Event {
    /// A rank's process has ended.
    Ended(u32),
    /// The last of what a rank said on one of its streams has been passed on.
    Silent,
    /// Somebody signalled the launcher.
    Signal(i32),
}

/// Runs a program as so many ranks, and returns when all have ended. Every child that this process has then is taken for one of
/// theirs, and killed.
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
    orphans::adopt().map_err(LaunchError::Prepare)?;
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
        match RankProcess::start(rank, request, &variables, &lines, &events) {
            Ok(process) => ranks.push(process),
            Err(error) => {
                // Those that run are killed as they are dropped.
                drop(ranks);
                orphans::kill();
                return Err(LaunchError::Start { program: request.program.clone(), error });
            }
        }
    }
    let result = Job::new(ranks, request.grace).watch(&inbox);
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
    /// How many of their streams may still say something.
    streams: usize,
    grace: Duration,
    /// The first that failed, and those that failed with it.
    failed: Vec<Failed>,
    /// How many others ran then.
    others: usize,
    /// When those are asked to end.
    end_at: Option<Instant>,
    /// Whether the others were asked to end: what they do then is no failure.
    asked: bool,
    /// When what still runs is killed.
    kill_at: Option<Instant>,
    signal: Option<i32>,
}

impl Job {
    fn new(ranks: Vec<RankProcess>, grace: Duration) -> Self {
        let streams = RankProcess::STREAMS * ranks.len();
        Self { ranks, streams, grace, failed: Vec::new(), others: 0, end_at: None, asked: false, kill_at: None, signal: None }
    }

    fn watch(mut self, inbox: &Receiver<Event>) -> Result<(), LaunchError> {
        while self.ranks.iter().any(RankProcess::is_running) {
            let next = self.end_at.or(self.kill_at);
            let patience = next.map_or(TIDY, |at| at.saturating_duration_since(Instant::now()).min(TIDY));
            match inbox.recv_timeout(patience) {
                Ok(Event::Ended(rank)) => self.ended(rank),
                Ok(Event::Silent) => self.streams -= 1,
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Err(_) => self.time_has_passed(),
            }
        }
        // They may hold the streams of a rank, which had no end else.
        orphans::kill();
        self.hear_out(inbox);
        match self.signal {
            Some(signal) => Err(LaunchError::Signal(signal)),
            None if self.failed.is_empty() => Ok(()),
            None => Err(LaunchError::Ranks { failed: self.failed, others: self.others }),
        }
    }

    /// Waits until all that ranks said is passed on, however slowly it is read; for the grace alone if the launcher is to end.
    fn hear_out(&mut self, inbox: &Receiver<Event>) {
        let mut end = self.signal.map(|_| Instant::now() + self.grace);
        while self.streams > 0 && end.is_none_or(|end| Instant::now() < end) {
            let patience = end.map_or(TIDY, |end| end.saturating_duration_since(Instant::now()));
            match inbox.recv_timeout(patience) {
                Ok(Event::Silent) => self.streams -= 1,
                Ok(Event::Signal(signal)) if !is_message(signal) => {
                    self.signal.get_or_insert(signal);
                    end = Some(Instant::now());
                }
                _ => {}
            }
        }
    }

    fn time_has_passed(&mut self) {
        let now = Instant::now();
        let is_over = |at: &mut Instant| *at <= now;
        if self.end_at.take_if(is_over).is_some() {
            self.others = self.ranks.iter().filter(|rank| rank.is_running()).count();
            self.end(SIGTERM);
        } else if self.kill_at.take_if(is_over).is_some() {
            self.send(SIGKILL);
        } else {
            orphans::reap(&self.ranks.iter().map(|rank| rank.process).collect::<Vec<_>>());
        }
    }

    fn ended(&mut self, rank: u32) {
        let ended = self.ranks[rank as usize].reap();
        if ended != Ended::Exited(0) && !self.asked {
            self.failed.push(Failed { rank, process: self.ranks[rank as usize].process, ended });
            self.end_at.get_or_insert(Instant::now() + TOGETHER);
        }
    }

    /// The first signal that asks for the end goes to all ranks; with the second there is no grace.
    fn signalled(&mut self, signal: i32) {
        match self.signal {
            _ if is_message(signal) => self.send(signal),
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
        (self.asked, self.end_at) = (true, None);
        self.kill_at.get_or_insert(Instant::now() + self.grace);
    }

    fn send(&self, signal: i32) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }
}

/// Whether a signal tells ranks something, and ends nobody by the launcher's will: batch systems announce the end of a job so.
const fn is_message(signal: i32) -> bool {
    matches!(signal, SIGUSR1 | SIGUSR2)
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
