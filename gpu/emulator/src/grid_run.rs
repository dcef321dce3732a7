//! The run of a launch, step by step or to its end.

use crate::fault::Fault;
use crate::grid::{ENDED, GOES_ON, Grid, Progress};
use crate::known::Known;
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
        let workers = match (options.mode, options.workers) {
            (Mode::Check, _) => 1,
            (Mode::Fast, 0) => std::thread::available_parallelism().map_or(1, usize::from),
            (Mode::Fast, n) => n,
        };
        let workers = workers.min(usize::try_from(launch.blocks()).unwrap_or(usize::MAX)).max(1);
        let grid = Arc::new(Grid {
            snapshot: memory.snapshot(),
            launch,
            options,
            memory: Arc::clone(memory),
            next_block: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            polls: (0..workers).map(|_| AtomicU64::new(GOES_ON)).collect(),
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
        let grid = &self.grid;
        let scheduler = &mut self.scheduler;
        let result = std::thread::scope(|scope| {
            let others: Vec<_> =
                (1..grid.polls.len()).map(|worker| scope.spawn(move || drive(&mut Scheduler::new(grid), worker))).collect();
            let mut result = drive(scheduler, 0);
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

    /// What the threads that have ended knew of streams and of other grids, in check mode and where [`Options::known`] says of any.
    pub fn known(&self) -> Known {
        self.scheduler.known()
    }

    /// What was counted so far.
    pub fn report(&self) -> Report {
        self.scheduler.report()
    }
}

/// Polls without an answer before [`Options::patience`] counts: on a busy machine all of that time may pass between two of them.
const LEAST_POLLS: u32 = 64;

/// Steps a worker's scheduler to its end. What it polls for may come from another worker: as long as one of them does anything else, or has not looked since another went on,
/// it waits, however long that takes on a busy machine. The patience is for other OS threads.
fn drive(scheduler: &mut Scheduler, worker: usize) -> Result<(), Fault> {
    let (mut since, mut polls) = (Instant::now(), 0);
    loop {
        let (before, seen) = (scheduler.progress(), scheduler.grid().progress.load(Ordering::SeqCst));
        let progress = scheduler.step(1 << 12)?;
        let made = scheduler.progress() - before;
        let grid = scheduler.grid();
        let all = grid.progress.fetch_add(made, Ordering::SeqCst) + made;
        let state = match progress {
            Progress::Done => ENDED,
            Progress::Blocked(_) if all == seen => all,
            _ => GOES_ON,
        };
        grid.polls[worker].store(state, Ordering::SeqCst);
        if !grid.all_poll() {
            (since, polls) = (Instant::now(), 0);
        }
        match progress {
            Progress::Done => return Ok(()),
            Progress::Running => {}
            Progress::Blocked(on) => {
                polls += 1;
                if polls >= LEAST_POLLS && since.elapsed() > grid.options.patience {
                    grid.stopped.store(true, Ordering::Relaxed);
                    return Err(scheduler.no_progress(&on));
                }
                std::thread::yield_now();
            }
        }
    }
}
