//! Views of memory that the operations of a chain use in turn.

use oxtile_tile::launch::{BufferAccess, DeviceViewMut};
use oxtile_tile::num::Pod;

use crate::runtime::Buffer;

/// A buffer, to be written by one piece of work that is enqueued before this returns to the caller of the set or of the chain.
pub(super) fn lend<T: Pod>(buffer: &Buffer<T>) -> DeviceViewMut<'_, T> {
    let access = buffer.view().access("weights");
    // SAFETY: an address, a length and an owner of a live buffer. Work is enqueued one piece after another, none takes two views of which one is written that share
    // elements, and the runtime orders the work by the uses of the memory. A tensor is lent to a caller only until the next one takes its memory: `Gathered` borrows the pass.
    unsafe { DeviceViewMut::from_raw(access.address, buffer.len(), access.owner) }
}

/// The memory of a buffer as an argument of work that writes it.
pub(super) fn write_access(buffer: &Buffer<u8>) -> BufferAccess<'_> {
    lend(buffer).access("weights")
}
