//! What the calls of a step enqueue.

use oxtile_tile::launch::DeviceView;

use super::super::memory::lend;
use super::link::Has;
use super::scatter::{GradientScatter, State};
use super::slots::slot_of;
use super::step::Ended;
use crate::comm::WorldSize;
use crate::runtime::module::{note, note_after, zero};
use crate::runtime::{Result, Stream};
use crate::sum_parts::{Addend, Before, PartApart, RankParts};

impl<E: Addend> GradientScatter<E> {
    /// Before a weight is computed: the one that was sent from the same buffer is summed, and not overwritten before that.
    pub(super) fn make_room(&self, state: &mut State<E>, weight: usize) -> Result<()> {
        match state.steps.sent() {
            Some(sent) if slot_of(sent) == slot_of(weight) => self.add_up(state, sent, state.steps.before()),
            _ => Ok(()),
        }
    }

    /// Sends a weight, and adds up the one before it. Returns the one whose sum was enqueued.
    pub(super) fn exchange(&self, state: &mut State<E>, compute: &Stream, weight: usize, before: Option<usize>) -> Result<Option<usize>> {
        let (slot, layout) = (slot_of(weight), &self.layouts[weight]);
        let written = compute.mark()?;
        // The next weight takes the other buffer, after the puts that read it: they are the last work of their stream now, and those of this weight are not waited for.
        note(compute, &[lend(&self.whole[1 - slot]).access("gradient")])?;
        let Some(slots) = state.link.as_mut().filter(|_| !self.is_alone()) else {
            state.steps.summed();
            self.add_parts(weight, (self.whole[slot].view().slice(0, layout.whole()), None), state.steps.before())?;
            return Ok(Some(weight));
        };
        // The puts are enqueued before the wait for those of others: queues of a device may be shared.
        slots.send(&self.send, slot, layout, &self.whole[slot])?;
        tracing::trace!(weight = self.weights[weight].name, slot, "scattered");
        if let Some(before) = before {
            self.add_up(state, before, state.steps.before())?;
        }
        if let Some(slots) = &state.link {
            // The sum comes after what is in the slot now, and not after what is enqueued there from now on.
            slots.note(&self.sum, slot)?;
        }
        state.written = Some(written);
        Ok(before)
    }

    /// Adds up the parts of the weight that was sent last, if that was not done.
    fn add_up(&self, state: &mut State<E>, weight: usize, onto: Before) -> Result<()> {
        let (slot, layout) = (slot_of(weight), &self.layouts[weight]);
        let (Some(written), Some(slots)) = (state.written.take(), state.link.as_mut()) else { return Ok(()) };
        if self.main[weight].is_empty() {
            return Ok(());
        }
        slots.accept(&self.sum, slot)?;
        let (parts, has) = slots.parts(slot, layout);
        let whole = self.whole[slot].view();
        let own = (has == Has::Others).then(|| layout.apart(self.member.rank().index() as usize, whole));
        if own.is_some() {
            // After the product that computed it, and not after those since. The product of the next weight but one comes after this sum.
            note_after(&self.sum, &written, &[whole.access("gradient")])?;
        }
        self.add_parts(weight, (parts, own), onto)?;
        slots.release(&self.sum, slot, layout)
    }

    fn add_parts(&self, weight: usize, (parts, apart): (DeviceView<'_, E>, Option<PartApart<'_, E>>), before: Before) -> Result<()> {
        let parts = RankParts { parts, count: self.member.team().size().get(), stride: self.layouts[weight].stride(), apart };
        self.add.add(&self.sum, parts, self.scale, before, lend(&self.main[weight]))?;
        tracing::trace!(weight = self.weights[weight].name, "summed");
        Ok(())
    }

    /// Adds up the weight that was sent last, and orders `stream` after all sums. What a step that replaces the main gradients did not sum is zero.
    pub(super) fn complete(&self, state: &mut State<E>, stream: &Stream, ended: &Ended) -> Result<()> {
        let Ended { last, order, before } = ended;
        if let Some(last) = *last {
            self.add_up(state, last, *before)?;
        }
        if let Some(link) = state.link.as_mut().filter(|_| !self.is_alone() && !order.is_empty() && !state.is_declared) {
            let names: Vec<_> = order.iter().map(|weight| self.weights[*weight].name.as_str()).collect();
            state.is_declared = link.declare_order(&self.send, order, format!("gradients, scattered in the order {}", names.join(", ")))?;
        }
        if *before == Before::Zero {
            (0..self.main.len())
                .filter(|weight| !order.contains(weight))
                .try_for_each(|weight| zero(&self.sum, lend(&self.main[weight])))?;
        }
        tracing::trace!(weights = order.len(), "gradients finished");
        note(stream, &self.main.iter().map(|main| main.view().access("main gradient")).collect::<Vec<_>>())
    }

    /// Whether no other rank has a part.
    pub(super) fn is_alone(&self) -> bool {
        self.member.team().size() == WorldSize::ONE
    }
}
