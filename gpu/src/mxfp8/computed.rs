//! The first half of a fused cast: the lane's vectors of each result, in shared memory that no other lane reads.

use oxtile_tile::pipeline;
use oxtile_tile::prelude::*;

use super::column_tile::{ROWS_A_LANE, raise};
use super::row_scales::RowScales;
use super::*;
use crate::activation::*;

/// Rows of a lane whose operands are read before any of their results is computed.
const BATCH: usize = ROWS_A_LANE / 2;

/// What a result needs of shared memory.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Part {
    /// The vectors of each lane, step by step.
    vectors: SharedArray<u32, { ROWS_A_LANE * THREADS as usize * 4 }>,
    pub row_scales: RowScales,
}

impl Part {
    #[inline(always)]
    fn store<T: Pod>(self, step: usize, vector: Vector<T>) {
        self.vectors.store_vector((step as u32 * THREADS + thread::index()) * 4, vector.words());
    }

    #[inline(always)]
    fn copy<T: Pod>(self, step: usize, Place { tensor, element }: Place<T>) {
        pipeline::copy_async_lasting(self.vectors, (step as u32 * THREADS + thread::index()) * 4, &tensor.lasting(), element);
    }

    #[inline(always)]
    pub fn load<T: Pod>(self, step: usize) -> Vector<T> {
        Vector::from_words(self.vectors.load_vector((step as u32 * THREADS + thread::index()) * 4))
    }
}

/// What a lane's rows of a tile come to, for each result.
pub(super) struct Computed {
    /// The running maxima of its columns.
    pub running: [[u32; 4]; 2],
    /// The scales of its rows' blocks, a byte a step.
    pub row_codes: [u64; 2],
}

impl Computed {
    const NOTHING: Self = Self { running: [[0; 4]; 2], row_codes: [0; 2] };

    /// Computes the lane's vectors of each result, which it leaves in the parts, from those of the operands at the `places` of each
    /// step; scales of rows are computed where they are wanted, and not of the input itself.
    ///
    /// Operands are copied to where results will be, without a register; what is one more than results is loaded. Half of the rows
    /// are waited for at a time.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "as in the kernel")]
    pub fn of_copied<O: Operation, T: Magnitude + Wide, Q: Fp8>(
        parts: &[Part],
        places: impl Fn(usize) -> [Place<T>; 3],
        by_rows: bool,
    ) -> Self {
        let loaded = O::OPERANDS - O::RESULTS;
        for batch in 0..ROWS_A_LANE / BATCH {
            for step in batch * BATCH..(batch + 1) * BATCH {
                for result in 0..O::RESULTS {
                    parts[result].copy(step, places(step)[loaded + result]);
                }
            }
            pipeline::commit_copies();
        }
        let mut computed = Self::NOTHING;
        for batch in 0..ROWS_A_LANE / BATCH {
            let step = |i: usize| batch * BATCH + i;
            let in_registers: [_; BATCH] =
                core::array::from_fn(|i| if loaded == 1 { places(step(i))[0].load() } else { Vector::from_words([0; 4]) });
            if batch == 0 {
                pipeline::wait_copies::<1>()
            } else {
                pipeline::wait_copies::<0>()
            }
            // All of a batch before its first result: the compiler does not know that no result lies where another operand does.
            let operands: [[Vector<T>; 3]; BATCH] = core::array::from_fn(|i| {
                core::array::from_fn(|operand| match operand.checked_sub(loaded) {
                    None => in_registers[i],
                    Some(result) => parts[result.min(O::RESULTS - 1)].load(step(i)),
                })
            });
            for i in 0..BATCH {
                let vectors = if O::COMPUTES { O::results(operands[i].map(in_f32)).map(vector_of::<T>) } else { [operands[i][0]; 2] };
                for result in 0..O::RESULTS {
                    computed.running[result] = raise(computed.running[result], vectors[result]);
                    if O::COMPUTES {
                        parts[result].store(step(i), vectors[result]);
                        if by_rows {
                            computed.scale_row::<T, Q>(result, step(i), vectors[result]);
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
    pub fn of_loaded<O: Operation, T: Magnitude + Wide, Q: Fp8>(parts: &[Part], places: impl Fn(usize) -> [Place<T>; 3]) -> Self {
        let mut computed = Self::NOTHING;
        for batch in 0..ROWS_A_LANE / BATCH {
            let step = |i: usize| batch * BATCH + i;
            let operands: [[Vector<T>; 3]; BATCH] = core::array::from_fn(|i| {
                let places = places(step(i));
                core::array::from_fn(|operand| if operand < O::OPERANDS { places[operand].load() } else { Vector::from_words([0; 4]) })
            });
            for i in 0..BATCH {
                let vectors = O::results(operands[i].map(in_f32)).map(vector_of::<T>);
                for result in 0..O::RESULTS {
                    computed.running[result] = raise(computed.running[result], vectors[result]);
                    parts[result].store(step(i), vectors[result]);
                    computed.scale_row::<T, Q>(result, step(i), vectors[result]);
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
