//! The warps that have parts of `dQ` added up in device memory.

use oxtile_tile::fragment_tile::FragmentTile;
use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;

use super::backward_tensors::QuerySums;
use super::backward_workspace::{ADDERS, Handoff, Parts};

/// Added to a block's turns when the first to add has stored.
const STORED: u32 = 1 << 31;

/// A warp that has parts of `dQ'` added up. One of its lanes does: others would wait for phases of the handoffs that are long past.
pub(super) struct Adder<const SPAN: usize> {
    /// Which of them.
    pub number: u32,
    pub parts: Parts<SPAN>,
    pub handoff: Handoff,
    pub sums: QuerySums,
}

impl<const SPAN: usize> Adder<SPAN> {
    /// Has the parts of step `step`, if that is this warp's, added to the sums of a block of queries; if `turn` is given, after as many
    /// others. One thread calls it, for every step.
    #[inline(always)]
    #[track_caller]
    pub fn add(&self, block: u32, step: u32, turn: Option<impl FnOnce() -> u32>) {
        if step % ADDERS != self.number {
            return;
        }
        let start = u64::from(block) * (2 * FragmentTile::<SPAN>::ELEMENTS) as u64;
        let turn = turn.map(|turn| turn());
        let first = match turn {
            Some(turn) => self.wait(block, turn),
            None => {
                // One after the other: others wait for the one that comes first, which must wait for nothing but its own warpgroups, and not for
                // the answer to the step before.
                self.handoff.claimed.wait((step % 2) ^ 1);
                let first = self.claim(block);
                self.handoff.claimed.arrive();
                first
            }
        };
        self.handoff.full.tile(self.number).wait(step / ADDERS % 2);
        if first {
            self.parts.store_to(&self.sums.values, start)
        } else {
            self.parts.add_to(&self.sums.values, start)
        }
        pipeline::commit_stores();
        pipeline::wait_stores_read::<0>();
        self.handoff.empty.arrive();
        if let Some(turn) = turn {
            pipeline::wait_stores::<0>();
            atomic::store_release(&self.sums.turns, block.into(), turn + 1);
        } else if first {
            pipeline::wait_stores::<0>();
            sync::fence_device();
            atomic::add_u32(&self.sums.turns, block.into(), STORED);
        }
    }

    /// Waits until `turn` others have added to a block; whether there are none.
    #[inline(always)]
    #[track_caller]
    fn wait(&self, block: u32, turn: u32) -> bool {
        while atomic::load_acquire(&self.sums.turns, block.into()) != turn {}
        turn == 0
    }

    /// Joins the tiles that add to a block; the first of them stores, and the others wait for that.
    #[inline(always)]
    #[track_caller]
    fn claim(&self, block: u32) -> bool {
        let others = atomic::take_ticket(&self.sums.turns, block.into());
        if others != 0 && others < STORED {
            while atomic::load_acquire(&self.sums.turns, block.into()) < STORED {}
        }
        others == 0
    }
}
