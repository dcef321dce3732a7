//! Matrices in the registers of a warpgroup.
//!
//! A tile has 64 rows, 16 for each warp in turn. A thread holds two of them, `8` apart, and in each the pairs of
//! neighbouring columns that lie `8` apart: four lanes, a quad, share a row.
//!
//! ```text
//! lane        columns 0 1   2 3   4 5   6 7   8 9 ...
//!  row 0          0   0   1   1   2   2   3   3   0
//!  row 1          4   4   5   5   6   6   7   7   4
//!  row 8          0   0   1 ...
//! ```
//!
//! Source: PTX ISA 9.7.15.5.1.2, the register fragments of `wgmma.mma_async.m64nNk16`.

use core::marker::PhantomData;

use crate::arch::{Columns, MatrixColumns, MatrixElement, MatrixMove, SharedMemory, Target};
use crate::global::GlobalMut;
use crate::layout::Swizzle;
use crate::num::{Half, HalfPair, bf16, e4m3, e4m3x4, f16};
use crate::shared::{Chunk, SharedTile};
use crate::thread;
use crate::warp;

/// Rows of a tile.
pub const ROWS: usize = 64;

/// Rows of which each thread holds a part.
pub const THREAD_ROWS: usize = 2;

/// One value for each of the two rows that a thread holds a part of.
pub type Rows = [f32; THREAD_ROWS];

/// The tile's row that is the thread's row `half` (0 or 1).
#[inline(always)]
#[track_caller]
pub fn row(half: u32) -> u32 {
    thread::warp() % 4 * 16 + thread::lane() / 4 + 8 * half
}

/// The tile's column of the first of the thread's pair `pair`.
#[inline(always)]
#[track_caller]
pub fn column(pair: u32) -> u32 {
    8 * pair + 2 * (thread::lane() % 4)
}

/// The largest of a value over the four lanes that share a row, in each of them.
#[inline(always)]
#[track_caller]
pub fn quad_max(value: f32) -> f32 {
    let value = crate::num::max(value, warp::shuffle_xor(value, 1));
    crate::num::max(value, warp::shuffle_xor(value, 2))
}

/// The sum of a value over the four lanes that share a row, in each of them.
#[inline(always)]
#[track_caller]
pub fn quad_sum(value: f32) -> f32 {
    let value = value + warp::shuffle_xor(value, 1);
    value + warp::shuffle_xor(value, 2)
}

/// A 64 by `COLUMNS` matrix of `f32`, over the 128 threads of a warpgroup.
pub struct RegisterTile<const COLUMNS: usize>
where
    Columns<COLUMNS>: MatrixColumns,
{
    pub(crate) registers: <Columns<COLUMNS> as MatrixColumns>::Registers,
}

impl<const COLUMNS: usize> Clone for RegisterTile<COLUMNS>
where
    Columns<COLUMNS>: MatrixColumns,
{
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<const COLUMNS: usize> Copy for RegisterTile<COLUMNS> where Columns<COLUMNS>: MatrixColumns {}

impl<const COLUMNS: usize> RegisterTile<COLUMNS>
where
    Columns<COLUMNS>: MatrixColumns,
{
    /// Pairs of neighbouring columns that a thread holds of each row.
    pub const PAIRS: usize = COLUMNS / 8;

    /// All zero.
    #[inline(always)]
    pub fn zero() -> Self {
        Self { registers: <Columns<COLUMNS> as MatrixColumns>::ZERO }
    }

    /// The two neighbours of row `half` from column [`column(pair)`](column()) on. Both indices are constants once loops are
    /// unrolled: registers have no addresses.
    #[inline(always)]
    pub fn pair(&self, half: usize, pair: usize) -> [f32; 2] {
        let registers = self.registers.as_ref();
        [registers[4 * pair + 2 * half], registers[4 * pair + 2 * half + 1]]
    }

    /// Replaces [`pair`](Self::pair).
    #[inline(always)]
    pub fn set_pair(&mut self, half: usize, pair: usize, values: [f32; 2]) {
        let registers = self.registers.as_mut();
        registers[4 * pair + 2 * half] = values[0];
        registers[4 * pair + 2 * half + 1] = values[1];
    }

    /// Every element by itself.
    #[inline(always)]
    #[track_caller]
    pub fn map(&mut self, f: impl Fn(f32) -> f32) {
        let registers = self.registers.as_mut();
        let mut i = 0;
        while i < COLUMNS / 2 {
            registers[i] = f(registers[i]);
            i += 1;
        }
    }

    /// Every pair of neighbours, given the thread's row (0 or 1) and the pair's number.
    #[inline(always)]
    #[track_caller]
    pub fn map_pairs(&mut self, f: impl Fn(usize, usize, [f32; 2]) -> [f32; 2]) {
        let mut pair = 0;
        while pair < Self::PAIRS {
            let mut half = 0;
            while half < THREAD_ROWS {
                self.set_pair(half, pair, f(half, pair, self.pair(half, pair)));
                half += 1;
            }
            pair += 1;
        }
    }

    /// Every row times a value.
    #[inline(always)]
    pub fn scale_rows(&mut self, factors: Rows) {
        self.map_pairs(|half, _, [a, b]| [a * factors[half], b * factors[half]]);
    }

    /// Each row folded over its columns, and over the lanes of the row by `quad` ([`quad_max`], [`quad_sum`]).
    #[inline(always)]
    #[track_caller]
    pub fn fold_rows(&self, start: Rows, f: impl Fn(f32, f32) -> f32, quad: impl Fn(f32) -> f32) -> Rows {
        let mut folded = start;
        let mut half = 0;
        while half < THREAD_ROWS {
            let mut pair = 0;
            while pair < Self::PAIRS {
                let [a, b] = self.pair(half, pair);
                folded[half] = f(f(folded[half], a), b);
                pair += 1;
            }
            folded[half] = quad(folded[half]);
            half += 1;
        }
        folded
    }

    /// The tile in 16 bits, as the left operand of a multiplication: the same elements stay in the same threads.
    #[inline(always)]
    pub fn to_operand<T: RegisterElement>(&self) -> OperandTile<T, COLUMNS> {
        let mut words = <Columns<COLUMNS> as MatrixColumns>::ZERO_WORDS;
        let mut i = 0;
        while i < COLUMNS / 4 {
            words.as_mut()[i] = T::pack([self.registers.as_ref()[2 * i], self.registers.as_ref()[2 * i + 1]]);
            i += 1;
        }
        OperandTile { words, element: PhantomData }
    }

    /// The tile in 8 bits, rounded to nearest even and at most 448, as the left operand of a multiplication. Elements stay in
    /// their threads, and so change their columns: of 16 columns, operand column `4 q + 2 j + e` is the tile's `8 j + 2 q + e`.
    /// The rows of the right operand are in the same order if [turned](crate::shared::SharedTile::turn). Columns of the operand after the
    /// tile's are zeros.
    #[inline(always)]
    pub fn to_turned_operand<const WIDE: usize>(&self) -> OperandTile<e4m3, WIDE>
    where
        Columns<WIDE>: MatrixColumns,
    {
        const { assert!(WIDE >= COLUMNS, "the operand has all columns of the tile") };
        let mut words = <Columns<WIDE> as MatrixColumns>::ZERO_WORDS;
        let mut i = 0;
        while i < COLUMNS / 8 {
            let (half, pair) = (i % 2, 4 * (i / 4) + i / 2 % 2 * 2);
            let ([a, b], [c, d]) = (self.pair(half, pair), self.pair(half, pair + 1));
            words.as_mut()[i] = e4m3x4::from_f32([a, b, c, d]).to_bits();
            i += 1;
        }
        OperandTile { words, element: PhantomData }
    }

    /// Writes its columns from `first` on, a constant, to a matrix of `rows` and `columns` in device memory, rounded to nearest even: the tile's first element belongs at `at`. Elements beyond the edge are left out. The matrix starts at a multiple
    /// of two elements, and its columns are even. All threads that hold a part call it; it does not wait.
    #[inline(always)]
    #[track_caller]
    pub fn store<T: StoredElement>(&self, matrix: &GlobalMut<T>, at: [u32; 2], [rows, columns]: [u32; 2], first: usize) {
        let mut pair = first / 8;
        while pair < Self::PAIRS {
            let mut half = 0;
            while half < THREAD_ROWS {
                let [row, column] = [at[0] + row(half as u32), at[1] + column(pair as u32)];
                if row < rows && column < columns {
                    T::store_two(matrix, u64::from(row) * u64::from(columns) + u64::from(column), self.pair(half, pair));
                }
                half += 1;
            }
            pair += 1;
        }
    }

    /// Writes `WIDTH` columns from `first` on, a constant, to a tile in shared memory, rounded to nearest even. All threads
    /// of the warpgroup call it; it does not wait.
    #[inline(always)]
    #[track_caller]
    pub fn store_columns<T: StoredElement, const WIDTH: usize, S: Swizzle>(&self, first: usize, target: SharedTile<T, ROWS, WIDTH, S>) {
        const { assert!(WIDTH.is_multiple_of(16), "tiles are stored 16 columns at a time") };
        let mut columns = 0;
        while columns < WIDTH {
            let pair = (first + columns) / 8;
            T::store(target, columns as u32, [[self.pair(0, pair), self.pair(1, pair)], [self.pair(0, pair + 1), self.pair(1, pair + 1)]]);
            columns += 16;
        }
    }

    /// Adds a tile in shared memory to `WIDTH` columns from `first` on, a constant. All threads of the warpgroup call it, after whatever published the tile; it does not wait.
    #[inline(always)]
    #[track_caller]
    pub fn add_columns<T: StoredElement, const WIDTH: usize, S: Swizzle>(&mut self, first: usize, source: SharedTile<T, ROWS, WIDTH, S>) {
        const { assert!(WIDTH.is_multiple_of(16), "tiles are added 16 columns at a time") };
        let mut columns = 0;
        while columns < WIDTH {
            let loaded = T::load(source, columns as u32);
            let mut i = 0;
            while i < 4 {
                let (half, pair) = (i % 2, (first + columns) / 8 + i / 2);
                let ([a, b], [x, y]) = (self.pair(half, pair), loaded[i / 2][half]);
                self.set_pair(half, pair, [a + x, b + y]);
                i += 1;
            }
            columns += 16;
        }
    }
}

/// A 64 by `K` left operand in the registers of a warpgroup, 4 bytes a word. Elements of 8 bits fill the first half of the
/// words; the compiler finds the others unused.
pub struct OperandTile<T, const K: usize>
where
    Columns<K>: MatrixColumns,
{
    pub(crate) words: <Columns<K> as MatrixColumns>::Words,
    element: PhantomData<fn() -> T>,
}

impl<T, const K: usize> Clone for OperandTile<T, K>
where
    Columns<K>: MatrixColumns,
{
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const K: usize> Copy for OperandTile<T, K> where Columns<K>: MatrixColumns {}

impl<T: MatrixElement, const K: usize> OperandTile<T, K>
where
    Columns<K>: MatrixColumns,
{
    /// Writes its transpose, `[K, 64]`, to a tile in shared memory, from a row and a column on that are multiples of 8. All
    /// threads of the warpgroup call it; waits for nothing.
    #[inline(always)]
    #[track_caller]
    pub fn store_transposed<const HEIGHT: usize, const WIDTH: usize, S: Swizzle>(
        &self,
        target: SharedTile<T, HEIGHT, WIDTH, S>,
        [first_row, first]: [u32; 2],
    ) {
        let row = first_row + thread::lane() / 16 * 8 + thread::lane() % 8;
        let column = first + thread::warp() % 4 * 16 + thread::lane() / 8 % 2 * 8;
        let address = target.address_of(row, column);
        let mut step = 0;
        while step < K / 16 {
            let words = core::array::from_fn(|i| self.words.as_ref()[4 * step + i]);
            // Atoms have 8 rows: 16 rows further the chunks are permuted in the same way.
            let further = 16 * step as u32 * SharedTile::<T, HEIGHT, WIDTH, S>::LAYOUT.panel_row();
            // SAFETY: `address_of` gives the address of 8 elements, 16 bytes that lie together, inside the tile, which has `K`
            // rows from `first_row` on.
            unsafe { Target::store_matrices_transposed(address + further, words) };
            step += 1;
        }
    }

    /// Loads an operand from shared memory. All threads of the warpgroup call it, after whatever published the tile.
    #[inline(always)]
    #[track_caller]
    pub fn load<S: Swizzle>(source: SharedTile<T, ROWS, K, S>) -> Self {
        let (row, column) = (thread::warp() % 4 * 16 + thread::lane() % 16, thread::lane() / 16 * (T::STEP as u32 / 2));
        // SAFETY: `address_of` gives the address of 16 bytes that lie together, inside the tile.
        Self::of_steps(|step| unsafe { Target::load_matrices(source.address_of(row, T::STEP as u32 * step + column)) })
    }

    /// The operand whose instruction `step` takes these four words.
    #[inline(always)]
    #[track_caller]
    fn of_steps(load: impl Fn(u32) -> [u32; 4]) -> Self {
        let mut words = <Columns<K> as MatrixColumns>::ZERO_WORDS;
        let mut step = 0;
        while step < K / T::STEP {
            let loaded = load(step as u32);
            let mut i = 0;
            while i < 4 {
                words.as_mut()[4 * step + i] = loaded[i];
                i += 1;
            }
            step += 1;
        }
        Self { words, element: PhantomData }
    }

    /// The same in other registers, made here: `zero` is 0, which the compiler must not know. For an operand that was made while a
    /// multiplication ran, and is given to the next after the wait: ptxas serialises multiplications if operands of one are made
    /// while another runs (advisory C7513).
    #[inline(always)]
    pub fn apart(mut self, zero: u32) -> Self {
        let mut i = 0;
        while i < K / 2 * size_of::<T>() / 4 {
            self.words.as_mut()[i] ^= zero;
            i += 1;
        }
        self
    }

    /// The words that instruction `step` takes.
    #[inline(always)]
    pub(crate) fn step(&self, step: usize) -> [u32; 4] {
        let words = self.words.as_ref();
        [words[4 * step], words[4 * step + 1], words[4 * step + 2], words[4 * step + 3]]
    }
}

impl<T: RegisterElement, const K: usize> OperandTile<T, K>
where
    Columns<K>: MatrixColumns,
{
    /// Loads an operand that is stored as its transpose, `[K, 64]`. All threads of the warpgroup call it, after whatever
    /// published the tile.
    #[inline(always)]
    #[track_caller]
    pub fn load_transposed<S: Swizzle>(source: SharedTile<T, K, ROWS, S>) -> Self {
        let (row, column) = (thread::lane() / 16 * 8 + thread::lane() % 8, thread::warp() % 4 * 16 + thread::lane() / 8 % 2 * 8);
        // SAFETY: `address_of` gives the address of 8 elements, 16 bytes that lie together, inside the tile.
        Self::of_steps(|step| unsafe { Target::load_matrices_transposed(source.address_of(16 * step + row, column)) })
    }
}

impl<T: RegisterElement> OperandTile<T, 16> {
    /// What a lane reads of a tile whose rows lie along K, for [`load_chunk`](Self::load_chunk): of the first instruction's 16 columns.
    #[inline(always)]
    #[track_caller]
    pub fn chunk<const M: usize, const K: usize, S: Swizzle>() -> Chunk<T, M, K, S> {
        Chunk::new(thread::warp() % 4 * 16 + thread::lane() % 16, thread::lane() / 16 * 8)
    }

    /// What a lane reads of a tile that holds the transpose, for [`load_chunk_transposed`](Self::load_chunk_transposed): of the first
    /// instruction's 16 rows.
    #[inline(always)]
    #[track_caller]
    pub fn chunk_transposed<const K: usize, const M: usize, S: Swizzle>() -> Chunk<T, K, M, S> {
        Chunk::new(thread::lane() / 16 * 8 + thread::lane() % 8, thread::warp() % 4 * 16 + thread::lane() / 8 % 2 * 8)
    }

    /// Loads what one instruction takes, from [`chunk`](Self::chunk) or the one 16 columns further, .... All threads of the warpgroup call it, after whatever published the tile.
    #[inline(always)]
    #[track_caller]
    pub fn load_chunk<const M: usize, const K: usize, S: Swizzle>(source: SharedTile<T, M, K, S>, chunk: Chunk<T, M, K, S>) -> Self {
        // SAFETY: `address_of_chunk` gives the address of 16 bytes that lie together, inside the tile.
        Self::of_steps(|_| unsafe { Target::load_matrices(source.address_of_chunk(chunk)) })
    }

    /// The same of a tile that holds the transpose, from [`chunk_transposed`](Self::chunk_transposed) or the one 16 rows further, ....
    #[inline(always)]
    #[track_caller]
    pub fn load_chunk_transposed<const K: usize, const M: usize, S: Swizzle>(
        source: SharedTile<T, K, M, S>,
        chunk: Chunk<T, K, M, S>,
    ) -> Self {
        // SAFETY: as `load_chunk`.
        Self::of_steps(|_| unsafe { Target::load_matrices_transposed(source.address_of_chunk(chunk)) })
    }
}

/// A 16-bit element of an operand in registers.
pub trait RegisterElement: MatrixElement {
    /// Two neighbours in a word, rounded to nearest even.
    fn pack(values: [f32; 2]) -> u32;
}

impl RegisterElement for bf16 {
    #[inline(always)]
    fn pack(values: [f32; 2]) -> u32 {
        <bf16 as Half>::X2::from_f32(values).to_bits()
    }
}

impl RegisterElement for f16 {
    #[inline(always)]
    fn pack(values: [f32; 2]) -> u32 {
        <f16 as Half>::X2::from_f32(values).to_bits()
    }
}

/// An element that a [`RegisterTile`] can be stored as.
pub trait StoredElement: crate::num::Float + crate::num::Pod {
    /// Stores 16 columns from `column` on: `values[pair][half]`.
    fn store<const WIDTH: usize, S: Swizzle>(target: SharedTile<Self, ROWS, WIDTH, S>, column: u32, values: [[[f32; 2]; 2]; 2]);

    /// Stores two neighbours from element `index` on, an even one, of a view that starts at a multiple of two elements.
    fn store_two(target: &GlobalMut<Self>, index: u64, values: [f32; 2]);

    /// Loads them, as they are stored.
    fn load<const WIDTH: usize, S: Swizzle>(source: SharedTile<Self, ROWS, WIDTH, S>, column: u32) -> [[[f32; 2]; 2]; 2];
}

macro_rules! stored_halves {
    ($($t:ident)*) => { $(
        impl StoredElement for $t {
            #[inline(always)]
            #[track_caller]
            fn store<const WIDTH: usize, S: Swizzle>(target: SharedTile<Self, ROWS, WIDTH, S>, column: u32, values: [[[f32; 2]; 2]; 2]) {
                let [[a, b], [c, d]] = values;
                let row = thread::warp() % 4 * 16 + thread::lane() % 16;
                let address = target.address_of(row, column + thread::lane() / 16 * 8);
                // SAFETY: the address is that of 8 elements, 16 bytes that lie together, inside the tile.
                unsafe { Target::store_matrices(address, [a, b, c, d].map(<$t as RegisterElement>::pack)) };
            }

            #[inline(always)]
            #[track_caller]
            fn store_two(target: &GlobalMut<Self>, index: u64, values: [f32; 2]) {
                target.store_word(index, <$t as RegisterElement>::pack(values));
            }

            #[inline(always)]
            #[track_caller]
            fn load<const WIDTH: usize, S: Swizzle>(source: SharedTile<Self, ROWS, WIDTH, S>, column: u32) -> [[[f32; 2]; 2]; 2] {
                let row = thread::warp() % 4 * 16 + thread::lane() % 16;
                let address = source.address_of(row, column + thread::lane() / 16 * 8);
                // SAFETY: as in `store`.
                let [a, b, c, d] = unsafe { Target::load_matrices(address) }.map(|word| <$t as Half>::X2::from_bits(word).to_f32());
                [[a, b], [c, d]]
            }
        }
    )* };
}
stored_halves! { bf16 f16 }

impl StoredElement for f32 {
    #[inline(always)]
    #[track_caller]
    fn store<const WIDTH: usize, S: Swizzle>(target: SharedTile<Self, ROWS, WIDTH, S>, first: u32, values: [[[f32; 2]; 2]; 2]) {
        let mut i = 0;
        while i < 4 {
            let (pair, half) = (i / 2, i % 2);
            let address = target.address_of(row(half as u32), first + column(pair as u32));
            // SAFETY: the address is that of two elements that lie together, inside the tile.
            unsafe { <Target as SharedMemory>::store(address, values[pair][half]) };
            i += 1;
        }
    }

    #[inline(always)]
    #[track_caller]
    fn store_two(target: &GlobalMut<Self>, index: u64, values: [f32; 2]) {
        target.store_pair(index, values.map(f32::to_bits));
    }

    #[inline(always)]
    #[track_caller]
    fn load<const WIDTH: usize, S: Swizzle>(source: SharedTile<Self, ROWS, WIDTH, S>, first: u32) -> [[[f32; 2]; 2]; 2] {
        core::array::from_fn(|pair| {
            core::array::from_fn(|half| {
                let address = source.address_of(row(half as u32), first + column(pair as u32));
                // SAFETY: as in `store`.
                unsafe { <Target as SharedMemory>::load(address) }
            })
        })
    }
}
