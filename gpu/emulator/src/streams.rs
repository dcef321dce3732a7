//! Streams beside grids: what the race detector is told of copies and signals that no kernel makes.
//!
//! A runtime whose streams copy and signal while a grid is under way tells the memory so ([`Memory::enter`], [`Memory::publish`]), and each grid what its
//! stream knows when it starts ([`Options::known`](crate::Options::known)). A read of what another stream wrote is then a race unless the thread has acquired a flag
//! that the stream set after it, whatever the order of this run.

use crate::clock::Clock;
use crate::history::{GridBlocks, Sequence};
use crate::known::{Agent, Known};
use crate::memory::Memory;
use crate::order::Scope;
use crate::shadow::{Manner, Record};
use std::panic::Location;

impl Memory {
    /// A stream that reports call `name`.
    pub fn agent(&self, name: &str, device: u32) -> Agent {
        let (kernel, start) = (name.to_owned(), Clock::default());
        let all = GridBlocks { blocks: 0..0, kernel, device, grid: [1; 3], block: [1; 3], cluster: [1; 3], is_stream: true, start };
        Agent(self.history().number(all, 1).start)
    }

    /// Operation `time` of a stream, which was asked for at `site`, writes the range: a grid under way that does not know the operation may not touch it. Nothing is
    /// written.
    pub fn enter(&self, agent: Agent, time: u64, address: u64, bytes: u64, site: &'static Location<'static>) {
        let record = Record { block: agent.0, slot: 0, time: time as u32, thread: 0, manner: Manner::Weak, writes: true, site };
        self.history().shadow.replace(address, bytes, &record);
    }

    /// A stream has written a word: threads that acquire it learn what the stream knew.
    pub fn publish(&self, agent: Agent, address: u64, known: Known) {
        let history = &mut *self.history();
        let sequence = history.releases.entry(address).or_default();
        sequence.clear();
        sequence.release(&history.grids, Scope::System, agent.0, &known.0);
    }

    /// What was known at the last write of a word at system scope.
    pub fn released(&self, address: u64) -> Option<Known> {
        self.history().releases.get(&address).and_then(Sequence::of_system).map(|knowledge| Known(knowledge.clone()))
    }
}
