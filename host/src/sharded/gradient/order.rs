//! Whether all ranks scatter in one order, where parts come by messages: weights of one shape have messages alike.

use std::sync::Arc;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};

use super::super::memory::lend;
use super::super::weight::Weight;
use crate::comm::{Communicator, Rank, WorldSize};
use crate::runtime::{Buffer, Error, Event, PinnedBuffer, Result, Stream};

/// What stands after the last weight of an order.
const NONE: u32 = u32::MAX;

/// What an all-gather is to a rank.
type AllGather = Box<dyn Fn(&Stream, DeviceView<'_, u32>, DeviceViewMut<'_, u32>) -> Result<()> + Send>;

/// The orders in which all ranks scattered the weights of a step, by number: told once, after the step, and compared in a later call, when those of all are there. No call waits.
pub(super) struct Order {
    rank: Rank,
    world: WorldSize,
    names: Vec<String>,
    own: Buffer<u32>,
    all: Buffer<u32>,
    /// The same in page-locked memory, taken before the first step: the driver's allocations may wait for streams that wait for other ranks.
    own_on_host: PinnedBuffer<u32>,
    all_on_host: PinnedBuffer<u32>,
    all_gather: AllGather,
    /// When all orders are there; none before they are told, and once they are compared.
    told: Option<Event>,
}

impl Order {
    pub fn new<C: Communicator + Send + Sync + 'static>(stream: &Stream, comm: &Arc<C>, weights: &[Weight]) -> Result<Self> {
        let (comm, rank, world, len) = (Arc::clone(comm), comm.rank(), comm.world(), weights.len() as u64);
        Ok(Self {
            rank,
            world,
            names: weights.iter().map(|weight| weight.name.clone()).collect(),
            own: Buffer::named(stream, "order of gradients", len)?,
            all: Buffer::named(stream, "orders of gradients", len * u64::from(world.get()))?,
            own_on_host: PinnedBuffer::zeros(stream, weights.len())?,
            all_on_host: PinnedBuffer::zeros(stream, weights.len() * world.get() as usize)?,
            all_gather: Box::new(move |stream, own, all| comm.all_gather(stream, own, all)),
            told: None,
        })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        (self.own.len() + self.all.len()) * size_of::<u32>() as u64
    }

    /// Tells all ranks the order of this one, unless the stream is captured: a graph would tell it at each replay. Returns whether it did.
    pub fn tell(&mut self, stream: &Stream, order: &[usize]) -> Result<bool> {
        if stream.is_capturing() {
            return Ok(false);
        }
        let numbers = self.own_on_host.as_mut_slice()?;
        numbers.fill(NONE);
        numbers.iter_mut().zip(order).for_each(|(number, weight)| *number = *weight as u32);
        self.own.copy_from_pinned(stream, &self.own_on_host)?;
        (self.all_gather)(stream, self.own.view(), lend(&self.all))?;
        self.all.copy_to_pinned(stream, &mut self.all_on_host)?;
        self.told = Some(stream.record()?);
        Ok(true)
    }

    /// Compares the orders, once, if they are there.
    ///
    /// # Errors
    /// [`Error::Mismatch`], with the first rank of another order.
    pub fn compare(&mut self) -> Result<()> {
        if self.told.as_ref().map(Event::is_done).transpose()? != Some(true) {
            return Ok(());
        }
        self.told = None;
        // The event is after the copy, and the stream may hold more, which waits for other ranks.
        self.all_on_host.forget_uses();
        let orders: Vec<_> = self.all_on_host.as_slice()?.chunks(self.names.len().max(1)).collect();
        let own = orders[self.rank.index() as usize];
        let Some((other, order)) = self.world.ranks().zip(&orders).find(|(_, order)| **order != own) else { return Ok(()) };
        let words = |order: &[u32]| {
            let names = order.iter().filter_map(|weight| self.names.get(*weight as usize).map(String::as_str));
            format!("gradients, scattered in the order {}", names.collect::<Vec<_>>().join(", "))
        };
        Err(Error::Mismatch {
            group: "the gradients' first step".to_owned(),
            sequence: 0,
            rank: self.rank,
            found: words(own),
            other,
            expected: words(order),
        })
    }
}
