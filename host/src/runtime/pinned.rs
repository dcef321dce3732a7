//! Page-locked host memory: the only host memory that copies reach without waiting.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::element::{HostElement, byte_count};
use super::error::Result;
use super::memory::Memory;
use super::stream::Stream;

/// `len` elements in page-locked memory of the host.
///
/// The host reaches them through [`as_slice`](Self::as_slice) and [`as_mut_slice`](Self::as_mut_slice), which first
/// wait for the copies that are under way. Like a [`Buffer`](super::Buffer) it may be dropped at any time.
pub struct PinnedBuffer<H> {
    memory: Arc<Memory>,
    len: usize,
    element: PhantomData<H>,
}

impl<H: HostElement> PinnedBuffer<H> {
    /// Allocates `len` zeros, in reach of the stream's device.
    ///
    /// # Errors
    /// Out of memory, [`Error::TooLarge`](super::Error::TooLarge), [`Error::NotCapturable`](super::Error::NotCapturable) during a capture.
    pub fn zeros(stream: &Stream, len: usize) -> Result<Self> {
        stream.0.refuse_capture("allocating page-locked memory", "allocate it before the capture and keep it for the replays")?;
        let bytes = byte_count::<H>("PinnedBuffer", len as u64)?;
        let address = if bytes == 0 { 0 } else { stream.0.runtime.backend.allocate_host(stream.0.id.device, bytes)? };
        if let (Ok(start), Ok(bytes)) = (usize::try_from(address), usize::try_from(bytes))
            && bytes != 0
        {
            // SAFETY: the back end just allocated so many bytes there, and nothing else knows of them.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start).write_bytes(0, bytes) };
        }
        let memory = Memory::on_host(&stream.0, address, bytes);
        Ok(Self { memory, len, element: PhantomData })
    }

    /// Allocates and copies a slice.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros).
    pub fn from_slice(stream: &Stream, slice: &[H]) -> Result<Self> {
        let mut buffer = Self::zeros(stream, slice.len())?;
        buffer.slice_mut().copy_from_slice(slice);
        Ok(buffer)
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, once the copies into them are done: waits for those.
    ///
    /// # Errors
    /// What went wrong in that work.
    pub fn as_slice(&self) -> Result<&[H]> {
        self.memory.wait_on_host(false)?;
        // SAFETY: see `slice_mut`; what may still be under way only reads.
        Ok(unsafe { std::slice::from_raw_parts(self.pointer(), self.len) })
    }

    /// The elements, once all copies from and into them are done: waits for those.
    ///
    /// # Errors
    /// What went wrong in that work.
    pub fn as_mut_slice(&mut self) -> Result<&mut [H]> {
        self.memory.wait_on_host(true)?;
        Ok(self.slice_mut())
    }

    fn slice_mut(&mut self) -> &mut [H] {
        // SAFETY: the memory holds `len` elements, zeroed when it was allocated and of a type of which every bit pattern
        // is a value; the borrow of `self` is exclusive, and no device work is under way (the callers waited, or it is new).
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.len) }
    }

    fn pointer(&self) -> *mut H {
        if self.len == 0 || self.memory.bytes == 0 {
            return std::ptr::NonNull::dangling().as_ptr();
        }
        std::ptr::with_exposed_provenance_mut(self.memory.address as usize)
    }

    /// Forgets the uses, after which all later reads of the host come already.
    pub(crate) fn forget_uses(&self) {
        self.memory.forget_uses();
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl<H> fmt::Debug for PinnedBuffer<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}
