//! `oxtile launch`: the ranks of one host, as processes that live and end together.
//!
//! Each rank is a process group of its own, so that what it starts ends with it. A rank that fails is named, with those that fail within
//! a tenth of a second: a rank that lost another may be seen to end before it. The others are
//! asked to end (SIGTERM) and then made to (SIGKILL); a signal to the launcher goes to all. What they started and left behind is
//! killed when the last has ended. Should the launcher itself be killed, the kernel kills the ranks, and a guardian what they started. Each of these steps has a deadline, so that
//! nothing keeps the launcher: what is left then is named.
//!
//! | file | what it holds |
//! |---|---|
//! | `rank` | one rank's process, and all that it starts |
//! | `lines` | the output of all ranks, line by line |
//! | `port` | the port of rank 0, kept from other programs |
//! | `guardian` | a process that ends the job if its launcher was killed |
//! | `subreaper` | processes that ranks left in groups of their own |
//! | `error` | how a launch can fail |

mod error;
pub mod guardian;
mod lines;
mod port;
mod rank;
mod subreaper;

use std::{
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use oxtile::comm::bootstrap::JobId;
use signal_hook::consts::{SIGCONT, SIGKILL, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH};

use crate::{arguments::Launch, interrupt, message, text::seconds};
pub use error::{Failed, LaunchError, Left, Limit};
use guardian::Guardian;
use lines::Lines;
pub use lines::Stream;
use port::Port;
pub use rank::Ended;
use rank::RankProcess;
use subreaper::{Subreaper, Survivor};

/// For how long after the first failure other failures are named too.
const TOGETHER: Duration = Duration::from_millis(100);
/// How often the system's table is rid of processes that ranks left behind and that have ended.
const TIDY: Duration = Duration::from_secs(60);
/// How long a process may take to end after SIGKILL: a driver that gives back much memory needs seconds.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the output of ranks is waited for at least, since the end of their streams is seen only then.
const MOMENT: Duration = Duration::from_millis(100);
/// How often the launcher checks whether its output is read.
const LOOK: Duration = Duration::from_millis(50);

/// What the launcher waits for.
enum Event {
    /// A rank's process has ended.
    Ended(u32),
    /// The last output of a rank on one of its streams has been passed on.
    Silent,
    /// A signal to the launcher.
    Signal(i32),
}

/// Runs a program as so many ranks, and returns when all have ended. Makes this process a subreaper: what ranks left behind becomes its
/// child, and is killed. Children that it had before live on.
///
/// # Errors
/// [`LaunchError`]; none of the processes is left, but for those that [`LaunchError::Left`] names.
pub fn run(request: &Launch) -> Result<(), LaunchError> {
    let begin = Instant::now();
    let (events, inbox) = mpsc::channel();
    let signals = events.clone();
    // From here on a signal is an event, and does not end the launcher.
    let _forwarding = interrupt::forward(move |signal| drop(signals.send(Event::Signal(signal))));
    let job = JobId::random().map_err(LaunchError::Prepare)?;
    let port = Port::reserve().map_err(LaunchError::Prepare)?;
    let mut subreaper = Subreaper::new(&job).map_err(LaunchError::Prepare)?;
    let guardian = Guardian::start(&job).map_err(LaunchError::Prepare)?;
    subreaper.spare(guardian.process());
    let lines = Lines::new(request.ranks);
    let mut ranks = Vec::new();
    for rank in 0..request.ranks {
        let variables = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", request.ranks.to_string()),
            ("LOCAL_WORLD_SIZE", request.ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.number().to_string()),
            ("OXTILE_JOB_ID", job.as_str().into()),
        ];
        match RankProcess::start(rank, request, &variables, &lines, &events) {
            Ok(process) => ranks.push(process),
            Err(error) => {
                let error = LaunchError::Start { rank, program: request.program().to_owned(), error };
                return LaunchError::with_left(Err(error), kill(ranks, &subreaper));
            }
        }
    }
    let result = Job::new(ranks, request, &lines, &subreaper).watch(&inbox);
    if result.is_ok() && request.verbose {
        message::tell(&format!("{} ranks ended well after {}", request.ranks, seconds(begin.elapsed().as_secs_f64())));
    }
    result
}

/// Kills ranks and what they left behind. Returns what is there after that.
fn kill(mut ranks: Vec<RankProcess>, subreaper: &Subreaper) -> Vec<Left> {
    ranks.iter().for_each(|rank| rank.signal(SIGKILL));
    let (limit, deadline) = (KILL_TIMEOUT, Instant::now() + KILL_TIMEOUT);
    let stay = |rank: &mut RankProcess| !rank.ends_by(deadline);
    let mut left: Vec<_> = ranks.extract_if(.., stay).map(|rank| Left::Rank { rank: rank.rank, process: rank.process, limit }).collect();
    let processes: Vec<_> = left.iter().filter_map(Left::process).collect();
    // They may hold the streams of a rank, which had no end else.
    let survivors = subreaper.kill_adopted(&processes, limit);
    left.extend(survivors.into_iter().map(|Survivor { process, name }| Left::Process { process, name, limit }));
    left
}

/// Ranks that run.
struct Job<'a> {
    ranks: Vec<RankProcess>,
    request: &'a Launch,
    lines: &'a Lines,
    subreaper: &'a Subreaper,
    /// How many of their streams may still have output.
    streams: usize,
    /// The first that failed, and those that failed with it.
    failed: Vec<Failed>,
    /// How many others ran then.
    others: usize,
    /// When those are asked to end.
    end_at: Option<Instant>,
    /// Whether the others were asked to end: how they end then is not a failure.
    asked: bool,
    /// When what still runs is killed.
    kill_at: Option<Instant>,
    signal: Option<i32>,
}

impl<'a> Job<'a> {
    fn new(ranks: Vec<RankProcess>, request: &'a Launch, lines: &'a Lines, subreaper: &'a Subreaper) -> Self {
        let streams = RankProcess::STREAMS * ranks.len();
        let (failed, others, end_at, asked, kill_at, signal) = (Vec::new(), 0, None, false, None, None);
        Self { ranks, request, lines, subreaper, streams, failed, others, end_at, asked, kill_at, signal }
    }

    fn watch(mut self, inbox: &Receiver<Event>) -> Result<(), LaunchError> {
        while self.ranks.iter().any(RankProcess::is_running) && self.kill_at.is_none_or(|at| at > Instant::now()) {
            let next = self.end_at.or(self.kill_at);
            let patience = next.map_or(TIDY, |at| at.saturating_duration_since(Instant::now()).min(TIDY));
            match inbox.recv_timeout(patience) {
                Ok(Event::Ended(rank)) => self.ended(rank),
                Ok(Event::Silent) => self.streams -= 1,
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Err(_) => self.time_has_passed(),
            }
        }
        let mut left = kill(std::mem::take(&mut self.ranks), self.subreaper);
        left.extend(self.hear_out(inbox));
        left.extend(self.lines.lost());
        let outcome = match self.signal {
            Some(signal) => Err(LaunchError::Signal(signal)),
            None if self.failed.is_empty() => Ok(()),
            None => Err(LaunchError::Ranks { failed: self.failed, others: self.others }),
        };
        LaunchError::with_left(outcome, left)
    }

    /// Waits until the output of ranks is passed on, however slowly it is read, but while nothing is read at most for the time to drain;
    /// only for the grace if the launcher is to end, and for a moment after a signal that comes now. Readers get that moment in any case.
    fn hear_out(&mut self, inbox: &Receiver<Event>) -> Option<Left> {
        let (mut limit, patience) = match self.signal {
            Some(_) => (Limit::Grace, self.request.grace.max(MOMENT)),
            None => (Limit::Drain, self.request.drain.max(MOMENT)),
        };
        let (mut since, mut passed_on) = (Instant::now(), self.lines.passed_on());
        let mut end = since + patience;
        while self.streams > 0 {
            // Events that have come are taken before the time is checked, also when it is over.
            let event = inbox.recv_timeout(end.saturating_duration_since(Instant::now()).min(LOOK));
            if limit == Limit::Drain && self.lines.passed_on() != passed_on {
                (since, passed_on) = (Instant::now(), self.lines.passed_on());
                end = since + patience;
            }
            match event {
                Ok(Event::Silent) => self.streams -= 1,
                Ok(Event::Signal(SIGTSTP)) => end += interrupt::stop(),
                Ok(Event::Signal(signal)) if !is_message(signal) => {
                    self.signal.get_or_insert(signal);
                    (limit, end) = (Limit::Signal, end.min(Instant::now() + MOMENT));
                }
                Err(_) if Instant::now() >= end => return Some(Left::Output { limit, waited: since.elapsed() }),
                _ => {}
            }
        }
        None
    }

    fn time_has_passed(&mut self) {
        let now = Instant::now();
        let is_over = |at: &mut Instant| *at <= now;
        if self.end_at.take_if(is_over).is_some() {
            self.others = self.ranks.iter().filter(|rank| rank.is_running()).count();
            self.end(SIGTERM);
        } else {
            self.subreaper.reap_ended(&self.ranks.iter().map(|rank| rank.process).collect::<Vec<_>>());
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
            // As the terminal's: all stop, and the shell that goes on with the launcher's group goes on with all.
            _ if signal == SIGTSTP => {
                self.send(signal);
                let stopped = interrupt::stop();
                [&mut self.end_at, &mut self.kill_at].into_iter().flatten().for_each(|at| *at += stopped);
            }
            _ if is_message(signal) => self.send(signal),
            None => {
                self.signal = Some(signal);
                self.end(signal);
            }
            Some(_) => self.kill_at = Some(Instant::now()),
        }
    }

    /// Asks all to end, and sets the time when they are made to.
    fn end(&mut self, signal: i32) {
        self.send(signal);
        (self.asked, self.end_at) = (true, None);
        self.kill_at.get_or_insert(Instant::now() + self.request.grace);
    }

    fn send(&self, signal: i32) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }
}

/// Whether a signal is only passed on to ranks, and ends none of them by the launcher's will: batch systems announce the end of a job so, shells that it goes
/// on, terminals their size.
const fn is_message(signal: i32) -> bool {
    matches!(signal, SIGUSR1 | SIGUSR2 | SIGTSTP | SIGCONT | SIGWINCH)
}
