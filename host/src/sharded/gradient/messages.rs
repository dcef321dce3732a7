//! Parts of gradients by the messages of a communicator, as between hosts, where there is no memory that ranks share.

use std::sync::Arc;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::super::memory::{lend, lend_first};
use super::super::weight::Weight;
use super::layout::Layout;
use super::link::{Has, Link};
use super::order::Order;
use super::slots::SLOTS;
use crate::comm::{Communicator, Rank};
use crate::runtime::module::note;
use crate::runtime::{Buffer, Result, Stream};
use crate::symmetric::Rows;

/// What an all-to-all is to a rank: input and output consist of one part a rank, all of one length.
type AllToAll<E> = Box<dyn Fn(&Stream, DeviceView<'_, E>, DeviceViewMut<'_, E>) -> Result<()> + Send>;

/// The slots of a rank. One all-to-all a weight brings each owner the parts of all ranks; what a slot is used for is ordered by the runtime.
pub(super) struct Messages<E> {
    rank: usize,
    slots: [Buffer<E>; SLOTS],
    /// Rows in the order of their owners, where they do not lie so in the whole gradient.
    packed: Buffer<E>,
    all_to_all: AllToAll<E>,
    order: Order,
}

impl<E: Pod> Messages<E> {
    /// Takes two slots for the parts of the largest weight, and memory for what is sent.
    pub fn new<C: Communicator + Send + Sync + 'static>(
        stream: &Stream,
        comm: &Arc<C>,
        (weights, layouts): (&[Weight], &[Layout]),
    ) -> Result<Self> {
        let most = |of: &mut dyn Iterator<Item = &Layout>| of.map(Layout::parts).max().unwrap_or(0);
        let (parts, packed) = (most(&mut layouts.iter()), most(&mut layouts.iter().filter(|layout| !layout.is_in_parts())));
        let order = Order::new(stream, comm, weights)?;
        let (comm, rank) = (Arc::clone(comm), comm.rank());
        Ok(Self {
            rank: index(rank),
            slots: [Buffer::named(stream, "parts of gradients", parts)?, Buffer::named(stream, "parts of gradients", parts)?],
            // Of ragged shards the padding is sent too, and read by none.
            packed: Buffer::zeros(stream, packed)?,
            all_to_all: Box::new(move |stream, input, output| comm.all_to_all(stream, input, output)),
            order,
        })
    }
}

fn index(rank: Rank) -> usize {
    rank.index() as usize
}

impl<E: Pod> Link<E> for Messages<E> {
    fn bytes(&self) -> u64 {
        (self.slots.iter().map(Buffer::len).sum::<u64>() + self.packed.len()) * size_of::<E>() as u64 + self.order.bytes()
    }

    /// The communicator compares its calls, and those of two weights of one shape are alike: the order of the first step is compared when the others' is there.
    fn open(&mut self, _: &Stream, _: &str) -> Result<()> {
        self.order.compare()
    }

    fn declare_order(&mut self, stream: &Stream, order: &[usize], _: String) -> Result<bool> {
        self.order.tell(stream, order)
    }

    fn send(&mut self, stream: &Stream, slot: usize, layout: &Layout, whole: &Buffer<E>) -> Result<()> {
        if layout.parts() == 0 {
            return Ok(());
        }
        let input = if layout.is_in_parts() {
            whole
        } else {
            let copies: Vec<Rows> = layout.owners().flat_map(|owner| layout.copies(owner, owner)).collect();
            Rows::copy_all(stream, "gradients", whole.view(), lend(&self.packed), &copies)?;
            &self.packed
        };
        (self.all_to_all)(stream, input.view().slice(0, layout.parts()), lend_first(&self.slots[slot], layout.parts()))
    }

    fn note(&self, stream: &Stream, slot: usize) -> Result<()> {
        note(stream, &[self.slots[slot].view().access("parts of gradients")])
    }

    fn accept(&self, _: &Stream, _: usize) -> Result<()> {
        Ok(())
    }

    /// The all-to-all brings the own rows too.
    fn parts(&self, slot: usize, layout: &Layout) -> (DeviceView<'_, E>, Has) {
        (self.slots[slot].view().slice(0, layout.end_of(layout.parts(), self.rank)), Has::All)
    }

    /// The next all-to-all into the slot comes after its readers.
    fn release(&mut self, _: &Stream, _: usize, _: &Layout) -> Result<()> {
        Ok(())
    }
}
