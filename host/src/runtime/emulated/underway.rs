//! Launches with flags or slots: they run a piece at a time, so that what they wait for can come meanwhile.
//!
//! Each runs on an operating system thread of its own, since the emulated threads of a grid stay on theirs; the scheduler hands it a number of
//! steps and waits for it, so that one seed still gives one order ([decision](../../../../docs/adr/0013-launches-under-way.md)).

use std::collections::VecDeque;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};

use oxtile_emulator::{Agent, Fault, GridRun, Known, Memory, Mode, Options, Progress, Report};

use super::clock::Clock;
use super::operation::{Entry, Launched, Use, misuse, word};
use super::options::EmulatedOptions;
use super::sanitizer::{Actor, Kind};
use super::scheduler::{State, run_options};
use crate::runtime::POISON;
use crate::runtime::error::{Error, Result};

/// A piece is 2^4 to 2^11 steps of a kernel's threads.
const SHORTEST_PIECE: usize = 4;
const PIECES: usize = 8;

/// How often launches that poll in vain go on while nothing else can.
const MOST_POLLS: u32 = 64;

/// A launch that has begun.
pub(super) struct Underway {
    pub launched: Arc<Launched>,
    budgets: Option<Sender<u64>>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
    /// Set when its flags were poisoned: what it reads is garbage.
    pardon: Arc<AtomicBool>,
    /// What its stream knew when it began, itself included.
    clock: Clock,
    /// What it may poll, as it was when it had polled in vain.
    polled: Option<Vec<u64>>,
}

/// Where a launch stands after a piece, and what it has learnt and shown once it is done.
type Answer = Result<(Progress, Known, Report), Fault>;

impl Underway {
    fn begin(launched: &Arc<Launched>, memory: &Arc<Memory>, options: Options, clock: Clock) -> Result<Self> {
        let (budgets, given) = mpsc::channel::<u64>();
        let (answer, answers) = mpsc::channel();
        let pardon = Arc::new(AtomicBool::new(false));
        let (launch, memory, options) =
            (launched.launch.clone(), Arc::clone(memory), Options { pardon: Some(Arc::clone(&pardon)), ..options });
        let run = move || {
            let mut run = GridRun::new(&memory, launch, options);
            for budget in given {
                let piece = match &mut run {
                    Ok(run) => run.step(budget).map(|progress| (progress, run.known(), run.report())),
                    Err(fault) => Err(fault.clone()),
                };
                // The cluster is gone.
                if answer.send(piece).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(format!("kernel {}", launched.launch.kernel)).spawn(run);
        let thread = thread.map_err(|error| invalid(&format!("no thread for a kernel that waits: {error}")))?;
        Ok(Self { launched: Arc::clone(launched), budgets: Some(budgets), answers, thread: Some(thread), pardon, clock, polled: None })
    }

    fn step(&self, budget: u64) -> Result<(Progress, Known, Report)> {
        let sent = self.budgets.as_ref().is_some_and(|budgets| budgets.send(budget).is_ok());
        let answer = self.answers.recv().ok().filter(|_| sent);
        Ok(answer.ok_or_else(|| invalid("the thread of a kernel that waits is gone"))??)
    }

    fn is_pardoned(&self) -> bool {
        self.pardon.load(Ordering::Relaxed)
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        self.budgets = None;
        // A panic of the thread was reported as the missing answer.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The first of the writes of a word since it was set back that has the value of the last: what a thread that finds it there may have acquired.
fn enough(written: &VecDeque<(u64, u64, Clock)>) -> Option<(u64, u64, Clock)> {
    let (_, last, _) = written.back()?;
    written.iter().find(|(_, value, _)| value == last).cloned()
}

fn invalid(why: &str) -> Error {
    Error::Invalid { what: "a launch", why: why.to_owned() }
}

impl Launched {
    /// What it may poll, as it is now.
    fn polled(&self, memory: &Memory) -> Result<Vec<u64>> {
        self.words(memory, Use::is_strong)
    }

    /// The words now of some of its memory.
    fn words(&self, memory: &Memory, chosen: fn(&Use) -> bool) -> Result<Vec<u64>> {
        let mut words = Vec::new();
        for flags in self.uses.iter().filter(|used| chosen(used)) {
            let mut bytes = vec![0; flags.bytes as usize];
            memory.read(flags.address, &mut bytes).map_err(misuse)?;
            words.extend(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
        }
        Ok(words)
    }

    /// Lets the scheduler take it again.
    fn unblock(&self) {
        *self.blocked.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl State {
    /// Runs a piece of a launch with flags; returns whether it is done.
    pub fn advance(
        &mut self,
        queue: u64,
        entry: &Entry,
        launched: &Arc<Launched>,
        memory: &Arc<Memory>,
        options: &EmulatedOptions,
    ) -> Result<bool> {
        if options.exploration.is_some() {
            return Err(invalid(
                "a kernel with flags runs in pieces, which a search of every order does not go through: run it under seeds",
            ));
        }
        if !self.underway.contains_key(&queue) {
            self.begin(queue, entry, launched, memory, options)?;
        }
        let budget = 1 << (SHORTEST_PIECE + self.random.below(PIECES));
        let Some(underway) = self.underway.get_mut(&queue) else { return Ok(true) };
        let (progress, known, report) = underway.step(budget)?;
        underway.polled = None;
        if let Progress::Blocked(on) = &progress {
            underway.polled = Some(launched.polled(memory)?);
            *launched.blocked.lock().unwrap_or_else(PoisonError::into_inner) = Some(on.clone());
        }
        // What it has set may be what others poll for.
        for other in self.underway.values().filter(|other| other.polled.is_some()) {
            if other.polled != Some(other.launched.polled(memory)?) {
                other.launched.unblock();
            }
        }
        if progress != Progress::Done {
            return Ok(false);
        }
        self.end(queue, entry, &known, memory, options)?;
        if let Some(explanations) = self.explanations.as_mut().filter(|_| options.mode == Mode::Check) {
            explanations.add(&launched.launch, report);
        }
        Ok(true)
    }

    /// Nothing can go on: lets launches that poll do so again, for their waits have bounds; returns whether they may.
    pub fn poll_again(&mut self) -> bool {
        self.polls += 1;
        let may = self.polls <= MOST_POLLS && !self.underway.is_empty();
        self.underway.values().filter(|_| may).for_each(|underway| underway.launched.unblock());
        may
    }

    fn begin(
        &mut self,
        queue: u64,
        entry: &Entry,
        launched: &Arc<Launched>,
        memory: &Arc<Memory>,
        options: &EmulatedOptions,
    ) -> Result<()> {
        let mut clock = self.clocks.remove(&queue).unwrap_or_default();
        clock.join_host(&entry.host);
        clock.tick(queue);
        self.clocks.insert(queue, clock.clone());
        let mut run = Options { explain: self.explanations.is_some(), ..run_options(options, self.random.next()) };
        if options.mode == Mode::Check {
            self.agent(queue, memory);
            let actor = Actor { queue, device: launched.launch.device, caller: entry.caller, clock: &clock };
            let mut unknown = Vec::new();
            if let Some(sanitizer) = self.sanitizer.as_mut().filter(|_| !self.poisoned.contains(&queue)) {
                for access in launched.accesses() {
                    unknown.extend(sanitizer.begin(memory, &self.host, access, &actor).map_err(Error::Race)?);
                }
            }
            for write in unknown {
                let agent = self.agent(write.queue, memory);
                write.extent.ranges().for_each(|row| memory.enter(agent, write.time, row.start, row.end - row.start, write.site));
            }
            let flags = launched.uses.iter().filter(|used| used.are_flags()).map(|used| used.address..used.address + used.bytes);
            let written: Vec<_> =
                flags.flat_map(|words| self.signals.range(words)).filter_map(|(at, all)| Some((*at, enough(all)?))).collect();
            for (address, (writer, value, clock)) in written {
                // Else a kernel has written it since.
                if word(memory, address) == Some(value) {
                    self.publish(writer, address, &clock, memory);
                }
            }
            run.known = self.known(&clock, memory);
        }
        let is_spoilt = clock.is_spoilt();
        let underway = Underway::begin(launched, memory, run, clock)?;
        underway.pardon.store(is_spoilt || launched.words(memory, Use::are_flags)?.iter().any(|word| *word >= POISON), Ordering::Relaxed);
        self.underway.insert(queue, underway);
        Ok(())
    }

    fn end(&mut self, queue: u64, entry: &Entry, known: &Known, memory: &Arc<Memory>, options: &EmulatedOptions) -> Result<()> {
        let Some(underway) = self.underway.remove(&queue) else { return Ok(()) };
        underway.launched.unblock();
        let (mut clock, launched) = (underway.clock.clone(), &underway.launched);
        if options.mode == Mode::Check {
            self.learn(&mut clock, known);
        } else {
            // Which flags it has seen is not known: all that are set.
            let flags = launched.uses.iter().filter(|used| used.are_flags());
            let written = flags.flat_map(|flags| self.signals.range(flags.address..flags.address + flags.bytes));
            written.filter_map(|(_, written)| written.back()).for_each(|(_, _, known)| clock.join(known));
        }
        if underway.is_pardoned() {
            clock.spoil();
            self.poisoned.insert(queue);
        }
        self.clocks.insert(queue, clock.clone());
        let is_checked = options.mode == Mode::Check && !self.poisoned.contains(&queue);
        let actor = Actor { queue, device: launched.launch.device, caller: entry.caller, clock: &clock };
        for access in launched.accesses() {
            if let Some(sanitizer) = &mut self.sanitizer {
                sanitizer.end(memory, access, &actor, is_checked).map_err(Error::Race)?;
            }
        }
        Ok(())
    }

    /// A stream as the race detector of kernels knows it.
    fn agent(&mut self, queue: u64, memory: &Memory) -> Agent {
        let device = self.streams.get(&queue).copied().unwrap_or(0);
        *self.agents.entry(queue).or_insert_with(|| memory.agent(&format!("stream {queue}"), device))
    }

    /// What a stream knows, for kernels: of every stream, since what a kernel learns by a flag orders its own stream after all of it.
    fn known(&mut self, clock: &Clock, memory: &Memory) -> Known {
        let mut known = clock.kernels().clone();
        for queue in clock.queues() {
            known.learn(self.agent(queue, memory), clock.of(queue));
        }
        known
    }

    /// What a stream learns of kernels.
    fn learn(&self, clock: &mut Clock, known: &Known) {
        self.agents.iter().for_each(|(queue, agent)| clock.learn(*queue, known.time(*agent)));
        clock.learn_kernels(known);
    }

    /// What a stream learns that has waited for a word which a kernel may have written.
    pub fn learn_released(&self, clock: &mut Clock, address: u64, memory: &Memory) {
        if let Some(known) = (!self.agents.is_empty()).then(|| memory.released(address)).flatten() {
            self.learn(clock, &known);
        }
    }

    /// Tells launches under way of an operation of a stream, just before it is done.
    pub fn tell_underway(&mut self, queue: u64, entry: &Entry, clock: &Clock, memory: &Arc<Memory>, options: &EmulatedOptions) {
        if self.underway.is_empty() {
            return;
        }
        if let Some((address, value)) = entry.operation.written_word() {
            for underway in self.underway.values() {
                underway.launched.unblock();
                let is_theirs = |flags: &Use| flags.are_flags() && (flags.address..flags.address + flags.bytes).contains(&address);
                if value >= POISON && underway.launched.uses.iter().any(is_theirs) {
                    underway.pardon.store(true, Ordering::Relaxed);
                }
            }
            // A word that has the value already may have been acquired for its first write.
            let is_new = self.signals.get(&address).and_then(VecDeque::back).is_none_or(|(_, last, _)| *last != value);
            if options.mode == Mode::Check && is_new {
                self.publish(queue, address, clock, memory);
            }
        }
        // A launch without flags is told of when it is done.
        if options.mode == Mode::Check && !entry.operation.is_launch() {
            self.enter_writes(queue, entry, clock, memory);
        }
    }

    /// Runs a launch without flags. Beside launches under way it knows what its stream does, and what it has written counts as written by the stream.
    pub fn launch_at_once(
        &mut self,
        queue: u64,
        entry: &Entry,
        launched: &Launched,
        clock: &Clock,
        memory: &Arc<Memory>,
        options: &EmulatedOptions,
    ) -> Result<()> {
        let is_told = options.mode == Mode::Check && !self.underway.is_empty();
        let known = if is_told { self.known(clock, memory) } else { Known::default() };
        // After a wait that poison has ended, what it reads may never have come.
        let pardon = self.poisoned.contains(&queue).then(|| Arc::new(AtomicBool::new(true)));
        let run = Options { known, pardon, ..run_options(options, self.random.next()) };
        self.launch(queue, launched, memory, run)?;
        if is_told {
            self.enter_writes(queue, entry, clock, memory);
        }
        Ok(())
    }

    /// Enters what an operation of a stream writes where kernels see it.
    fn enter_writes(&mut self, queue: u64, entry: &Entry, clock: &Clock, memory: &Memory) {
        let (agent, site) = (self.agent(queue, memory), entry.caller.unwrap_or(Location::caller()));
        for access in entry.operation.accesses(memory).into_iter().filter(|access| access.kind == Kind::Write && !access.on_host) {
            access.extent.ranges().for_each(|row| memory.enter(agent, clock.of(queue), row.start, row.end - row.start, site));
        }
    }

    /// Tells kernels what a stream knew when it wrote a word.
    fn publish(&mut self, queue: u64, address: u64, clock: &Clock, memory: &Memory) {
        let (agent, known) = (self.agent(queue, memory), self.known(clock, memory));
        memory.publish(agent, address, known);
    }
}
