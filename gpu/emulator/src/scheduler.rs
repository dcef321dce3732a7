//! Picks which warp runs next: sweeps in fast mode, seeded choices in check mode.

use crate::async_copy;
use crate::block::Block;
use crate::cluster::Cluster;
use crate::divergence;
use crate::fault::{Fault, FaultKind, Involved};
use crate::grid::{Grid, Progress};
use crate::known::Known;
use crate::launch::{Mode, Policy};
use crate::panic_hook;
use crate::replay::{Next, Replay};
use crate::report::Report;
#[cfg(unix)]
use crate::stack_overflow;
use crate::thread::{Stopped, Waiting, running, set_current};
use crate::warp::lanes;
use crate::worker::Worker;
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// One OS thread's share of a launch.
pub(crate) struct Scheduler {
    blocks: Vec<Rc<Block>>,
    worker: Rc<Worker>,
    policy: Policy,
    /// The lane that runs last, of every warp; a bit, or none.
    starved: u32,
    /// Blocks kept in flight. Another starts beyond them where these poll, or go on for long.
    wanted: usize,
    /// The warps that can go on, by their blocks: in check mode, at each choice.
    ready: RefCell<Vec<(usize, usize)>>,
    /// Resumptions in a row that were mere polling.
    idle: u64,
    /// In check mode, where turns are noted or given.
    replay: Option<Replay>,
    /// When a block last ended, and after which step the clock is looked at next.
    last_end: (Instant, u64),
    /// When the last step ended: time between steps is another's.
    paused: Option<Instant>,
}

/// Steps after which a run is long: another block starts beside its blocks, and the clock is looked at. Then again after as many.
const LONG_RUN: u64 = 1 << 16;

impl Scheduler {
    pub fn new(grid: &Arc<Grid>) -> Self {
        panic_hook::install();
        #[cfg(unix)]
        stack_overflow::install();
        let worker = Rc::new(Worker::new(grid));
        let policy = match grid.options.policy {
            Policy::Seeded => match worker.random.below(4) {
                0 => Policy::StarveProducer,
                1 => Policy::StarveConsumer,
                2 => Policy::StarveLane,
                _ => Policy::Random,
            },
            policy => policy,
        };
        let starved = if policy == Policy::StarveLane { 1 << worker.random.below(32) } else { 0 };
        let is_checked = grid.options.mode == Mode::Check;
        let replay = grid.options.schedule.as_ref().filter(|_| is_checked).map(Replay::new);
        let most = grid.options.resident_blocks.max(1);
        // Few blocks at a time take two thirds of the time: their threads' stacks and shadows stay in the cache. What orders accesses is the same. Given turns name their blocks: all may be in flight.
        let is_drawn = grid.options.policy == Policy::Seeded && !replay.as_ref().is_some_and(Replay::is_given);
        let wanted = match (is_checked, is_drawn) {
            (false, _) => 1,
            (true, true) => [1, 1, 2.min(most), most][worker.random.below(4)],
            (true, false) => most,
        };
        Self {
            blocks: Vec::new(),
            worker,
            policy,
            starved,
            wanted,
            ready: RefCell::default(),
            idle: 0,
            replay,
            last_end: (Instant::now(), LONG_RUN),
            paused: None,
        }
    }

    /// The run is over, one way or the other.
    fn end(&mut self) {
        self.blocks.clear();
        self.worker.finish();
    }

    pub fn grid(&self) -> &Grid {
        self.worker.grid()
    }

    pub fn report(&self) -> Report {
        let worker = &self.worker;
        let plain = Report { steps: worker.steps.get(), sites: worker.sites(), lines: worker.totals.borrow().lines(), ..Report::default() };
        let Some(explained) = &worker.explained else { return plain };
        let phases = explained.phases.borrow().named(|offset| worker.shared.mbarrier(offset));
        Report { shared: worker.shared.fields(), boxes: explained.boxes.borrow().iter().cloned().collect(), phases, ..plain }
    }

    /// What the grid's threads knew at their ends.
    pub fn known(&self) -> Known {
        Known(self.worker.learnt.borrow().clone())
    }

    /// How often a thread went on so far.
    pub fn progress(&self) -> u64 {
        self.worker.progress()
    }

    /// Runs up to `budget` resumptions.
    pub fn step(&mut self, budget: u64) -> Result<Progress, Fault> {
        if let Some(paused) = self.paused.take() {
            self.last_end.0 += paused.elapsed();
        }
        let result = catch_unwind(AssertUnwindSafe(|| self.run_for(budget)));
        self.paused = Some(Instant::now());
        let result = match result {
            Ok(result) => result,
            Err(payload) => Err(self.fault_of(payload)),
        };
        if result.is_err() {
            self.replay.iter().for_each(|replay| replay.finish(&self.blocks));
            self.grid().stopped.store(true, Ordering::Relaxed);
            self.end();
        }
        result
    }

    fn run_for(&mut self, budget: u64) -> Result<Progress, Fault> {
        let until = self.worker.steps.get().saturating_add(budget);
        loop {
            if self.grid().stopped.load(Ordering::Relaxed) {
                self.end();
                return Ok(Progress::Done);
            }
            if !self.fill()? {
                self.end();
                return Ok(Progress::Done);
            }
            let before = (self.worker.steps.get(), self.worker.progress());
            match self.grid().options.mode {
                Mode::Fast => self.sweep(),
                Mode::Check => match &self.replay {
                    Some(replay) if replay.is_given() => self.follow(replay)?,
                    _ => self.pick()?,
                },
            }
            if let Some(fault) = self.worker.take_fault() {
                return Err(fault);
            }
            self.retire()?;
            let steps = self.worker.steps.get();
            if steps > self.grid().options.step_limit {
                return Err(self.stuck(
                    FaultKind::StepLimit,
                    format!("{steps} steps were made"),
                    "raise Options::step_limit, or end the loop",
                ));
            }
            if steps > self.last_end.1 {
                self.look_at_long_run(steps)?;
            }
            if self.worker.progress() != before.1 {
                self.idle = 0;
            } else {
                self.idle += (steps - before.0).max(1);
                if let Some(progress) = self.look_for_hang()? {
                    return Ok(progress);
                }
            }
            if steps >= until {
                return Ok(Progress::Running);
            }
        }
    }

    /// Keeps blocks in flight; false when none is left.
    fn fill(&mut self) -> Result<bool, Fault> {
        while self.blocks.len() < self.wanted && self.start_cluster()? {}
        Ok(!self.blocks.is_empty())
    }

    /// Blocks of a cluster start together.
    fn start_cluster(&mut self) -> Result<bool, Fault> {
        let Some(first) = self.grid().next_cluster() else { return Ok(false) };
        let cluster = Rc::new(Cluster::default());
        for rank in 0..self.grid().launch.cluster[0] {
            let block = Block::new(&self.worker, first + u64::from(rank), &cluster, rank)?;
            cluster.join(&block);
            self.blocks.push(block);
        }
        Ok(true)
    }

    /// Fast mode: runs every ready lane of every block until it waits.
    fn sweep(&self) {
        for block in &self.blocks {
            for (number, warp) in block.warps.iter().enumerate() {
                let mut idle = 0;
                while warp.ready.get() & !idle != 0 && !self.worker.has_fault() {
                    let lane = (warp.ready.get() & !idle).trailing_zeros();
                    self.resume(block, number as u32, lane);
                    // A polling lane runs once a sweep, so that others get their turn.
                    idle |= warp.ready.get() & 1 << lane;
                }
            }
        }
    }

    /// Check mode: one choice of the seed, a warp's ready lanes or an asynchronous copy.
    fn pick(&self) -> Result<(), Fault> {
        let random = &self.worker.random;
        let list = &mut *self.ready.borrow_mut();
        let mut list_all_but = |held: u32| {
            list.clear();
            for (b, block) in self.blocks.iter().enumerate() {
                list.extend(block.warps.iter().enumerate().filter(|(_, w)| w.ready.get() & !held != 0).map(|(w, _)| (b, w)));
            }
            list.len()
        };
        // A lane is lapped only if it is held back for phases of a barrier, not for a choice or two.
        let biased = !random.once_in(if self.starved != 0 { 256 } else { 8 }) && self.idle < 256;
        let mut held = if biased { self.starved } else { 0 };
        let mut count = list_all_but(held);
        let in_flight = || self.blocks.iter().filter(|block| block.has_transfers());
        let copy_turn = match self.policy {
            Policy::StarveProducer => random.once_in(32),
            Policy::StarveConsumer => !random.once_in(4),
            _ => random.once_in(3),
        };
        let copying = in_flight().count();
        if copying != 0 && (copy_turn || count == 0 || self.idle > 256) {
            let block = in_flight().nth(random.below(copying)).expect("one of so many");
            return self.advance(block, random.next() as usize);
        }
        if count == 0 {
            held = 0;
            count = list_all_but(held);
        }
        if count == 0 {
            return Ok(());
        }
        let ready = &*list;
        let chosen = match self.policy {
            Policy::StarveProducer if biased => ready.iter().copied().max_by_key(|&(b, w)| (w, b)),
            Policy::StarveConsumer if biased => ready.iter().copied().min_by_key(|&(b, w)| (w, b)),
            _ => None,
        };
        let (block, warp) = chosen.unwrap_or_else(|| ready[random.below(ready.len())]);
        let block = &self.blocks[block];
        let ready = block.warps[warp].ready.get() & !held;
        let turn = random.below(32) as u32;
        for lane in lanes(ready.rotate_right(turn)) {
            let lane = (lane as u32 + turn) % 32;
            self.take_turn(block, warp as u32, lane);
            if self.worker.has_fault() {
                break;
            }
        }
        Ok(())
    }

    /// Check mode with given turns: the next one, or the default order's.
    #[cold]
    fn follow(&self, replay: &Replay) -> Result<(), Fault> {
        let started = self.grid().next_block.load(Ordering::Relaxed).min(self.grid().launch.blocks());
        match replay.choose(&self.blocks, started) {
            Some(Next::Thread(block, thread, until)) => {
                let block = &self.blocks[block];
                let place = |block: &Block| block.threads[thread as usize].places.get();
                let before = place(block);
                self.worker.turn_end.set(Some(until));
                self.take_turn(block, thread / 32, thread % 32);
                // A turn may be long: it counts as the steps that a seed makes of it.
                self.worker.steps.set(self.worker.steps.get() + u64::from(place(block).wrapping_sub(before)) / 16);
                Ok(())
            }
            Some(Next::Copy(block, at)) => self.advance(&self.blocks[block], at),
            None => Ok(()),
        }
    }

    /// Takes a copy one stage on.
    fn advance(&self, block: &Block, choice: usize) -> Result<(), Fault> {
        let (at, turn, site) = async_copy::chosen(block, choice);
        self.replay.iter().for_each(|replay| replay.copy(block, &turn, site));
        async_copy::advance(block, at)
    }

    /// Resumes a lane, and notes it where turns are noted.
    #[inline(always)]
    fn take_turn(&self, block: &Block, warp: u32, lane: u32) {
        let Some(replay) = &self.replay else { return self.resume(block, warp, lane) };
        let thread = &block.threads[(warp * 32 + lane) as usize];
        replay.begin(block, thread);
        self.resume(block, warp, lane);
        replay.end(block, thread);
    }

    #[inline(always)]
    fn resume(&self, block: &Block, warp: u32, lane: u32) {
        let ready = &block.warps[warp as usize].ready;
        ready.set(ready.get() & !(1 << lane));
        self.worker.steps.set(self.worker.steps.get() + 1);
        block.resume(warp, lane);
        if !block.threads[(warp * 32 + lane) as usize].waiting.get().is_idle() {
            self.worker.productive();
        }
    }

    fn retire(&mut self) -> Result<(), Fault> {
        let mut at = 0;
        while at < self.blocks.len() {
            if self.blocks[at].is_done() {
                let block = self.blocks.swap_remove(at);
                block.finish()?;
                self.last_end.0 = Instant::now();
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Starts another block beside those that go on for long; ends a launch that goes on and on: a loop that does not end.
    #[cold]
    fn look_at_long_run(&mut self, steps: u64) -> Result<(), Fault> {
        self.last_end.1 = steps + LONG_RUN;
        // They may poll by operations that are work, such as votes, for what a block writes that has not started.
        if self.blocks.len() < self.grid().options.resident_blocks {
            self.start_cluster()?;
        }
        let passed = self.last_end.0.elapsed();
        if passed <= self.grid().options.time_limit {
            return Ok(());
        }
        let what = format!("no block has ended for {:.0} s, in which threads went on and on", passed.as_secs_f64());
        Err(self.stuck(
            FaultKind::StepLimit,
            what,
            "end the loop; a kernel that needs longer runs with a larger EmulatedOptions::time_limit",
        ))
    }

    /// Nothing but polling happened lately, if anything.
    fn look_for_hang(&mut self) -> Result<Option<Progress>, Fault> {
        let in_flight = self.blocks.iter().any(|block| block.has_transfers());
        if self.blocks.is_empty() || in_flight {
            return Ok(None);
        }
        let ready: u32 = self.blocks.iter().flat_map(|block| &block.warps).map(|warp| warp.ready.get().count_ones()).sum();
        if ready != 0 && self.idle < 256 + 8 * u64::from(ready) {
            return Ok(None);
        }
        if self.grid().blocks_left() && self.blocks.len() < self.grid().options.resident_blocks && self.start_cluster()? {
            self.idle = 0;
            return Ok(None);
        }
        if ready != 0 {
            self.idle = 0;
            return Ok(Some(Progress::Blocked(self.describe_waiting())));
        }
        let (kind, what, mend) = match self.blocks.iter().any(|block| divergence::is_cause(block)) {
            true => (
                FaultKind::Divergence,
                "threads wait at a collective or barrier for others, which are at another one or have ended",
                "let all threads of the group reach the same collective or barrier: no branch around it, no early return before it, that only \
                 some of them take",
            ),
            false => (
                FaultKind::Deadlock,
                "every thread waits",
                "let as many arrive as are waited for, at a barrier of the same number, and announce the bytes that are copied",
            ),
        };
        Err(self.stuck(kind, what.to_owned(), mend))
    }

    fn describe_waiting(&self) -> String {
        self.blocks.iter().map(|block| block.describe_waiting()).collect()
    }

    pub fn no_progress(&self, on: &str) -> Fault {
        self.replay.iter().for_each(|replay| replay.finish(&self.blocks));
        let mut fault = self.stuck(
            FaultKind::NoProgress,
            "threads poll and nothing answers".to_owned(),
            "let the other side signal, or raise Options::patience",
        );
        fault.message = format!("threads poll and nothing answers{on}");
        fault
    }

    #[cold]
    fn stuck(&self, kind: FaultKind, what: String, mend: &'static str) -> Fault {
        let waiting = self.blocks.iter().flat_map(|block| block.threads.iter());
        let mut involved: Vec<Involved> = Vec::new();
        for thread in waiting.filter(|thread| thread.waiting.get() != Waiting::Exited) {
            let Some(location) = thread.site.get() else { continue };
            if !involved.iter().any(|known| known.location == location) {
                involved.push(Involved { location, action: String::new() });
            }
        }
        let message = format!("{what}{}", self.describe_waiting());
        Fault { kind, kernel: self.grid().launch.kernel.clone(), thread: None, message, involved, mend }
    }

    /// The fault that caused an unwinding that came out of a kernel.
    fn fault_of(&self, payload: Box<dyn Any + Send>) -> Fault {
        let thread = running();
        set_current(ptr::null());
        if payload.is::<Stopped>() {
            return self.worker.take_fault().expect("what stops the run leaves its fault");
        }
        let Some(thread) = thread else { std::panic::resume_unwind(payload) };
        let (message, involved) = panic_hook::take();
        Fault {
            kind: FaultKind::Panic,
            kernel: self.grid().launch.kernel.clone(),
            thread: Some((thread.block().index, thread.index)),
            message,
            involved,
            mend: "",
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.end();
        self.worker.keep_stacks();
    }
}
