//! How parts of gradients come from all ranks to the owner of their rows.

use oxtile_tile::launch::DeviceView;

use super::layout::Layout;
use crate::runtime::{Buffer, Result, Stream};

/// Whose parts a slot has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Has {
    All,
    Others,
}

/// Slots of an owner, which weights take in turn, and the way in which parts get there. In each slot, every rank that sends has a part of its own.
pub(super) trait Link<E>: Send {
    /// Bytes of all slots.
    fn bytes(&self) -> u64;

    /// Compares what the members make, and opens the slots, once. May wait for the others.
    fn open(&mut self, stream: &Stream, what: &str) -> Result<()>;

    /// Tells the others the order of a step, by the weights' numbers and in words, where that is compared. Does not wait. Returns whether that was done.
    fn declare_order(&mut self, stream: &Stream, order: &[usize], words: String) -> Result<bool>;

    /// Sends the rows of the other members to them, after all that has used the buffer and their slots.
    fn send(&mut self, stream: &Stream, slot: usize, layout: &Layout, whole: &Buffer<E>) -> Result<()>;

    /// Later work of the stream comes after what this rank has enqueued on the slot so far.
    fn note(&self, stream: &Stream, slot: usize) -> Result<()>;

    /// Later work of the stream may read the parts of all members.
    fn accept(&self, stream: &Stream, slot: usize) -> Result<()>;

    /// The parts of this rank's rows, and whether those are the parts of all members, or of the others alone: then this rank's own is in its whole gradient.
    fn parts(&self, slot: usize, layout: &Layout) -> (DeviceView<'_, E>, Has);

    /// The others may write again what the earlier work of the stream has read.
    fn release(&mut self, stream: &Stream, slot: usize, layout: &Layout) -> Result<()>;
}
