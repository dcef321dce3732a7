//! Device memory as the host lends it to a kernel.

use core::any::Any;
use core::marker::PhantomData;

use super::parameter_name::ParameterName;
use crate::layout::Linear;
use crate::num::Pod;

/// The memory behind a view: an opaque cell of the runtime that lent it.
pub type Owner<'a> = &'a (dyn Any + Send + Sync);

/// How a kernel uses one buffer.
#[derive(Clone, Copy)]
pub struct BufferAccess<'a> {
    /// The parameter's name.
    pub parameter: ParameterName,
    /// The runtime's cell for the buffer.
    pub owner: Owner<'a>,
    /// The first byte.
    pub address: u64,
    /// Bytes from there.
    pub bytes: u64,
    /// Whether the kernel may write it.
    pub writes: bool,
    /// How other streams use it while the kernel runs.
    pub meanwhile: Meanwhile,
}

/// How other streams use memory while a kernel that has it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// Not at all: they come before it or after it.
    Nothing,
    /// As flags: words that the kernel polls, or sets, at system scope alone, and that order it with other streams.
    Flags,
    /// As [slots](crate::slots): words that the kernel polls, or stores, at system scope alone, and that are data themselves.
    Slots,
}

/// Device memory lent to a kernel for reading. Not dereferenceable on the host.
pub struct DeviceView<'a, T> {
    address: u64,
    length: u64,
    owner: Owner<'a>,
    element: PhantomData<fn() -> T>,
}

/// Device memory lent to a kernel for reading and writing.
pub struct DeviceViewMut<'a, T>(DeviceView<'a, T>);

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceView<'_, T> {}

impl<'a, T> DeviceView<'a, T> {
    /// Lends `length` elements at `address`. Runtimes call this; users get views from buffers.
    ///
    /// # Safety
    /// `address` is aligned for `T` and the memory lives as long as `owner`, on every device that runs kernels on it.
    pub const unsafe fn from_raw(address: u64, length: u64, owner: Owner<'a>) -> Self {
        Self { address, length, owner, element: PhantomData }
    }

    /// The device address of the first element.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// How many elements.
    pub const fn len(&self) -> u64 {
        self.length
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Elements `start..end`.
    ///
    /// # Panics
    /// If the range leaves the view.
    #[track_caller]
    pub const fn slice(&self, start: u64, end: u64) -> Self {
        assert!(start <= end && end <= self.length, "the range leaves the device view");
        Self { address: self.address + start * size_of::<T>() as u64, length: end - start, owner: self.owner, element: PhantomData }
    }

    /// The same bytes as elements `U`.
    ///
    /// # Panics
    /// If they are no whole number of those, or not aligned for them.
    #[track_caller]
    pub const fn cast<U: Pod>(self) -> DeviceView<'a, U> {
        let (bytes, size) = (self.length * size_of::<T>() as u64, size_of::<U>() as u64);
        assert!(size > 0 && bytes.is_multiple_of(size), "the bytes of the device view are no whole number of elements");
        assert!(self.address.is_multiple_of(align_of::<U>() as u64), "the device view is not aligned for the elements");
        DeviceView { address: self.address, length: bytes / size, owner: self.owner, element: PhantomData }
    }

    /// What a kernel that takes this view as `parameter` does with the memory.
    pub const fn access(&self, parameter: &'static str) -> BufferAccess<'a> {
        self.access_as(ParameterName::new(parameter))
    }

    pub(super) const fn access_as(&self, parameter: ParameterName) -> BufferAccess<'a> {
        let bytes = self.length * size_of::<T>() as u64;
        BufferAccess { parameter, owner: self.owner, address: self.address, bytes, writes: false, meanwhile: Meanwhile::Nothing }
    }
}

impl<'a, T> DeviceViewMut<'a, T> {
    /// Lends `length` elements at `address`. Runtimes call this; users get views from buffers.
    ///
    /// # Safety
    /// As [`DeviceView::from_raw`], and no other view of this memory exists while this one does.
    pub const unsafe fn from_raw(address: u64, length: u64, owner: Owner<'a>) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { DeviceView::from_raw(address, length, owner) })
    }

    /// The same memory for reading only; this view cannot be used meanwhile.
    pub const fn as_view(&self) -> DeviceView<'_, T> {
        self.0
    }

    /// All elements; this view cannot be used meanwhile.
    pub const fn reborrow(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut(self.0)
    }

    /// Elements `start..end`; this view cannot be used meanwhile.
    ///
    /// # Panics
    /// If the range leaves the view.
    #[track_caller]
    pub const fn slice_mut(&mut self, start: u64, end: u64) -> DeviceViewMut<'_, T> {
        DeviceViewMut(self.0.slice(start, end))
    }

    /// The elements before `at`, and those from there on.
    ///
    /// # Panics
    /// If there are fewer.
    #[track_caller]
    pub const fn split_at(self, at: u64) -> (Self, Self) {
        (Self(self.0.slice(0, at)), Self(self.0.slice(at, self.0.length)))
    }

    /// The same bytes as elements `U`.
    ///
    /// # Panics
    /// As [`DeviceView::cast`].
    #[track_caller]
    pub const fn cast<U: Pod>(self) -> DeviceViewMut<'a, U> {
        DeviceViewMut(self.0.cast())
    }

    /// What a kernel that takes this view as `parameter` does with the memory.
    pub const fn access(&self, parameter: &'static str) -> BufferAccess<'a> {
        self.access_as(ParameterName::new(parameter))
    }

    pub(super) const fn access_as(&self, parameter: ParameterName) -> BufferAccess<'a> {
        BufferAccess { writes: true, ..self.0.access_as(parameter) }
    }

    /// The device address of the first element.
    pub const fn address(&self) -> u64 {
        self.0.address
    }

    /// How many elements.
    pub const fn len(&self) -> u64 {
        self.0.length
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.length == 0
    }
}

/// Flags lent to a kernel, which polls or sets them; other streams may do so at the same time.
#[derive(Clone, Copy)]
pub struct DeviceFlags<'a>(DeviceView<'a, u64>);

impl<'a> DeviceFlags<'a> {
    /// Lends these words as flags. Runtimes call this.
    ///
    /// # Safety
    /// Work on other streams uses these words as signals alone, as long as a kernel has them.
    pub const unsafe fn new(words: DeviceView<'a, u64>) -> Self {
        Self(words)
    }
}

/// [Slots](crate::slots::Slots) lent to a kernel, which receives what other devices store in them at the same time.
pub struct DeviceSlots<'a, T>(DeviceView<'a, T>);

impl<T> Clone for DeviceSlots<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlots<'_, T> {}

impl<'a, T> DeviceSlots<'a, T> {
    /// Lends these elements as slots. Runtimes call this.
    ///
    /// # Safety
    /// Work on other streams uses them as slots alone, as long as a kernel has them; all bits of each are set before the first use.
    pub const unsafe fn new(elements: DeviceView<'a, T>) -> Self {
        Self(elements)
    }
}

/// Views that other streams use while a kernel has them.
macro_rules! used_meanwhile {
    ([$($generics:tt)*] $view:ty { $($field:ident: $value:expr),* }) => {
        impl<$($generics)*> $view {
            /// The device address of the first element.
            pub const fn address(&self) -> u64 {
                self.0.address
            }

            /// How many elements.
            pub const fn len(&self) -> u64 {
                self.0.length
            }

            /// Whether there are none.
            pub const fn is_empty(&self) -> bool {
                self.0.is_empty()
            }

            /// What a kernel that takes them as `parameter` does with the memory.
            pub const fn access(&self, parameter: &'static str) -> BufferAccess<'a> {
                self.access_as(ParameterName::new(parameter))
            }

            pub(super) const fn access_as(&self, parameter: ParameterName) -> BufferAccess<'a> {
                BufferAccess { $($field: $value,)* ..self.0.access_as(parameter) }
            }
        }
    };
}

used_meanwhile!(['a] DeviceFlags<'a> { meanwhile: Meanwhile::Flags });
used_meanwhile!(['a, T] DeviceSlots<'a, T> { meanwhile: Meanwhile::Slots, writes: true });

/// A table of views in device memory, lent to a kernel for reading.
pub struct DeviceTable<'a, T> {
    entries: DeviceView<'a, u64>,
    members: &'a [BufferAccess<'a>],
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for DeviceTable<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceTable<'_, T> {}

impl<'a, T> DeviceTable<'a, T> {
    /// The device address of the table.
    pub const fn address(&self) -> u64 {
        self.entries.address
    }

    pub(super) fn accesses(&self, parameter: ParameterName, visit: &mut dyn FnMut(BufferAccess<'a>)) {
        visit(self.entries.access_as(parameter));
        for member in self.members {
            visit(BufferAccess { parameter, ..*member });
        }
    }

    /// Lends a table: `entries` holds address and length of each view, `members` the memory behind them.
    /// Runtimes call this.
    ///
    /// # Safety
    /// Each entry is a view of `T` that one of `members` covers, as [`DeviceView::from_raw`] demands.
    pub const unsafe fn from_raw(entries: DeviceView<'a, u64>, members: &'a [BufferAccess<'a>]) -> Self {
        Self { entries, members, element: PhantomData }
    }

    /// How many views.
    pub const fn len(&self) -> u64 {
        self.entries.length / 2
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// An encoded tensor map in device memory, lent to a kernel for reading the matrix behind it.
pub struct DeviceTensorMap<'a, T, const ROWS: usize, const COLUMNS: usize, S = Linear, const RANK: usize = 2> {
    map: BufferAccess<'a>,
    matrix: BufferAccess<'a>,
    element: PhantomData<fn() -> (T, S)>,
}

/// An encoded tensor map in device memory, lent to a kernel for writing the matrix behind it.
pub struct DeviceTensorMapMut<'a, T, const ROWS: usize, const COLUMNS: usize, S = Linear, const RANK: usize = 2>(
    DeviceTensorMap<'a, T, ROWS, COLUMNS, S, RANK>,
);

impl<'a, T, const ROWS: usize, const COLUMNS: usize, S, const RANK: usize> DeviceTensorMap<'a, T, ROWS, COLUMNS, S, RANK> {
    /// Lends the map at `map`, of boxes of `ROWS` by `COLUMNS` of the matrix of `T` at `matrix`. Runtimes call this.
    ///
    /// # Safety
    /// The map was encoded for that memory and such boxes, and lies at a multiple of 64.
    pub const unsafe fn from_raw(map: BufferAccess<'a>, matrix: BufferAccess<'a>) -> Self {
        Self { map, matrix, element: PhantomData }
    }

    /// The device address of the encoded map.
    pub const fn address(&self) -> u64 {
        self.map.address
    }

    pub(super) fn accesses(&self, parameter: ParameterName, writes: bool, visit: &mut dyn FnMut(BufferAccess<'a>)) {
        visit(BufferAccess { parameter, writes: false, ..self.map });
        visit(BufferAccess { parameter, writes, ..self.matrix });
    }
}

impl<'a, T, const ROWS: usize, const COLUMNS: usize, S, const RANK: usize> DeviceTensorMapMut<'a, T, ROWS, COLUMNS, S, RANK> {
    pub(super) const fn as_map(&self) -> &DeviceTensorMap<'a, T, ROWS, COLUMNS, S, RANK> {
        &self.0
    }

    /// As [`DeviceTensorMap::from_raw`]. Runtimes call this.
    ///
    /// # Safety
    /// As [`DeviceTensorMap::from_raw`], and no view of the matrix exists while this does.
    pub const unsafe fn from_raw(map: BufferAccess<'a>, matrix: BufferAccess<'a>) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { DeviceTensorMap::from_raw(map, matrix) })
    }
}
