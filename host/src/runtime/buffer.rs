//! Device memory.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use oxtile_tile::num::Pod;

use super::backend::{Copy, CopyRows, Direction};
use super::device::Device;
use super::element::{HostElement, byte_count};
use super::error::{Error, Result};
use super::memory::{self, Memory, Owner, copy};
use super::module::enqueue;
use super::pinned::PinnedBuffer;
use super::runtime::Kind;
use super::stream::{Stream, StreamInner};

/// The name of a buffer that was given none.
pub(crate) const UNNAMED: &str = "buffer";

/// What keeps memory of another library alive.
struct KeptAlive(#[expect(dead_code, reason = "it is there to be dropped")] Arc<dyn Any + Send + Sync>);

/// The other library frees in stream order by itself.
impl Owner for KeptAlive {
    fn used_on(&self, _: &Arc<StreamInner>) {}
}

/// `len` elements of `T` in the memory of one device. Empty buffers are legal.
///
/// A buffer remembers the streams that used it. Use it on any stream of its device: the runtime adds the events that
/// order the uses, and none where one stream does it all. Dropping it never waits: the memory is freed after the work
/// that still uses it.
pub struct Buffer<T> {
    memory: Arc<Memory>,
    len: u64,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Buffer<T> {
    /// The reads of the host, in errors.
    const READ: &str = "Buffer::copy_to_slice";

    /// Allocates without writing anything: every element must be written before it is read. On the emulator its bytes are 255, NaN in each float
    /// format, and a checked runtime reports a read of what was not written, by a kernel or by the host.
    ///
    /// # Errors
    /// Out of memory, [`Error::TooLarge`], [`Error::NotCapturable`] during a capture.
    pub fn uninitialised(stream: &Stream, len: u64) -> Result<Self> {
        Self::named(stream, UNNAMED, len)
    }

    /// As [`uninitialised`](Self::uninitialised), with a name that reports and error texts use.
    ///
    /// # Errors
    /// As [`uninitialised`](Self::uninitialised).
    pub fn named(stream: &Stream, name: &str, len: u64) -> Result<Self> {
        stream.0.refuse_capture("allocating a buffer", "allocate it before the capture and keep it for the replays")?;
        let bytes = byte_count::<T>("Buffer", len)?;
        let address = if bytes == 0 { 0 } else { stream.0.runtime.backend.allocate(stream.0.id, name, bytes)? };
        let memory = Memory::on_device(&stream.0, address, bytes, name);
        Ok(Self { memory, len, element: PhantomData })
    }

    /// Allocates and fills with zero bytes, in stream order.
    ///
    /// # Errors
    /// As [`uninitialised`](Self::uninitialised).
    #[track_caller]
    pub fn zeros(stream: &Stream, len: u64) -> Result<Self> {
        let mut buffer = Self::uninitialised(stream, len)?;
        buffer.fill_zero(stream)?;
        Ok(buffer)
    }

    /// Allocates and copies a host slice; returns once the slice may be reused.
    ///
    /// # Errors
    /// As [`uninitialised`](Self::uninitialised) and [`copy_from_slice`](Self::copy_from_slice).
    #[track_caller]
    pub fn from_slice<H: HostElement<Device = T>>(stream: &Stream, slice: &[H]) -> Result<Self> {
        let mut buffer = Self::uninitialised(stream, slice.len() as u64)?;
        buffer.copy_from_slice(stream, slice)?;
        Ok(buffer)
    }

    /// Borrows device memory of another library.
    ///
    /// # Safety
    /// `len` elements lie at `address`, aligned for `T`, usable on `device` and there until the buffer and all work
    /// on it are done. The caller orders earlier work of the other library on them before (share the stream, or
    /// record and wait for an event).
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub unsafe fn borrow_raw(device: &Device, address: u64, len: u64) -> Result<Self> {
        let bytes = byte_count::<T>("Buffer::borrow_raw", len)?;
        let memory = Memory::borrowed(&device.runtime, device.index, address, bytes, None);
        Ok(Self { memory, len, element: PhantomData })
    }

    /// Borrows device memory of another library together with what keeps it alive: a tensor of that library, most of all. So the buffer may
    /// outlive the scope that has the tensor, and a graph keeps it for its replays.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use oxtile::{Buffer, Result, Runtime};
    ///
    /// # fn main() -> Result<()> {
    /// let stream = Runtime::checked(1)?.device(0)?.stream()?;
    /// let theirs = Arc::new(Buffer::from_slice(&stream, &[1_u32, 2, 3])?);
    /// // SAFETY: the three elements are there as long as `theirs`, whose memory is freed in stream order.
    /// let ours = unsafe { Buffer::<u32>::lent(&stream.device(), theirs.address(), 3, Arc::clone(&theirs) as _)? };
    /// drop(theirs);
    /// assert_eq!(ours.to_vec(&stream)?, [1, 2, 3]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Safety
    /// `len` elements lie at `address`, aligned for `T` and usable on `device`, for as long as `keep_alive` is not dropped. It is dropped with the
    /// last handle on the memory, on any thread, while work on it may still be under way and while the runtime holds locks: its drop takes no lock that
    /// a thread may hold which calls the runtime, and calls the runtime for nothing but to free memory. What it frees is freed in the order of one
    /// stream, on which all uses of the buffer are or which waits for them, or after a wait for them. The caller orders earlier work of the other library on the
    /// memory before, as for [`borrow_raw`](Self::borrow_raw).
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub unsafe fn lent(device: &Device, address: u64, len: u64, keep_alive: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        // SAFETY: passed on to the caller.
        unsafe { Self::of_owner(device, address, len, Arc::new(KeptAlive(keep_alive))) }
    }

    /// Device memory that its owner keeps for as long as the buffer, or a graph with work on it, is there.
    ///
    /// # Safety
    /// `len` elements lie at `address`, aligned for `T` and usable on `device`, until the owner is gone and the work on the streams that it
    /// was told of is done.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub(crate) unsafe fn of_owner(device: &Device, address: u64, len: u64, owner: Arc<dyn Owner>) -> Result<Self> {
        let bytes = byte_count::<T>("Buffer", len)?;
        let memory = Memory::borrowed(&device.runtime, device.index, address, bytes, Some(owner));
        Ok(Self { memory, len, element: PhantomData })
    }

    /// Memory that its user vouches for.
    ///
    /// # Safety
    /// `len` elements lie in it from its beginning, aligned for `T`.
    pub(crate) unsafe fn of(memory: Arc<Memory>, len: u64) -> Self {
        Self { memory, len, element: PhantomData }
    }

    /// `len` elements of `U` from byte `start` on, under the uses of all of this: what is done with any window, or with this, is ordered as uses of one memory.
    ///
    /// # Safety
    /// Nothing takes two windows that overlap, of which one is written, for one piece of work. The bytes from `start` on are aligned for `U`.
    pub(crate) unsafe fn window<U: Pod>(&self, start: u64, len: u64) -> Buffer<U> {
        let bytes = len * size_of::<U>() as u64;
        debug_assert!(start + bytes <= self.memory.bytes, "{start} and {bytes} bytes of {}", self.memory.bytes);
        Buffer { memory: self.memory.window(self.memory.address + start, bytes), len, element: PhantomData }
    }

    /// How many elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The name in reports.
    pub fn name(&self) -> &str {
        &self.memory.name
    }

    /// The device that the memory belongs to.
    pub fn device(&self) -> Device {
        Device { runtime: Arc::clone(&self.memory.runtime), index: self.memory.device }
    }

    /// The device address of the first element, to lend to another library; 0 for an empty buffer.
    pub fn address(&self) -> u64 {
        self.memory.address
    }

    /// Lends the whole buffer to kernels that read it.
    pub fn view(&self) -> DeviceView<'_, T> {
        // SAFETY: the owner keeps the memory alive; allocations are aligned to 256 bytes, and `borrow_raw` promised it.
        unsafe { DeviceView::from_raw(self.memory.address, self.len, self.owner()) }
    }

    /// The view of an operation that has the buffer itself.
    ///
    /// # Safety
    /// The buffer outlives what uses the view, and is not moved until then.
    pub(crate) unsafe fn view_within<'a>(&self) -> DeviceView<'a, T> {
        let memory = &raw const self.memory;
        // SAFETY: as in `view`; that the owner is there is promised by the caller.
        unsafe { DeviceView::from_raw(self.memory.address, self.len, &*memory) }
    }

    /// Lends the whole buffer to a kernel that writes it.
    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        // SAFETY: as in `view`; the exclusive borrow of the buffer is the exclusive view.
        unsafe { DeviceViewMut::from_raw(self.memory.address, self.len, self.owner()) }
    }

    /// The bytes of its elements: its memory may have more.
    fn bytes(&self) -> u64 {
        self.len * size_of::<T>() as u64
    }

    pub(crate) fn owner(&self) -> &(dyn Any + Send + Sync) {
        &self.memory
    }

    /// Fails unless work on the stream may use the buffer.
    pub(crate) fn check_stream(&self, stream: &Stream, what: &'static str) -> Result<()> {
        self.memory.check_stream(&stream.0, what)
    }

    /// Writes words from the beginning on, in stream order: the call takes them with it, so that neither does the host wait nor must they stay.
    #[track_caller]
    pub(crate) fn write_words(&mut self, stream: &Stream, words: &[u64]) -> Result<()> {
        self.memory.check_stream(&stream.0, "Buffer::write_words")?;
        debug_assert!(size_of_val(words) as u64 <= self.memory.bytes, "the words leave the buffer");
        let _enqueue = stream.0.runtime.enqueue();
        memory::order(&stream.0, |wait_for| self.memory.add_use(&stream.0, true, wait_for))?;
        if words.is_empty() {
            return Ok(());
        }
        stream.0.note("words", Some(Location::caller()));
        stream.0.runtime.backend.write_words(stream.0.id, self.memory.address, words, Location::caller())
    }

    /// Fills with zero bytes, in stream order.
    ///
    /// # Errors
    /// [`Error::ForeignRuntime`], [`Error::WrongDevice`], a driver error.
    #[track_caller]
    pub fn fill_zero(&mut self, stream: &Stream) -> Result<()> {
        self.memory.check_stream(&stream.0, "Buffer::fill_zero")?;
        let _enqueue = stream.0.runtime.enqueue();
        memory::order(&stream.0, |wait_for| self.memory.add_use(&stream.0, true, wait_for))?;
        if self.is_empty() {
            Ok(())
        } else {
            stream.0.note("fill", Some(Location::caller()));
            stream.0.runtime.backend.fill(stream.0.id, self.memory.address, 0, self.bytes(), Location::caller())
        }
    }

    /// Copies a host slice into the buffer. Waits for the stream: the slice may be reused at once. For a copy that
    /// does not wait use a [`PinnedBuffer`].
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::NotCapturable`], and what went wrong in earlier work of the stream.
    #[track_caller]
    pub fn copy_from_slice<H: HostElement<Device = T>>(&mut self, stream: &Stream, slice: &[H]) -> Result<()> {
        const WHAT: &str = "Buffer::copy_from_slice";
        self.check_host(stream, WHAT)?;
        self.check_len(WHAT, slice.len() as u64)?;
        let source = slice.as_ptr().expose_provenance() as u64;
        self.copy(
            stream,
            Copy {
                direction: Direction::HostToDevice,
                target: self.address(),
                source,
                bytes: self.bytes(),
                rows: CopyRows::ONE,
                caller: Location::caller(),
            },
        )
    }

    /// Copies the buffer into a host slice and waits for it.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::NotCapturable`], [`Error::Unwritten`], and what went wrong in earlier work of the stream.
    #[track_caller]
    pub fn copy_to_slice<H: HostElement<Device = T>>(&self, stream: &Stream, slice: &mut [H]) -> Result<()> {
        self.check_len(Self::READ, slice.len() as u64)?;
        self.read(stream, 0, slice)
    }

    /// The elements, on the host; waits for the stream.
    ///
    /// # Errors
    /// As [`copy_to_slice`](Self::copy_to_slice).
    #[track_caller]
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>>
    where
        T: HostElement<Device = T>,
    {
        self.to_vec_as(stream)
    }

    /// The elements as another host type of the same bits, such as [`half::bf16`]; waits for the stream.
    ///
    /// # Errors
    /// As [`copy_to_slice`](Self::copy_to_slice).
    #[track_caller]
    pub fn to_vec_as<H: HostElement<Device = T>>(&self, stream: &Stream) -> Result<Vec<H>> {
        self.part_to_vec(stream, 0..self.len)
    }

    /// As [`to_vec_as`](Self::to_vec_as), the elements of a range inside of the buffer alone.
    #[track_caller]
    pub(crate) fn part_to_vec<H: HostElement<Device = T>>(&self, stream: &Stream, part: Range<u64>) -> Result<Vec<H>> {
        let len = usize::try_from(part.end - part.start).map_err(|_| self.too_large())?;
        // SAFETY: every bit pattern is an `H` (`HostElement`, `Pod`), zero among them.
        let mut elements = vec![unsafe { std::mem::zeroed::<H>() }; len];
        self.read(stream, part.start, &mut elements)?;
        Ok(elements)
    }

    /// Copies the elements from `start` on into a host slice and waits for it. The caller has checked that the buffer has that many.
    #[track_caller]
    fn read<H: HostElement<Device = T>>(&self, stream: &Stream, start: u64, slice: &mut [H]) -> Result<()> {
        self.check_host(stream, Self::READ)?;
        let (target, element_bytes) = (slice.as_mut_ptr().expose_provenance() as u64, size_of::<T>() as u64);
        let (source, bytes) = (self.address() + start * element_bytes, slice.len() as u64 * element_bytes);
        self.copy(
            stream,
            Copy {
                direction: Direction::DeviceToHost { element_bytes },
                target,
                source,
                bytes,
                rows: CopyRows::ONE,
                caller: Location::caller(),
            },
        )
    }

    /// Copies page-locked host memory into the buffer, in stream order.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::ForeignRuntime`], [`Error::WrongDevice`], a driver error.
    #[track_caller]
    pub fn copy_from_pinned<H: HostElement<Device = T>>(&mut self, stream: &Stream, source: &PinnedBuffer<H>) -> Result<()> {
        self.check_pinned(stream, "Buffer::copy_from_pinned", source.memory(), source.len() as u64)?;
        let (target, from, bytes) = (self.address(), source.memory().address, self.bytes());
        copy(
            &stream.0,
            Copy { direction: Direction::HostToDevice, target, source: from, bytes, rows: CopyRows::ONE, caller: Location::caller() },
            Some(&self.memory),
            Some(source.memory()),
        )
    }

    /// Copies the buffer into page-locked host memory, in stream order.
    ///
    /// # Errors
    /// As [`copy_from_pinned`](Self::copy_from_pinned).
    #[track_caller]
    pub fn copy_to_pinned<H: HostElement<Device = T>>(&self, stream: &Stream, target: &mut PinnedBuffer<H>) -> Result<()> {
        self.check_pinned(stream, "Buffer::copy_to_pinned", target.memory(), target.len() as u64)?;
        let (to, source, bytes) = (target.memory().address, self.address(), self.bytes());
        copy(
            &stream.0,
            Copy {
                direction: Direction::DeviceToHost { element_bytes: size_of::<T>() as u64 },
                target: to,
                source,
                bytes,
                rows: CopyRows::ONE,
                caller: Location::caller(),
            },
            Some(target.memory()),
            Some(&self.memory),
        )
    }

    /// Copies another buffer of the same device into this one, in stream order.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::ForeignRuntime`], [`Error::WrongDevice`], a driver error.
    #[track_caller]
    pub fn copy_from(&mut self, stream: &Stream, source: &Self) -> Result<()> {
        self.check_len("Buffer::copy_from", source.len)?;
        self.copy_part(stream, source, 0)
    }

    /// Fills this buffer with elements of another one, from `start` on. The caller has checked that the other one is long enough.
    #[track_caller]
    pub(crate) fn copy_part(&mut self, stream: &Stream, source: &Self, start: u64) -> Result<()> {
        const WHAT: &str = "Buffer::copy_from";
        self.memory.check_stream(&stream.0, WHAT)?;
        source.memory.check_stream(&stream.0, WHAT)?;
        debug_assert!(start + self.len <= source.len, "the part leaves the buffer");
        let (target, from, bytes) = (self.address(), source.address() + start * size_of::<T>() as u64, self.bytes());
        copy(
            &stream.0,
            Copy { direction: Direction::DeviceToDevice, target, source: from, bytes, rows: CopyRows::ONE, caller: Location::caller() },
            Some(&self.memory),
            Some(&source.memory),
        )
    }

    /// Copies all elements to a view of as many, the parameter `name` of `what`; that there are so many, the caller knows.
    #[track_caller]
    pub(crate) fn copy_to_view(
        &self,
        stream: &Stream,
        target: &mut DeviceViewMut<'_, T>,
        what: &'static str,
        name: &'static str,
    ) -> Result<()> {
        debug_assert!(self.len == target.len(), "the view has another length");
        let (source, target) = (self.view().access("source"), target.access(name));
        let copy = Copy {
            direction: Direction::DeviceToDevice,
            target: target.address,
            source: source.address,
            bytes: source.bytes,
            rows: CopyRows::ONE,
            caller: Location::caller(),
        };
        enqueue(stream, what, &[source, target], |id| if copy.bytes == 0 { Ok(()) } else { stream.0.runtime.backend.copy(id, copy) })
    }

    /// Copies between the buffer and pageable host memory, and waits.
    ///
    /// The driver copies pageable memory inside the call, where copies of other threads wait for it. So earlier work is waited for
    /// first: it may be the signal of a rank that one of those threads is.
    fn copy(&self, stream: &Stream, bytes: Copy) -> Result<()> {
        let writes = bytes.direction == Direction::HostToDevice;
        let (target, source) = if writes { (Some(&self.memory), None) } else { (None, Some(&self.memory)) };
        let runtime = &stream.0.runtime;
        if runtime.kind() == Kind::Cuda || runtime.deadline.is_some() || !stream.0.watchers.present().is_empty() {
            memory::order(&stream.0, |wait_for| self.memory.add_use(&stream.0, writes, wait_for))?;
            stream.synchronize()?;
        }
        copy(&stream.0, bytes, target, source)?;
        // Nothing is before it that could take long, and it uses the caller's memory until it is done.
        runtime.counts[stream.0.id.device as usize].wait();
        runtime.backend.synchronize(stream.0.id)
    }

    fn check_host(&self, stream: &Stream, what: &'static str) -> Result<()> {
        self.memory.check_stream(&stream.0, what)?;
        stream.0.refuse_capture("a copy of pageable host memory", "copy before or after Graph::replay, on the same stream")
    }

    /// A graph would touch the host's memory at each replay, while the host may hold a slice of it.
    fn check_pinned(&self, stream: &Stream, what: &'static str, pinned: &Memory, len: u64) -> Result<()> {
        self.memory.check_stream(&stream.0, what)?;
        stream.0.refuse_capture("a copy from or to the host", "copy before or after Graph::replay, on the same stream")?;
        pinned.check_stream(&stream.0, what)?;
        self.check_len(what, len)
    }

    fn check_len(&self, what: &'static str, found: u64) -> Result<()> {
        if found == self.len { Ok(()) } else { Err(Error::Length { what, expected: self.len, found }) }
    }

    fn too_large(&self) -> Error {
        Error::TooLarge { what: "Buffer::to_vec", count: self.len, element_bytes: size_of::<T>() as u64 }
    }
}

impl<T> Buffer<T> {
    /// The memory and its uses.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

/// All of the buffer, to read.
impl<'a, T: Pod> From<&'a Buffer<T>> for DeviceView<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        buffer.view()
    }
}

/// All of the buffer, to write.
impl<'a, T: Pod> From<&'a mut Buffer<T>> for DeviceViewMut<'a, T> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        buffer.view_mut()
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("name", &self.memory.name).field("len", &self.len).finish_non_exhaustive()
    }
}
