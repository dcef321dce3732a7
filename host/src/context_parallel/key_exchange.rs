//! How keys travel in a fused pass: the launch that waits for them, and what goes around it ([flags](super::fused)).
//!
//! ```text
//! stream   keys wanted |        launch 0        | resets, FREE |        launch 1        | ...
//! outs 0   take FREE, put sections of group 0   |              | take FREE, put sections of group 2
//! outs 1   take FREE, put sections of group 1                  |
//! ```
//!
//! Streams carry keys to the ranks by turns.
//!
//! A pass over all heads is one group. The groups of a capped one take turns in two places: the keys of a group travel while the one before it is attended to.

use std::sync::MutexGuard;

use super::core::check_captures;
use super::element::ContextElement;
use super::fused::{Fused, world_rank};
use super::memory::note;
use super::pieces::Pieces;
use crate::attention::Waiting;
use crate::comm::Rank;
use crate::runtime::runtime::lock;
use crate::runtime::{Bound, Kind, Result, Stream};
use crate::symmetric::{Rows, SymmetricBuffer};
use crate::tensor::Heads;
use crate::thd::Share;
use oxtile_tile::arrivals::WaitsArgument;

const WHAT: &str = "ContextParallel, fused";

/// Keys and values of all ranks.
type Gathered<T> = [SymmetricBuffer<T>; 2];

/// A pass over a group of heads, bound.
pub(super) struct BoundPass<'a, T> {
    /// Keys and values of this rank.
    pub own: [Heads<'a, T>; 2],
    /// The launch that waits for those of others, with what goes before it and may go beside the next group's puts.
    pub launch: Waiting<'a>,
    /// What follows, when the keys were read.
    pub finish: Bound<'a>,
}

/// Enqueues the passes of groups of heads, one after another, in places by turns. One that fails ends the arena: the others go on with it.
pub(super) fn run<T: ContextElement>(turns: &[Fused<T>], stream: &Stream, passes: &mut [BoundPass<'_, T>]) -> Result<()> {
    let mut gathered: Vec<MutexGuard<'_, Gathered<T>>> = turns.iter().map(|fused| lock(&fused.gathered)).collect();
    for fused in turns {
        fused.streams().try_for_each(|out| check_captures(stream, out))?;
        fused.arena.glance()?;
        // After the pass before, on whichever stream: until it has reset the flags, a kernel would take its keys for those of this one.
        note(stream, &fused.places.each_ref().map(|place| place.access(true)))?;
        // After the zeros of slots: others store there once keys of this rank have come.
        fused.gradients.iter().try_for_each(|gradients| note(stream, &[gradients.place.access(true)]))?;
    }
    let mut enqueue = || {
        let Some(first) = passes.first() else { return Ok(()) };
        turns[0].give(stream, &gathered[0], first.own)?;
        for at in 0..passes.len() {
            let [turn, other] = [at, at + 1].map(|at| at % turns.len());
            // Before the launch that waits for what others put: queues of the device may be shared. After the keys of this group, which it waits for.
            if let Some(next) = passes.get(at + 1) {
                turns[other].streams().zip(turns[turn].streams()).try_for_each(|(next, now)| next.wait(&now.mark()?))?;
                turns[other].give(stream, &gathered[other], next.own)?;
            }
            let BoundPass { launch, finish, .. } = &mut passes[at];
            turns[turn].take(stream, &mut gathered[turn], |waits| launch(stream, waits))?;
            finish.run(stream)?;
        }
        Ok(())
    };
    let done = enqueue();
    turns[0].arena.or_abort(stream, WHAT, done)
}

impl<T: ContextElement> Fused<T> {
    /// Puts own keys at the others, after the stream's work so far, also on memory whose uses the runtime does not know.
    fn give(&self, stream: &Stream, gathered: &Gathered<T>, own: [Heads<'_, T>; 2]) -> Result<()> {
        let wanted = stream.mark()?;
        self.streams().try_for_each(|out| out.wait(&wanted))?;
        if !self.pieces.own_apart {
            self.keep(stream, own)?;
        }
        self.put(gathered, own)
    }

    /// Enqueues `launch`, which waits for the others' keys, and then says that they were read.
    fn take(&self, stream: &Stream, gathered: &mut Gathered<T>, launch: impl FnOnce(WaitsArgument<'_>) -> Result<()>) -> Result<()> {
        let flags = self.awaited();
        launch(self.ready.waits(stream, &flags)?)?;
        // Later work may write the keys again, and a capture ends on one stream.
        self.streams().try_for_each(|out| stream.wait(&out.mark()?))?;
        let mut batch = self.arena.batch(stream);
        for (flag, from) in flags {
            // A flag that the kernel has not waited for may not be set yet.
            batch = if self.pieces.may_skip() { batch.wait_flag(&self.ready, flag, from)? } else { batch };
            batch = batch.clear(&self.ready, flag, from)?;
        }
        batch.enqueue()?;
        if stream.0.runtime.kind() == Kind::Emulated {
            gathered.iter_mut().try_for_each(|all| all.discard(stream, 0..all.len()))?;
        }
        let batch = self.arena.batch(stream);
        self.owners().try_fold(batch, |batch, owner| batch.set(&self.free, 0, owner))?.enqueue()
    }

    /// Copies own keys among those of all ranks.
    fn keep(&self, stream: &Stream, own: [Heads<'_, T>; 2]) -> Result<()> {
        let Share { rank, .. } = self.local.share;
        for (tensor, place) in own.iter().zip(&self.places) {
            let rows: Vec<_> = self
                .pieces
                .of(rank)
                .into_iter()
                .flat_map(|piece| self.pieces.copies(tensor, piece, 0..self.sections.heads.into()))
                .collect();
            Rows::copy_all(stream, WHAT, tensor.view(), place.lend(), &rows)?;
        }
        Ok(())
    }

    /// Puts own keys at the others, a section at all of them before the next one, and sets its flag.
    fn put(&self, gathered: &[SymmetricBuffer<T>; 2], own: [Heads<'_, T>; 2]) -> Result<()> {
        let me = self.local.share.rank;
        for (section, (to, out)) in (0..self.sections.count()).flat_map(|section| self.turns().map(move |turn| (section, turn))) {
            let there = world_rank(&self.member, to);
            if section == 0 {
                self.arena.batch(out).take_back(&self.free, 0, there)?.enqueue()?;
            }
            for (tensor, all) in own.iter().zip(gathered) {
                let rows: Vec<_> =
                    self.pieces.seen(me, to).flat_map(|piece| self.pieces.copies(tensor, piece, self.sections.heads(section))).collect();
                all.put_rows_each(out, tensor.view(), there, &rows)?;
            }
            self.arena.batch(out).set(&self.ready, section, there)?.enqueue()?;
        }
        Ok(())
    }

    /// The flags of all sections of the ranks whose keys are read.
    pub(super) fn awaited(&self) -> Vec<(u32, Rank)> {
        (0..self.sections.count()).flat_map(|section| self.owners().map(move |from| (section, from))).collect()
    }

    /// The other ranks whose keys this one reads, by their numbers in the arena.
    pub(super) fn owners(&self) -> impl Iterator<Item = Rank> {
        let me = self.local.share.rank;
        self.others(move |pieces, other| pieces.reads(me, other))
    }

    /// Those that read the keys of this one.
    pub(super) fn readers(&self) -> impl Iterator<Item = Rank> {
        let me = self.local.share.rank;
        self.others(move |pieces, other| pieces.reads(other, me))
    }

    fn others(&self, is: impl Fn(&Pieces, Rank) -> bool) -> impl Iterator<Item = Rank> {
        let Share { rank, world, .. } = self.local.share;
        let others = world.ranks().filter(move |other| *other != rank && is(&self.pieces, *other));
        others.map(|other| world_rank(&self.member, other))
    }
}
