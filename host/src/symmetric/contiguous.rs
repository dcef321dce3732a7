//! All ranks' instances of a symmetric buffer in one range of addresses.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use oxtile_tile::launch::{DeviceView, DeviceViewMut, Owner};
use oxtile_tile::num::Pod;

use super::backend::SymmetricBackend;
use super::buffer::{SymmetricBuffer, fits};
use super::ticket::Ticket;
use crate::comm::Rank;
use crate::rank::SymmetricError;
use crate::runtime::instances::Instances;
use crate::runtime::{Buffer, Error, Kind, Result, Stream};

/// All ranks' instances of a [`SymmetricBuffer`], or the same elements of each: element `i` of rank `r` is element `r * stride + i` of the
/// [view](Self::view) that kernels take, so that one base and one stride are all that they need. Made by [`SymmetricBuffer::contiguous`].
///
/// What lies between two ranks' elements belongs to others. As with a [`Peer`](super::Peer), signals alone order what ranks do with each other's: a stream
/// [waits](super::Arena::wait) for them before its kernels read, and signals after them. The instance of this rank is ordered by the runtime too, as
/// [`local`](SymmetricBuffer::local) is. The host waits for such work by [`Arena::ticket`](super::Arena::ticket).
pub struct ContiguousView<'a, T> {
    buffer: &'a SymmetricBuffer<T>,
    /// The address of the first element of rank 0.
    address: u64,
    /// From one rank's instance to the next one's, in elements.
    stride: u64,
    start: u64,
    len: u64,
}

/// A [`ContiguousView`] whose elements may be written, those of every rank: the other ranks may use them only after a signal.
///
/// A read view cannot be used while a write view is alive:
///
/// ```compile_fail,E0502
/// # use oxtile::{Stream, symmetric::ContiguousViewMut};
/// fn both(view: &mut ContiguousViewMut<'_, f32>, stream: &Stream) {
///     let read = view.as_view().view(stream).unwrap();
///     let write = unsafe { view.view_mut(stream) }.unwrap();
///     drop((read, write));
/// }
/// ```
pub struct ContiguousViewMut<'a, T>(ContiguousView<'a, T>);

impl<T: Pod> SymmetricBuffer<T> {
    /// All ranks' instances as one. Meets all ranks, as [`peer`](Self::peer) does.
    ///
    /// # Errors
    /// [`SymmetricError::Unavailable`] for a back end that does not map ranks so ([`Capabilities::contiguous`](super::Capabilities));
    /// [`Error::Invalid`] for elements whose size does not divide the bytes from rank to rank; as [`peer`](Self::peer).
    pub fn contiguous(&self) -> Result<ContiguousView<'_, T>> {
        let inner = &self.arena.0;
        let Some(stride) = inner.backend.stride() else { return Err(unavailable(&*inner.backend).into()) };
        let bases = inner.world.ranks().map(|rank| inner.peer(rank, self.number)).collect::<Result<Vec<_>>>()?;
        if bases.windows(2).any(|pair| pair[1].wrapping_sub(pair[0]) != stride) {
            return Err(unavailable(&*inner.backend).into());
        }
        let size = size_of::<T>() as u64;
        if !stride.is_multiple_of(size) {
            let why = format!("elements of {size} bytes do not divide the {stride} from rank to rank: take an element type of 2^n bytes");
            return Err(Error::Invalid { what: "SymmetricBuffer::contiguous", why });
        }
        Ok(ContiguousView { buffer: self, address: bases[0] + self.offset, stride: stride / size, start: 0, len: self.len() })
    }

    /// As [`contiguous`](Self::contiguous), to be written.
    ///
    /// # Errors
    /// As [`contiguous`](Self::contiguous).
    pub fn contiguous_mut(&mut self) -> Result<ContiguousViewMut<'_, T>> {
        self.contiguous().map(ContiguousViewMut)
    }
}

fn unavailable(backend: &dyn SymmetricBackend) -> SymmetricError {
    let why = "its ranks' memory does not lie in one range of addresses (Capabilities::contiguous): use SymmetricBuffer::peer, or vmm";
    SymmetricError::Unavailable { backend: backend.name(), why: why.to_owned() }
}

impl<'a, T: Pod> ContiguousView<'a, T> {
    /// How many elements of each rank.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Elements from one rank's to the same one of the next rank.
    pub fn stride(&self) -> u64 {
        self.stride
    }

    /// Where a rank's first element lies in this rank's addresses, to lend to another library.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank of another world.
    pub fn address(&self, rank: Rank) -> Result<u64> {
        let world = self.buffer.arena.world();
        if rank.index() >= world.get() {
            return Err(Error::Invalid { what: "ContiguousView::address", why: format!("{rank} is not of this world of {world}") });
        }
        Ok(self.address + u64::from(rank.index()) * self.stride * size_of::<T>() as u64)
    }

    /// The elements `range` of every rank's.
    ///
    /// # Errors
    /// [`Error::Length`] for a range outside.
    pub fn slice(self, range: Range<u64>) -> Result<Self> {
        let len = range.end.saturating_sub(range.start);
        fits("ContiguousView::slice", range.start, len, self.len)?;
        let address = self.address + range.start * size_of::<T>() as u64;
        Ok(Self { address, start: self.start + range.start, len, ..self })
    }

    /// Lends the elements to kernels on the stream that read them: of rank `r`, those from `r * stride` on. Wait for the ranks' signals on the
    /// stream first. What lies between may change at any time.
    ///
    /// # Errors
    /// What ended the arena.
    pub fn view(&self, stream: &Stream) -> Result<DeviceView<'a, T>> {
        let arena = &self.buffer.arena.0;
        self.buffer.local.check_stream(stream, "ContiguousView::view")?;
        arena.check()?;
        arena.use_on(stream)?;
        let between = u64::from(arena.world.get() - 1) * self.stride;
        let len = if self.is_empty() { 0 } else { between + self.len };
        // SAFETY: the buffer's memory keeps the arena, whose mappings of all ranks go when it does; buffers are aligned to 256 bytes.
        Ok(unsafe { DeviceView::from_raw(self.address, len, self.owner()) })
    }

    /// The owner of kernels' views: on the virtual cluster it tells which elements those are. On a GPU that is not asked.
    fn owner(&self) -> Owner<'a> {
        self.owner_of(|_| 0..self.len)
    }

    /// The same of some elements of each rank's.
    fn owner_of(&self, of: impl Fn(Rank) -> Range<u64>) -> Owner<'a> {
        let buffer = self.buffer;
        if buffer.local.memory().runtime.kind() != Kind::Emulated {
            return buffer.local.owner();
        }
        let (memory, size) = (Arc::clone(buffer.local.memory()), size_of::<T>() as u64);
        let piece = |rank: Rank| {
            let Range { start, end } = of(rank);
            (self.address + (u64::from(rank.index()) * self.stride + start) * size, (end - start) * size)
        };
        buffer.lent.lend(Instances { memory, pieces: buffer.arena.world().ranks().map(piece).collect() })
    }

    /// Copies the elements of every rank to `target`, one rank's after the other's, in stream order and by the copy engine: as
    /// [`SymmetricBuffer::get_each`]. Wait for the ranks' signals on the stream first. The ticket has the target.
    ///
    /// # Errors
    /// As [`SymmetricBuffer::get_each`].
    #[track_caller]
    pub fn get(&self, stream: &Stream, target: Buffer<T>) -> Result<Ticket<Buffer<T>>> {
        let pieces: Vec<_> = self.buffer.arena.world().ranks().map(|rank| (rank, self.start..self.start + self.len)).collect();
        self.buffer.get_each(stream, &pieces, target)
    }
}

impl<'a, T: Pod> ContiguousViewMut<'a, T> {
    /// The elements `range` of every rank's.
    ///
    /// # Errors
    /// As [`ContiguousView::slice`].
    pub fn slice(self, range: Range<u64>) -> Result<Self> {
        self.0.slice(range).map(Self)
    }

    /// A view for reading; this one cannot be used while it is alive.
    pub fn as_view(&self) -> ContiguousView<'_, T> {
        let ContiguousView { buffer, address, stride, start, len } = self.0;
        ContiguousView { buffer, address, stride, start, len }
    }

    /// Lends the elements to a kernel on the stream that writes them, as [`ContiguousView::view`] does to those that read. Wait for the ranks' signals
    /// that they may be written first; signal after it.
    ///
    /// # Safety
    /// The kernel uses no elements but `r * stride + i` with `i` below [`len`](ContiguousView::len): what lies between belongs to other buffers, which
    /// others may have borrowed, and to the arena's signals.
    ///
    /// # Errors
    /// What ended the arena.
    pub unsafe fn view_mut(&mut self, stream: &Stream) -> Result<DeviceViewMut<'_, T>> {
        let view = self.0.view(stream)?;
        // SAFETY: as there; the exclusive borrow of the buffer is the exclusive view of its elements on this rank, signals order the others'; of what lies
        // between the caller vouches that it is not used.
        Ok(unsafe { DeviceViewMut::from_raw(view.address(), view.len(), self.0.owner()) })
    }

    /// The same view, for a kernel that writes a part of each rank's elements: what others do with the rest needs no order with it.
    ///
    /// # Safety
    /// As [`view_mut`](Self::view_mut), with `i` in the part of rank `r`, which lies within its elements and may be empty.
    ///
    /// # Errors
    /// What ended the arena.
    pub(crate) unsafe fn parts_mut(&mut self, stream: &Stream, part: impl Fn(Rank) -> Range<u64>) -> Result<DeviceViewMut<'_, T>> {
        let view = self.0.view(stream)?;
        // SAFETY: as above; the caller vouches that no more is used.
        Ok(unsafe { DeviceViewMut::from_raw(view.address(), view.len(), self.0.owner_of(part)) })
    }
}

impl<T> fmt::Debug for ContiguousView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContiguousView").field("stride", &self.stride).field("buffer", self.buffer).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for ContiguousViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ContiguousViewMut").field(&self.0).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::arena::Arena;
    use super::super::backend::{ArenaMemory, Capabilities, Emulated};
    use super::super::nccl::NcclMemory;
    use super::super::nvshmem::NvshmemMemory;
    use super::super::options::ArenaOptions;
    use super::*;
    use crate::comm::{ArenaRank, EmulatedCommunicator, Meeting, WorldSize};
    use crate::rank::BackendName;
    use crate::runtime::Runtime;

    /// A back end's capabilities, on a stand-in for its library, over memory of the virtual cluster.
    #[derive(Debug)]
    struct Says(Box<dyn SymmetricBackend>, Emulated);

    impl SymmetricBackend for Says {
        fn name(&self) -> BackendName {
            self.0.name()
        }

        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }

        fn is_collective(&self) -> bool {
            self.1.is_collective()
        }

        fn open(&self, stream: &Stream, meeting: &Meeting, memory: ArenaMemory) -> Result<u64> {
            self.1.open(stream, meeting, memory)
        }

        fn peers(&self, meeting: &Meeting, deadline: Duration) -> Result<Vec<u64>> {
            self.1.peers(meeting, deadline)
        }

        fn stride(&self) -> Option<u64> {
            self.0.stride()
        }

        fn close(&self, stream: &Stream) -> Result<()> {
            self.1.close(stream)
        }
    }

    fn view_over(backend: impl SymmetricBackend + 'static) -> (Capabilities, Result<u64>) {
        let runtime = Runtime::emulated(1).unwrap();
        let rank = EmulatedCommunicator::world_of(&runtime, WorldSize::ONE).unwrap().remove(0);
        let control = Stream::urgent(rank.device()).unwrap();
        let backend = Box::new(Says(Box::new(backend), Emulated::default()));
        // Nothing is waited for.
        let options = ArenaOptions { deadline: Duration::from_millis(100), ..ArenaOptions::default() };
        let arena = Arena::over(backend, control, options, rank.next_meeting()).unwrap();
        let mut buffer = arena.buffer::<u32>(4).unwrap();
        let found = buffer.contiguous().map(|view| view.len());
        assert_eq!(buffer.contiguous_mut().is_ok(), found.is_ok());
        drop(buffer);
        let capabilities = arena.capabilities();
        arena.close().unwrap().finish().unwrap();
        (capabilities, found)
    }

    /// Memory that NCCL or NVSHMEM has allocated lies where the library put it: a view would be of something else.
    #[test]
    fn memory_of_a_library_has_no_view_of_all_ranks() {
        let found = [
            (BackendName::Nccl, view_over(NcclMemory::on_a_stand_in())),
            (BackendName::Nvshmem, view_over(NvshmemMemory::on_a_stand_in())),
        ];
        for (name, (capabilities, found)) in found {
            assert!(!capabilities.contiguous);
            let error = found.unwrap_err();
            assert!(matches!(&error, Error::Symmetric(SymmetricError::Unavailable { backend, .. }) if *backend == name), "{error}");
            assert!(error.to_string().contains("does not lie in one range of addresses"), "{error}");
        }
    }
}
