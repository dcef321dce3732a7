//! Slices of cudarc as buffers of Oxtile, and the events at both ends of a loan.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaStream, SyncOnDrop};
use oxtile::num::Pod;
use oxtile::{Buffer, HostElement, PinnedBuffer, Stream};
use oxtile_tile::launch::DeviceViewMut;

use crate::error::{Error, Result};
use crate::on::On;
use crate::slice::sealed::Lent;
use crate::slice::{Source, Target};

/// What ends a loan when it is dropped: cudarc is told of the use, and the stream that owns the memory waits for it.
pub struct Loan<'a> {
    on: &'a On,
    /// The stream that owns the memory and frees it.
    owner: Arc<CudaStream>,
    /// Records cudarc's event of the slice on the stream of the use.
    _recorded: SyncOnDrop<'a>,
}

impl<'a> Loan<'a> {
    /// Orders the use after what the stream that owns the memory holds now, its allocation most of all, of which cudarc has no event, and after cudarc's uses. Returns the
    /// address, and the elements of `T` there.
    fn begin<H, T>(on: &'a On, slice: impl Lent<'a>) -> Result<(Self, u64, u64)> {
        let (owner, elements) = (slice.owner(), slice.count());
        on.same_context(&owner)?;
        if *owner != *on.lane {
            on.lane.join(&owner)?;
        }
        let (address, recorded) = slice.lend(&on.lane);
        let loan = Self { on, owner, _recorded: recorded };
        Ok((loan, address, count::<H, T>(address, elements)?))
    }
}

impl Drop for Loan<'_> {
    /// The memory is freed in the order of its own stream, which cudarc's event alone does not order where the context tracks none. Both ends are noted by events; the
    /// host does not wait.
    fn drop(&mut self) {
        if *self.owner != *self.on.lane {
            let context = self.owner.context();
            context.record_err(self.owner.join(&self.on.lane));
        }
    }
}

/// A slice of cudarc's that is read: a [`Buffer`].
pub struct Read<'a, T> {
    buffer: Buffer<T>,
    loan: Loan<'a>,
}

/// A slice of cudarc's that is written: a [`Buffer`], whose elements are changed by the methods here. No `&mut Buffer` of it is lent, as that could be taken out of the loan.
pub struct Write<'a, T> {
    buffer: Buffer<T>,
    loan: Loan<'a>,
}

impl On {
    /// Lends memory of cudarc to be read. Work after this comes after cudarc's earlier writes.
    ///
    /// # Errors
    /// [`Error::Lend`] if the memory is of another context; [`Error::Cudarc`].
    pub fn read<'a, H: HostElement>(&'a self, slice: impl Source<'a, H>) -> Result<Read<'a, H::Device>> {
        self.read_as(slice)
    }

    /// As [`read`](Self::read), as elements of another type, such as `e4m3` of bytes: every bit pattern is a value of both.
    ///
    /// # Errors
    /// As [`read`](Self::read), and [`Error::Lend`] if the bytes are no whole number of aligned elements.
    pub fn read_as<'a, H: HostElement, T: Pod>(&'a self, slice: impl Source<'a, H>) -> Result<Read<'a, T>> {
        let (loan, address, len) = Loan::begin::<H, T>(self, slice)?;
        // SAFETY: cudarc's memory, so many elements of it, is borrowed for as long as the loan, which outlives the buffer; work on the one stream that may use it comes after
        // earlier writes (`device_ptr`, `Loan::begin`), and what frees it waits for that work (`Loan`).
        let buffer = unsafe { Buffer::scoped(self.stream(), address, len)? };
        Ok(Read { buffer, loan })
    }

    /// Lends memory of cudarc to be written, or read and written. Work after this comes after cudarc's earlier reads and writes.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write<'a, H: HostElement>(&'a self, slice: impl Target<'a, H>) -> Result<Write<'a, H::Device>> {
        self.write_as(slice)
    }

    /// As [`write`](Self::write), as elements of another type.
    ///
    /// # Errors
    /// As [`read_as`](Self::read_as).
    pub fn write_as<'a, H: HostElement, T: Pod>(&'a self, slice: impl Target<'a, H>) -> Result<Write<'a, T>> {
        let (loan, address, len) = Loan::begin::<H, T>(self, slice)?;
        // SAFETY: as in `read_as`; the exclusive borrow of the slice is the buffer's.
        let buffer = unsafe { Buffer::scoped(self.stream(), address, len)? };
        Ok(Write { buffer, loan })
    }
}

/// How many elements of `T` lie in so many of `H`.
fn count<H, T>(address: u64, elements: usize) -> Result<u64> {
    let (bytes, size) = ((elements * size_of::<H>()) as u64, size_of::<T>() as u64);
    if !bytes.is_multiple_of(size) || (bytes > 0 && !address.is_multiple_of(align_of::<T>() as u64)) {
        return Err(Error::Lend(format!("the slice has {bytes} bytes at {address:#x}: they are no elements of {size} bytes")));
    }
    Ok(bytes / size)
}

impl<'a, T> Read<'a, T> {
    /// The buffer and its loan, for structs of Oxtile's that own buffers.
    ///
    /// # Safety
    /// No work is enqueued on the buffer after the loan was dropped, and none that writes.
    pub unsafe fn into_parts(self) -> (Buffer<T>, Loan<'a>) {
        (self.buffer, self.loan)
    }
}

impl<'a, T> Write<'a, T> {
    /// The buffer and its loan, for structs of Oxtile's that own buffers.
    ///
    /// # Safety
    /// No work is enqueued on the buffer after the loan was dropped.
    pub unsafe fn into_parts(self) -> (Buffer<T>, Loan<'a>) {
        (self.buffer, self.loan)
    }
}

impl<T> Deref for Read<'_, T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        &self.buffer
    }
}

impl<T> Deref for Write<'_, T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        &self.buffer
    }
}

impl<T: Pod> Write<'_, T> {
    /// As [`Buffer::view_mut`].
    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        self.buffer.view_mut()
    }

    /// As [`Buffer::fill_zero`].
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn fill_zero(&mut self, stream: &Stream) -> oxtile::Result<()> {
        self.buffer.fill_zero(stream)
    }

    /// As [`Buffer::copy_from`].
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn copy_from(&mut self, stream: &Stream, source: &Buffer<T>) -> oxtile::Result<()> {
        self.buffer.copy_from(stream, source)
    }

    /// As [`Buffer::copy_from_slice`].
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn copy_from_slice<H: HostElement<Device = T>>(&mut self, stream: &Stream, slice: &[H]) -> oxtile::Result<()> {
        self.buffer.copy_from_slice(stream, slice)
    }

    /// As [`Buffer::copy_from_pinned`].
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn copy_from_pinned<H: HostElement<Device = T>>(&mut self, stream: &Stream, source: &PinnedBuffer<H>) -> oxtile::Result<()> {
        self.buffer.copy_from_pinned(stream, source)
    }
}

impl<T> fmt::Debug for Read<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Read").field(&self.buffer).finish()
    }
}

impl<T> fmt::Debug for Write<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Write").field(&self.buffer).finish()
    }
}

impl fmt::Debug for Loan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_whole_and_aligned() {
        assert_eq!(count::<u8, f32>(0x100, 12).unwrap(), 3);
        assert_eq!(count::<u8, f32>(0x101, 0).unwrap(), 0);
        for (address, bytes) in [(0x100, 13), (0x102, 12)] {
            let refused = count::<u8, f32>(address, bytes).unwrap_err().to_string();
            assert!(refused.contains("no elements of 4 bytes"), "{refused}");
        }
    }
}
