//! The cast of the blocks of a tile, in either direction.

use oxtile_tile::num::{e2m1x2, e2m1x8, e4m3};
use oxtile_tile::prelude::*;

use super::cast_tile::{Block, CastTile, STEPS, element_of, lane_of};
use super::hadamard;
use super::multipliers::{BlockScale, Multipliers};
use super::rounding::{COLUMNS, ROWS, Rounding};
use super::*;
use crate::codes::Codes;
use crate::magnitude::Magnitude;

/// The words of a block, as [`CastTile`] gives them.
type Words = [u32; BLOCK as usize];

/// Where the codes of one direction go, and how they are found.
pub(super) struct BlockCast<R> {
    pub codes: Codes<e2m1x2, e4m3>,
    pub multipliers: Multipliers,
    pub rounding: R,
}

impl<R: Rounding> BlockCast<R> {
    /// Casts the blocks of the tile's rows. `scale_of` gives a block's scale from its own largest magnitude.
    #[inline(always)]
    pub fn rows<T: Magnitude>(&self, tile: &CastTile<T>, scale_of: impl Fn(&Block, f32) -> BlockScale) {
        for block in tile.row_blocks() {
            let words = tile.row_words(&block);
            let scale = scale_of(&block, T::finish(words.into_iter().take(BLOCK as usize / T::PER_WORD).fold(0, T::raise)));
            let codes = [0, 1].map(|half| {
                let (scaled, signs) = row_half::<T>(&words, half, scale.scaled);
                self.rounding.encode(ROWS, block.index, half, scaled, signs)
            });
            self.store(ROWS, block.index, scale, codes, |i| tile.row_element(&block, i));
        }
    }

    /// As [`rows`](Self::rows), of the blocks that this thread loaded.
    #[inline(always)]
    pub fn loaded_rows<T: Magnitude>(&self, tile: &CastTile<T>, chunks: &[Vector<T>; STEPS], scale_of: impl Fn(&Block, f32) -> BlockScale) {
        let mut blocks = tile.row_blocks();
        // Written out: the chunks are in registers, which a loop cannot index.
        self.loaded_row(tile, blocks.next(), chunks, 0, &scale_of);
        self.loaded_row(tile, blocks.next(), chunks, 1, &scale_of);
        if STEPS / size_of::<T>() > 2 {
            self.loaded_row(tile, blocks.next(), chunks, 2, &scale_of);
            self.loaded_row(tile, blocks.next(), chunks, 3, &scale_of);
        }
    }

    #[inline(always)]
    fn loaded_row<T: Magnitude>(
        &self,
        tile: &CastTile<T>,
        block: Option<Block>,
        chunks: &[Vector<T>; STEPS],
        number: usize,
        scale_of: &impl Fn(&Block, f32) -> BlockScale,
    ) {
        if let Some(block) = block {
            let first = number * size_of::<T>();
            let words: Words = core::array::from_fn(|i| if i / 4 < size_of::<T>() { chunks[first + i / 4].words()[i % 4] } else { 0 });
            let scale = scale_of(&block, T::finish(words.into_iter().take(BLOCK as usize / T::PER_WORD).fold(0, T::raise)));
            let codes = [0, 1].map(|half| {
                let (scaled, signs) = row_half::<T>(&words, half, scale.scaled);
                self.rounding.encode(ROWS, block.index, half, scaled, signs)
            });
            self.store(ROWS, block.index, scale, codes, |i| tile.row_element(&block, i));
        }
    }

    /// Casts the blocks of the tile's columns, into the transpose.
    #[inline(always)]
    pub fn columns<T: Magnitude>(&self, tile: &CastTile<T>, scale_of: impl Fn(&Block, f32) -> BlockScale) {
        for block in tile.column_blocks() {
            let words = tile.column_words(&block);
            let running = words.into_iter().fold(0, T::raise);
            for place in 0..T::PER_WORD {
                let index = block.index + place as u64 * (tile.rows / BLOCK);
                let scale = scale_of(&block, T::maximum_of(running, place));
                let codes = [0, 1].map(|half| {
                    let (scaled, signs) = column_half::<T>(&words, half, place, scale.scaled);
                    self.rounding.encode(COLUMNS, index, half, scaled, signs)
                });
                self.store(COLUMNS, index, scale, codes, |i| tile.column_element(&block, place as u32, i));
            }
        }
    }

    /// Casts the blocks of the tile's columns after the Hadamard transform.
    #[inline(always)]
    pub fn transformed_columns<T: Magnitude>(&self, tile: &CastTile<T>) {
        for block in tile.column_blocks() {
            let words = tile.column_words(&block);
            for place in 0..T::PER_WORD {
                let index = block.index + place as u64 * (tile.rows / BLOCK);
                let values = hadamard::transform(words.map(|word| element_of::<T>(word, place as u32)));
                let scale = self.multipliers.of_block(hadamard::amax(&values));
                let codes = [0, 1].map(|half| {
                    let (scaled, signs) = value_half(&values, half, scale.scaled);
                    self.rounding.encode(COLUMNS, index, half, scaled, signs)
                });
                // Read and transformed again where they are rare, the values need not stay in registers.
                let element = |i| hadamard::element(tile.column_words(&block).map(|word| element_of::<T>(word, place as u32)), i);
                self.store(COLUMNS, index, scale, codes, element);
            }
        }
    }

    /// Stores a block's scale and codes; one with a NaN, or that saturates, is rare and encoded once more, by a loop.
    #[inline(always)]
    fn store(&self, stream: u64, block: u64, scale: BlockScale, codes: [Option<e2m1x8>; 2], element: impl Fn(u32) -> f32) {
        // Not one branch for both halves: with that the tile kernels were 3 % slower.
        let codes = match codes {
            [Some(low), Some(high)] if scale.is_exact => [low, high].map(e2m1x8::to_bits),
            _ => {
                let multiplier = self.multipliers.exact(scale.code);
                encode_saturating(self.rounding, stream, block, |i| element(i) * multiplier)
            }
        };
        self.codes.data.store_pair(block * BLOCK_BYTES, codes);
        self.codes.scales.store(block, scale.code);
    }
}

/// Half of a row's block as [`Rounding::encode`] takes it: magnitudes times [`Rounding::SCALE`] and signs.
#[inline(always)]
fn row_half<T: Magnitude>(words: &Words, half: usize, multiplier: f32) -> ([f32; 8], u32) {
    let first = 8 * half / T::PER_WORD;
    let scaled = |i: usize| lane_of::<T>(T::magnitudes(words[first + i / T::PER_WORD]), i % T::PER_WORD) * multiplier;
    (core::array::from_fn(scaled), T::signs(|i| words[first + i]))
}

/// Half of a column's block, at one place of its words.
#[inline(always)]
pub(super) fn column_half<T: Magnitude>(words: &Words, half: usize, place: usize, multiplier: f32) -> ([f32; 8], u32) {
    let scaled = |i: usize| lane_of::<T>(T::magnitudes(words[8 * half + i]), place) * multiplier;
    (core::array::from_fn(scaled), T::signs_at(|i| words[8 * half + i], place))
}

/// Half of a block of values.
#[inline(always)]
fn value_half(values: &[f32; BLOCK as usize], half: usize, multiplier: f32) -> ([f32; 8], u32) {
    let value = |i: usize| values[8 * half + i];
    (core::array::from_fn(|i| value(i).abs() * multiplier), e2m1x8::signs_of_singles(core::array::from_fn(|i| value(i).to_bits())))
}

/// The codes of a block, whatever is in it, one element at a time: it costs the others no registers.
#[inline(always)]
pub(super) fn encode_saturating<R: Rounding>(rounding: R, stream: u64, block: u64, element: impl Fn(u32) -> f32) -> [u32; 2] {
    let mut codes = 0;
    let mut i = 0;
    // An end that the compiler does not know keeps it from unrolling.
    while i < block::threads().min(BLOCK as u32) {
        codes |= u64::from(rounding.encode_one(stream, block, i, element(i)).to_bits()) << (4 * i);
        i += 1;
    }
    [codes as u32, (codes >> 32) as u32]
}
