//! The state of a virtual cluster and how its queues are emptied.
//!
//! Work runs only while some thread waits: each step takes the next operation of a random queue among those that can go on.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;
use std::thread::ThreadId;

use oxtile_emulator::{Agent, Memory, Mode, Options};

use super::clock::Clock;
use super::explain::Explanations;
use super::log::{Log, name_of};
use super::operation::{Entry, Mark, Operation, check_written, word};
use super::options::EmulatedOptions;
use super::random::Random;
use super::ranges::Ranges;
use super::sanitizer::{Actor, Sanitizer};
use super::schedule::{Graph, Queues};
use super::script::Script;
use super::underway::Underway;
use crate::recording::Recording;
use crate::runtime::POISON;
use crate::runtime::backend::{Caller, EventId};
use crate::runtime::error::{Error, Result};

/// Writes of a signal word that a late wait can still tell apart.
const SIGNALS_KEPT: usize = 64;

pub(super) struct State {
    pub random: Random,
    /// The last handle given out, of any sort.
    handle: u64,
    /// Operations done so far.
    pub steps: u64,
    /// Operations enqueued so far.
    enqueued: u64,
    pub queues: Queues,
    /// `None` if it is not wanted.
    pub sanitizer: Option<Sanitizer>,
    /// The writes of each signal word: the queue, the value, and what was known.
    pub signals: BTreeMap<u64, VecDeque<(u64, u64, Clock)>>,
    /// Queues that a poisoned signal let go: what they do is meaningless.
    pub poisoned: BTreeSet<u64>,
    /// Launches that have begun and wait for flags at times, by queue.
    pub underway: BTreeMap<u64, Underway>,
    /// Streams that kernels with flags have met.
    pub agents: BTreeMap<u64, Agent>,
    /// How often launches under way have polled since something else was done.
    pub polls: u32,
    /// The device of each stream, for reports.
    pub streams: BTreeMap<u64, u32>,
    /// Streams whose last handle is gone, while they still have work.
    pub gone: BTreeSet<u64>,
    /// Handles of streams that are no more, with their device and their last time.
    pub retired: BTreeMap<u64, (u32, u64)>,
    pub clocks: BTreeMap<u64, Clock>,
    /// What host threads have waited for.
    pub host: Arc<Clock>,
    /// The latest record of each event.
    pub events: BTreeMap<u64, Option<Arc<Mark>>>,
    /// The streams of a capture, and what each capture holds, by the handle of its first stream.
    pub capturing: BTreeMap<u64, u64>,
    pub captures: BTreeMap<u64, Queues>,
    pub graphs: BTreeMap<u64, Arc<Graph>>,
    /// Graphs whose last handle is gone, with replays that were under way.
    pub ending: Vec<Arc<Graph>>,
    pub ranges: Ranges,
    /// The thread that last called for each rank, by the rank's handle.
    pub drivers: BTreeMap<u64, Option<ThreadId>>,
    /// Threads that wait and could run nothing since something last happened.
    pub waiting: HashSet<ThreadId>,
    /// What is recorded, if it is.
    pub log: Option<Log>,
    /// The order, where it is noted or given.
    pub script: Option<Script>,
    /// What launches show, where it is asked for.
    pub explanations: Option<Explanations>,
    /// The kernel and parameter that an allocation was last given to, by its address.
    pub given: BTreeMap<u64, String>,
    /// What ended all work.
    fault: Option<Error>,
}

impl State {
    pub fn new(seed: u64, sanitize: bool) -> Self {
        Self {
            random: Random::new(seed),
            handle: 0,
            steps: 0,
            enqueued: 0,
            queues: Queues::default(),
            sanitizer: sanitize.then(|| Sanitizer::new(seed)),
            signals: BTreeMap::new(),
            poisoned: BTreeSet::new(),
            underway: BTreeMap::new(),
            agents: BTreeMap::new(),
            polls: 0,
            streams: BTreeMap::new(),
            gone: BTreeSet::new(),
            retired: BTreeMap::new(),
            clocks: BTreeMap::new(),
            host: Arc::default(),
            events: BTreeMap::new(),
            capturing: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            ending: Vec::new(),
            ranges: Ranges::default(),
            drivers: BTreeMap::new(),
            waiting: HashSet::new(),
            log: None,
            script: None,
            explanations: Explanations::from_environment(),
            given: BTreeMap::new(),
            fault: None,
        }
    }

    pub fn new_handle(&mut self) -> u64 {
        self.handle += 1;
        self.handle
    }

    pub fn check(&self) -> Result<()> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    pub fn push(&mut self, stream: u64, operation: Operation, caller: Option<Caller>) -> Result<()> {
        self.check()?;
        self.waiting.clear();
        let entry = Entry { operation, host: Arc::clone(&self.host), caller, step: self.steps, number: self.next_number() };
        let captured = self.capturing.get(&stream).and_then(|capture| self.captures.get_mut(capture));
        captured.unwrap_or(&mut self.queues).push(stream, entry);
        Ok(())
    }

    fn next_number(&mut self) -> u64 {
        self.enqueued += 1;
        self.enqueued - 1
    }

    pub fn mark(&self, event: EventId) -> Option<Arc<Mark>> {
        self.events.get(&event.handle).cloned().flatten()
    }

    /// A host thread has waited for all that the queue did.
    pub fn host_waited_for(&mut self, queue: u64) {
        if let Some(clock) = self.clocks.get(&queue) {
            Arc::make_mut(&mut self.host).join(clock);
        }
    }

    /// A host thread has waited for the event.
    pub fn host_saw(&mut self, mark: &Mark) {
        mark.join_into(Arc::make_mut(&mut self.host));
    }

    /// Whether another thread that does not wait drives a rank, or may begin to. This thread waits, or is about to.
    pub fn others_may_enqueue(&self) -> bool {
        let me = std::thread::current().id();
        self.drivers.values().any(|driver| driver.is_none_or(|driver| driver != me && !self.waiting.contains(&driver)))
    }

    /// Runs one operation of a random queue that can go on; false if there is none.
    pub fn step(&mut self, memory: &Arc<Memory>, options: &EmulatedOptions) -> Result<bool> {
        let taken = self.take(memory, options).map_err(|error| self.poison(error, memory))?;
        let Some((queue, entry)) = taken else { return Ok(self.poll_again()) };
        self.steps += 1;
        self.waiting.clear();
        if let Some(script) = &mut self.script {
            let device = self.streams.get(&queue).copied().unwrap_or(0);
            script.take(queue, device, name_of(&entry, device, memory), entry.caller);
        }
        let done = match &entry.operation {
            Operation::Launch(launched) if launched.may_poll() => {
                let launched = Arc::clone(launched);
                match self.advance(queue, &entry, &launched, memory, options) {
                    Ok(false) => {
                        self.queues.push_first(queue, entry);
                        return Ok(true);
                    }
                    done => done.map(drop),
                }
            }
            _ => self.execute(queue, &entry, memory, options),
        };
        self.polls = 0;
        if let Some(log) = &mut self.log {
            log.add(queue, self.streams.get(&queue), &entry, memory, self.steps, done.is_ok());
        }
        self.forget_idle(queue);
        done.map_err(|error| self.poison(error, memory))?;
        Ok(true)
    }

    /// How much there is of all that comes and goes.
    #[cfg(test)]
    pub fn sizes(&self) -> [(&'static str, usize); 12] {
        let widest = self.clocks.values().chain([&*self.host]).map(Clock::width).max();
        [
            ("queues", self.queues.lengths().len()),
            ("streams", self.streams.len()),
            ("gone", self.gone.len()),
            ("retired", self.retired.len()),
            ("clocks", self.clocks.len()),
            ("queues in a clock", widest.unwrap_or(0)),
            ("signals", self.signals.len()),
            ("poisoned", self.poisoned.len()),
            ("events", self.events.len()),
            ("captures", self.capturing.len() + self.captures.len()),
            ("graphs", self.graphs.len() + self.ending.len()),
            ("drivers", self.drivers.len()),
        ]
    }

    pub fn start_recording(&mut self) -> bool {
        let starts = self.log.is_none();
        let steps = self.steps;
        self.log.get_or_insert_with(|| Log::new(steps));
        starts
    }

    pub fn recorded(&self, memory: &Memory) -> Recording {
        let log = self.log.clone().unwrap_or_else(|| Log::new(self.steps));
        self.with_heads(log, memory).into_recording()
    }

    /// Adds what each queue is at.
    fn with_heads(&self, mut log: Log, memory: &Memory) -> Log {
        for (queue, entry) in self.queues.heads() {
            log.add(queue, self.streams.get(&queue), entry, memory, self.steps, false);
        }
        log
    }

    fn take(&mut self, memory: &Memory, options: &EmulatedOptions) -> Result<Option<(u64, Entry)>> {
        let ready = self.ready(memory, options);
        if let Some(script) = self.script.as_mut().filter(|script| script.is_given()) {
            return Ok(self.queues.take_chosen(&ready, |ready| script.choose(ready)));
        }
        let Some(exploration) = &options.exploration else { return Ok(self.queues.take(ready, &mut self.random)) };
        let place = |address: u64| memory.find(address).map(|found| (found.device, found.name, found.offset));
        let mut signals: Vec<_> = self.signals.iter().map(|(address, written)| (place(*address), written)).collect();
        // Addresses differ from run to run.
        signals.sort_by(|a, b| a.0.cmp(&b.0));
        let state = (self.queues.lengths(), signals, &self.clocks, &self.poisoned);
        self.queues.take_explored(&ready, |ready| exploration.choose(ready.len(), state))
    }

    fn execute(&mut self, queue: u64, entry: &Entry, memory: &Arc<Memory>, options: &EmulatedOptions) -> Result<()> {
        let mut clock = self.clocks.remove(&queue).unwrap_or_default();
        clock.join_host(&entry.host);
        if entry.operation.has_time() {
            clock.tick(queue);
        }
        self.sanitize(queue, entry, memory, &clock)?;
        self.tell_underway(queue, entry, &clock, memory, options);
        if let (Operation::Copy(copy), Mode::Check) = (&entry.operation, options.mode)
            && !self.poisoned.contains(&queue)
        {
            check_written(memory, copy, &self.given)?;
        }
        if let Operation::Free { address } = &entry.operation {
            self.given.remove(address);
        }
        let result = match &entry.operation {
            Operation::WriteValue { address, value } => {
                let written = self.signals.entry(*address).or_default();
                // What was set back cannot have been waited for by what comes later.
                if written.back().is_some_and(|(_, last, _)| value < last) {
                    written.clear();
                }
                written.push_back((queue, *value, clock.clone()));
                if written.len() > SIGNALS_KEPT {
                    written.pop_front();
                }
                entry.operation.execute(memory, Options::fast())
            }
            Operation::WaitValue { address, value } => {
                self.acquire(memory, *address, *value, &mut clock);
                Ok(())
            }
            Operation::Record(mark) => {
                mark.reach(&clock);
                Ok(())
            }
            Operation::Wait(mark) => {
                mark.join_into(&mut clock);
                Ok(())
            }
            Operation::Replay(graph) => {
                self.replay(queue, graph, &clock);
                Ok(())
            }
            Operation::Free { address } => {
                let bytes = memory.find(*address).map_or(0, |found| found.bytes);
                let words: Vec<_> = self.signals.range(*address..*address + bytes).map(|(word, _)| *word).collect();
                words.iter().for_each(|word| _ = self.signals.remove(word));
                entry.operation.execute(memory, Options::fast())
            }
            Operation::Arrive(part) => part.arrive(memory, &clock),
            Operation::Leave(part) => part.leave(memory, &mut clock),
            Operation::Launch(launched) => self.launch_at_once(queue, entry, launched, &clock, memory, options),
            operation => operation.execute(memory, run_options(options, self.random.next())),
        };
        if clock.is_spoilt() {
            self.poisoned.insert(queue);
        }
        self.clocks.insert(queue, clock);
        result
    }

    fn sanitize(&mut self, queue: u64, entry: &Entry, memory: &Memory, clock: &Clock) -> Result<()> {
        let Some(sanitizer) = self.sanitizer.as_mut().filter(|_| !self.poisoned.contains(&queue)) else { return Ok(()) };
        let device = self.streams.get(&queue).copied().unwrap_or(0);
        let actor = Actor { queue, device, caller: entry.caller, clock };
        for access in entry.operation.accesses(memory) {
            sanitizer.access(memory, &self.host, access, &actor).map_err(Error::Race)?;
        }
        Ok(())
    }

    /// A wait learns what was known at the first write that was enough for it.
    fn acquire(&mut self, memory: &Memory, address: u64, value: u64, clock: &mut Clock) {
        if word(memory, address).is_some_and(|word| word >= POISON) {
            clock.spoil();
            return;
        }
        let enough = |(_, written, _): &&(u64, u64, Clock)| written.wrapping_sub(value).cast_signed() >= 0;
        if let Some((_, _, known)) = self.signals.get(&address).and_then(|written| written.iter().find(enough)) {
            clock.join(known);
        }
        self.learn_released(clock, address, memory);
    }

    /// Adds the branches of a graph to the queues; the stream goes on when they are done.
    fn replay(&mut self, stream: u64, graph: &Graph, clock: &Clock) {
        graph.reset();
        let host = Arc::new(clock.clone());
        for branch in graph.branches() {
            let number = self.next_number();
            let entry = |operation| Entry { operation, host: Arc::clone(&host), caller: None, step: self.steps, number };
            let end = entry(Operation::Record(Arc::clone(&branch.end)));
            let wait = entry(Operation::Wait(Arc::clone(&branch.end)));
            if let Some(device) = self.streams.get(&stream).copied() {
                self.streams.insert(branch.queue, device);
            }
            for entry in branch.entries.iter().cloned().chain([end]) {
                self.queues.push(branch.queue, Entry { host: Arc::clone(&host), step: self.steps, number, ..entry });
            }
            self.queues.push_first(stream, wait);
        }
    }

    /// Ends all work because no queue can go on.
    pub fn stuck(&mut self, memory: &Arc<Memory>, options: &EmulatedOptions) -> Error {
        let mut waits = String::new();
        for (queue, entry) in self.queues.heads() {
            let device = self.streams.get(&queue).map_or(String::new(), |device| format!(" of device {device}"));
            let at = entry.caller.map_or(String::new(), |at| format!(", enqueued at {at}"));
            let _ = write!(waits, "\n  stream {queue}{device} waits for {}{at}", self.waits_for(queue, entry, memory, options));
        }
        self.poison(Error::Stuck { waits }, memory)
    }

    /// Ends all work: only frees are still done.
    pub fn poison(&mut self, error: Error, memory: &Arc<Memory>) -> Error {
        self.fault = Some(error.clone());
        // What the queues were at is what a reader of the recording looks for.
        self.log = self.log.take().map(|log| self.with_heads(log, memory));
        self.abandon(memory);
        error
    }

    pub fn abandon(&mut self, memory: &Arc<Memory>) {
        self.underway.clear();
        for entry in self.queues.drain() {
            if entry.operation.is_free() {
                // What cannot be freed is freed with the memory itself.
                let _ = entry.operation.execute(memory, Options::fast());
            }
        }
    }
}

pub(super) fn run_options(options: &EmulatedOptions, seed: u64) -> Options {
    let run = match options.mode {
        Mode::Check => Options::check(seed),
        Mode::Fast => Options::fast(),
    };
    Options { workers: options.workers, time_limit: options.time_limit, ..run }
}
