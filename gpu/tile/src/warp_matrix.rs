//! Matrix multiplication by warps, on GPUs from sm_80 on: `D += A B`, each warp for its own 16 rows.
//!
//! The tiles are those of the warpgroup ([`register_tile`](crate::register_tile)): four warps hold 64 rows, 16 each, in the
//! same fragments, so that what works on rows is the same for both. A warp waits for no other: [`multiply_add`] is done when
//! it returns, and tiles in shared memory are published to the warps by an ordinary barrier.
//!
//! Products are exact and accumulated in `f32` with the tensor core's own rounding, as in [`matrix`](crate::matrix).
//!
//! Source: PTX ISA 9.7.14.5, `mma` and `ldmatrix`; 16-bit elements from sm_80, 8-bit ones from sm_89.

use core::marker::PhantomData;

use crate::arch::{Columns, MatrixColumns, MatrixElement, MatrixMove, Target, WarpMatrix};
use crate::layout::Swizzle;
use crate::register_tile::{OperandTile, RegisterElement, RegisterTile};
use crate::shared::{Chunk, SharedTile};
use crate::thread;

/// A right operand, `K` by `N`, in shared memory.
pub trait Right<T, const N: usize, const K: usize>: Copy {
    /// What instruction `step` takes for the eight columns from `column` on, and for the eight after them.
    #[doc(hidden)]
    fn fragments(self, column: u32, step: u32) -> [u32; 4];
}

/// A tile that holds the transpose of a right operand: its rows lie along K.
#[derive(Clone, Copy)]
pub struct KMajor<T>(pub T);

/// A tile that holds a right operand of 16 bits as it is: its rows lie along N.
#[derive(Clone, Copy)]
pub struct NMajor<T>(pub T);

impl<T: MatrixElement, const N: usize, const K: usize, S: Swizzle> Right<T, N, K> for KMajor<SharedTile<T, N, K, S>> {
    #[inline(always)]
    #[track_caller]
    fn fragments(self, column: u32, step: u32) -> [u32; 4] {
        let (matrix, row) = (thread::lane() / 8, thread::lane() % 8);
        let at = self.0.address_of(column + matrix / 2 * 8 + row, T::STEP as u32 * step + matrix % 2 * (T::STEP as u32 / 2));
        // SAFETY: `address_of` gives the address of 16 bytes that lie together, inside the tile.
        unsafe { Target::load_matrices(at) }
    }
}

impl<T: RegisterElement, const N: usize, const K: usize, S: Swizzle> Right<T, N, K> for NMajor<SharedTile<T, K, N, S>> {
    #[inline(always)]
    #[track_caller]
    fn fragments(self, column: u32, step: u32) -> [u32; 4] {
        let (matrix, row) = (thread::lane() / 8, thread::lane() % 8);
        let at = self.0.address_of(16 * step + matrix % 2 * 8 + row, column + matrix / 2 * 8);
        // SAFETY: `address_of` gives the address of 8 elements, 16 bytes that lie together, inside the tile.
        unsafe { Target::load_matrices_transposed(at) }
    }
}

/// A right operand of 16 bits in the registers of a warp, as deep as one instruction: loaded early, it lets [`multiply_add`] begin at
/// once.
#[derive(Clone, Copy)]
pub struct RightTile<T, const N: usize>
where
    Columns<N>: MatrixColumns,
{
    words: <Columns<N> as MatrixColumns>::Words,
    element: PhantomData<fn() -> T>,
}

impl<T: RegisterElement, const N: usize> RightTile<T, N>
where
    Columns<N>: MatrixColumns,
{
    /// Loads an operand from shared memory. All lanes of a warp call it together, after whatever published the tile.
    #[inline(always)]
    #[track_caller]
    pub fn load(source: impl Right<T, N, 16>) -> Self {
        Self::of_columns(|column| source.fragments(column, 0))
    }

    /// What a lane reads of a tile whose rows lie along K, for [`load_chunk`](Self::load_chunk): of the first row and column.
    #[inline(always)]
    #[track_caller]
    pub fn chunk<const ROWS: usize, const K: usize, S: Swizzle>() -> Chunk<T, ROWS, K, S> {
        Chunk::new(thread::lane() / 16 * 8 + thread::lane() % 8, thread::lane() / 8 % 2 * 8)
    }

    /// The same of a tile whose rows lie along N, for [`load_chunk_transposed`](Self::load_chunk_transposed).
    #[inline(always)]
    #[track_caller]
    pub fn chunk_transposed<const K: usize, const COLUMNS: usize, S: Swizzle>() -> Chunk<T, K, COLUMNS, S> {
        Chunk::new(thread::lane() % 16, thread::lane() / 16 * 8)
    }

    /// Loads an operand from [`chunk`](Self::chunk) on, or from one that is multiples of 16 rows and columns further. All lanes of a warp
    /// call it together, after whatever published the tile.
    #[inline(always)]
    #[track_caller]
    pub fn load_chunk<const ROWS: usize, const K: usize, S: Swizzle>(
        source: SharedTile<T, ROWS, K, S>,
        chunk: Chunk<T, ROWS, K, S>,
    ) -> Self {
        // SAFETY: `address_of_chunk` gives the address of 16 bytes that lie together, inside the tile.
        Self::of_columns(|column| unsafe { Target::load_matrices(source.address_of_chunk(chunk.below(column))) })
    }

    /// The same of a tile whose rows lie along N, from [`chunk_transposed`](Self::chunk_transposed), or from one that is multiples of 16 rows and of
    /// `N` columns further. All columns are in one panel.
    #[inline(always)]
    #[track_caller]
    pub fn load_chunk_transposed<const K: usize, const COLUMNS: usize, S: Swizzle>(
        source: SharedTile<T, K, COLUMNS, S>,
        chunk: Chunk<T, K, COLUMNS, S>,
    ) -> Self {
        // SAFETY: as `load_chunk`.
        Self::of_columns(|column| unsafe { Target::load_matrices_transposed(source.address_of_chunk(chunk.beside(column))) })
    }

    /// The operand of which `load` gives 16 columns.
    #[inline(always)]
    #[track_caller]
    fn of_columns(load: impl Fn(u32) -> [u32; 4]) -> Self {
        let mut words = <Columns<N> as MatrixColumns>::ZERO_WORDS;
        let mut column = 0;
        while column < N {
            let loaded = load(column as u32);
            let mut i = 0;
            while i < 4 {
                words.as_mut()[column / 4 + i] = loaded[i];
                i += 1;
            }
            column += 16;
        }
        Self { words, element: PhantomData }
    }
}

impl<T: RegisterElement, const N: usize> Right<T, N, 16> for RightTile<T, N>
where
    Columns<N>: MatrixColumns,
{
    #[inline(always)]
    fn fragments(self, column: u32, _: u32) -> [u32; 4] {
        core::array::from_fn(|i| self.words.as_ref()[column as usize / 4 + i])
    }
}

/// Adds `A B` for each of some left operands, of 64 rows each. All lanes of a warp call it together.
#[inline(always)]
#[track_caller]
pub fn multiply_add<T: MatrixElement, const N: usize, const K: usize, const COUNT: usize>(
    sums: &mut [RegisterTile<N>; COUNT],
    left: &[OperandTile<T, K>; COUNT],
    right: impl Right<T, N, K>,
) where
    Columns<N>: MatrixColumns,
    Columns<K>: MatrixColumns,
{
    let mut step = 0;
    while step < K / T::STEP {
        let mut column = 0;
        while column < N {
            let [a, b, c, d] = right.fragments(column as u32, step as u32);
            let mut i = 0;
            while i < COUNT {
                let words = left[i].step(step);
                multiply_eight::<T, N>(&mut sums[i], column / 8, words, [a, b]);
                multiply_eight::<T, N>(&mut sums[i], column / 8 + 1, words, [c, d]);
                i += 1;
            }
            column += 16;
        }
        step += 1;
    }
}

/// One instruction: eight columns of a tile.
#[inline(always)]
#[track_caller]
fn multiply_eight<T: MatrixElement, const N: usize>(sum: &mut RegisterTile<N>, pair: usize, left: [u32; 4], right: [u32; 2])
where
    Columns<N>: MatrixColumns,
{
    let ([a, b], [c, d]) = (sum.pair(0, pair), sum.pair(1, pair));
    let [a, b, c, d] = Target::multiply_warp::<T>([a, b, c, d], left, right);
    sum.set_pair(0, pair, [a, b]);
    sum.set_pair(1, pair, [c, d]);
}
