//! Tables of many tensors for kernels that take any number of them.

use std::fmt;
use std::marker::PhantomData;

use oxtile_tile::launch::{self, BufferAccess, DeviceView};
use oxtile_tile::num::Pod;

use crate::runtime::{Buffer, HostElement, PinnedBuffer, Result, Stream};

/// A copy of `values` on the device, in stream order; the host does not wait for it.
pub(crate) fn upload<H: HostElement>(stream: &Stream, values: &[H]) -> Result<Buffer<H::Device>> {
    let mut buffer = Buffer::uninitialised(stream, values.len() as u64)?;
    buffer.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, values)?)?;
    Ok(buffer)
}

/// The addresses and lengths of many views, in device memory: one argument of a multi-tensor kernel.
///
/// It borrows the views' buffers, so that none is freed or written while the table lives. Launches order themselves
/// after earlier work on each of them.
pub struct DeviceTable<'a, T> {
    /// Address and length of each view in turn.
    entries: Buffer<u64>,
    members: Vec<BufferAccess<'a>>,
    element: PhantomData<fn() -> T>,
}

impl<'a, T: Pod> DeviceTable<'a, T> {
    /// Copies the addresses and lengths to the stream's device, in stream order.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`Buffer::copy_from_pinned`]. That the views belong to this device is checked by the launch.
    pub fn new(stream: &Stream, views: &[DeviceView<'a, T>]) -> Result<Self> {
        let words: Vec<u64> = views.iter().flat_map(|view| [view.address(), view.len()]).collect();
        let members = views.iter().map(|view| view.access("table")).collect();
        Ok(Self { entries: upload(stream, &words)?, members, element: PhantomData })
    }

    /// How many views.
    pub fn len(&self) -> u64 {
        self.members.len() as u64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Lends the table to a kernel.
    pub fn view(&self) -> launch::DeviceTable<'_, T> {
        // SAFETY: each entry was written from a view of `T`, whose buffer is borrowed for `'a` and named in `members`.
        unsafe { launch::DeviceTable::from_raw(self.entries.view(), &self.members) }
    }
}

impl<T> fmt::Debug for DeviceTable<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceTable").field("len", &self.members.len()).finish_non_exhaustive()
    }
}
