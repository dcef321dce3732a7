//! The tile of the kernels that cast columns: 128 rows of 256 bytes in shared memory.
//!
//! It comes through registers, 8 chunks of 16 bytes a thread, all loads before the first store. A row's chunks are permuted by an
//! exclusive or, so that neither walk meets a bank twice:
//!
//! | walk | a thread takes | its neighbours |
//! |---|---|---|
//! | rows | a block of 16 elements of a row | the next blocks of the row |
//! | columns | 16 rows of one word: two columns, or one of `f32` | the next 16 rows: 64 bytes of a row of the transpose for 8 threads |
//!
//! Each walk is a loop to an end that follows from the shape: unrolled it needs more registers and is no faster. Rows that a thread
//! loads as whole blocks it can cast from its registers instead, without the walk.

use core::marker::PhantomData;

use oxtile_tile::num::{e2m1x2, e4m3};
use oxtile_tile::prelude::*;

use super::rounding::Rounding;
use super::*;
use crate::magnitude::Magnitude;
use crate::matrix::MatrixArgument;

pub(super) const THREADS: u32 = 256;
/// CUDA blocks a multiprocessor: 1024 threads of 64 registers, or 768 of 80 that draw.
pub(super) const fn resident<R: Rounding>() -> u32 {
    if R::DRAWS == 0 { 4 } else { 3 }
}
const ROWS: u32 = 128;
const ROW_BYTES: u32 = 256;
const CHUNKS: u32 = ROW_BYTES / 16;
/// Chunks of a thread.
pub(super) const STEPS: usize = (ROWS * CHUNKS / THREADS) as usize;
/// Blocks of 16 rows.
const ROW_BLOCKS: u32 = ROWS / BLOCK as u32;
/// Squares of 16 by 16 elements of a 16-bit type; `f32` has half as many.
pub(super) const SQUARES: usize = (ROW_BLOCKS * ROW_BYTES / (2 * BLOCK as u32)) as usize;
/// Words of a row.
const WORDS: u32 = ROW_BYTES / 4;
const GRID_LIMIT: u64 = 65_535;

// A step of the loads is a block of rows: the sixteen of a thread's chunks are at the same row of each.
const _: () = assert!(THREADS / CHUNKS == BLOCK as u32);

/// Where the tile lies.
pub(super) type TileWords = SharedArray<u32, { (ROWS * WORDS) as usize }>;

/// Elements of a row of the tile.
const fn columns_a_tile<T>() -> u32 {
    ROW_BYTES / size_of::<T>() as u32
}

/// The tile of a CUDA block in a tensor `[rows, columns]`.
#[derive(Clone, Copy)]
pub(super) struct CastTile<T> {
    words: TileWords,
    first_row: u64,
    first_column: u64,
    pub rows: u64,
    pub columns: u64,
    element: PhantomData<T>,
}

/// Sixteen elements, and where they and their scale go.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Its number among the blocks of the output.
    pub index: u64,
    /// The first element: which 16 rows of the tile, which of them, and which word.
    row_block: u32,
    row: u32,
    word: u32,
}

/// The blocks of a thread, one after the other.
pub(super) struct Blocks {
    next: Block,
    step: Block,
    left: u32,
}

impl Iterator for Blocks {
    type Item = Block;

    // Always in line: a closure for each block is too large for LLVM, which would call it.
    #[inline(always)]
    fn next(&mut self) -> Option<Block> {
        if self.left == 0 {
            return None;
        }
        let block = self.next;
        let Block { index, row_block, row, word } = self.step;
        self.next =
            Block { index: block.index + index, row_block: block.row_block + row_block, row: block.row + row, word: block.word + word };
        self.left -= 1;
        Some(block)
    }
}

impl<T: Magnitude> CastTile<T> {
    /// The tile of this CUDA block: grid x walks along the rows.
    #[inline(always)]
    pub fn of_block(words: TileWords, rows: u64, columns: u64) -> Self {
        let [x, y, _] = block::index();
        Self::at(words, [u64::from(x), u64::from(y)], rows, columns)
    }

    /// Tiles side by side and below each other.
    #[inline(always)]
    pub const fn tiles(rows: u64, columns: u64) -> [u64; 2] {
        [columns.div_ceil(columns_a_tile::<T>() as u64), rows.div_ceil(ROWS as u64)]
    }

    /// The tile of this number in each direction.
    #[inline(always)]
    pub fn at(words: TileWords, [x, y]: [u64; 2], rows: u64, columns: u64) -> Self {
        let (first_row, first_column) = (y * u64::from(ROWS), x * u64::from(columns_a_tile::<T>()));
        Self { words, first_row, first_column, rows, columns, element: PhantomData }
    }

    /// This thread's chunks: one of every sixteenth row. Outside the tensor they are never read: there they are others of its chunks.
    #[inline(always)]
    pub fn load(&self, input: &Global<T>) -> [Vector<T>; STEPS] {
        let (row, chunk) = (thread::index() / CHUNKS, thread::index() % CHUNKS);
        let column = self.first_column + u64::from(chunk) * Vector::<T>::LANES as u64;
        let column = if column < self.columns { column } else { self.first_column };
        let mut element = (self.first_row + u64::from(row)) * self.columns + column;
        let end = self.rows_here();
        core::array::from_fn(|step| {
            let vector = input.load_vector(element);
            // The same for all threads: a block of rows is whole.
            element += if (step as u32 + 1) * (BLOCK as u32) < end { BLOCK * self.columns } else { 0 };
            vector
        })
    }

    /// Puts them where all threads find them after a block barrier.
    #[inline(always)]
    pub fn store(&self, chunks: [Vector<T>; STEPS]) {
        for (step, chunk) in chunks.iter().enumerate() {
            self.words.store_vector(
                self.place(step as u32, thread::index() / CHUNKS, thread::index() % CHUNKS * 4),
                Vector::from_words(chunk.words()),
            );
        }
    }

    /// The blocks of rows that [`row_blocks`](Self::row_blocks) gives this thread, by their chunks. Outside the tensor they are never read: there
    /// they are others of its chunks.
    #[inline(always)]
    pub fn load_blocks(&self, input: &Global<T>) -> [Vector<T>; STEPS] {
        let blocks = columns_a_tile::<T>() / BLOCK as u32;
        let (row, of_row) = (thread::index() / blocks, thread::index() % blocks);
        let column = self.first_column + u64::from(of_row) * BLOCK;
        let column = if column < self.columns { column } else { self.first_column };
        let end = self.rows_here();
        let mut element = (self.first_row + u64::from(row.min(end - 1))) * self.columns + column;
        core::array::from_fn(|step| {
            let (number, part) = (step / size_of::<T>(), step % size_of::<T>());
            let vector = input.load_vector(element + (part * Vector::<T>::LANES) as u64);
            if part + 1 == size_of::<T>() {
                let next = row + (number as u32 + 1) * (THREADS / blocks);
                element += if next < end { u64::from(THREADS / blocks) * self.columns } else { 0 };
            }
            vector
        })
    }

    /// Puts them where all threads find them after a block barrier.
    #[inline(always)]
    pub fn store_blocks(&self, chunks: &[Vector<T>; STEPS]) {
        let blocks = columns_a_tile::<T>() / BLOCK as u32;
        let (row, of_row) = (thread::index() / blocks, thread::index() % blocks);
        for (step, chunk) in chunks.iter().enumerate() {
            let (number, part) = ((step / size_of::<T>()) as u32, (step % size_of::<T>()) as u32);
            let row_block = row / BLOCK as u32 + number * (THREADS / blocks / BLOCK as u32);
            self.words.store_vector(
                self.place(row_block, row % BLOCK as u32, of_row * (WORDS / blocks) + part * 4),
                Vector::from_words(chunk.words()),
            );
        }
    }

    /// Where a word of a row of a block of rows is in the tile's memory.
    #[inline(always)]
    fn place(&self, row_block: u32, row: u32, word: u32) -> u32 {
        let chunk = word / 4;
        let flipped = chunk ^ chunk >> 3 ^ row_block;
        (row_block * BLOCK as u32 + row) * WORDS + flipped * 4 + word % 4
    }

    /// The blocks of the rows that this thread takes.
    #[inline(always)]
    pub fn row_blocks(&self) -> Blocks {
        let blocks = columns_a_tile::<T>() / BLOCK as u32;
        let (row, of_row) = (thread::index() / blocks, thread::index() % blocks);
        let a_row = self.columns / BLOCK;
        let of_tensor = self.first_column / BLOCK + u64::from(of_row);
        let end = if of_tensor < a_row { self.rows_here() } else { 0 };
        Blocks {
            next: Block {
                index: (self.first_row + u64::from(row)) * a_row + of_tensor,
                row_block: row / BLOCK as u32,
                row: row % BLOCK as u32,
                word: of_row * (WORDS / blocks),
            },
            step: Block { index: u64::from(THREADS / blocks) * a_row, row_block: THREADS / blocks / BLOCK as u32, row: 0, word: 0 },
            left: end.saturating_sub(row).div_ceil(THREADS / blocks),
        }
    }

    /// The words of 16 rows that this thread takes; `index` is the block of the first column in the transpose.
    #[inline(always)]
    pub fn column_blocks(&self) -> Blocks {
        let (word, of_column) = (thread::index() / ROW_BLOCKS, thread::index() % ROW_BLOCKS);
        let a_column = self.rows / BLOCK;
        let column = self.first_column + u64::from(word) * T::PER_WORD as u64;
        let end = if of_column * (BLOCK as u32) < self.rows_here() { self.words_here() } else { 0 };
        let words = THREADS / ROW_BLOCKS;
        Blocks {
            next: Block { index: column * a_column + self.first_row / BLOCK + u64::from(of_column), row_block: of_column, row: 0, word },
            step: Block { index: u64::from(words) * T::PER_WORD as u64 * a_column, row_block: 0, row: 0, word: words },
            left: end.saturating_sub(word).div_ceil(words),
        }
    }

    /// The square of 16 by 16 elements that a block is in.
    #[inline(always)]
    pub fn square_of(&self, block: &Block) -> u32 {
        let blocks = columns_a_tile::<T>() / BLOCK as u32;
        block.row_block * blocks + block.word / (WORDS / blocks)
    }

    /// The largest magnitude of the square that this thread and its neighbours share, and for one of them which it is.
    ///
    /// All threads call it, after the barrier that follows [`store`](Self::store).
    #[inline(always)]
    pub fn square_amax(&self) -> (Option<u32>, f32) {
        let blocks = columns_a_tile::<T>() / BLOCK as u32;
        let threads = THREADS / (ROW_BLOCKS * blocks);
        let (square, part) = (thread::index() / threads, thread::index() % threads);
        let mut running = 0;
        for i in 0..BLOCK as u32 / threads {
            let block = Block { index: 0, row_block: square / blocks, row: i * threads + part, word: square % blocks * (WORDS / blocks) };
            running = self.row_words(&block).into_iter().fold(running, T::raise);
        }
        let mut flip = 1;
        while flip < threads {
            running = T::join(running, warp::shuffle_xor(running, flip));
            flip *= 2;
        }
        ((part == 0).then_some(square), T::finish(running))
    }

    #[inline(always)]
    fn rows_here(&self) -> u32 {
        (self.rows - self.first_row).min(u64::from(ROWS)) as u32
    }

    #[inline(always)]
    fn words_here(&self) -> u32 {
        ((self.columns - self.first_column) / T::PER_WORD as u64).min(u64::from(WORDS)) as u32
    }

    /// The words of a block of a row; a 16-bit type has half as many, and zeros after them.
    #[inline(always)]
    pub fn row_words(&self, block: &Block) -> [u32; BLOCK as usize] {
        let mut words = [0; BLOCK as usize];
        for i in 0..size_of::<T>() {
            let chunk = self.words.load_vector(self.place(block.row_block, block.row, block.word + 4 * i as u32));
            words[4 * i..4 * i + 4].copy_from_slice(&chunk.words());
        }
        words
    }

    /// The words of 16 rows.
    #[inline(always)]
    pub fn column_words(&self, block: &Block) -> [u32; BLOCK as usize] {
        core::array::from_fn(|i| self.words.load(self.place(block.row_block, block.row, block.word) + i as u32 * WORDS))
    }

    /// Element `i` of a block of a row, whatever `i`.
    #[inline(always)]
    pub fn row_element(&self, block: &Block, i: u32) -> f32 {
        let word = self.words.load(self.place(block.row_block, block.row, block.word + i / T::PER_WORD as u32));
        element_of::<T>(word, i % T::PER_WORD as u32)
    }

    /// Element `i` of a column.
    #[inline(always)]
    pub fn column_element(&self, block: &Block, place: u32, i: u32) -> f32 {
        element_of::<T>(self.words.load(self.place(block.row_block, block.row, block.word) + i * WORDS), place)
    }
}

/// The element at a place of a word, whatever the place.
#[inline(always)]
pub(super) fn element_of<T: Magnitude>(word: u32, place: u32) -> f32 {
    lane_of::<T>(word >> (place * 8 * size_of::<T>() as u32), 0)
}

/// The element at a constant place of a word.
#[inline(always)]
pub(super) fn lane_of<T: Magnitude>(word: u32, place: usize) -> f32 {
    Vector::<T>::from_words([word, 0, 0, 0]).lane(place).to_f32()
}

/// One CUDA block a tile, and the lengths of the tensor, of whole blocks of 16 by 16.
pub(super) fn grid<T: Magnitude>(input: &MatrixArgument<'_, T>) -> Result<Grid, LaunchError> {
    let MatrixArgument { values, rows, columns } = *input;
    LaunchError::check_multiple("input.rows", BLOCK, rows)?;
    LaunchError::check_multiple("input.columns", BLOCK, columns)?;
    input.check()?;
    LaunchError::check_alignment("input.values", 16, values.address())?;
    let down = rows.div_ceil(u64::from(ROWS));
    LaunchError::check_limit("input.rows", rows, GRID_LIMIT * u64::from(ROWS))?;
    let across = Grid::cover("input.columns", columns, columns_a_tile::<T>())?;
    Ok(if down == 0 { Grid::x(0) } else { Grid::xy(across.x, down as u32) })
}

/// The lengths of codes and scales of so many elements, and of the amax.
pub(super) fn check_output(
    elements: u64,
    amax: (&'static str, &DeviceView<'_, f32>),
    data: (&'static str, &DeviceViewMut<'_, e2m1x2>),
    scales: (&'static str, &DeviceViewMut<'_, e4m3>),
) -> Result<(), LaunchError> {
    LaunchError::check_length(amax.0, 1, amax.1.len())?;
    LaunchError::check_length(data.0, elements / 2, data.1.len())?;
    LaunchError::check_alignment(data.0, 8, data.1.address())?;
    LaunchError::check_length(scales.0, elements / BLOCK, scales.1.len())
}
