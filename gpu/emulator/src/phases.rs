//! When the phases of a block's mbarriers ended, and which warps arrived and waited, in steps of the scheduler.

use std::collections::BTreeMap;

/// One phase of an mbarrier of the grid's first block. Times are steps of the scheduler: they order what happened, and measure nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// The mbarrier, such as "the mbarrier `full[1]` of `Shared`".
    pub mbarrier: String,
    /// Its offset in the shared memory.
    pub offset: u32,
    /// The phase, from 0.
    pub phase: u64,
    /// When it ended, if it did.
    pub ended: Option<u64>,
    /// When the first and the last of its copies came.
    pub copies: Option<[u64; 2]>,
    /// By warp, when its first and its last thread arrived.
    pub arrivals: BTreeMap<u32, [u64; 2]>,
    /// By warp, when its first thread began to wait, and when its last went on.
    pub waits: BTreeMap<u32, [u64; 2]>,
}

/// More phases than this are not noted.
const MOST: usize = 4096;

/// The phases of a run, by mbarrier and number.
#[derive(Default)]
pub(crate) struct Phases(BTreeMap<(u32, u64), Phase>);

impl Phases {
    fn of(&mut self, offset: u32, phase: u64) -> Option<&mut Phase> {
        if self.0.len() >= MOST && !self.0.contains_key(&(offset, phase)) {
            return None;
        }
        Some(self.0.entry((offset, phase)).or_insert_with(|| Phase { offset, phase, ..Phase::default() }))
    }

    pub fn end(&mut self, offset: u32, phase: u64, step: u64) {
        if let Some(phase) = self.of(offset, phase) {
            phase.ended = Some(step);
        }
    }

    /// A warp's thread arrives, or a copy comes.
    pub fn arrive(&mut self, offset: u32, phase: u64, warp: Option<u32>, step: u64) {
        let Some(phase) = self.of(offset, phase) else { return };
        match warp {
            Some(warp) => extend(phase.arrivals.entry(warp).or_insert([step; 2]), step),
            None => extend(phase.copies.get_or_insert([step; 2]), step),
        }
    }

    /// A warp's thread waits for the phase, or has waited for it.
    pub fn wait(&mut self, offset: u32, phase: u64, warp: u32, step: u64) {
        if let Some(phase) = self.of(offset, phase) {
            extend(phase.waits.entry(warp).or_insert([step; 2]), step);
        }
    }

    /// All of them, under the names that mbarriers have.
    pub fn named(&self, name: impl Fn(u32) -> String) -> Vec<Phase> {
        self.0.values().map(|phase| Phase { mbarrier: name(phase.offset), ..phase.clone() }).collect()
    }
}

fn extend(span: &mut [u64; 2], step: u64) {
    *span = [span[0].min(step), span[1].max(step)];
}
