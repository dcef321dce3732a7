//! Views of memory that the operations of a chain use in turn.

use oxtile_tile::launch::{BufferAccess, DeviceViewMut};
use oxtile_tile::num::Pod;

use crate::runtime::Buffer;

/// A buffer, to be written by one piece of work.
pub(super) fn lend<T: Pod>(buffer: &Buffer<T>) -> DeviceViewMut<'_, T> {
    lend_first(buffer, buffer.len())
}

/// A buffer's first elements, to be written by one piece of work.
pub(super) fn lend_first<T: Pod>(buffer: &Buffer<T>, len: u64) -> DeviceViewMut<'_, T> {
    debug_assert!(len <= buffer.len(), "{len} elements of {}", buffer.len());
    let access = buffer.view().access("weights");
    // SAFETY: an address, a length and an owner of a live buffer. Other views of it exist, in operations and with callers, which name the weight whose turn it is. No piece of work
    // takes two views of which one is written that share elements, the host reads through none of them, and the runtime orders the devices' work by the uses of the memory.
    unsafe { DeviceViewMut::from_raw(access.address, len, access.owner) }
}

/// The memory of a buffer as an argument of work that writes it.
pub(super) fn write_access(buffer: &Buffer<u8>) -> BufferAccess<'_> {
    lend(buffer).access("weights")
}
