//! What the scheduler did, as spans of its steps.

use std::collections::BTreeMap;

use oxtile_emulator::Memory;

use super::operation::{Entry, Operation};
use crate::rank::launcher::process_rank;
use crate::recording::{Activity, Clock, MOST_SPANS, Recording, Span, Work, now_ns};
use crate::runtime::POISON;
use crate::runtime::backend::{Copy, Direction};

/// A recording under way.
#[derive(Clone)]
pub(super) struct Log {
    rank: Option<u32>,
    start_ns: u64,
    /// The step that is its zero.
    zero: u64,
    /// When the last operation of each queue was done.
    done: BTreeMap<u64, u64>,
    spans: Vec<Span>,
    dropped: u64,
}

impl Log {
    pub fn new(zero: u64) -> Self {
        Self { rank: process_rank(), start_ns: now_ns(), zero, done: BTreeMap::new(), spans: Vec::new(), dropped: 0 }
    }

    /// Adds an operation that this step completes, or that is the first of its queue. It began when it became the first.
    pub fn add(&mut self, queue: u64, device: Option<&u32>, entry: &Entry, memory: &Memory, step: u64, is_finished: bool) {
        let before = self.done.get(&queue).copied().unwrap_or(self.zero);
        if let Operation::Arrive(_) = &entry.operation
            && is_finished
        {
            // The collective goes on until it is left.
            self.done.insert(queue, before.max(entry.step));
            return;
        }
        self.done.insert(queue, step);
        let device = device.copied().unwrap_or(0);
        let Some(work) = work(entry, device, memory) else { return };
        if self.spans.len() == MOST_SPANS {
            self.dropped += 1;
            return;
        }
        let times = [before.max(entry.step), step].map(|step| (step - self.zero.min(step)) as f64);
        self.spans.push(work.spanning(self.rank.unwrap_or(device), device, queue, times, is_finished));
    }

    pub fn into_recording(self) -> Recording {
        Recording::new(Clock::Steps, self.start_ns, self.spans, self.dropped)
    }
}

/// What an operation is called in a story; none for what only marks a point or frees.
pub(super) fn name_of(entry: &Entry, device: u32, memory: &Memory) -> Option<String> {
    let kernel = if matches!(entry.operation, Operation::Launch(_)) { "kernel " } else { "" };
    work(entry, device, memory).map(|work| format!("{kernel}{}", work.name))
}

/// What an operation is called; none for what only marks a point or frees.
fn work(entry: &Entry, device: u32, memory: &Memory) -> Option<Work> {
    use Activity::{Collective, Fill, Graph, Kernel, Signal, Wait};
    let work = |activity, name: String, bytes| Some(Work::new(activity, name, bytes, entry.caller));
    match &entry.operation {
        Operation::Launch(launched) => work(Kernel, launched.launch.kernel.clone(), None),
        Operation::Copy(copy) => work(Activity::Copy, copy_name(*copy, device, memory), Some(copy.total())),
        Operation::Fill { bytes, .. } => work(Fill, "fill".to_owned(), Some(*bytes)),
        Operation::WriteWords { words, .. } => work(Activity::Copy, "words".to_owned(), Some(size_of_val(&**words) as u64)),
        Operation::WriteValue { value, .. } if *value >= POISON => work(Signal, "poison".to_owned(), None),
        Operation::WriteValue { address, value } => {
            let to = device_of(memory, *address, device).map_or(String::new(), |peer| format!(" to device {peer}"));
            work(Signal, format!("signal {value}{to}"), None)
        }
        Operation::WaitValue { value, .. } => work(Wait, format!("wait for signal {value}"), None),
        Operation::Wait(mark) => work(Wait, format!("wait for stream {}", mark.stream), None),
        Operation::Replay(_) => work(Graph, "replay".to_owned(), None),
        Operation::Arrive(part) | Operation::Leave(part) => {
            let (name, bytes) = part.describe();
            work(Collective, name.to_owned(), Some(bytes))
        }
        Operation::Discard { .. } | Operation::Free { .. } | Operation::FreeHost { .. } | Operation::Record(_) => None,
    }
}

fn copy_name(copy: Copy, device: u32, memory: &Memory) -> String {
    if copy.direction != Direction::DeviceToDevice {
        return copy.direction.name().to_owned();
    }
    match [copy.source, copy.target].map(|address| device_of(memory, address, device)) {
        [Some(peer), _] => format!("get from device {peer}"),
        [_, Some(peer)] => format!("put to device {peer}"),
        _ => copy.direction.name().to_owned(),
    }
}

/// Whose memory it is, if not this device's own.
fn device_of(memory: &Memory, address: u64, own: u32) -> Option<u32> {
    memory.find(address).map(|found| found.device).filter(|device| *device != own)
}
