//! The rows of a file's tensors that each rank has.
//!
//! Sequences of a dense tensor are cut into chunks as they are. A packed sequence is padded first, so that any length and any place in the file will do:
//! a rank's rows are those of [`Partition`] in sequences that lie one after another.

use oxtile::{
    attention::{AttentionConfig, Layout, Mask},
    comm::{Rank, WorldSize},
    context_parallel::{ContextParallelConfig, Partition, Schedule},
};

use super::{Plan, PlanError};
use crate::safetensors::{Checkpoint, ReadError, Tensor};

/// A sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sequence {
    /// Its first row in the file.
    first: u64,
    /// Rows in the file.
    length: u64,
    /// Rows that the ranks share, with padding at the end.
    padded: u64,
}

/// Rows that are next to each other in the file, and in a rank's tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    /// The first in the rank's tensor.
    of_rank: u64,
    /// The first in the file.
    of_file: u64,
    rows: u64,
}

/// Queries, or keys with their values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    /// Queries, results and their gradients.
    Queries,
    /// Keys, values and their gradients.
    Keys,
}

/// What each rank has of the sequences of a file.
#[derive(Debug)]
pub struct Parts {
    world: WorldSize,
    partition: Partition,
    /// Of queries and of keys.
    sequences: [Vec<Sequence>; 2],
    /// The attention of all ranks.
    pub config: AttentionConfig,
}

impl Parts {
    /// The parts of `world` ranks. `arrays` are those of [`Plan::arrays`], which were checked.
    ///
    /// # Errors
    /// [`PlanError::Causal`] for a causal mask over sequences of other numbers of queries than of keys.
    pub fn new(plan: &Plan, arrays: &[Vec<u32>], world: WorldSize) -> Result<Self, PlanError> {
        let (partition, AttentionConfig { layout, batches, queries, keys, mask, .. }) = (Partition::default(), plan.config);
        let chunks = partition.chunks(world);
        let dense = |rows: u64| (0..batches).map(|batch| Sequence { first: batch * rows, length: rows, padded: rows }).collect::<Vec<_>>();
        let packed = |side: usize| -> Vec<Sequence> {
            let (sums, offsets) = (&arrays[side], arrays.get(side + 2).unwrap_or(&arrays[side]));
            let lengths = sums.windows(2).map(|sums| u64::from(sums[1] - sums[0]));
            let sequence =
                |(length, &first): (u64, &u32)| Sequence { first: first.into(), length, padded: length.next_multiple_of(chunks) };
            lengths.zip(offsets).map(sequence).collect()
        };
        if layout != Layout::Packed {
            // Batches of no rows are no sequences.
            let batches = if queries == 0 && keys == 0 { batches.min(1) } else { batches };
            let sequences = [queries, keys].map(|rows| if rows == 0 { Vec::new() } else { dense(rows) });
            return Ok(Self { world, partition, sequences, config: AttentionConfig { batches, ..plan.config } });
        }
        let sequences = [packed(0), packed(1)];
        let lengths = || sequences[0].iter().zip(&sequences[1]).map(|(queries, keys)| [queries.length, keys.length]);
        if let Some((index, [queries, keys])) = lengths().enumerate().find(|(_, [queries, keys])| mask != Mask::Full && queries != keys) {
            return Err(PlanError::Causal { index, queries, keys });
        }
        let [queries, keys] = [0, 1].map(|side| sequences[side].iter().map(|sequence| sequence.padded).sum());
        Ok(Self { world, partition, sequences, config: AttentionConfig { queries, keys, ..plan.config } })
    }

    /// Sums of the lengths of a side's sequences, and where each begins among the rows of all ranks.
    pub fn sums(&self, side: Side) -> [Vec<u32>; 2] {
        [|sequence: &Sequence| sequence.length, |sequence: &Sequence| sequence.padded].map(|rows| {
            let ends = self.sequences[side as usize].iter().scan(0, |end, sequence| {
                *end += rows(sequence);
                // What passes 32 bits has been refused by then: no launch has that many rows.
                Some(u32::try_from(*end).unwrap_or(u32::MAX))
            });
            std::iter::once(0).chain(ends).collect()
        })
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// A side's rows on each rank.
    fn rows(&self, side: Side) -> u64 {
        self.sequences[side as usize].iter().map(|sequence| sequence.padded / u64::from(self.world.get())).sum()
    }

    /// What all ranks compute, by a schedule.
    pub fn context(&self, schedule: Schedule) -> ContextParallelConfig {
        let config = ContextParallelConfig::new(self.config).by(schedule);
        // One launch has fewer forms backward: where it has none, what suits.
        let backward = if schedule == Schedule::Fused { Schedule::Auto } else { config.backward };
        ContextParallelConfig { backward, ..config }
    }

    /// A side's rows of a rank, but for padding.
    fn runs(&self, side: Side, rank: Rank) -> Vec<Run> {
        let (mut runs, mut before) = (Vec::new(), 0);
        for &Sequence { first, length, padded } in self.sequences[side as usize].iter().filter(|sequence| sequence.padded > 0) {
            let chunk = padded / self.partition.chunks(self.world);
            for at in (0..u64::from(self.partition.chunks_of_rank())).map(|number| number * chunk) {
                let token = self.partition.token(rank, self.world, padded, at);
                let rows = length.saturating_sub(token).min(chunk);
                if rows > 0 {
                    runs.push(Run { of_rank: before + at, of_file: first + token, rows });
                }
            }
            before += padded / u64::from(self.world.get());
        }
        runs
    }

    /// A rank's rows of a tensor of rows of so many bytes. Padding is zero.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn take(&self, side: Side, rank: Rank, file: &Checkpoint, tensor: &Tensor, row: u64) -> Result<Vec<u8>, ReadError> {
        let length = self.rows(side) * row;
        let mut part = file.room(length)?;
        part.resize(length as usize, 0);
        for run in self.runs(side, rank).into_iter().filter(|run| run.rows * row > 0) {
            let window = file.window(tensor, run.of_file * row..(run.of_file + run.rows) * row)?;
            part[bytes(run.of_rank, run.rows, row)].copy_from_slice(&window);
        }
        Ok(part)
    }

    /// Puts a rank's rows where they are in the file: the other way.
    pub fn put(&self, side: Side, rank: Rank, part: &[u8], file: &mut [u8], row: u64) {
        for run in self.runs(side, rank) {
            file[bytes(run.of_file, run.rows, row)].copy_from_slice(&part[bytes(run.of_rank, run.rows, row)]);
        }
    }

    /// Elements of a rank's log-sum-exp.
    pub fn statistics(&self) -> u64 {
        self.rows(Side::Queries) * self.config.heads
    }

    /// Puts a rank's numbers of heads and queries, `[batches, heads, queries]`, where they are in the file, which has `queries` of a batch.
    pub fn put_statistics(&self, rank: Rank, part: &[f32], file: &mut [f32], queries: u64) {
        let AttentionConfig { layout, heads, .. } = self.config;
        let of_batch = if layout == Layout::Packed { self.rows(Side::Queries) } else { queries / u64::from(self.world.get()) };
        let place = |row: u64, rows: u64, head: u64| ((row / rows * heads + head) * rows + row % rows) as usize;
        for Run { of_rank, of_file, rows } in self.runs(Side::Queries, rank) {
            for head in 0..heads {
                let (from, to) = (place(of_rank, of_batch, head), place(of_file, queries, head));
                file[to..to + rows as usize].copy_from_slice(&part[from..from + rows as usize]);
            }
        }
    }
}

/// Bytes of rows.
fn bytes(first: u64, rows: u64, row: u64) -> std::ops::Range<usize> {
    (first * row) as usize..((first + rows) * row) as usize
}
