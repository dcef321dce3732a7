//! Rows of a matrix and the threads that share them: what kernels that reduce rows are written with.
//!
//! A row is cut into pieces of eight elements. [`Split`] is the policy which threads share a row and which pieces a thread has; a kernel takes one as
//! its parameter, and the host the first that [`takes`](Split::takes) the rows at hand.
//!
//! | policy | a row belongs to | a thread keeps it | widest row | elements lie |
//! |---|---|---|---|---|
//! | [`ByWarp<N>`](ByWarp) | a warp | in registers, `N` vectors | `256 N` | at multiples of 16 bytes, whole vectors |
//! | [`ByBlock<THREADS, N>`](ByBlock) | a block | in registers, `N` vectors | `8 THREADS N` | the same |
//! | [`ByElements`] | a block | nowhere: each use reads it again, from a cache if it is lucky | any | anywhere |
//!
//! All loads of a row are in flight together, and the first two policies read it once.

#![allow(clippy::needless_range_loop, reason = "an iterator leaves an array in local memory")]

use core::marker::PhantomData;

use oxtile_tile::prelude::*;

/// Elements of a piece.
pub const PIECE: usize = 8;

/// Which threads share a row, and how.
pub trait Split: 'static {
    /// Threads of a block.
    const THREADS: u32;
    /// Rows that a block works on at a time.
    const ROWS: u32;
    /// The widest row.
    const WIDEST: u32;
    /// Whether rows are whole vectors, at multiples of 16 bytes.
    const IS_OF_VECTORS: bool;
    /// What a thread has of a row.
    type Part<T: Half>: Part;
    /// What a thread adds up over rows.
    type Sums: Sums;

    /// The pieces of a thread.
    fn pieces(width: u32) -> u32;
    /// The element of the row that is number `j` in the thread's piece `i`.
    fn element(i: u32, j: u32) -> u32;
    /// The thread's part of the `width` elements from `start` on, and `fill` after their end.
    fn load<T: Half>(view: Global<T>, start: u64, width: u32, fill: f32) -> Self::Part<T>;
    /// Writes piece `i` of the `width` elements from `start` on.
    fn store<T: Half>(view: &GlobalMut<T>, start: u64, width: u32, i: u32, piece: [f32; PIECE]);
    /// The sum over the threads that share the row, in all of them.
    fn sum(value: f32, storage: ReduceStorage) -> f32;

    /// Refuses rows that it does not take, of `width` elements, and tensors that start where it does not take them.
    ///
    /// # Errors
    /// `width` or the tensor is named as the cause.
    fn check(width: u32, starts: &[(&'static str, u64)]) -> Result<(), LaunchError> {
        LaunchError::check_limit("width", width.into(), Self::WIDEST.into())?;
        if Self::IS_OF_VECTORS {
            LaunchError::check_multiple("width", PIECE as u64, width.into())?;
            starts.iter().try_for_each(|&(name, address)| LaunchError::check_alignment(name, 16, address))?;
        }
        Ok(())
    }

    /// Whether it takes rows of so many elements, at these addresses.
    fn takes(width: u64, addresses: &[u64]) -> bool {
        let is_whole = width.is_multiple_of(PIECE as u64) && addresses.iter().all(|address| address.is_multiple_of(16));
        width <= u64::from(Self::WIDEST) && (is_whole || !Self::IS_OF_VECTORS)
    }
}

/// A thread's part of a row.
pub trait Part: Copy {
    /// Piece `i`.
    fn piece(&self, i: u32) -> [f32; PIECE];
    /// The same part, which is unpacked again when it is used `after` this number is known. Otherwise the compiler keeps all of a part in `f32` from
    /// its first use to its last, in twice the registers.
    fn again(self, after: f32) -> Self;
}

/// What a thread adds up over rows, for each element of its part.
pub trait Sums {
    /// Zeros, which are to go to the `width` elements of `sums` from `start` on.
    fn zero(sums: GlobalMut<f32>, start: u64, width: u32) -> Self;
    /// Adds to those of piece `i`, once a row.
    fn add(&mut self, i: u32, piece: [f32; PIECE]);
    /// Writes them, after the last row.
    fn finish(self);
}

/// A row, as one of the threads that share it sees it.
pub struct Row<S> {
    /// Its number.
    pub index: u64,
    /// Its elements.
    pub width: u32,
    split: PhantomData<S>,
}

impl<S: Split> Row<S> {
    /// The first row of this thread.
    #[inline(always)]
    pub fn first(width: u32) -> Self {
        let index = u64::from(block::index()[0]) * u64::from(S::ROWS) + u64::from(Self::team());
        Self { index, width, split: PhantomData }
    }

    /// The next one, where all blocks take rows in turn.
    #[inline(always)]
    pub fn next(self) -> Self {
        Self { index: self.index + u64::from(block::count()[0]) * u64::from(S::ROWS), ..self }
    }

    /// Whether a matrix of so many elements has it.
    #[inline(always)]
    pub fn is_in(&self, elements: u64) -> bool {
        self.start() < elements
    }

    /// Whether this thread is the first of those that share it.
    #[inline(always)]
    pub fn is_leader(&self) -> bool {
        thread::index() == Self::team() * (S::THREADS / S::ROWS)
    }

    /// The thread's part of this row of a matrix.
    #[inline(always)]
    pub fn load<T: Half>(&self, matrix: Global<T>) -> S::Part<T> {
        S::load(matrix, self.start(), self.width, 0.0)
    }

    /// The thread's part of a vector that all rows have in common.
    #[inline(always)]
    pub fn load_common<T: Half>(&self, vector: Global<T>) -> S::Part<T> {
        S::load(vector, 0, self.width, 0.0)
    }

    /// The sum over the row of what `piece` gives of each of the thread's pieces: of a thread's elements by their place in the piece, then pairwise,
    /// then over the threads. All threads that share the row have it.
    #[inline(always)]
    pub fn sum(&self, storage: ReduceStorage, piece: impl Fn(u32) -> [f32; PIECE]) -> f32 {
        let mut sums = [0.0; PIECE];
        for i in 0..S::pieces(self.width) {
            sums = zip([sums, piece(i)], |[sum, x]| sum + x);
        }
        let [a, b, c, d, e, f, g, h] = sums;
        S::sum(((a + b) + (c + d)) + ((e + f) + (g + h)), storage)
    }

    /// Writes this row of a matrix, rounded to nearest even.
    #[inline(always)]
    pub fn store<T: Half>(&self, matrix: &GlobalMut<T>, piece: impl Fn(u32) -> [f32; PIECE]) {
        for i in 0..S::pieces(self.width) {
            S::store(matrix, self.start(), self.width, i, piece(i));
        }
    }

    /// Adds what `piece` gives to sums over rows.
    #[inline(always)]
    pub fn add(&self, sums: &mut S::Sums, piece: impl Fn(u32) -> [f32; PIECE]) {
        for i in 0..S::pieces(self.width) {
            sums.add(i, piece(i));
        }
    }

    /// Which of the rows that the block works on at a time.
    #[inline(always)]
    fn team() -> u32 {
        if S::ROWS == 1 { 0 } else { thread::warp() }
    }

    #[inline(always)]
    fn start(&self) -> u64 {
        self.index * u64::from(self.width)
    }
}

/// What `f` makes of the elements at each place of some pieces.
#[inline(always)]
pub fn zip<const N: usize>(pieces: [[f32; PIECE]; N], f: impl Fn([f32; N]) -> f32) -> [f32; PIECE] {
    core::array::from_fn(|j| f(core::array::from_fn(|piece| pieces[piece][j])))
}

/// Vectors of a row, in registers.
#[derive(Clone, Copy)]
pub struct Kept<T, const N: usize>([Vector<T>; N]);

impl<T: Half, const N: usize> Part for Kept<T, N> {
    #[inline(always)]
    fn piece(&self, i: u32) -> [f32; PIECE] {
        self.0[i as usize].to_f32()
    }

    #[inline(always)]
    fn again(self, after: f32) -> Self {
        Self(self.0.map(|vector| Vector::from_words(vector.words().map(|word| num::permute_bytes(word, after.to_bits(), 0x3210)))))
    }
}

/// Sums in registers.
pub struct KeptSums<S, const N: usize> {
    values: [[f32; PIECE]; N],
    sums: GlobalMut<f32>,
    start: u64,
    width: u32,
    split: PhantomData<S>,
}

impl<S: Split, const N: usize> Sums for KeptSums<S, N> {
    #[inline(always)]
    fn zero(sums: GlobalMut<f32>, start: u64, width: u32) -> Self {
        Self { values: [[0.0; PIECE]; N], sums, start, width, split: PhantomData }
    }

    #[inline(always)]
    fn add(&mut self, i: u32, piece: [f32; PIECE]) {
        self.values[i as usize] = zip([self.values[i as usize], piece], |[sum, x]| sum + x);
    }

    #[inline(always)]
    fn finish(self) {
        for i in 0..N {
            let ([a, b, c, d, e, f, g, h], at) = (self.values[i], S::element(i as u32, 0));
            if at < self.width {
                self.sums.store_vector(self.start + u64::from(at), Vector::<f32>::from_f32([a, b, c, d]));
                self.sums.store_vector(self.start + u64::from(at) + 4, Vector::<f32>::from_f32([e, f, g, h]));
            }
        }
    }
}

macro_rules! in_registers {
    ($split:ident [$($parameter:ident: $type:ty),*], $threads:expr, $rows:expr, $member:expr, |$value:ident, $storage:ident| $sum:expr) => {
        impl<$(const $parameter: $type,)* const N: usize> Split for $split<$($parameter,)* N> {
            const THREADS: u32 = $threads;
            const ROWS: u32 = $rows;
            const WIDEST: u32 = (PIECE * N) as u32 * (Self::THREADS / Self::ROWS);
            const IS_OF_VECTORS: bool = true;
            type Part<T: Half> = Kept<T, N>;
            type Sums = KeptSums<Self, N>;

            #[inline(always)]
            fn pieces(_: u32) -> u32 {
                N as u32
            }

            #[inline(always)]
            fn element(i: u32, j: u32) -> u32 {
                (i * (Self::THREADS / Self::ROWS) + $member) * PIECE as u32 + j
            }

            #[inline(always)]
            fn load<T: Half>(view: Global<T>, start: u64, width: u32, fill: f32) -> Kept<T, N> {
                Kept(core::array::from_fn(|i| {
                    let at = Self::element(i as u32, 0);
                    if at < width { view.load_vector(start + u64::from(at)) } else { Vector::<T>::from_f32([fill; PIECE]) }
                }))
            }

            #[inline(always)]
            fn store<T: Half>(view: &GlobalMut<T>, start: u64, width: u32, i: u32, piece: [f32; PIECE]) {
                let at = Self::element(i, 0);
                if at < width {
                    view.store_vector(start + u64::from(at), Vector::<T>::from_f32(piece));
                }
            }

            #[inline(always)]
            fn sum($value: f32, $storage: ReduceStorage) -> f32 {
                $sum
            }
        }
    };
}

/// A warp has a row, in `N` vectors a lane; a block has eight rows at a time.
pub struct ByWarp<const N: usize>;
in_registers!(ByWarp [], 256, 8, thread::lane(), |value, _storage| warp::sum_f32(value));

/// A block of so many threads has a row, in `N` vectors a thread.
pub struct ByBlock<const THREADS: u32, const N: usize>;
in_registers!(ByBlock [THREADS: u32], THREADS, 1, thread::index(), |value, storage| block::sum_f32(value, storage));

/// A block has a row, of which a thread takes every 256th element.
pub struct ByElements;

/// A row in device memory.
#[derive(Clone, Copy)]
pub struct InMemory<T> {
    view: Global<T>,
    start: u64,
    width: u32,
    fill: f32,
}

impl<T: Half> Part for InMemory<T> {
    #[inline(always)]
    fn piece(&self, i: u32) -> [f32; PIECE] {
        core::array::from_fn(|j| {
            let at = ByElements::element(i, j as u32);
            if at < self.width { self.view.load(self.start + u64::from(at)).to_f32() } else { self.fill }
        })
    }

    #[inline(always)]
    fn again(self, _: f32) -> Self {
        self
    }
}

/// Sums in device memory, each of which one thread alone reads and writes.
pub struct SumsInMemory {
    sums: GlobalMut<f32>,
    start: u64,
    width: u32,
}

impl Sums for SumsInMemory {
    #[inline(always)]
    fn zero(sums: GlobalMut<f32>, start: u64, width: u32) -> Self {
        for at in thread::stride(width.into(), 1) {
            sums.store(start + at, 0.0);
        }
        Self { sums, start, width }
    }

    #[inline(always)]
    fn add(&mut self, i: u32, piece: [f32; PIECE]) {
        let place = |j: usize| (ByElements::element(i, j as u32), self.start + u64::from(ByElements::element(i, j as u32)));
        // All loads first.
        let before: [f32; PIECE] = core::array::from_fn(|j| if place(j).0 < self.width { self.sums.load(place(j).1) } else { 0.0 });
        for j in 0..PIECE {
            if place(j).0 < self.width {
                self.sums.store(place(j).1, before[j] + piece[j]);
            }
        }
    }

    #[inline(always)]
    fn finish(self) {}
}

impl Split for ByElements {
    const THREADS: u32 = 256;
    const ROWS: u32 = 1;
    const WIDEST: u32 = i32::MAX as u32;
    const IS_OF_VECTORS: bool = false;
    type Part<T: Half> = InMemory<T>;
    type Sums = SumsInMemory;

    #[inline(always)]
    fn pieces(width: u32) -> u32 {
        width.div_ceil(Self::THREADS * PIECE as u32)
    }

    #[inline(always)]
    fn element(i: u32, j: u32) -> u32 {
        (i * PIECE as u32 + j) * Self::THREADS + thread::index()
    }

    #[inline(always)]
    fn load<T: Half>(view: Global<T>, start: u64, width: u32, fill: f32) -> InMemory<T> {
        InMemory { view, start, width, fill }
    }

    #[inline(always)]
    fn store<T: Half>(view: &GlobalMut<T>, start: u64, width: u32, i: u32, piece: [f32; PIECE]) {
        for j in 0..PIECE {
            let at = Self::element(i, j as u32);
            if at < width {
                view.store(start + u64::from(at), T::from_f32(piece[j]));
            }
        }
    }

    #[inline(always)]
    fn sum(value: f32, storage: ReduceStorage) -> f32 {
        block::sum_f32(value, storage)
    }
}
