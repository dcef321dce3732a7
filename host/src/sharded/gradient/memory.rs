//! Memory that weights use in turn.

use oxtile_tile::launch::DeviceViewMut;
use oxtile_tile::num::Pod;

pub(super) use super::super::memory::lend;
use crate::runtime::Buffer;
pub(super) use crate::runtime::module::note;

/// Slots of an owner, and buffers of whole gradients.
pub(super) const SLOTS: usize = 2;

/// The slot and the buffer of a weight.
pub(super) fn slot_of(weight: usize) -> usize {
    weight % SLOTS
}

/// A buffer's first elements, to be written by one operation of a step.
pub(super) fn lend_first<T: Pod>(buffer: &Buffer<T>, len: u64) -> DeviceViewMut<'_, T> {
    let access = buffer.view().access("gradient");
    // SAFETY: an address, a length and an owner of a live buffer, which is that long: the largest weight was counted. Other views of it exist, in operations and with callers, who
    // name the weight whose turn it is. The host reads through none of them, and the runtime orders the devices' work by the uses of the memory.
    unsafe { DeviceViewMut::from_raw(access.address, len, access.owner) }
}
