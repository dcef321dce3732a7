//! The order of a whole run: which stream's operation comes next, and which thread in each kernel. Noted as the seed has it, or given.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use oxtile_emulator::{Memory, Mode, Options, Schedule, Sentence, Turn};

use super::operation::Launched;
use super::scheduler::State;
use crate::runtime::error::Result;

/// One scheduling decision. Operations of a stream are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// A stream goes on before all others, until it has done so many operations.
    Stream { stream: u64, until: u64 },
    /// A thread or copy goes on, in the kernel that is this operation of the stream.
    Turn { stream: u64, operation: u64, turn: Turn },
}

/// Operations of a stream in a row after which, in the default order, another one goes on if it can.
const MOST_ALONE: u64 = 1000;

/// The order of a run.
pub(crate) struct Script {
    /// `None` leaves the order to the seed.
    given: Option<Vec<Decision>>,
    /// The given decision that is next.
    next: usize,
    /// The source lines that the story is about, if it is told.
    about: Option<Vec<&'static Location<'static>>>,
    /// A kernel may take so many steps.
    step_limit: u64,
    /// Operations done, by stream.
    done: BTreeMap<u64, u64>,
    taken: Vec<Decision>,
    /// Sentences, and whether each is of an operation of a stream.
    story: Vec<(Sentence, bool)>,
    /// The kernel under way, by its stream.
    launch: Option<(u64, Schedule)>,
    launches: usize,
    /// The resumptions of threads in the longest kernel.
    longest: u64,
    /// The stream that went on last, and for how many operations.
    alone: (u64, u64),
}

impl Script {
    /// The order of the seed, noted.
    pub fn seeded() -> Self {
        Self {
            given: None,
            next: 0,
            about: None,
            step_limit: u64::MAX,
            done: BTreeMap::new(),
            taken: Vec::new(),
            story: Vec::new(),
            launch: None,
            launches: 0,
            longest: 0,
            alone: (0, 0),
        }
    }

    /// These decisions, and the default order where they leave it open: the lowest stream first. A kernel that takes more steps is stopped.
    pub fn given(decisions: &[Decision], step_limit: u64) -> Self {
        Self { given: Some(decisions.to_vec()), step_limit, ..Self::seeded() }
    }

    /// The same, told in words.
    pub fn told(self, about: Vec<&'static Location<'static>>) -> Self {
        Self { about: Some(about), ..self }
    }

    /// What was decided, one after another.
    pub fn decisions(&self) -> &[Decision] {
        &self.taken
    }

    /// What the streams and their kernels did. A single stream does one operation after another: only those that matter are told.
    pub fn story(&self) -> Vec<Sentence> {
        let is_told = |(sentence, is_operation): &&(Sentence, bool)| sentence.matters || !is_operation || self.done.len() > 1;
        self.story.iter().filter(is_told).map(|(sentence, _)| sentence.clone()).collect()
    }

    /// The resumptions of threads in the longest kernel.
    pub fn longest(&self) -> u64 {
        self.longest
    }

    /// Whether the order is given, not the seed's.
    pub fn is_given(&self) -> bool {
        self.given.is_some()
    }

    fn given_next(&self) -> Option<Decision> {
        self.given.as_ref()?.get(self.next).copied()
    }

    /// Which of these streams, lowest first, goes on.
    pub fn choose(&mut self, ready: &[u64]) -> Option<u64> {
        // One that has gone on for very long lets another go on: a host that enqueues to the lowest until an event of another comes would never end.
        let (last, operations) = self.alone;
        let is_tired = |stream: &u64| operations >= MOST_ALONE && *stream == last;
        let lowest = ready.iter().find(|stream| !is_tired(stream)).or(ready.first()).copied();
        while let Some(decision) = self.given_next() {
            match decision {
                Decision::Stream { stream, until } if self.done.get(&stream).is_none_or(|done| *done < until) => {
                    return if ready.contains(&stream) { Some(stream) } else { lowest };
                }
                _ => self.next += 1,
            }
        }
        lowest
    }

    /// A stream does an operation, of this name if it has one.
    pub fn take(&mut self, stream: u64, device: u32, name: Option<String>, caller: Option<&'static Location<'static>>) {
        let done = self.done.entry(stream).or_default();
        *done += 1;
        let until = *done;
        self.alone = if self.alone.0 == stream { (stream, self.alone.1 + 1) } else { (stream, 1) };
        match self.taken.last_mut() {
            Some(Decision::Stream { stream: last, until: end }) if *last == stream => *end = until,
            _ => self.taken.push(Decision::Stream { stream, until }),
        }
        let (Some(about), Some(name)) = (&self.about, name) else { return };
        let is_given = matches!(self.given_next(), Some(Decision::Stream { stream: next, .. }) if next == stream);
        let at = caller.map_or(String::new(), |at| format!(", enqueued at {at}"));
        let matters = is_given || caller.is_some_and(|at| about.contains(&at));
        self.story.push((Sentence { text: format!("stream {stream} of device {device}: {name}{at}"), matters }, true));
    }

    /// The options of a kernel that a stream is about to run.
    pub fn begin(&mut self, stream: u64, options: Options) -> Options {
        let operation = self.done.get(&stream).copied().unwrap_or(0);
        let of_launch = |decision: &Decision| match *decision {
            Decision::Turn { stream: other, operation: number, turn } if (other, number) == (stream, operation) => Some(turn),
            _ => None,
        };
        let schedule = match &self.given {
            Some(given) => Schedule::given(&given.iter().filter_map(of_launch).collect::<Vec<_>>()),
            None => Schedule::seeded(),
        };
        let schedule = self.about.iter().fold(schedule, |schedule, about| schedule.told(about));
        self.launch = Some((stream, schedule.clone()));
        self.launches += 1;
        // Kernels run one after another: what a thread polls for does not come later.
        let step_limit = options.step_limit.min(self.step_limit);
        Options { schedule: Some(schedule), patience: Duration::ZERO, step_limit, ..options }
    }

    /// The kernel has ended, one way or the other.
    pub fn end(&mut self) {
        let Some((stream, schedule)) = self.launch.take() else { return };
        let operation = self.done.get(&stream).copied().unwrap_or(0);
        let turns = schedule.turns();
        self.longest = self.longest.max(turns.len() as u64);
        self.taken.extend(turns.into_iter().map(|turn| Decision::Turn { stream, operation, turn }));
        let story = schedule.story();
        // Where there are several kernels, a reader has to know which of them it was.
        if self.launches > 1
            && story.iter().any(|sentence| sentence.matters)
            && let Some((kernel, _)) = self.story.last_mut()
        {
            kernel.matters = true;
        }
        self.story.extend(story.into_iter().map(|sentence| (sentence, false)));
    }
}

impl State {
    /// Runs a kernel, in the order that is given, if one is; notes its order, and what it shows.
    pub fn launch(&mut self, queue: u64, launched: &Launched, memory: &Arc<Memory>, run: Options) -> Result<()> {
        for tensor in &launched.launch.tensors {
            if let Some(found) = memory.find(tensor.address) {
                // Its name is the parameter's, then the buffer's in brackets.
                let parameter = tensor.name.split(' ').next().unwrap_or_default();
                let given = format!(", last given to kernel `{}` as `{parameter}`", launched.launch.kernel);
                self.given.insert(tensor.address - found.offset, given);
            }
        }
        let run = Options { explain: self.explanations.is_some(), ..run };
        let run = match &mut self.script {
            Some(script) => script.begin(queue, run),
            None => run,
        };
        let (is_checked, result) = (run.mode == Mode::Check, launched.run(memory, run));
        self.script.iter_mut().for_each(Script::end);
        let report = result?;
        if let Some(explanations) = self.explanations.as_mut().filter(|_| is_checked) {
            explanations.add(&launched.launch, report);
        }
        Ok(())
    }
}
