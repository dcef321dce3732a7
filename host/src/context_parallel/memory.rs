//! Memory that the operations of a pass use in turn.

use std::ops::{Deref, Range};
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::launch::{BufferAccess, DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use crate::runtime::backend::{Copy, CopyRows, Direction};
use crate::runtime::module::enqueue;
use crate::runtime::module::fill;
pub(super) use crate::runtime::module::{note, zero};
use crate::runtime::{Buffer, Error, HostElement, Result, Stream};
use crate::symmetric::{Arena, SymmetricBuffer};

/// A buffer that several bound operations read and write, in the order in which they are enqueued: the runtime orders the uses of its memory on all
/// streams.
pub(super) struct Scratch<T>(Buffer<T>);

impl<T: Pod> Scratch<T> {
    pub fn new(stream: &Stream, name: &str, len: u64) -> Result<Self> {
        Buffer::named(stream, name, len).map(Self)
    }

    pub fn of(buffer: Buffer<T>) -> Self {
        Self(buffer)
    }

    pub fn len(&self) -> u64 {
        self.0.len()
    }

    pub fn view(&self) -> DeviceView<'_, T> {
        self.0.view()
    }

    pub fn part(&self, Range { start, end }: Range<u64>) -> DeviceView<'_, T> {
        self.0.view().slice(start, end)
    }

    /// All elements, to be written by one operation of a pass.
    pub fn lend(&self) -> DeviceViewMut<'_, T> {
        let access = self.0.view().access("scratch");
        // SAFETY: an address, a length and an owner of a live buffer. Other views of it exist, all of this module's operations. No operation gets two
        // views of which one is written that share elements; operations are enqueued one after another, under the lock of their `ContextParallel`, and
        // the runtime orders their work by the uses of the memory. The host does not read it.
        unsafe { DeviceViewMut::from_raw(access.address, self.0.len(), access.owner) }
    }

    /// Some of them.
    pub fn lend_part(&self, Range { start, end }: Range<u64>) -> DeviceViewMut<'_, T> {
        let (_, rest) = self.lend().split_at(start);
        rest.split_at(end - start).0
    }

    /// Its elements, for the host, which waits.
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>>
    where
        T: HostElement<Device = T>,
    {
        self.0.to_vec(stream)
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.len() * size_of::<T>() as u64
    }

    /// The memory as an argument of work, for [`note`].
    pub fn access(&self, writes: bool) -> BufferAccess<'_> {
        if writes { self.lend().access("scratch") } else { self.0.view().access("scratch") }
    }

    /// Fills it with zero bytes, in stream order.
    pub fn zero(&self, stream: &Stream) -> Result<()> {
        zero(stream, self.lend())
    }

    /// Fills it with NaN, in stream order.
    pub fn spoil(&self, stream: &Stream) -> Result<()> {
        spoil(stream, self.lend())
    }
}

/// Such a buffer that other ranks may write too, if it is of an arena.
pub(super) struct Place<T> {
    memory: Scratch<T>,
    symmetric: Option<SymmetricBuffer<T>>,
}

impl<T: Pod> Place<T> {
    /// Takes it from the arena, if there is one.
    pub fn new(stream: &Stream, arena: Option<&Arena>, name: &str, len: u64) -> Result<Self> {
        let Some(arena) = arena else { return Ok(Self { memory: Scratch::new(stream, name, len)?, symmetric: None }) };
        let symmetric = arena.buffer(len)?;
        let local: &Buffer<T> = symmetric.local();
        // SAFETY: the same elements; the runtime is told of the uses of either as of one.
        let memory = Scratch::of(unsafe { Buffer::of(Arc::clone(local.memory()), len) });
        Ok(Self { memory, symmetric: Some(symmetric) })
    }

    /// Every rank's, if it is of an arena.
    pub fn symmetric(&self) -> Option<&SymmetricBuffer<T>> {
        self.symmetric.as_ref()
    }
}

impl<T> Deref for Place<T> {
    type Target = Scratch<T>;

    fn deref(&self) -> &Scratch<T> {
        &self.memory
    }
}

/// Fills a view with NaN, in stream order: of every type of 16 and 32 bits that is all ones.
#[track_caller]
pub(super) fn spoil<T>(stream: &Stream, view: DeviceViewMut<'_, T>) -> Result<()> {
    fill(stream, view, u8::MAX)
}

/// The bytes of a view.
pub(super) fn bytes<T>(view: DeviceView<'_, T>) -> DeviceView<'_, u8> {
    let access = view.access("bytes");
    // SAFETY: the same memory, for the same owner.
    unsafe { DeviceView::from_raw(access.address, access.bytes, access.owner) }
}

/// The bytes of a view that is written.
pub(super) fn bytes_mut<T>(view: DeviceViewMut<'_, T>) -> DeviceViewMut<'_, u8> {
    let access = view.access("bytes");
    // SAFETY: the same memory, for the same owner; the view was given up.
    unsafe { DeviceViewMut::from_raw(access.address, access.bytes, access.owner) }
}

/// The first elements of a view, for one more launch of the pass that has it.
pub(super) fn again<'a, T>(view: &DeviceViewMut<'a, T>, len: u64) -> DeviceViewMut<'a, T> {
    let access = view.access("out");
    assert!(len * size_of::<T>() as u64 <= access.bytes, "{len} elements of {} bytes", access.bytes);
    // SAFETY: elements of the view, as was checked, for the same owner and as long as it is borrowed. The pass keeps the view and gives it to nothing that is enqueued beside its
    // launches, which are enqueued one after another on one stream; the host does not read it.
    unsafe { DeviceViewMut::from_raw(access.address, len, access.owner) }
}

/// Copies elements of one device, in stream order.
#[track_caller]
pub(super) fn copy<T>(stream: &Stream, source: DeviceView<'_, T>, target: DeviceViewMut<'_, T>) -> Result<()> {
    Error::check_length("ContextParallel, a copy", source.len(), target.len())?;
    let (source, target, caller) = (source.access("source"), target.access("target"), Location::caller());
    let (direction, bytes, rows) = (Direction::DeviceToDevice, source.bytes, CopyRows::ONE);
    let copy = Copy { direction, target: target.address, source: source.address, bytes, rows, caller };
    enqueue(stream, "copy", &[source, target], |id| if bytes == 0 { Ok(()) } else { stream.0.runtime.backend.copy(id, copy) })
}
