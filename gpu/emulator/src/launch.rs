//! A launch as a value: what to run, and how.

use crate::fault::{Fault, FaultKind};
use crate::known::Known;
use crate::mutation::Mutation;
use crate::schedule::Schedule;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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

    /// Whether a device takes it.
    pub(crate) fn validate(&self) -> Result<(), Fault> {
        let problem = if self.grid.contains(&0) || self.block.contains(&0) {
            "a grid or block dimension is zero"
        } else if self.block.iter().map(|&n| u64::from(n)).product::<u64>() > 1024 {
            "a block has more than 1024 threads"
        } else if self.shared_bytes > 227 << 10 {
            "a block has more than 227 KiB of shared memory"
        } else if self.cluster[1..] != [1, 1] || !(1..=8).contains(&self.cluster[0]) || !self.grid[0].is_multiple_of(self.cluster[0]) {
            "a cluster is not of 1 to 8 blocks in x, of which the grid has a multiple"
        } else {
            return Ok(());
        };
        Err(Fault {
            kind: FaultKind::Launch,
            kernel: self.kernel.clone(),
            thread: None,
            message: format!(
                "{problem}: grid {:?}, cluster {:?}, block {:?}, {} shared bytes",
                self.grid, self.cluster, self.block, self.shared_bytes
            ),
            involved: Vec::new(),
            mend: "launch nothing for an empty problem, and keep to the limits of compute capability 9.0",
        })
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

/// Which warp runs first when several could ([`Mode::Check`]).
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
    /// OS threads of [`Mode::Fast`] in [`GridRun::run`](crate::GridRun::run); 0 takes one a core.
    pub workers: usize,
    /// Resumptions of a thread after which the run ends with [`FaultKind::StepLimit`].
    pub step_limit: u64,
    /// How long a launch may go on in which no block ends, before it ends with [`FaultKind::StepLimit`] too.
    pub time_limit: Duration,
    /// How long [`GridRun::run`](crate::GridRun::run) polls, when nothing but polling is left, before it gives up.
    pub patience: Duration,
    /// Stack of an emulated thread in bytes.
    pub stack_bytes: usize,
    /// Blocks in flight at once on one OS thread, at most: with [`Policy::Seeded`] the seed draws one, two or all of them, and more are begun when those poll or go on for long. A cluster starts whole.
    pub resident_blocks: usize,
    /// One change to one synchronisation site.
    pub mutation: Option<Mutation>,
    /// Whether the [`Report`](crate::Report) says what memory requests cost, what shared memory holds, which boxes are copied and when mbarriers' phases ended ([`Mode::Check`]).
    pub explain: bool,
    /// Which thread goes on when, to note it or to give it ([`Mode::Check`]).
    pub schedule: Option<Schedule>,
    /// What the launch's stream knows of other streams and of grids that are under way. Grids that have ended are known to all.
    pub known: Known,
    /// Once this is set, races and reads of what was never written are none: the flags that the grid waited for were poisoned, or did not come in time, and what it reads is garbage.
    pub pardon: Option<Arc<AtomicBool>>,
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
            time_limit: Duration::MAX,
            patience: Duration::from_millis(200),
            stack_bytes: 128 << 10,
            resident_blocks: 16,
            mutation: None,
            explain: false,
            schedule: None,
            known: Known::default(),
            pardon: None,
        }
    }

    /// Bounds checks only, as fast as it goes.
    pub fn fast() -> Self {
        Self { mode: Mode::Fast, step_limit: u64::MAX, ..Self::check(0) }
    }

    /// From here on races and reads of what was never written are none.
    pub(crate) fn pardon(&self) {
        if let Some(pardon) = &self.pardon {
            pardon.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_pardoned(&self) -> bool {
        self.pardon.as_ref().is_some_and(|pardon| pardon.load(Ordering::Relaxed))
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::check(0)
    }
}

/// The coordinates of a number in a grid of these sizes, x first.
pub(crate) fn unflatten(number: u64, [x, y, _]: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(x), u64::from(y));
    [(number % x) as u32, (number / x % y) as u32, (number / (x * y)) as u32]
}
