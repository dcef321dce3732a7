//! The first half of a fused cast along columns: the lane's vectors of each result, in shared memory that no other lane reads.

use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;

use super::column_tile::{ROWS_A_LANE, raise};
use super::fused_tile::Source;
use super::*;
use crate::activation::*;

/// Rows of a lane whose operands are read before any of their results is computed.
const BATCH: usize = ROWS_A_LANE / 2;

/// Rows of a lane whose operands are under way at a time where they are [streamed](stream).
const AHEAD: usize = ROWS_A_LANE / 2;

/// Vectors that each lane of a CUDA block has, step by step: those of a result by default.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Vectors<const WORDS: usize = { words(ROWS_A_LANE) }> {
    words: SharedArray<u32, WORDS>,
}

/// Where operands that are no result's place are [streamed](stream) through.
pub(super) type Ring = Vectors<{ words(AHEAD) }>;

/// Words of so many vectors of each lane.
const fn words(steps: usize) -> usize {
    steps * THREADS as usize * 4
}

impl<const WORDS: usize> Vectors<WORDS> {
    #[inline(always)]
    fn store<T: Pod>(self, step: usize, vector: Vector<T>) {
        self.words.store_vector((step as u32 * THREADS + thread::index()) * 4, Vector::from_words(vector.words()));
    }

    #[inline(always)]
    fn copy<T: Pod>(self, step: usize, Place { tensor, element }: Place<T>) {
        pipeline::copy_async_lasting(self.words, (step as u32 * THREADS + thread::index()) * 4, &tensor.lasting(), element);
    }

    #[inline(always)]
    pub fn load<T: Pod>(self, step: usize) -> Vector<T> {
        Vector::from_words(self.words.load_vector((step as u32 * THREADS + thread::index()) * 4).words())
    }
}

/// The outcome of a lane's rows of a tile, for each result.
pub(super) struct Computed {
    /// The running maxima of its columns.
    pub running: [[u32; 4]; 2],
    /// The scales of its rows' blocks, a byte a step.
    pub row_codes: [u64; 2],
}

impl Computed {
    const NOTHING: Self = Self { running: [[0; 4]; 2], row_codes: [0; 2] };

    /// Computes the lane's vectors of each result, which it leaves in shared memory, from those of the operands; scales of rows
    /// are computed where they are wanted, and not of the input itself.
    ///
    /// Operands are copied to where results will be, without a register; what is one more than results is loaded. Half of the rows
    /// are waited for at a time.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "as in the kernel")]
    pub fn of_copied<O: Operation, T: Magnitude + Wide, Q: Fp8>(vectors: &[Vectors], source: &Source<'_, T>, by_rows: bool) -> Self {
        let loaded = O::OPERANDS - O::RESULTS;
        for batch in 0..ROWS_A_LANE / BATCH {
            for step in batch * BATCH..(batch + 1) * BATCH {
                for result in 0..O::RESULTS {
                    vectors[result].copy(step, source.places::<O>(step)[loaded + result]);
                }
            }
            pipeline::commit_copies();
        }
        let mut computed = Self::NOTHING;
        for batch in 0..ROWS_A_LANE / BATCH {
            let step = |i: usize| batch * BATCH + i;
            let in_registers: [_; BATCH] =
                core::array::from_fn(|i| if loaded == 1 { source.places::<O>(step(i))[0].load() } else { Vector::from_words([0; 4]) });
            if batch == 0 {
                pipeline::wait_copies::<1>()
            } else {
                pipeline::wait_copies::<0>()
            }
            // All of a batch before its first result: the compiler does not know that no result lies where another operand does.
            let operands: [[Vector<T>; 3]; BATCH] = core::array::from_fn(|i| {
                core::array::from_fn(|operand| match operand.checked_sub(loaded) {
                    None => in_registers[i],
                    Some(result) => vectors[result.min(O::RESULTS - 1)].load(step(i)),
                })
            });
            for i in 0..BATCH {
                let results = if O::COMPUTES { O::results(operands[i].map(in_f32)).map(vector_of::<T>) } else { [operands[i][0]; 2] };
                for result in 0..O::RESULTS {
                    computed.running[result] = raise(computed.running[result], results[result]);
                    if O::COMPUTES {
                        vectors[result].store(step(i), results[result]);
                        if by_rows {
                            computed.scale_row::<T, Q>(result, step(i), results[result]);
                        }
                    }
                }
            }
        }
        computed
    }

    /// The same from operands that are loaded, half of the rows at a time, while results of others are computed: where there are few
    /// tiles, a CUDA block that waits has no other beside it that computes.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "as in the kernel")]
    pub fn of_loaded<O: Operation, T: Magnitude + Wide, Q: Fp8>(vectors: &[Vectors], source: &Source<'_, T>, by_rows: bool) -> Self {
        let mut computed = Self::NOTHING;
        for batch in 0..ROWS_A_LANE / BATCH {
            let step = |i: usize| batch * BATCH + i;
            let operands: [[Vector<T>; 3]; BATCH] = core::array::from_fn(|i| {
                let places = source.places::<O>(step(i));
                core::array::from_fn(|operand| if operand < O::OPERANDS { places[operand].load() } else { Vector::from_words([0; 4]) })
            });
            for i in 0..BATCH {
                let results = O::results(operands[i].map(in_f32)).map(vector_of::<T>);
                for result in 0..O::RESULTS {
                    computed.running[result] = raise(computed.running[result], results[result]);
                    vectors[result].store(step(i), results[result]);
                    if by_rows {
                        computed.scale_row::<T, Q>(result, step(i), results[result]);
                    }
                }
            }
        }
        computed
    }

    /// The scale of the lane's block of the row of a step.
    #[inline(always)]
    fn scale_row<T: Magnitude, Q: Fp8>(&mut self, result: usize, step: usize, vector: Vector<T>) {
        self.row_codes[result] |= u64::from(block_scale::<T, Q>(of_vector(vector)).to_bits()) << (8 * step);
    }
}

/// As [`Computed::of_copied`] without a register for what is under way: all operands are copied, row by row, some rows ahead of the one
/// that is computed, those that are no result's place through the ring. Gives the running maxima of the lane's columns.
#[inline(always)]
pub(super) fn stream<O: Operation, T: Magnitude + Wide>(vectors: &[Vectors], ring: Ring, source: &Source<'_, T>) -> [[u32; 4]; 2] {
    let others = O::OPERANDS - O::RESULTS;
    let copy = |step: usize| {
        let places = source.places::<O>(step);
        for result in 0..O::RESULTS {
            vectors[result].copy(step, places[others + result]);
        }
        if others == 1 {
            ring.copy(step % AHEAD, places[0]);
        }
    };
    for step in 0..AHEAD {
        copy(step);
        pipeline::commit_copies();
    }
    let mut running = [[0; 4]; 2];
    for step in 0..ROWS_A_LANE {
        pipeline::wait_copies::<{ AHEAD as u32 - 1 }>();
        let operands: [Vector<T>; 3] = core::array::from_fn(|operand| match operand.checked_sub(others) {
            None => ring.load(step % AHEAD),
            Some(result) => vectors[result.min(O::RESULTS - 1)].load(step),
        });
        if step + AHEAD < ROWS_A_LANE {
            copy(step + AHEAD);
        }
        // Of nothing in the end, so that a group is a row.
        pipeline::commit_copies();
        let results = if O::COMPUTES { O::results(operands.map(in_f32)).map(vector_of::<T>) } else { [operands[0]; 2] };
        for result in 0..O::RESULTS {
            running[result] = raise(running[result], results[result]);
            if O::COMPUTES {
                vectors[result].store(step, results[result]);
            }
        }
    }
    running
}
