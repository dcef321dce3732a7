//! Ranges of addresses that allocations are placed in.

use crate::shadow::ALLOCATED;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// What allocations begin at multiples of.
pub(crate) const ALIGNMENT: usize = ALLOCATED as usize;

/// A range of addresses set aside, as by `cuMemAddressReserve`: what lies between the allocations in it belongs to none of them. It is there as long
/// as a handle or an allocation in it.
pub struct Reservation {
    words: NonNull<AtomicU64>,
    layout: Layout,
}

// SAFETY: `words` points at atomics owned by this range, freed only when the last owner drops it.
unsafe impl Send for Reservation {}
// SAFETY: as above; all access to the words is atomic.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// A range of so many bytes, rounded up to 256.
    pub fn new(bytes: u64) -> Arc<Self> {
        let size = usize::try_from(bytes.max(1)).expect("a range fits the address space");
        let layout = Layout::from_size_align(size.next_multiple_of(ALIGNMENT), ALIGNMENT).expect("a size below isize::MAX");
        // SAFETY: the layout's size is not zero.
        let Some(words) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        Arc::new(Self { words: words.cast(), layout })
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.words.as_ptr().expose_provenance() as u64
    }

    /// The words from a byte offset on, if so many bytes lie inside.
    pub(crate) fn words_at(&self, offset: u64, bytes: u64) -> Option<(NonNull<AtomicU64>, Layout)> {
        // One of no bytes has a word too.
        let end = offset.checked_add(bytes.max(1))?;
        let is_inside = end <= self.layout.size() as u64 && offset.is_multiple_of(ALIGNMENT as u64);
        let layout = Layout::from_size_align((bytes.max(1) as usize).next_multiple_of(ALIGNMENT), ALIGNMENT).ok()?;
        // SAFETY: the offset is inside of the range, at a multiple of 256.
        is_inside.then(|| (unsafe { self.words.byte_add(offset as usize) }, layout))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; nothing else owns it.
        unsafe { dealloc(self.words.as_ptr().cast(), self.layout) }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("address", &self.address()).field("bytes", &self.layout.size()).finish()
    }
}
