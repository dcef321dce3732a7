//! Emulated device memory: named allocations whose device addresses are host addresses.

use crate::history::History;
use crate::initialisation::Initialisation;
use crate::reservation::{ALIGNMENT, Reservation};
use crate::words::{read_bytes, write_bytes};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// What every byte of new memory holds. It was never written and reads as NaN in each float format, so that a result of it shows.
pub(crate) const UNWRITTEN: u8 = 0xff;
/// The same of a word.
pub(crate) const UNWRITTEN_WORD: u64 = u64::from_ne_bytes([UNWRITTEN; 8]);

/// Bytes that a copy handles at once.
const PIECE: usize = 1 << 20;

/// Where a device address lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The allocation's name.
    pub name: String,
    /// Bytes from its start.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The device that it was allocated on.
    pub device: u32,
}

/// An error of the host side of [`Memory`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The range is not inside one live allocation.
    #[error("{bytes} bytes at {address:#x} are not inside one live allocation; nearest: {nearest}")]
    OutOfBounds {
        /// First address of the access.
        address: u64,
        /// Length of the access.
        bytes: u64,
        /// The allocation that it is in, or the last one before it.
        nearest: String,
    },
    /// `free` of an address that no allocation starts at.
    #[error("no allocation starts at {address:#x}; free takes the address that allocate returned, once")]
    NotAllocated {
        /// The address.
        address: u64,
    },
    /// An allocation was to lie where another one does.
    #[error("{bytes} bytes at {address:#x} are not free: `{by}` lies there")]
    Occupied {
        /// Where it was to lie.
        address: u64,
        /// Its length.
        bytes: u64,
        /// What lies there.
        by: String,
    },
}

/// One allocation. Its bytes are words accessed by relaxed atomics, so that racing kernels are defined.
pub(crate) struct Allocation {
    pub name: String,
    pub device: u32,
    pub start: u64,
    pub bytes: u64,
    words: NonNull<AtomicU64>,
    layout: Layout,
    /// What the words belong to, if not to it alone.
    range: Option<Arc<Reservation>>,
    freed: AtomicBool,
    pub initialisation: Initialisation,
}

// SAFETY: `words` points at atomics owned by this allocation, freed only when the last owner drops it.
unsafe impl Send for Allocation {}
// SAFETY: as above; all access to the words is atomic.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn new(name: &str, bytes: u64, device: u32) -> Self {
        let size = usize::try_from(bytes.max(1)).expect("an allocation fits the address space");
        let layout = Layout::from_size_align(size.next_multiple_of(ALIGNMENT), ALIGNMENT).expect("a size below isize::MAX");
        // SAFETY: the layout's size is not zero.
        let Some(words) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
        // SAFETY: just allocated with this size, and nothing else knows of it.
        unsafe { words.write_bytes(UNWRITTEN, layout.size()) };
        Self::over(words.cast(), layout, None, name, bytes, device)
    }

    /// One whose words are part of a range; none where they are not inside it.
    pub fn inside(range: &Arc<Reservation>, offset: u64, name: &str, bytes: u64, device: u32) -> Option<Self> {
        let (words, layout) = range.words_at(offset, bytes)?;
        Some(Self::over(words, layout, Some(Arc::clone(range)), name, bytes, device))
    }

    fn over(words: NonNull<AtomicU64>, layout: Layout, range: Option<Arc<Reservation>>, name: &str, bytes: u64, device: u32) -> Self {
        let start = words.as_ptr().expose_provenance() as u64;
        let (freed, initialisation) = (AtomicBool::new(false), Initialisation::new(bytes.max(1) as usize));
        Self { name: name.to_owned(), device, start, bytes, words, layout, range, freed, initialisation }
    }

    /// The 8-byte words; the last may reach past `bytes`.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the layout is a multiple of 8 bytes, filled at allocation, and lives as long as `self`, or the range that it keeps.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.layout.size() / 8) }
    }

    #[inline]
    pub fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        address.checked_sub(self.start).is_some_and(|offset| offset <= self.bytes && bytes <= self.bytes - offset)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.range.is_none() {
            // SAFETY: allocated in `new` with this layout; nothing else owns it.
            unsafe { dealloc(self.words.as_ptr().cast(), self.layout) }
        }
    }
}

/// The allocations at one moment, sorted by address.
pub(crate) type Snapshot = Arc<Vec<Arc<Allocation>>>;

#[derive(Default)]
struct Table {
    live: Snapshot,
    freed: Vec<Freed>,
}

/// An allocation that is gone, kept so that a late access can be named.
#[derive(Clone)]
pub(crate) struct Freed {
    pub name: String,
    pub start: u64,
    pub bytes: u64,
}

/// The memory of all emulated devices of a process: share it by `Arc` between the grids that use it.
#[derive(Default)]
pub struct Memory {
    table: Mutex<Table>,
    history: Mutex<History>,
}

impl Memory {
    /// A memory with no allocations.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Allocates uninitialised memory on a device; returns its device address, a multiple of 256.
    pub fn allocate(&self, name: &str, bytes: u64, device: u32) -> u64 {
        self.insert(Allocation::new(name, bytes, device)).expect("memory of its own overlaps no other")
    }

    /// Allocates at a multiple of 256 inside a range, where nothing lies yet or any more: as `cuMemMap`. Freed as any other allocation. What was
    /// freed there before can still be read.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] for a place that is not inside the range; [`MemoryError::Occupied`].
    pub fn allocate_in(&self, range: &Arc<Reservation>, offset: u64, name: &str, bytes: u64, device: u32) -> Result<u64, MemoryError> {
        let outside = || MemoryError::OutOfBounds { address: range.address().saturating_add(offset), bytes, nearest: format!("{range:?}") };
        self.insert(Allocation::inside(range, offset, name, bytes, device).ok_or_else(outside)?)
    }

    /// Adds an allocation to those that are there.
    fn insert(&self, allocation: Allocation) -> Result<u64, MemoryError> {
        let (start, bytes) = (allocation.start, allocation.bytes);
        let mut table = self.table();
        let at = table.live.partition_point(|other| other.start < start);
        let before = table.live[..at].last().filter(|other| other.start + other.bytes.max(1) > start);
        let after = table.live.get(at).filter(|other| other.start < start + bytes.max(1));
        if let Some(other) = before.or(after) {
            return Err(MemoryError::Occupied { address: start, bytes, by: other.name.clone() });
        }
        // What lay there before is gone.
        if allocation.range.is_some() {
            allocation.words().iter().for_each(|word| word.store(UNWRITTEN_WORD, Ordering::Relaxed));
        }
        table.freed.retain(|freed| freed.start + freed.bytes <= start || start + bytes <= freed.start);
        let mut live = Vec::clone(&table.live);
        live.insert(at, Arc::new(allocation));
        table.live = Arc::new(live);
        drop(table);
        // The address is not given out yet.
        self.history().forget(start, bytes);
        Ok(start)
    }

    /// Frees what [`allocate`](Self::allocate) returned; a grid that still uses it gets a use-after-free fault.
    pub fn free(&self, address: u64) -> Result<(), MemoryError> {
        let mut table = self.table();
        let at = table.live.binary_search_by_key(&address, |a| a.start).map_err(|_| MemoryError::NotAllocated { address })?;
        let mut live = Vec::clone(&table.live);
        let gone = live.remove(at);
        gone.freed.store(true, Ordering::Relaxed);
        table.freed.push(Freed { name: gone.name.clone(), start: gone.start, bytes: gone.bytes });
        table.live = Arc::new(live);
        Ok(())
    }

    /// Writes bytes from the host.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let (allocation, offset) = self.checked(address, bytes.len() as u64)?;
        write_bytes(allocation.words(), offset as usize, bytes);
        allocation.initialisation.set(offset, bytes.len() as u64);
        Ok(())
    }

    /// Reads bytes to the host. Bytes that were never written read as 255, which is NaN in every float format;
    /// [`first_unwritten`](Self::first_unwritten) finds them.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let (allocation, offset) = self.checked(address, bytes.len() as u64)?;
        read_bytes(allocation.words(), offset as usize, bytes);
        Ok(())
    }

    /// Copies bytes between ranges that do not overlap. Bytes that were never written stay uninitialised at the target.
    pub fn copy(&self, target: u64, source: u64, bytes: u64) -> Result<(), MemoryError> {
        let ((from, start), (to, end)) = (self.checked(source, bytes)?, self.checked(target, bytes)?);
        for at in (0..bytes).step_by(PIECE) {
            let mut piece = vec![0; (bytes - at).min(PIECE as u64) as usize];
            read_bytes(from.words(), (start + at) as usize, &mut piece);
            write_bytes(to.words(), (end + at) as usize, &piece);
        }
        to.initialisation.copy(end, &from.initialisation, start, bytes);
        Ok(())
    }

    /// Takes the range as never written from here on: what it holds is not needed any more. Grids under way are not asked.
    pub fn discard(&self, address: u64, bytes: u64) -> Result<(), MemoryError> {
        let (allocation, offset) = self.checked(address, bytes)?;
        allocation.initialisation.clear(offset, bytes);
        Ok(())
    }

    /// How many bytes from `address` on the first byte of the range lies that neither the host nor a kernel wrote. A kernel in fast mode counts
    /// as a writer of all of an allocation.
    pub fn first_unwritten(&self, address: u64, bytes: u64) -> Result<Option<u64>, MemoryError> {
        let (allocation, offset) = self.checked(address, bytes)?;
        Ok(allocation.initialisation.first_missing(offset, bytes).map(|at| at - offset))
    }

    /// The live allocation that an address lies in.
    pub fn find(&self, address: u64) -> Option<Found> {
        let live = self.snapshot();
        let allocation = nearest(&live, address).filter(|a| a.contains(address, 1))?;
        Some(Found {
            name: allocation.name.clone(),
            offset: address - allocation.start,
            bytes: allocation.bytes,
            device: allocation.device,
        })
    }

    fn checked(&self, address: u64, bytes: u64) -> Result<(Arc<Allocation>, u64), MemoryError> {
        let live = self.snapshot();
        match nearest(&live, address) {
            Some(found) if found.contains(address, bytes) => Ok((Arc::clone(found), address - found.start)),
            other => {
                let nearest = other.map_or("none".to_owned(), |a| format!("`{}`, {} bytes at {:#x}", a.name, a.bytes, a.start));
                Err(MemoryError::OutOfBounds { address, bytes, nearest })
            }
        }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Arc::clone(&self.table().live)
    }

    pub(crate) fn freed_at(&self, address: u64) -> Option<Freed> {
        self.table().freed.iter().rev().find(|f| (f.start..f.start + f.bytes).contains(&address)).cloned()
    }
}

/// The last allocation that starts at or before an address.
pub(crate) fn nearest(live: &[Arc<Allocation>], address: u64) -> Option<&Arc<Allocation>> {
    live[..live.partition_point(|a| a.start <= address)].last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_lie_in_one_range_and_apart() {
        let (memory, range) = (Memory::new(), Reservation::new(1024));
        let [first, second] = [0, 512].map(|at| memory.allocate_in(&range, at, "part", 256, (at / 512) as u32).unwrap());
        assert_eq!((first, second), (range.address(), range.address() + 512));
        memory.write(first, &[1; 256]).unwrap();
        memory.write(second, &[2; 256]).unwrap();
        assert_eq!(memory.find(second + 8).map(|found| (found.offset, found.device)), Some((8, 1)));
        assert!(memory.find(first + 256).is_none(), "between the two lies nothing");
        assert!(memory.write(first + 255, &[0; 2]).is_err() && memory.read(first, &mut [0; 768]).is_err());
        let occupied = memory.allocate_in(&range, 256, "over", 512, 0).unwrap_err();
        assert_eq!(occupied, MemoryError::Occupied { address: first + 256, bytes: 512, by: "part".to_owned() });
        for (offset, bytes) in [(1024, 1), (1024, 0), (768, 257), (u64::MAX, 2), (8, 8)] {
            assert!(matches!(memory.allocate_in(&range, offset, "outside", bytes, 0), Err(MemoryError::OutOfBounds { .. })));
        }
        // An allocation keeps the range.
        drop(range);
        memory.free(first).unwrap();
        let mut bytes = [0; 256];
        memory.read(second, &mut bytes).unwrap();
        assert_eq!(bytes, [2; 256]);
        memory.free(second).unwrap();
    }
}
