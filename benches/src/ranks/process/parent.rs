//! The program that started a rank's process: it asks it, and lets it meet the others.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use oxtile::comm::Rank;

use super::{Begin, FLAG, FromRank, Opened, ToRank, line};
use crate::ranks::gate::Gate;
use crate::ranks::{Request, Times};

/// How long a process may take to give back what it has, after its last message.
const CLOSING: Duration = Duration::from_secs(60);
/// The same of one whose rank has failed.
const FAILING: Duration = Duration::from_secs(5);
/// The time between two looks at whether a process has ended.
const LOOK: Duration = Duration::from_millis(5);

/// The process of a rank. It is ended, at the latest, when this is dropped.
pub struct Process {
    rank: Rank,
    child: Kill,
    /// None after the last message.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    closing: Duration,
}

/// Ends a process.
#[derive(Clone)]
pub struct Kill(Arc<Mutex<Child>>);

impl Kill {
    /// Ends it, unless it has ended.
    pub fn now(&self) {
        _ = self.child().kill();
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it ended; if it has not within `limit`, it is ended.
    fn wait(&self, limit: Duration) -> std::io::Result<ExitStatus> {
        let begin = Instant::now();
        loop {
            // The lock is not held meanwhile: another thread may end it.
            if let Some(status) = self.child().try_wait()? {
                return Ok(status);
            }
            if begin.elapsed() > limit {
                self.now();
            }
            thread::sleep(LOOK);
        }
    }
}

impl Process {
    /// This program again.
    pub fn of_this_program(rank: Rank) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("this program's file is not known")?);
        command.arg(FLAG);
        Self::start(rank, command)
    }

    /// A program that does as a rank does.
    pub fn start(rank: Rank, mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("the process of {rank} cannot be started"))?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("it has a standard output")?);
        Ok(Self { rank, child: Kill(Arc::new(Mutex::new(child))), requests, answers, closing: FAILING })
    }

    pub fn kill(&self) -> Kill {
        self.child.clone()
    }

    /// Has the process serve requests, until there are no more, or one fails. No rank passes the gate after a failure.
    pub fn serve(mut self, begin: Begin, gate: &Gate, requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
        let answers_first = begin.errand.answers_first();
        self.say(&ToRank::Begin(begin));
        let relay = |process: &mut Self| {
            let answer = process.answer(gate);
            let is_well = answer.as_ref().inspect_err(|error| gate.end(format!("{error:#}"))).is_ok();
            answers.send(answer).is_ok() && is_well
        };
        if answers_first && !relay(&mut self) {
            return;
        }
        while let Ok(request) = requests.recv() {
            self.say(&ToRank::Work(request));
            if !relay(&mut self) {
                return;
            }
        }
        self.say(&ToRank::End);
        self.closing = CLOSING;
    }

    /// Sends a message. Where that fails the process has ended, which is found when it is to answer.
    fn say(&mut self, message: &ToRank) {
        if let (Some(requests), Ok(line)) = (&mut self.requests, line(message)) {
            _ = requests.write_all(line.as_bytes());
        }
    }

    /// The process's next answer. Before that it is let through the gate as often as it comes there.
    fn answer(&mut self, gate: &Gate) -> Result<Times> {
        loop {
            match self.hear()? {
                FromRank::Meet { limit } => {
                    let opened = match gate.pass(limit) {
                        Ok(()) => Opened::Open { failed: gate.failed() },
                        Err(error) => Opened::Shut { why: format!("{error:#}") },
                    };
                    self.say(&ToRank::Opened(opened));
                }
                FromRank::Made(made) => gate.made(made)?,
                FromRank::Failed(by, why) => gate.fail(by, why),
                FromRank::Answer(Ok(times)) => return Ok(times),
                FromRank::Answer(Err(why)) => bail!("{}: {why}", self.rank),
            }
        }
    }

    /// The next message. Lines that are none are those of libraries, and go to the standard error.
    fn hear(&mut self) -> Result<FromRank> {
        loop {
            let mut line = String::new();
            match self.answers.read_line(&mut line) {
                Ok(0) => return Err(self.ended()),
                Ok(_) => match serde_json::from_str(&line) {
                    Ok(message) => return Ok(message),
                    Err(_) => _ = std::io::stderr().write_all(line.as_bytes()),
                },
                Err(error) => return Err(anyhow!(error).context(format!("what {} writes cannot be read", self.rank))),
            }
        }
    }

    /// The error of a process that has closed its output.
    fn ended(&self) -> anyhow::Error {
        let how = self.child.wait(FAILING).map_or_else(|error| error.to_string(), |status| status.to_string());
        anyhow!("the process of {} has ended ({how}): see what it wrote above", self.rank)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An end of its input ends it too.
        self.requests = None;
        _ = self.child.wait(self.closing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::process::tests::begin;
    use crate::ranks::workers::{Errand, Ranks};
    use crate::ranks::{Work, context_parallel};
    use oxtile::comm::WorldSize;

    const REQUEST: Request = Request { work: Work::Put, bytes: 8, calls: 1 };
    /// A rank that passes the gate once for each request, and answers.
    const WORKS: &str = r#"
        read begin
        while read work; do
            case "$work" in *end*) exit 0;; esac
            echo "NCCL INFO of a library"
            echo '{"meet":{"limit":{"secs":500,"nanos":0}}}'
            read opened
            case "$opened" in *open*) ;; *) exit 9;; esac
            echo '{"answer":{"Ok":{"wall":2.5,"device":0.5,"ended":{"secs":7,"nanos":0}}}}'
        done
        sleep 1000"#;

    fn ranks(scripts: &[&str], errand: &Errand) -> Ranks {
        let world = WorldSize::new(scripts.len() as u32).unwrap();
        let start = |(rank, script): (Rank, &&str)| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            (begin(errand.clone()).of(rank), Process::start(rank, command).unwrap())
        };
        Ranks::processes(world.ranks().zip(scripts).map(start).collect()).unwrap()
    }

    #[test]
    fn processes_meet_and_answer() {
        let ranks = ranks(&[WORKS; 3], &Errand::Comparisons);
        for _ in 0..3 {
            let times = ranks.round(REQUEST).unwrap();
            assert_eq!((times.wall, times.device, times.idle), (2.5, 0.5, vec![0.0; 3]));
        }
        let begin = Instant::now();
        drop(ranks);
        assert!(begin.elapsed() < FAILING, "they end with the last message");
    }

    #[test]
    fn a_process_that_ends_is_named_and_ends_the_others() {
        for (script, how) in [
            ("read begin; read work; exit 3", "exit status: 3"),
            ("read begin; read work; kill -9 $$", "signal: 9"),
            ("exit 4", "exit status: 4"),
        ] {
            let begin = Instant::now();
            let ranks = ranks(&[WORKS, script], &Errand::Comparisons);
            for _ in 0..2 {
                let error = format!("{:#}", ranks.round(REQUEST).unwrap_err());
                assert!(error.starts_with("the process of rank 1 has ended (") && error.contains(how), "{error}");
            }
            drop(ranks);
            assert!(begin.elapsed() < 4 * FAILING, "{how}: the rank at the gate was not told: {:?}", begin.elapsed());
        }
    }

    #[test]
    fn an_error_of_a_process_is_its_rank_s() {
        let script = r#"read begin; read work; echo '{"answer":{"Err":"out of memory"}}'"#;
        let ranks = ranks(
            &["read begin; read work; echo '{\"answer\":{\"Ok\":{\"wall\":1,\"device\":1}}}'; read end", script],
            &Errand::Comparisons,
        );
        assert_eq!(ranks.round(REQUEST).unwrap_err().to_string(), "rank 1: out of memory");
    }

    #[test]
    fn a_side_that_failed_on_one_rank_is_told_to_all() {
        let row = context_parallel::rows(crate::bench::Size::Smoke, 2)[0];
        let meets = r#"echo '{"meet":{"limit":{"secs":500,"nanos":0}}}'; read opened; echo "{\"answer\":{\"Err\":\"told $(echo "$opened" | tr -d '\"')\"}}"; read end"#;
        let fails = format!(r#"read begin; echo '{{"failed":["ring","no memory"]}}'; {meets}"#);
        let ranks = ranks(&[&format!("read begin; {meets}"), &fails], &Errand::Row { row, left_out: Vec::new() });
        let told: Vec<_> = ranks.answers().into_iter().map(|answer| answer.unwrap_err().to_string()).collect();
        let of = |rank| format!("rank {rank}: told {{opened:{{open:{{failed:[ring,no memory]}}}}}}");
        assert_eq!(told, [of(0), of(1)]);
        assert_eq!(ranks.gate.failed(), Some((context_parallel::By::Ring, "no memory".into())));
    }
}
