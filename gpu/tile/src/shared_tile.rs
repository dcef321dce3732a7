//! Matrices in shared memory.

use core::fmt::{self, Write};
use core::marker::PhantomData;

use crate::arch::{Control, SharedMemory, Target};
use crate::layout::{ATOM_ROWS, Linear, Swizzle, SwizzleMode, TileLayout};
use crate::num::{self, Pod};
use crate::shared::{SharedStorage, name_piece};

/// A `ROWS` by `COLUMNS` matrix in shared memory, row by row in panels of the swizzle's span
/// ([`layout`](crate::layout)), where TMA can put it and matrix instructions can read it.
pub struct SharedTile<T, const ROWS: usize, const COLUMNS: usize, S = Linear> {
    address: u32,
    element: PhantomData<fn() -> (T, S)>,
}

impl<T, const ROWS: usize, const COLUMNS: usize, S> Clone for SharedTile<T, ROWS, COLUMNS, S> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const ROWS: usize, const COLUMNS: usize, S> Copy for SharedTile<T, ROWS, COLUMNS, S> {}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle> SharedStorage for SharedTile<T, ROWS, COLUMNS, S> {
    const SIZE: u32 = {
        assert!(ROWS * COLUMNS * size_of::<T>() <= u32::MAX as usize, "a block has at most 227 KiB of shared memory");
        let layout = Self::LAYOUT;
        let swizzled = !matches!(layout.swizzle, SwizzleMode::None);
        assert!(!swizzled || layout.row_bytes.is_multiple_of(layout.swizzle.span()), "a swizzled tile is whole panels wide");
        assert!(!swizzled || layout.rows.is_multiple_of(ATOM_ROWS), "a swizzled tile has a multiple of 8 rows");
        layout.rows * layout.row_bytes
    };
    const ALIGN: u32 = S::MODE.alignment();

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address, element: PhantomData }
    }

    /// `[row, column]`.
    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        let element = size_of::<T>() as u32;
        let (row, byte) = Self::LAYOUT.place(offset);
        if byte % element + bytes > element {
            return Ok(());
        }
        write!(name, "[{row}, {}]", byte / element)
    }
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle> SharedTile<T, ROWS, COLUMNS, S> {
    /// Where its bytes lie.
    pub const LAYOUT: TileLayout = TileLayout { rows: ROWS as u32, row_bytes: (COLUMNS * size_of::<T>()) as u32, swizzle: S::MODE };

    /// The same bytes as elements of another type, in rows of as many bytes.
    #[inline(always)]
    pub const fn cast<U: Pod, const WIDTH: usize>(self) -> SharedTile<U, ROWS, WIDTH, S> {
        const { assert!(COLUMNS * size_of::<T>() == WIDTH * size_of::<U>(), "rows are of as many bytes") };
        SharedTile { address: self.address, element: PhantomData }
    }

    /// Its `PART` rows from `first` on, a multiple of 8.
    #[inline(always)]
    #[track_caller]
    pub fn rows<const PART: usize>(self, first: u32) -> SharedTile<T, PART, COLUMNS, S> {
        const {
            assert!((COLUMNS * size_of::<T>()) as u32 <= S::MODE.span(), "the tile is one panel wide");
            assert!(PART <= ROWS && PART.is_multiple_of(8), "rows are taken by atoms");
        }
        if Target::CHECKED && (first as usize + PART > ROWS || !first.is_multiple_of(8)) {
            let last = (first as usize + PART) * COLUMNS;
            Target::out_of_bounds_shared(self.address, Self::SIZE, last as u64 - 1, (ROWS * COLUMNS) as u64);
        }
        SharedTile { address: self.address + first * Self::LAYOUT.row_bytes, element: PhantomData }
    }

    /// The element at `row`, `column`.
    #[inline(always)]
    #[track_caller]
    pub fn load(self, row: u32, column: u32) -> T {
        // SAFETY: `address_of` checked the place where this build checks; the derive laid the tile inside the arena.
        unsafe { <Target as SharedMemory>::load(self.address_of(row, column)) }
    }

    /// Writes the element at `row`, `column`.
    #[inline(always)]
    #[track_caller]
    pub fn store(self, row: u32, column: u32, value: T) {
        // SAFETY: as `load`.
        unsafe { <Target as SharedMemory>::store(self.address_of(row, column), value) };
    }

    /// Writes two 4-byte elements that start at `row`, `column`, an even one.
    #[inline(always)]
    #[track_caller]
    pub fn store_pair(self, row: u32, column: u32, values: [T; 2]) {
        const { assert!(size_of::<T>() == 4, "a pair is two words") };
        // SAFETY: as `load`; an even column is 8-byte aligned, and swizzles move 16 bytes together.
        unsafe { <Target as SharedMemory>::store::<[T; 2]>(self.address_of(row, column), values) };
    }

    /// The shared address of the first element, for copies.
    #[inline(always)]
    pub const fn address(self) -> u32 {
        self.address
    }

    /// The shared address of the element at `row`, `column`.
    #[inline(always)]
    #[track_caller]
    pub fn address_of(self, row: u32, column: u32) -> u32 {
        if Target::CHECKED && (row as usize >= ROWS || column as usize >= COLUMNS) {
            Target::out_of_bounds_shared(
                self.address,
                Self::SIZE,
                u64::from(row) * COLUMNS as u64 + u64::from(column),
                (ROWS * COLUMNS) as u64,
            );
        }
        Self::LAYOUT.address(self.address, row, column * size_of::<T>() as u32)
    }

    /// The shared address of the 16 bytes at `chunk`.
    #[inline(always)]
    #[track_caller]
    pub fn address_of_chunk(self, chunk: Chunk<T, ROWS, COLUMNS, S>) -> u32 {
        if Target::CHECKED && chunk.offset >= Self::SIZE {
            let element = size_of::<T>() as u32;
            Target::out_of_bounds_shared(self.address, Self::SIZE, (chunk.offset / element).into(), (ROWS * COLUMNS) as u64);
        }
        self.address + chunk.offset
    }
}

/// Where 16 bytes lie in each tile of a kind. A thread that finds one before a loop finds others by constants: those of a row that is whole
/// atoms further by an addition, and those of the same row by an xor.
#[derive(Clone, Copy)]
pub struct Chunk<T, const ROWS: usize, const COLUMNS: usize, S> {
    offset: u32,
    tile: PhantomData<fn() -> (T, S)>,
}

impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle> Chunk<T, ROWS, COLUMNS, S> {
    /// The 16 bytes from `row`, `column` on, where a column of whole chunks begins.
    #[inline(always)]
    pub fn new(row: u32, column: u32) -> Self {
        Self { offset: SharedTile::<T, ROWS, COLUMNS, S>::LAYOUT.address(0, row, column * size_of::<T>() as u32), tile: PhantomData }
    }

    /// The chunk `rows` further, a multiple of the 8 rows of an atom.
    #[inline(always)]
    pub fn below(self, rows: u32) -> Self {
        Self { offset: self.offset + rows * SharedTile::<T, ROWS, COLUMNS, S>::LAYOUT.panel_row(), ..self }
    }

    /// The same chunk, [anew](crate::num::anew()).
    #[inline(always)]
    pub fn anew(self, changing: u32) -> Self {
        Self { offset: num::anew(self.offset, changing), ..self }
    }

    /// The chunk of the same row whose column is this one's, xor `columns`: whole chunks, in the same panel.
    #[inline(always)]
    pub fn beside(self, columns: u32) -> Self {
        Self { offset: self.offset ^ (columns * size_of::<T>() as u32), ..self }
    }
}

/// `COUNT` tiles (or other pieces) one after the other. Unlike in an array, which one is meant may be known at run time
/// only.
pub struct Tiles<S, const COUNT: usize> {
    address: u32,
    piece: PhantomData<fn() -> S>,
}

impl<S, const COUNT: usize> Clone for Tiles<S, COUNT> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<S, const COUNT: usize> Copy for Tiles<S, COUNT> {}

impl<S: SharedStorage, const COUNT: usize> SharedStorage for Tiles<S, COUNT> {
    const SIZE: u32 = <[S; COUNT] as SharedStorage>::SIZE;
    const ALIGN: u32 = S::ALIGN;

    #[inline(always)]
    unsafe fn at(address: u32) -> Self {
        Self { address, piece: PhantomData }
    }

    #[inline]
    fn name_part(offset: u32, bytes: u32, name: &mut dyn Write) -> fmt::Result {
        name_piece::<S>(offset, bytes, name)
    }
}

impl<S: SharedStorage, const COUNT: usize> Tiles<S, COUNT> {
    /// Tile `index`, below `COUNT`.
    #[inline(always)]
    #[track_caller]
    pub fn tile(self, index: u32) -> S {
        if Target::CHECKED && index >= COUNT as u32 {
            Target::out_of_bounds_shared(self.address, Self::SIZE, index.into(), COUNT as u64);
        }
        // SAFETY: the code that made this handle vouched for `COUNT` pieces one after the other.
        unsafe { S::at(self.address + index * S::SIZE.next_multiple_of(S::ALIGN)) }
    }

    /// The shared address of the first tile.
    #[inline(always)]
    pub const fn address(self) -> u32 {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Swizzle32, Swizzle64, Swizzle128};
    use crate::num::bf16;

    /// Every chunk follows from any other of the same columns' bits by rows of atoms and an xor.
    fn chunks_follow<S: Swizzle>() {
        // SAFETY: no access is made.
        let tile = unsafe { SharedTile::<bf16, 32, 64, S>::at(1024) };
        let width = S::MODE.span() / 16;
        for (row, below) in (0..8).flat_map(|row| [0, 8, 24].map(|below| (row, below))) {
            for (from, to) in (0..width).flat_map(|from| (0..width).map(move |to| (8 * from, 8 * to))) {
                let chunk = Chunk::<bf16, 32, 64, S>::new(row, from);
                let found = tile.address_of_chunk(chunk.beside(from ^ to).below(below));
                assert_eq!(found, tile.address_of(row + below, to), "{:?}: row {row} and {below}, column {from} to {to}", S::MODE);
                assert_eq!(found, tile.address_of_chunk(chunk.below(below).anew(7).beside(from ^ to)));
            }
        }
    }

    #[test]
    fn chunks_follow_from_one_another() {
        chunks_follow::<Swizzle32>();
        chunks_follow::<Swizzle64>();
        chunks_follow::<Swizzle128>();
    }
}
