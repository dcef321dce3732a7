//! The block's shared memory: one arena, laid out by `#[derive(SharedStorage)]`.
//!
//! Fields are handles: 32-bit addresses that know their type and size. They are `Copy`; every thread
//! of the block has the same ones.

use core::fmt::{self, Write};
use core::marker::PhantomData;

use crate::arch::{Cluster, Control, SharedMemory, Target};
use crate::launch::SHARED_BYTES;
use crate::num::Pod;
use crate::vector::Vector;

pub use crate::shared_tile::{Chunk, SharedTile, Tiles};

/// A piece of the arena.
pub trait SharedStorage: Sized {
    /// Bytes.
    const SIZE: u32;
    /// Alignment in bytes, a power of two.
    const ALIGN: u32;

    /// The piece at this shared address.
    ///
    /// # Safety
    /// [`SIZE`](Self::SIZE) bytes at `address`, a multiple of [`ALIGN`](Self::ALIGN), are in the block's arena, and only
    /// handles of this type at this address name them while it is used.
    unsafe fn at(address: u32) -> Self;

    /// Names the smallest part that holds `bytes` bytes, one at least, from `offset` on, after this piece's own name: `[5]` in an array, `.sums[5]`
    /// in a struct. Nothing where no part holds them all. For the emulator's reports.
    ///
    /// # Errors
    /// Those of `name`.
    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        let _ = (offset, bytes, name);
        Ok(())
    }
}

/// `[5]`, if the element of so many bytes in an array holds them all.
#[inline]
pub(crate) fn name_element(element: u32, offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
    if offset % element + bytes <= element { write!(name, "[{}]", offset / element) } else { Ok(()) }
}

/// The same, then the part of that piece, in a row of pieces.
#[inline]
pub(crate) fn name_piece<S: SharedStorage>(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
    let stride = S::SIZE.next_multiple_of(S::ALIGN);
    name_element(stride, offset, bytes, name)?;
    if offset % stride + bytes <= S::SIZE { S::name_part(offset % stride, bytes, name) } else { Ok(()) }
}

/// `.field`, then its part, if the field of so many bytes from `start` on holds them all; whether it does. For the derive.
///
/// # Errors
/// Those of `name`.
#[doc(hidden)]
#[inline]
pub fn name_field<S: SharedStorage>(field: &str, start: u32, offset: u32, bytes: u32, name: &mut dyn Write) -> Result<bool, fmt::Error> {
    let holds = start <= offset && offset + bytes <= start + S::SIZE;
    if holds {
        write!(name, ".{field}")?;
        S::name_part(offset - start, bytes, name)?;
    }
    Ok(holds)
}

/// The arena's address, for a kernel that takes the arena for the layout `S` of this name. For the derive.
#[doc(hidden)]
#[inline(always)]
#[track_caller]
pub fn claim<S: SharedStorage>(name: &'static str) -> u32 {
    Target::claim::<S>(name)
}

/// No memory.
impl SharedStorage for () {
    const SIZE: u32 = 0;
    const ALIGN: u32 = 1;

    #[inline(always)]
    unsafe fn at(_: u32) -> Self {}
}

/// The shared address of the arena's first byte, 1024-byte aligned.
#[inline(always)]
#[track_caller]
pub fn arena() -> u32 {
    Target::arena()
}

/// The largest of some sizes or alignments. For the derive.
#[doc(hidden)]
pub const fn max_align(aligns: &[u32]) -> u32 {
    let (mut largest, mut i) = (1, 0);
    while i < aligns.len() {
        if aligns[i] > largest {
            largest = aligns[i];
        }
        i += 1;
    }
    largest
}

/// The bytes of a layout, if a block can have so many. For the derive.
///
/// # Panics
/// If not, with the bytes of each field.
#[doc(hidden)]
#[track_caller]
pub const fn checked_size(layout: &str, bytes: u32, fields: &[(&str, u32)]) -> u32 {
    if bytes > SHARED_BYTES {
        let mut text =
            Text::EMPTY.word("`").word(layout).word("` takes ").number(bytes).word(" bytes of shared memory, but a block has at most ");
        text = text.number(SHARED_BYTES).word(" (227 KiB): ");
        let mut i = 0;
        while i < fields.len() {
            let separator = if i == 0 { "`" } else { ", `" };
            text = text.word(separator).word(fields[i].0).word("` ").number(fields[i].1);
            i += 1;
        }
        panic!("{}", text.as_str());
    }
    bytes
}

/// An error text that is made at compile time, cut where it is longer.
struct Text {
    bytes: [u8; 512],
    length: usize,
}

impl Text {
    const EMPTY: Self = Self { bytes: [0; 512], length: 0 };

    const fn word(mut self, word: &str) -> Self {
        let mut i = 0;
        while i < word.len() && self.length < self.bytes.len() {
            self.bytes[self.length] = word.as_bytes()[i];
            self.length += 1;
            i += 1;
        }
        self
    }

    const fn number(self, number: u32) -> Self {
        let digit = (number % 10) as usize;
        let head = if number < 10 { self } else { self.number(number / 10) };
        head.word("0123456789".split_at(digit).1.split_at(1).0)
    }

    const fn as_str(&self) -> &str {
        match core::str::from_utf8(self.bytes.split_at(self.length).0) {
            Ok(text) => text,
            Err(_) => "a layout takes too much shared memory",
        }
    }
}

/// `N` elements in shared memory, 16-byte aligned. Uninitialised when the block starts.
pub struct SharedArray<T, const N: usize> {
    address: u32,
    element: PhantomData<fn() -> T>,
}

impl<T, const N: usize> Clone for SharedArray<T, N> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const N: usize> Copy for SharedArray<T, N> {}

impl<T: Pod, const N: usize> SharedStorage for SharedArray<T, N> {
    const SIZE: u32 = {
        // The layout holds it to the block's limit, and names its field.
        assert!(N * size_of::<T>() <= u32::MAX as usize, "a block has at most 227 KiB of shared memory");
        (N * size_of::<T>()) as u32
    };
    const ALIGN: u32 = 16;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address, element: PhantomData }
    }

    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        name_element(size_of::<T>() as u32, offset, bytes, name)
    }
}

impl<S: SharedStorage, const N: usize> SharedStorage for [S; N] {
    const SIZE: u32 = S::SIZE.next_multiple_of(S::ALIGN) * N as u32;
    const ALIGN: u32 = S::ALIGN;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        // SAFETY: the caller vouches for all pieces; they lie one after the other.
        core::array::from_fn(|i| unsafe { S::at(address + i as u32 * S::SIZE.next_multiple_of(S::ALIGN)) })
    }

    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        name_piece::<S>(offset, bytes, name)
    }
}

/// One piece of memory that is an `A` and a `B` at different times: each use begins by writing, after what ends the
/// other's reads.
pub struct Overlay<A, B> {
    address: u32,
    pieces: PhantomData<fn() -> (A, B)>,
}

impl<A, B> Clone for Overlay<A, B> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, B> Copy for Overlay<A, B> {}

impl<A: SharedStorage, B: SharedStorage> SharedStorage for Overlay<A, B> {
    const SIZE: u32 = max_align(&[A::SIZE, B::SIZE]);
    const ALIGN: u32 = max_align(&[A::ALIGN, B::ALIGN]);

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address, pieces: PhantomData }
    }
}

impl<A: SharedStorage, B: SharedStorage> Overlay<A, B> {
    /// The memory as an `A`.
    #[inline(always)]
    pub fn first(self) -> A {
        // SAFETY: the code that made this handle vouched for the larger of both; that their uses do not meet is the kernel's
        // contract, which the race detector holds it to: both are plain bytes.
        unsafe { A::at(self.address) }
    }

    /// The memory as a `B`.
    #[inline(always)]
    pub fn second(self) -> B {
        // SAFETY: as `first`.
        unsafe { B::at(self.address) }
    }
}

impl<T: Pod, const N: usize> SharedArray<T, N> {
    /// Element `index`.
    #[inline(always)]
    #[track_caller]
    pub fn load(self, index: u32) -> T {
        // SAFETY: `range` checked the index where this build checks; the derive laid the array inside the arena.
        unsafe { <Target as SharedMemory>::load(self.range(index, 1)) }
    }

    /// Writes element `index`.
    #[inline(always)]
    #[track_caller]
    pub fn store(self, index: u32, value: T) {
        // SAFETY: as `load`.
        unsafe { <Target as SharedMemory>::store(self.range(index, 1), value) };
    }

    /// The two elements from `index` on, an even one.
    #[inline(always)]
    #[track_caller]
    pub fn load_pair(self, index: u32) -> [T; 2]
    where
        [T; 2]: Pod,
    {
        // SAFETY: as `load`; the array is 16-byte aligned.
        unsafe { <Target as SharedMemory>::load(self.range(index, 2)) }
    }

    /// The 16 bytes that start at element `index`, which lies at a multiple of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub fn load_vector(self, index: u32) -> Vector<T> {
        // SAFETY: as `load`.
        Vector::from_words(unsafe { <Target as SharedMemory>::load_vector(self.range(index, Vector::<T>::LANES as u32)) })
    }

    /// Writes the 16 bytes that start at element `index`, which lies at a multiple of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub fn store_vector(self, index: u32, value: Vector<T>) {
        // SAFETY: as `load`.
        unsafe { <Target as SharedMemory>::store_vector(self.range(index, Vector::<T>::LANES as u32), value.words()) };
    }

    /// The same in the block of `rank` of this cluster, at the same place of its shared memory. A [`cluster::sync`](crate::cluster::sync) comes before it, after the last use of
    /// that memory there, and another after it, before it is read there. Needs sm_90.
    #[inline(always)]
    #[track_caller]
    pub fn store_vector_to(self, rank: u32, index: u32, value: Vector<T>) {
        // SAFETY: as `load`; that the rank is one of the cluster, whose block has not ended, is the kernel's contract, which the emulator checks.
        unsafe { <Target as Cluster>::store_vector_to(self.range(index, Vector::<T>::LANES as u32), rank, value.words()) };
    }

    /// The shared address of element `index`, which is in the array.
    #[inline(always)]
    #[track_caller]
    pub fn address_of(self, index: u32) -> u32 {
        self.range(index, 1)
    }

    /// The shared address of `count` elements from `index` on, all in the array.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn range(self, index: u32, count: u32) -> u32 {
        if Target::CHECKED && (index as usize > N || N - (index as usize) < count as usize) {
            Target::out_of_bounds_shared(self.address, Self::SIZE, u64::from(index) + u64::from(count.saturating_sub(1)), N as u64);
        }
        self.address + index * size_of::<T>() as u32
    }
}
