//! The transpose of a tile of codes, built in 16 KiB of shared memory.
//!
//! A column of the tile is a run of 128 bytes. Its chunks of 16 bytes lie at places that depend on the column, so that lanes which store
//! words of different columns, and those which load the chunks of one, meet different banks.

use oxtile_tile::num::Fp8;
use oxtile_tile::prelude::*;

use super::THREADS;
use super::tile::{LINES, SIDE, Tile};
use crate::interleave::transpose_bytes;

const WORDS: usize = (SIDE * SIDE / 4) as usize;
/// Words of a column.
const COLUMN: u32 = SIDE as u32 / 4;
/// Words of a chunk.
const CHUNK: u32 = 4;
/// Chunks of a column.
const CHUNKS: u32 = COLUMN / CHUNK;

/// The codes of a tile, transposed.
#[derive(SharedStorage)]
pub(super) struct Staging {
    words: SharedArray<u32, WORDS>,
}

impl Staging {
    /// Puts the codes of the lane's group of rows in a step in their columns. `codes[line]` holds the row's words, `N` of them.
    #[inline(always)]
    pub fn put<T: Element, const N: usize>(&self, tile: &Tile<T>, step: usize, codes: [[u32; N]; LINES]) {
        for word in 0..Tile::<T>::LANES as usize / 4 {
            let columns = transpose_bytes(codes.map(|line| line[word]));
            // By reference: an iterator that owns the array leaves it in local memory.
            for (i, rows) in columns.iter().enumerate() {
                self.words.store(word_of::<T>(tile.column() + (word * 4 + i) as u32, tile.group(step)), *rows);
            }
        }
    }

    /// Stores the transpose of the tile in `transposed`, `[columns, rows]`. All threads call it, after a block barrier.
    #[inline(always)]
    pub fn store<T: Element, Q: Fp8>(&self, tile: &Tile<T>, transposed: &GlobalMut<Q>) {
        if tile.rows.is_multiple_of(16) && transposed.start().is_multiple_of(16) {
            self.store_chunks(tile, transposed);
        } else {
            self.store_bytes(tile, transposed);
        }
    }

    #[inline(always)]
    fn store_chunks<T: Element, Q: Fp8>(&self, tile: &Tile<T>, transposed: &GlobalMut<Q>) {
        const COLUMNS_A_STEP: u32 = THREADS / CHUNKS;
        let (chunk, first) = (thread::index() % CHUNKS, thread::index() / CHUNKS);
        let start = (tile.first_column + u64::from(first)) * tile.rows + tile.first_row + u64::from(chunk * 16);
        for step in 0..SIDE as u32 / COLUMNS_A_STEP {
            let distance = step * COLUMNS_A_STEP;
            let vector = self.words.load_vector(word_of::<T>(first + distance, chunk * CHUNK));
            if tile.has(chunk * 16, first + distance) {
                transposed.store_vector(start + u64::from(distance) * tile.rows, Vector::from_words(vector.words()));
            }
        }
    }

    #[inline(always)]
    fn store_bytes<T: Element, Q: Fp8>(&self, tile: &Tile<T>, transposed: &GlobalMut<Q>) {
        let mut slot = thread::index();
        while slot < (SIDE * SIDE) as u32 {
            let (column, row) = (slot / SIDE as u32, slot % SIDE as u32);
            let (line, place) = (tile.first_column + u64::from(column), tile.first_row + u64::from(row));
            if line < tile.columns && place < tile.rows {
                let rows = self.words.load(word_of::<T>(column, row / 4));
                transposed.store(line * tile.rows + place, Q::from_byte((rows >> (8 * (row % 4))) as u8));
            }
            slot += THREADS;
        }
    }
}

/// Where the word of a group of rows is in a column.
#[inline(always)]
fn word_of<T: Element>(column: u32, group: u32) -> u32 {
    let chunk = (group / CHUNK) ^ (column / Tile::<T>::LANES % CHUNKS);
    column * COLUMN + chunk * CHUNK + group % CHUNK
}
