//! Views of device memory, as a kernel holds them.
//!
//! Indices count elements. They are checked on the emulator and in `--checked` device builds; a
//! kernel's `grid` function checks the lengths before the launch.

use core::marker::PhantomData;

use crate::arch::{Control, GlobalMemory, Target};
use crate::num::Pod;
use crate::vector::Vector;

/// Device memory that is not written while the kernel runs. Loads go through `ld.global.nc`.
pub struct Global<T> {
    address: u64,
    length: u64,
    element: PhantomData<fn() -> T>,
}

/// The same memory by loads of 4, 8 or 16 bytes whose lines stay longest in the L2 cache: see [`Global::lasting`].
pub struct Lasting<T>(Global<T>);

/// Device memory that the kernel writes. A copy of the handle writes the same memory: that no two
/// threads touch one element unordered is what the emulator's race detector shows.
pub struct GlobalMut<T>(Global<T>);

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Global<T> {}

impl<T> Clone for GlobalMut<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for GlobalMut<T> {}

/// A view of nothing.
impl<T: Pod> Default for Global<T> {
    #[inline(always)]
    fn default() -> Self {
        // SAFETY: there is no element that could be used.
        unsafe { Self::from_raw_parts(0, 0) }
    }
}

impl<T: Pod> Global<T> {
    /// A view of `length` elements at `address`.
    ///
    /// # Safety
    /// The memory is there while the kernel runs, aligned for `T`, and not written meanwhile.
    #[inline(always)]
    pub const unsafe fn from_raw_parts(address: u64, length: u64) -> Self {
        Self { address, length, element: PhantomData }
    }

    /// How many elements.
    #[inline(always)]
    pub const fn len(&self) -> u64 {
        self.length
    }

    /// Whether there are none.
    #[inline(always)]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Element `index`.
    #[inline(always)]
    #[track_caller]
    pub fn load(&self, index: u64) -> T {
        // SAFETY: `range` checked the index where this build checks; the maker vouched for the memory.
        unsafe { Target::load_read_only(self.range(index, 1)) }
    }

    /// The 16 bytes that start at element `index`, whose address is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub fn load_vector(&self, index: u64) -> Vector<T> {
        // SAFETY: as `load`.
        Vector::from_words(unsafe { Target::load_read_only_vector(self.range(index, Vector::<T>::LANES as u64)) })
    }

    /// The device address of element `index`, which is in the view.
    #[inline(always)]
    #[track_caller]
    pub fn address_of(&self, index: u64) -> u64 {
        self.range(index, 1)
    }

    /// The 8 bytes that start at element `index`, whose address is a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn load_pair(&self, index: u64) -> [u32; 2] {
        // SAFETY: as `load`.
        let pair: u64 = unsafe { Target::load_read_only(self.range(index, elements_of::<T>(8).into())) };
        [pair as u32, (pair >> 32) as u32]
    }

    /// The 4 bytes that start at element `index`, whose address is a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn load_word(&self, index: u64) -> u32 {
        // SAFETY: as `load`.
        unsafe { Target::load_read_only(self.range(index, elements_of::<T>(4).into())) }
    }

    /// The view for loads whose lines are the last to leave the L2 cache (`evict_last`). For a kernel that writes no less than it reads: what
    /// it wrote then leaves the cache first, in longer runs. It gives the same values.
    #[inline(always)]
    pub const fn lasting(self) -> Lasting<T> {
        Lasting(self)
    }

    /// The device address that the view starts at, of an empty one too: what alignment is judged by.
    #[inline(always)]
    pub const fn start(&self) -> u64 {
        self.address
    }

    /// Elements before the first that lies at a multiple of 16 bytes, at most all: from there on
    /// vectors may be loaded.
    #[inline(always)]
    pub fn elements_to_boundary(&self) -> u64 {
        let bytes = self.address.wrapping_neg() % 16;
        (bytes / size_of::<T>() as u64).min(self.length)
    }

    /// The `length` elements from `start` on, which are in the view.
    #[inline(always)]
    #[track_caller]
    pub fn slice(&self, start: u64, length: u64) -> Self {
        Self { address: self.range(start, length), length, element: PhantomData }
    }

    /// The device address of `count` elements from `index` on, all in the view; none may stand at its end.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn range(&self, index: u64, count: u64) -> u64 {
        if Target::CHECKED && (index > self.length || self.length - index < count) {
            Target::out_of_bounds(self.address, index.saturating_add(count.saturating_sub(1)), self.length);
        }
        self.address + index * size_of::<T>() as u64
    }

    /// An address that an asynchronous copy may name when it reads nothing, wherever its range would have been: the
    /// 16 aligned bytes around the first element, which are of the same allocation.
    #[inline(always)]
    pub(crate) const fn address_of_nothing(&self) -> u64 {
        self.address & !15
    }
}

/// A place in a view, which a loop carries on where an index would be multiplied and added to the view's address for each access. It may be
/// outside: an access checks it, where indices are checked.
#[derive(Clone, Copy)]
pub struct Cursor<T> {
    view: Global<T>,
    address: u64,
}

impl<T: Pod> Cursor<T> {
    /// The place of element `index` of a view.
    #[inline(always)]
    pub fn new(view: Global<T>, index: u64) -> Self {
        Self { view, address: view.address + index * size_of::<T>() as u64 }
    }

    /// The place `elements` further.
    #[inline(always)]
    #[must_use]
    pub fn further(self, elements: u64) -> Self {
        Self { address: self.address + elements * size_of::<T>() as u64, ..self }
    }

    /// Element `i` from here on.
    #[inline(always)]
    #[track_caller]
    pub fn load(self, i: u64) -> T {
        // SAFETY: as `Global::load`.
        unsafe { Target::load_read_only(self.further(i).range(1)) }
    }

    /// The device address of `count` elements from here on, all in the view.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn range(self, count: u64) -> u64 {
        if Target::CHECKED {
            return self.view.range((self.address - self.view.address) / size_of::<T>() as u64, count);
        }
        self.address
    }

    /// As [`Global::address_of_nothing`].
    #[inline(always)]
    pub(crate) const fn address_of_nothing(&self) -> u64 {
        self.view.address_of_nothing()
    }
}

impl<T: Pod> Lasting<T> {
    #[inline(always)]
    #[track_caller]
    pub(crate) fn range(&self, index: u64, count: u64) -> u64 {
        self.0.range(index, count)
    }

    /// As [`Global::load_word`].
    #[inline(always)]
    #[track_caller]
    pub fn load_word(&self, index: u64) -> u32 {
        // SAFETY: as `Global::load`.
        unsafe { Target::load_read_only_lasting(self.0.range(index, elements_of::<T>(4).into())) }
    }

    /// As [`Global::load_pair`].
    #[inline(always)]
    #[track_caller]
    pub fn load_pair(&self, index: u64) -> [u32; 2] {
        // SAFETY: as `Global::load`.
        let pair: u64 = unsafe { Target::load_read_only_lasting(self.0.range(index, elements_of::<T>(8).into())) };
        [pair as u32, (pair >> 32) as u32]
    }

    /// As [`Global::load_vector`].
    #[inline(always)]
    #[track_caller]
    pub fn load_vector(&self, index: u64) -> Vector<T> {
        // SAFETY: as `Global::load`.
        Vector::from_words(unsafe { Target::load_read_only_vector_lasting(self.0.range(index, Vector::<T>::LANES as u64)) })
    }
}

/// The elements that `bytes` touch.
pub(crate) const fn elements_of<T>(bytes: u32) -> u32 {
    bytes.div_ceil(size_of::<T>() as u32)
}

/// A table in device memory of views that are not written while the kernel runs: how one launch
/// reads any number of tensors.
pub struct GlobalTable<T> {
    /// Address and length of each tensor.
    entries: Global<u64>,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for GlobalTable<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for GlobalTable<T> {}

impl<T: Pod> GlobalTable<T> {
    /// A table of `length` entries at `address`, each the address and the length of a view.
    ///
    /// # Safety
    /// As [`Global::from_raw_parts`], for the table and for every view in it; 16-byte aligned.
    #[inline(always)]
    pub const unsafe fn from_raw_parts(address: u64, length: u64) -> Self {
        // SAFETY: passed on to the caller.
        Self { entries: unsafe { Global::from_raw_parts(address, 2 * length) }, element: PhantomData }
    }

    /// How many views.
    #[inline(always)]
    pub const fn len(&self) -> u64 {
        self.entries.length / 2
    }

    /// Whether there are none.
    #[inline(always)]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// View `index`.
    #[inline(always)]
    #[track_caller]
    pub fn get(&self, index: u64) -> Global<T> {
        let entry = self.entries.load_vector(2 * index);
        // SAFETY: the maker vouched for every view in the table.
        unsafe { Global::from_raw_parts(entry.lane(0), entry.lane(1)) }
    }
}

/// A view of nothing.
impl<T: Pod> Default for GlobalMut<T> {
    #[inline(always)]
    fn default() -> Self {
        Self(Global::default())
    }
}

impl<T: Pod> GlobalMut<T> {
    /// A view of `length` elements at `address`.
    ///
    /// # Safety
    /// The memory is there while the kernel runs, aligned for `T`.
    #[inline(always)]
    pub const unsafe fn from_raw_parts(address: u64, length: u64) -> Self {
        // SAFETY: passed on to the caller; this handle's own loads are not `.nc`.
        Self(unsafe { Global::from_raw_parts(address, length) })
    }

    /// How many elements.
    #[inline(always)]
    pub const fn len(&self) -> u64 {
        self.0.length
    }

    /// Whether there are none.
    #[inline(always)]
    pub const fn is_empty(&self) -> bool {
        self.0.length == 0
    }

    /// Brings the line of element `index` into the L2 cache. A hint.
    #[inline(always)]
    #[track_caller]
    pub fn prefetch(&self, index: u64) {
        // SAFETY: as `Global::load`.
        unsafe { Target::prefetch_line(self.range(index, 1)) };
    }

    /// Element `index`, as this thread sees it.
    #[inline(always)]
    #[track_caller]
    pub fn load(&self, index: u64) -> T {
        // SAFETY: as `Global::load`.
        unsafe { <Target as GlobalMemory>::load(self.range(index, 1)) }
    }

    /// The 16 bytes that start at element `index`, whose address is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub fn load_vector(&self, index: u64) -> Vector<T> {
        // SAFETY: as `Global::load`.
        Vector::from_words(unsafe { <Target as GlobalMemory>::load_vector(self.range(index, Vector::<T>::LANES as u64)) })
    }

    /// The 8 bytes that start at element `index`, whose address is a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn load_pair(&self, index: u64) -> [u32; 2] {
        // SAFETY: as `Global::load`.
        let pair: u64 = unsafe { <Target as GlobalMemory>::load(self.range(index, elements_of::<T>(8).into())) };
        [pair as u32, (pair >> 32) as u32]
    }

    /// Writes element `index`.
    #[inline(always)]
    #[track_caller]
    pub fn store(&self, index: u64, value: T) {
        // SAFETY: as `Global::load`.
        unsafe { <Target as GlobalMemory>::store(self.range(index, 1), value) };
    }

    /// Writes the 4 bytes that start at element `index`, whose address is a multiple of 4.
    #[inline(always)]
    #[track_caller]
    pub fn store_word(&self, index: u64, word: u32) {
        // SAFETY: as `Global::load`.
        unsafe { <Target as GlobalMemory>::store(self.range(index, elements_of::<T>(4).into()), word) };
    }

    /// Writes the 8 bytes that start at element `index`, whose address is a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn store_pair(&self, index: u64, words: [u32; 2]) {
        // SAFETY: as `Global::load`.
        unsafe { Target::store_pair(self.range(index, elements_of::<T>(8).into()), words) };
    }

    /// Writes the 16 bytes that start at element `index`, whose address is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub fn store_vector(&self, index: u64, value: Vector<T>) {
        // SAFETY: as `Global::load`.
        unsafe { <Target as GlobalMemory>::store_vector(self.range(index, Vector::<T>::LANES as u64), value.words()) };
    }

    /// The device address that the view starts at, of an empty one too: what alignment is judged by.
    #[inline(always)]
    pub const fn start(&self) -> u64 {
        self.0.address
    }

    /// The device address of element `index`, which is in the view.
    #[inline(always)]
    #[track_caller]
    pub fn address_of(&self, index: u64) -> u64 {
        self.range(index, 1)
    }

    /// The `length` elements from `start` on, which are in the view.
    #[inline(always)]
    #[track_caller]
    pub fn slice(&self, start: u64, length: u64) -> Self {
        Self(self.0.slice(start, length))
    }

    /// As `Global::range`.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn range(&self, index: u64, count: u64) -> u64 {
        self.0.range(index, count)
    }
}
