//! What the calls of a step enqueue.

use oxtile_tile::launch::DeviceView;

use super::super::memory::lend;
use super::link::Link;
use super::scatter::{GradientScatter, State};
use super::slots::slot_of;
use crate::comm::WorldSize;
use crate::runtime::module::note;
use crate::runtime::{Result, Stream};
use crate::sum_parts::Addend;

impl<E: Addend> GradientScatter<E> {
    /// Sends a weight, and adds up the one before it. Returns the one whose sum was enqueued.
    pub(super) fn exchange(&self, state: &mut State<E>, compute: &Stream, weight: usize, before: Option<usize>) -> Result<Option<usize>> {
        let (slot, layout) = (slot_of(weight), &self.layouts[weight]);
        // The next weight takes the other buffer, after the puts that read it: they are the last work of their stream now, and those of this weight are not waited for.
        note(compute, &[lend(&self.whole[1 - slot]).access("gradient")])?;
        let Some(slots) = state.link.as_mut().filter(|_| !self.is_alone()) else {
            state.steps.summed();
            self.add_parts(weight, self.whole[slot].view().slice(0, layout.whole()))?;
            return Ok(Some(weight));
        };
        if let Some(before) = before {
            // After the copy of the own rows of that weight, and not after the puts of this one.
            slots.note(&self.sum, slot_of(before))?;
            if slot_of(before) == slot {
                self.add_up(&mut **slots, before)?;
            }
        }
        // The puts are enqueued before the wait for those of others: queues of a device may be shared.
        slots.send(&self.send, slot, layout, &self.whole[slot])?;
        slots.keep(&self.send, slot, layout, &self.whole[slot])?;
        if let Some(before) = before.filter(|before| slot_of(*before) != slot) {
            self.add_up(&mut **slots, before)?;
        }
        Ok(before)
    }

    /// Adds up the parts of a weight that all ranks have sent.
    fn add_up(&self, slots: &mut dyn Link<E>, weight: usize) -> Result<()> {
        let (slot, layout) = (slot_of(weight), &self.layouts[weight]);
        if self.main[weight].is_empty() {
            return Ok(());
        }
        slots.accept(&self.sum, slot)?;
        self.add_parts(weight, slots.parts(slot, layout))?;
        slots.release(&self.sum, slot, layout)
    }

    fn add_parts(&self, weight: usize, parts: DeviceView<'_, E>) -> Result<()> {
        let (count, stride) = (self.member.team().size().get(), self.layouts[weight].stride());
        self.add.run(&self.sum, parts, count, stride, self.scale, lend(&self.main[weight]))
    }

    /// Adds up the weight that was sent last, and orders `stream` after all sums.
    pub(super) fn complete(&self, state: &mut State<E>, stream: &Stream, last: Option<usize>, order: &[usize]) -> Result<()> {
        if let Some(slots) = state.link.as_mut().filter(|_| !self.is_alone()) {
            if let Some(last) = last {
                slots.note(&self.sum, slot_of(last))?;
                self.add_up(&mut **slots, last)?;
            }
            if !order.is_empty() && !std::mem::replace(&mut state.is_declared, true) {
                let names: Vec<_> = order.iter().map(|weight| self.weights[*weight].name.as_str()).collect();
                slots.declare_order(format!("gradients, scattered in the order {}", names.join(", ")))?;
            }
        }
        note(stream, &self.main.iter().map(|main| main.view().access("main gradient")).collect::<Vec<_>>())
    }

    /// Whether no other rank has a part.
    pub(super) fn is_alone(&self) -> bool {
        self.member.team().size() == WorldSize::ONE
    }
}
