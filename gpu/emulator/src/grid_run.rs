//! The run of a launch, step by step or to its end.

use crate::fault::Fault;
use crate::grid::{Grid, Progress};
use crate::launch::{Launch, Mode, Options};
use crate::memory::Memory;
use crate::report::Report;
use crate::scheduler::Scheduler;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// A launch under way. It stays on the OS thread that made it.
pub struct GridRun {
    grid: Arc<Grid>,
    scheduler: Scheduler,
    done: bool,
}

impl GridRun {
    /// Prepares a launch; nothing runs yet. Its memory is the allocations live now.
    pub fn new(memory: &Arc<Memory>, launch: Launch, options: Options) -> Result<Self, Fault> {
        launch.validate()?;
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

/// Polls without an answer before [`Options::patience`] counts: on a busy machine all of that time may pass between two of them.
const LEAST_POLLS: u32 = 64;

/// Steps a scheduler to its end. What it polls for may come from another worker: as long as one of them goes on, it waits.
fn drive(scheduler: &mut Scheduler) -> Result<(), Fault> {
    let (mut productive_at, mut seen, mut polls) = (Instant::now(), u64::MAX, 0);
    loop {
        let before = scheduler.progress();
        let progress = scheduler.step(1 << 12)?;
        let made = scheduler.progress() - before;
        let all = scheduler.grid().progress.fetch_add(made, Ordering::Relaxed) + made;
        if all != std::mem::replace(&mut seen, all) {
            (productive_at, polls) = (Instant::now(), 0);
        }
        match progress {
            Progress::Done => return Ok(()),
            Progress::Running => {}
            Progress::Blocked(on) => {
                polls += 1;
                if polls >= LEAST_POLLS && productive_at.elapsed() > scheduler.grid().options.patience {
                    scheduler.grid().stopped.store(true, Ordering::Relaxed);
                    return Err(scheduler.no_progress(&on));
                }
                std::thread::yield_now();
            }
        }
    }
}
