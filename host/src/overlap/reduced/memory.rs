//! The memory in which complete sums arrive, and that of small sums.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use oxtile_tile::num::Pod;

use super::mailbox::Mailbox;
use crate::overlap::memory::OverlapMemory;
use crate::runtime::runtime::lock;
use crate::runtime::{Buffer, Error, Result};
use crate::symmetric::{Flags, SymmetricBuffer};

/// Memory of an arena for the results of [`GemmAllReduce`](super::GemmAllReduce), over an [`OverlapMemory`], lent to all operations of a model: one result, which each call writes, and a mailbox for the parts of small
/// sums. A cheap handle.
///
/// A result stays until the next call of an operation on the memory. What reads it on the stream of the calls, or on a stream that is ordered after it, comes before that call.
#[derive(Clone)]
pub struct AllReduceMemory(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub parts: OverlapMemory,
    bytes: u64,
    result: Mutex<SymmetricBuffer<u8>>,
    /// Set by a rank after all of its finished rows were put.
    pub rows: Flags,
    pub mailbox: Mailbox,
}

impl AllReduceMemory {
    /// Takes the result of the largest operation, of `bytes` bytes, and a mailbox from the arena of `parts`, for each rank of the world of about twice as many bytes, counting 256 KiB at most, and at least 64 KiB (on devices of fewer than 32 multiprocessors more); and 2 signal channels. Every rank takes as much, in one order with all else, also one of another
    /// team.
    ///
    /// [`AllReduceConfig::result_bytes`](super::AllReduceConfig::result_bytes) states how many bytes a product needs: take the most of all layers.
    ///
    /// # Errors
    /// As [`Arena::buffer`](crate::symmetric::Arena::buffer) and [`Arena::flags`](crate::symmetric::Arena::flags); ranks that do not come.
    pub fn take(parts: &OverlapMemory, bytes: u64) -> Result<Self> {
        let inner = &parts.0;
        let result = Mutex::new(inner.arena.buffer(bytes)?);
        let rows = inner.arena.flags("finished rows", 1)?;
        let mailbox = Mailbox::take(inner, bytes)?;
        Ok(Self(Arc::new(Inner { parts: parts.clone(), bytes, result, rows, mailbox })))
    }

    /// The bytes of the result.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Where parts of sums arrive.
    pub fn parts(&self) -> &OverlapMemory {
        &self.0.parts
    }

    /// Fails unless a result of so many bytes fits.
    pub(super) fn check_room(&self, what: &'static str, needed: u64) -> Result<()> {
        if needed <= self.bytes() {
            return Ok(());
        }
        let why = format!("a result of {needed} bytes for a memory of {}: take the most of all layers", self.bytes());
        Err(Error::Invalid { what, why })
    }
}

impl Inner {
    pub fn result(&self) -> MutexGuard<'_, SymmetricBuffer<u8>> {
        lock(&self.result)
    }

    /// The first elements of the result, which share its uses.
    pub fn elements<T: Pod>(&self, len: u64) -> Buffer<T> {
        let memory = Arc::clone(self.result().local().memory());
        // SAFETY: so many elements of any bits lie there, as `check_room` found; buffers of arenas are aligned to 256 bytes.
        unsafe { Buffer::of(memory, len) }
    }

    /// Elements of the result, from number `first` of them on, whose uses are told apart from those of the others: rows that are put while later ones are written.
    pub fn rows_of<T: Pod>(&self, first: u64, len: u64) -> Buffer<T> {
        let (size, result) = (size_of::<T>() as u64, self.result());
        let memory = result.local().memory();
        // SAFETY: so many elements of any bits lie there, as `check_room` found; `first` is a number of whole elements.
        unsafe { Buffer::of(memory.part(memory.address + first * size, len * size), len) }
    }
}

impl fmt::Debug for AllReduceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllReduceMemory").field("parts", &self.0.parts).field("bytes", &self.0.bytes).finish_non_exhaustive()
    }
}
