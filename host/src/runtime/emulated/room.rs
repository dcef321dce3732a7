//! Room on a device: which work can begin beside what is under way there.
//!
//! A launch that waits for flags holds its multiprocessors until it ends, and a collective one from when its rank has come until all have. All other work is
//! done in one step and holds nothing, but a kernel needs room for a block. Streams that share a hardware queue go on in the order in which their work
//! was enqueued, as far as [`EmulatedOptions::hardware_queues`] says that they share one.

use oxtile_emulator::Memory;
use oxtile_tile::launch::KernelInfo;

use super::operation::{Entry, Launched, Operation};
use super::options::EmulatedOptions;
use super::scheduler::State;
use crate::runtime::POISON;

/// A multiprocessor, in the units in which launches share it.
const MULTIPROCESSOR: u64 = 1 << 16;
/// What a multiprocessor of compute capability 9.0 has (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
const BLOCKS: u32 = 32;
const THREADS: u32 = 2048;
const REGISTERS: u32 = 64 << 10;
const SHARED_BYTES: u32 = 228 << 10;
/// Shared memory of a block that the driver has.
const RESERVED_BYTES: u32 = 1 << 10;
const MOST_REGISTERS: u32 = 255;

/// The part of a multiprocessor that a block takes. Registers are not known here: they are as many as the launch bounds let a thread have.
pub(super) fn share_of(info: &KernelInfo) -> u64 {
    let threads = info.threads.max(1);
    let registers = MOST_REGISTERS.min(REGISTERS / (threads * info.min_blocks.max(1))).max(1);
    let by_registers = REGISTERS / (threads * registers);
    let by_shared = SHARED_BYTES / (info.shared_bytes + RESERVED_BYTES);
    MULTIPROCESSOR / u64::from(BLOCKS.min(THREADS / threads).min(by_registers).min(by_shared).max(1))
}

impl Launched {
    /// The multiprocessors that it takes, of a device that has so many: all its blocks, or those that fit.
    fn room(&self, of: u64) -> u64 {
        let blocks: u64 = self.launch.grid.iter().map(|extent| u64::from(*extent)).product();
        of.min(blocks.saturating_mul(self.share))
    }
}

impl State {
    /// The queues whose next operation can go on, lowest first.
    pub fn ready(&self, memory: &Memory, options: &EmulatedOptions) -> Vec<u64> {
        let goes_on = |(queue, entry): &(u64, &Entry)| entry.operation.is_ready(memory) && self.hindrance(*queue, entry, options).is_none();
        self.queues.heads().filter(goes_on).map(|(queue, _)| queue).collect()
    }

    /// What keeps the next operation of a queue from going on, for the report of a deadlock.
    pub fn waits_for(&self, queue: u64, entry: &Entry, memory: &Memory, options: &EmulatedOptions) -> String {
        let hindrance = || self.hindrance(queue, entry, options).unwrap_or_else(|| entry.operation.waits_for());
        if entry.operation.is_ready(memory) { hindrance() } else { entry.operation.waits_for() }
    }

    /// What another queue of the device has that an operation needs.
    fn hindrance(&self, queue: u64, entry: &Entry, options: &EmulatedOptions) -> Option<String> {
        let device = self.streams.get(&queue)?;
        if let Some(before) = options.hardware_queues.and_then(|queues| self.queued_before(queue, entry, queues)) {
            return Some(format!("stream {before}, whose work in the same hardware queue was enqueued before"));
        }
        let all = u64::from(options.multiprocessors.max(1)) * MULTIPROCESSOR;
        let (needed, meets_collectives) = match &entry.operation {
            Operation::Launch(_) if self.underway.contains_key(&queue) => return None,
            Operation::Launch(launched) if launched.may_poll() => (launched.room(all), true),
            Operation::Launch(launched) => (launched.share, false),
            Operation::Arrive(_) => (MULTIPROCESSOR, false),
            _ => return None,
        };
        let on_device = |queue: &u64| self.streams.get(queue) == Some(device);
        let launches = self.underway.iter().filter(|(queue, _)| on_device(queue)).map(|(_, underway)| &underway.launched);
        let launches = launches.map(|launched| (launched.room(all), format!("kernel `{}`", launched.launch.kernel)));
        let has_begun = |entry: &Entry| matches!(&entry.operation, Operation::Leave(part) if !part.all_are_there());
        let collectives = self.queues.heads().filter(|(queue, entry)| meets_collectives && on_device(queue) && has_begun(entry));
        let holders: Vec<_> = launches.chain(collectives.map(|_| (MULTIPROCESSOR, "a collective".to_owned()))).collect();
        let held: u64 = holders.iter().map(|(room, _)| room).sum();
        (held + needed > all).then(|| {
            let whole = |room: u64| room.div_ceil(MULTIPROCESSOR);
            let holders: Vec<_> = holders.iter().map(|(room, what)| format!("{what} holds {}", whole(*room))).collect();
            format!("{} of {} multiprocessors, while {}", whole(needed), whole(all), holders.join(" and "))
        })
    }

    /// A stream with work in the same hardware queue that was enqueued before. A kernel under way has left the queue; what follows it in its stream has not.
    fn queued_before(&self, queue: u64, entry: &Entry, queues: u32) -> Option<u64> {
        // Poison goes through, as on GPUs after a copy of a word to the host.
        if entry.operation.written_word().is_some_and(|(_, value)| value >= POISON) {
            return None;
        }
        let device = self.streams.get(&queue)?;
        let on_device = self.streams.iter().filter(|(_, of)| *of == device).map(|(queue, _)| *queue);
        let (place, queues) = (on_device.clone().position(|other| other == queue)?, queues.max(1) as usize);
        let shares = |(at, other): &(usize, u64)| *other != queue && at % queues == place % queues;
        let next = |other: u64| self.queues.entries(other).nth(usize::from(self.underway.contains_key(&other)));
        let is_before = |other: &u64| next(*other).is_some_and(|next| next.number < entry.number);
        on_device.enumerate().filter(shares).map(|(_, other)| other).find(is_before)
    }
}
