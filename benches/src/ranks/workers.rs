//! Our ranks: a process each on GPUs, a thread each on virtual GPUs. The thread of a rank serves its requests, or has its process serve them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use oxtile::comm::{EmulatedCommunicator, HostRank, UniqueId, WorldSize};
use oxtile::{Device, Runtime};
use serde::{Deserialize, Serialize};

use super::context_parallel::{self, Row};
use super::gate::Gate;
use super::member::{DEADLINE, Member};
use super::process::{Begin, Kill, Process};
use super::{Request, Times};

/// Where ranks run.
pub enum Home {
    /// Threads of this process, on its virtual GPUs.
    Threads(Runtime),
    /// A process for each GPU.
    Processes,
}

/// What ranks are started for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Errand {
    /// All but context parallelism.
    Comparisons,
    /// One configuration of context parallelism after another, whose schedule is chosen.
    Choices,
    /// Context parallelism, without sides that failed before.
    Row { row: Row, left_out: Vec<(context_parallel::By, String)> },
}

/// What a rank begins with.
pub struct Seat {
    pub rank: HostRank,
    pub runtime: Runtime,
    /// None on virtual GPUs.
    pub id: Option<UniqueId>,
    /// On virtual GPUs alone.
    pub emulated: Option<EmulatedCommunicator>,
    pub gate: Arc<Gate>,
}

/// Our ranks.
pub struct Ranks {
    workers: Vec<Worker>,
    pub gate: Arc<Gate>,
}

/// The thread of one rank, and the channels of its requests.
struct Worker {
    requests: SyncSender<Request>,
    results: Receiver<Result<Times>>,
    thread: JoinHandle<()>,
    /// Ends the rank's process.
    kill: Option<Kill>,
}

/// How often a wait for an answer looks whether another rank has ended.
const LOOK: Duration = Duration::from_millis(200);

impl Errand {
    /// Whether a rank answers once before it is asked: that it is ready.
    pub fn answers_first(&self) -> bool {
        matches!(self, Self::Row { .. })
    }

    /// Serves requests, until there are no more, or one fails.
    pub fn serve(&self, seat: Seat, requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
        match self {
            Self::Comparisons => {
                let (name, gate) = (seat.rank.rank(), Arc::clone(&seat.gate));
                let member = Member::join(seat.id, seat.rank, seat.runtime).with_context(|| format!("{name} joins"));
                serve(member, &gate, requests, answers);
            }
            Self::Choices => context_parallel::auto::serve(&seat, requests, answers),
            Self::Row { row, left_out } => context_parallel::serve(&seat, *row, left_out, requests, answers),
        }
    }
}

impl Ranks {
    pub fn start(world: u32, home: &Home, errand: &Errand) -> Result<Self> {
        let size = WorldSize::new(world).context("there are ranks")?;
        match home {
            Home::Threads(runtime) => Self::threads(size, runtime, errand),
            Home::Processes => {
                let begin = Begin::new(size, errand)?;
                Self::processes(size.ranks().map(|rank| Ok((begin.of(rank), Process::of_this_program(rank)?))).collect::<Result<_>>()?)
            }
        }
    }

    fn threads(size: WorldSize, runtime: &Runtime, errand: &Errand) -> Result<Self> {
        let devices: Vec<Device> = size.ranks().map(|rank| runtime.device(rank.index())).collect::<oxtile::Result<_>>()?;
        let emulated = EmulatedCommunicator::world_of(runtime, size)?;
        let gate = Arc::new(Gate::new(size.get()));
        let start = |(rank, emulated)| {
            let (errand, gate, runtime) = (errand.clone(), Arc::clone(&gate), runtime.clone());
            Worker::start(None, move |requests, answers| {
                errand.serve(Seat { rank, runtime, id: None, emulated: Some(emulated), gate }, requests, answers);
            })
        };
        let workers = HostRank::threads(&devices)?.into_iter().zip(emulated).map(start).collect();
        Ok(Self { workers, gate })
    }

    /// Ranks whose processes have been started.
    pub fn processes(started: Vec<(Begin, Process)>) -> Result<Self> {
        let gate = Arc::new(Gate::new(u32::try_from(started.len())?));
        let start = |(begin, process): (Begin, Process)| {
            let gate = Arc::clone(&gate);
            Worker::start(Some(process.kill()), move |requests, answers| process.serve(begin, &gate, requests, answers))
        };
        Ok(Self { workers: started.into_iter().map(start).collect(), gate })
    }

    /// The next answer of each rank.
    pub fn answers(&self) -> Vec<Result<Times>> {
        self.workers.iter().map(|worker| self.answer(worker)).collect()
    }

    /// The next times of all ranks.
    ///
    /// # Errors
    /// That of the rank that failed first, where ranks are processes.
    pub fn times(&self) -> Result<Vec<Times>> {
        let answers = self.answers();
        match self.gate.ended() {
            Some((why, _)) => bail!("{why}"),
            None => answers.into_iter().collect(),
        }
    }

    /// The next answer of a rank. What it does may never end where another one has failed: then it is ended.
    fn answer(&self, worker: &Worker) -> Result<Times> {
        loop {
            match worker.results.recv_timeout(LOOK) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Disconnected) => bail!("a rank has ended"),
                Err(RecvTimeoutError::Timeout) => {
                    if self.gate.ended().is_some_and(|(_, since)| since.elapsed() > 2 * DEADLINE) {
                        self.kill();
                    }
                }
            }
        }
    }

    fn kill(&self) {
        self.workers.iter().filter_map(|worker| worker.kill.as_ref()).for_each(Kill::now);
    }

    pub fn round(&self, request: Request) -> Result<Times> {
        // A rank that has ended is found by its answer.
        self.workers.iter().for_each(|worker| _ = worker.requests.send(request));
        let times = self.times()?;
        let slowest = |of: fn(&Times) -> f64| times.iter().map(of).fold(0.0, f64::max);
        let ends: Vec<Duration> = times.iter().filter_map(|times| times.ended).collect();
        let last = ends.iter().max().copied();
        // Of one rank alone nothing is known.
        let idle =
            last.filter(|_| ends.len() == times.len()).map(|last| ends.iter().map(|end| (last - *end).as_secs_f64() * 1e3).collect());
        Ok(Times { wall: slowest(|times| times.wall), device: slowest(|times| times.device), idle: idle.unwrap_or_default(), ended: last })
    }
}

impl Worker {
    fn start(kill: Option<Kill>, serve: impl FnOnce(&Receiver<Request>, &SyncSender<Result<Times>>) + Send + 'static) -> Self {
        let (requests, incoming) = sync_channel(1);
        let (answers, results) = sync_channel(1);
        Self { requests, results, thread: thread::spawn(move || serve(&incoming, &answers)), kill }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if self.gate.ended().is_some() {
            self.kill();
        }
        let (requests, threads): (Vec<_>, Vec<_>) = self.workers.drain(..).map(|worker| (worker.requests, worker.thread)).unzip();
        // All first: they give their arenas back together.
        drop(requests);
        threads.into_iter().for_each(|thread| _ = thread.join());
    }
}

fn serve(mut member: Result<Member>, gate: &Gate, requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
    while let Ok(request) = requests.recv() {
        let times = match &mut member {
            Ok(member) => member.round(request, gate),
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        };
        let failed = times.is_err();
        if answers.send(times).is_err() || failed {
            return;
        }
    }
}
