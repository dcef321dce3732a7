//! A launch as a value: what to run, how, and the run itself, step by step.

use crate::fault::{Fault, FaultKind};
use crate::memory::{Memory, Snapshot};
use crate::report::Report;
use crate::scheduler::Scheduler;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A range of device memory with the name that reports use for it: a kernel's tensor parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorName {
    /// The parameter's name.
    pub name: String,
    /// Device address of its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel's name, for reports.
    pub kernel: String,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Blocks of a cluster in each dimension; they run at the same time.
    pub cluster: [u32; 3],
    /// Bytes of shared memory a block.
    pub shared_bytes: u32,
    /// The kernel's arguments, 8 bytes each.
    pub arguments: Vec<u64>,
    /// The kernel: each emulated thread calls it once with the arguments.
    pub body: fn(&[u64]),
    /// The device that runs it.
    pub device: u32,
    /// Names for the reports; memory outside them is named by its allocation.
    pub tensors: Vec<TensorName>,
}

impl Launch {
    /// A launch of one-dimensional blocks with no arguments and no shared memory, on device 0.
    pub fn new(kernel: &str, blocks: u32, threads: u32, body: fn(&[u64])) -> Self {
        Self {
            kernel: kernel.to_owned(),
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 0,
            arguments: Vec::new(),
            body,
            device: 0,
            tensors: Vec::new(),
        }
    }

    /// The same launch with these arguments.
    pub fn arguments(mut self, arguments: &[u64]) -> Self {
        self.arguments = arguments.to_vec();
        self
    }

    /// The same launch with this much shared memory a block.
    pub fn shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// The same launch with clusters of so many blocks in x.
    pub fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = [blocks, 1, 1];
        self
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    pub(crate) fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}

/// What a run checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Every detector on; one OS thread, an interleaving drawn from the seed, copies done late.
    Check,
    /// Bounds, alignment, divergence and deadlock alone; blocks on a worker pool, copies done at once.
    Fast,
}

/// Which runs first when several warps could ([`Mode::Check`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// One of the four below, by the seed.
    Seeded,
    /// Every choice is drawn evenly.
    Random,
    /// Low warps run only when no other can, and asynchronous copies are late.
    StarveProducer,
    /// Low warps run as long as they can, and asynchronous copies are early.
    StarveConsumer,
    /// One lane, by the seed the same in every warp, runs only when no other can: what the other lanes do must wait for it.
    StarveLane,
}

/// How a launch is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is checked.
    pub mode: Mode,
    /// The interleaving's seed: the same seed gives the same run and the same report.
    pub seed: u64,
    /// Which warp runs first.
    pub policy: Policy,
    /// OS threads of [`Mode::Fast`] in [`GridRun::run`]; 0 takes one a core.
    pub workers: usize,
    /// Resumptions of a thread after which the run ends with [`FaultKind::StepLimit`].
    pub step_limit: u64,
    /// How long [`GridRun::run`] polls, when nothing but polling is left, before it gives up.
    pub patience: Duration,
    /// Stack of an emulated thread in bytes.
    pub stack_bytes: usize,
    /// Blocks in flight at once on one OS thread.
    pub resident_blocks: usize,
    /// One change to one synchronisation site.
    pub mutation: Option<crate::mutation::Mutation>,
}

impl Options {
    /// Every detector on, with this seed.
    pub fn check(seed: u64) -> Self {
        Self {
            mode: Mode::Check,
            seed,
            policy: Policy::Seeded,
            workers: 0,
            step_limit: 1 << 28,
            patience: Duration::from_millis(200),
            stack_bytes: 128 << 10,
            resident_blocks: 16,
            mutation: None,
        }
    }

    /// Bounds checks only, as fast as it goes.
    pub fn fast() -> Self {
        Self { mode: Mode::Fast, step_limit: u64::MAX, ..Self::check(0) }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::check(0)
    }
}

/// Where a run stands after [`GridRun::step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The budget is used up; there is more to do.
    Running,
    /// All that is left polls memory that others must write; the text says which threads wait where.
    Blocked(String),
    /// Every thread has ended.
    Done,
}

/// What the workers of one launch share.
pub(crate) struct Grid {
    pub launch: Launch,
    pub options: Options,
    pub memory: Arc<Memory>,
    pub snapshot: Snapshot,
    pub next_block: AtomicU64,
    pub stopped: AtomicBool,
    /// How often a thread of any worker went on.
    pub progress: AtomicU64,
}

impl Grid {
    /// The first block of the next cluster.
    pub fn next_cluster(&self) -> Option<u64> {
        let next = self.next_block.fetch_add(self.launch.cluster[0].into(), Ordering::Relaxed);
        (next < self.launch.blocks()).then_some(next)
    }

    pub fn blocks_left(&self) -> bool {
        self.next_block.load(Ordering::Relaxed) < self.launch.blocks()
    }
}

/// A launch under way. It stays on the OS thread that made it.
pub struct GridRun {
    grid: Arc<Grid>,
    scheduler: Scheduler,
    done: bool,
}

impl GridRun {
    /// Prepares a launch; nothing runs yet. Its memory is the allocations live now.
    pub fn new(memory: &Arc<Memory>, launch: Launch, options: Options) -> Result<Self, Fault> {
        validate(&launch)?;
        let grid = Arc::new(Grid {
            snapshot: memory.snapshot(),
            launch,
            options,
            memory: Arc::clone(memory),
            next_block: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            progress: AtomicU64::new(0),
        });
        Ok(Self { scheduler: Scheduler::new(&grid), grid, done: false })
    }

    /// Runs until `budget` resumptions of emulated threads were made, nothing can go on, or the grid is done.
    pub fn step(&mut self, budget: u64) -> Result<Progress, Fault> {
        if self.done {
            return Ok(Progress::Done);
        }
        let progress = self.scheduler.step(budget)?;
        self.done = progress == Progress::Done;
        Ok(progress)
    }

    /// Runs to the end. Polling that nothing answers becomes a fault after [`Options::patience`].
    pub fn run(mut self) -> Result<Report, Fault> {
        let workers = match (self.grid.options.mode, self.grid.options.workers) {
            (Mode::Check, _) => 1,
            (Mode::Fast, 0) => std::thread::available_parallelism().map_or(1, usize::from),
            (Mode::Fast, n) => n,
        };
        let workers = workers.min(usize::try_from(self.grid.launch.blocks()).unwrap_or(usize::MAX)).max(1);
        let grid = &self.grid;
        let scheduler = &mut self.scheduler;
        let result = std::thread::scope(|scope| {
            let others: Vec<_> = (1..workers).map(|_| scope.spawn(|| drive(&mut Scheduler::new(grid)))).collect();
            let mut result = drive(scheduler);
            for other in others {
                let theirs = other.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload));
                result = result.and(theirs);
            }
            result
        });
        result?;
        self.done = true;
        Ok(self.report())
    }

    /// What was counted so far.
    pub fn report(&self) -> Report {
        self.scheduler.report()
    }
}

/// Steps a scheduler to its end. The value that it polls for may come from another worker: while one of them makes progress, it waits.
fn drive(scheduler: &mut Scheduler) -> Result<(), Fault> {
    let (mut productive_at, mut seen) = (Instant::now(), u64::MAX);
    loop {
        let before = scheduler.progress();
        let progress = scheduler.step(1 << 12)?;
        let made = scheduler.progress() - before;
        let all = scheduler.grid().progress.fetch_add(made, Ordering::Relaxed) + made;
        if all != std::mem::replace(&mut seen, all) {
            productive_at = Instant::now();
        }
        match progress {
            Progress::Done => return Ok(()),
            Progress::Running => {}
            Progress::Blocked(on) => {
                if productive_at.elapsed() > scheduler.grid().options.patience {
                    scheduler.grid().stopped.store(true, Ordering::Relaxed);
                    return Err(scheduler.no_progress(&on));
                }
                std::thread::yield_now();
            }
        }
    }
}

fn validate(launch: &Launch) -> Result<(), Fault> {
    let problem = if launch.grid.contains(&0) || launch.block.contains(&0) {
        "a grid or block dimension is zero"
    } else if launch.block.iter().map(|&n| u64::from(n)).product::<u64>() > 1024 {
        "a block has more than 1024 threads"
    } else if launch.shared_bytes > 227 << 10 {
        "a block has more than 227 KiB of shared memory"
    } else if launch.cluster[1..] != [1, 1] || !(1..=8).contains(&launch.cluster[0]) || !launch.grid[0].is_multiple_of(launch.cluster[0]) {
        "a cluster is not of 1 to 8 blocks in x, of which the grid has a multiple"
    } else {
        return Ok(());
    };
    Err(Fault {
        kind: FaultKind::Launch,
        kernel: launch.kernel.clone(),
        thread: None,
        message: format!(
            "{problem}: grid {:?}, cluster {:?}, block {:?}, {} shared bytes",
            launch.grid, launch.cluster, launch.block, launch.shared_bytes
        ),
        involved: Vec::new(),
        mend: "launch nothing for an empty problem, and keep to the limits of compute capability 9.0",
    })
}
