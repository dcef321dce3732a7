//! What both portable forward kernels take: tensors that they address by themselves, and a tile of queries for each block.

use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;

use super::schedule::Tile;
use super::sequence::{Sequence, SequencesArgument};
use super::shape::{Checked, Heads, MOST_BLOCKS};

/// Queries, keys and values: rows of heads of the kernel's size, of which those of a sequence lie as [`Sequences`](super::Sequences) says. They
/// start at multiples of 16 bytes.
#[derive(Clone, Copy, Parameter)]
pub struct Inputs<T: Pod> {
    /// Queries.
    pub q: Global<T>,
    /// Keys.
    pub k: Global<T>,
    /// Values.
    pub v: Global<T>,
}

/// The same of heads of any size.
#[derive(Clone, Copy, Parameter)]
pub struct SizedInputs<T: Pod> {
    /// Queries.
    pub q: Global<T>,
    /// Keys.
    pub k: Global<T>,
    /// Values.
    pub v: Global<T>,
    /// Elements of a query head and of a key head: a multiple of 8.
    pub size: u32,
    /// Elements of a head of values and of results: a multiple of 8.
    pub value_size: u32,
    /// A score beside those of the keys: one for each head, or one for all.
    pub sink: Option<Global<f32>>,
}

/// The natural logarithm of each row's sum of exponentials.
#[derive(Clone, Copy, Parameter)]
pub struct LogSumExp {
    /// `[heads, query_rows]` if `rows` is 0, else `[batches, heads, rows]`.
    pub values: GlobalMut<f32>,
    /// Rows of each sequence if all have as many; else 0.
    pub rows: u32,
}

impl LogSumExp {
    /// The element of the first query of a sequence.
    #[inline(always)]
    pub(super) fn start(&self, tile: &Tile, heads: &Heads, sequence: &Sequence, query_rows: u32) -> u64 {
        match self.rows {
            0 => u64::from(tile.head) * u64::from(query_rows) + u64::from(sequence.query_offset),
            rows => u64::from(tile.batch * heads.heads + tile.head) * u64::from(rows),
        }
    }
}

/// The tile of this block, of `tile_rows` queries, `row_tiles` of which the longest sequence may have. The last rows come first: they see the
/// most keys.
#[inline(always)]
pub(super) fn tile_of_block(heads: &Heads, row_tiles: u32, tile_rows: usize) -> Tile {
    // No divisor is zero, as there is a block; `max(1)` saves its check.
    let (index, all_heads) = (block::index()[0], (heads.heads * heads.batches).max(1));
    let (inside, heads) = (index % all_heads, heads.heads.max(1));
    Tile { row: (row_tiles - 1 - index / all_heads) * tile_rows as u32, head: inside % heads, batch: inside / heads }
}

/// Rows of heads of a tensor of queries, and of one of keys.
#[derive(Clone, Copy)]
pub(super) struct HeadRows {
    pub queries: u64,
    pub keys: u64,
}

impl HeadRows {
    /// Of these sequences; the heads were checked.
    pub(super) fn of(sequences: &SequencesArgument<'_>, heads: &Heads) -> Result<Self, LaunchError> {
        let row_heads = heads.of_row()?;
        let key_heads = row_heads / u64::from(heads.group).max(1);
        Ok(Self {
            queries: u64::from(sequences.query_rows).saturating_mul(row_heads),
            keys: u64::from(sequences.key_rows).saturating_mul(key_heads),
        })
    }
}

impl<T: Pod> InputsArgument<'_, T> {
    /// Heads of `size` elements.
    pub(super) fn check(&self, rows: HeadRows, size: usize) -> Checked {
        check_inputs([self.q, self.k, self.v], rows, [size as u64; 2])
    }
}

impl<T: Pod> SizedInputsArgument<'_, T> {
    /// `heads` heads of up to `most` elements.
    pub(super) fn check(&self, rows: HeadRows, most: usize, heads: u32) -> Checked {
        let sizes = [self.size, self.value_size].map(u64::from);
        for (name, size) in ["inputs.size", "inputs.value_size"].into_iter().zip(sizes) {
            LaunchError::check_multiple(name, 8, size)?;
            LaunchError::check_limit(name, size, most as u64)?;
        }
        if let Some(sink) = self.sink.filter(|sink| sink.len() != 1) {
            LaunchError::check_length("inputs.sink", heads.into(), sink.len())?;
        }
        check_inputs([self.q, self.k, self.v], rows, sizes)
    }
}

fn check_inputs<T: Pod>([q, k, v]: [DeviceView<'_, T>; 3], rows: HeadRows, [size, value_size]: [u64; 2]) -> Checked {
    for (name, tensor, rows, size) in
        [("inputs.q", q, rows.queries, size), ("inputs.k", k, rows.keys, size), ("inputs.v", v, rows.keys, value_size)]
    {
        LaunchError::check_length(name, rows.saturating_mul(size), tensor.len())?;
        LaunchError::check_alignment(name, 16, tensor.address())?;
    }
    Ok(())
}

impl LogSumExpArgument<'_> {
    pub(super) fn check(&self, heads: &Heads, query_rows: u32) -> Checked {
        let rows = match self.rows {
            0 => u64::from(heads.heads) * u64::from(query_rows),
            rows => heads.many().saturating_mul(rows.into()),
        };
        LaunchError::check_length("results.log_sum_exp.values", rows, self.values.len())
    }
}

/// A block for each tile of `tile_rows` queries that the longest sequence may have.
pub(super) fn grid(sequences: &SequencesArgument<'_>, heads: &Heads, row_tiles: u32, tile_rows: usize) -> Result<Grid, LaunchError> {
    sequences.check(heads.batches)?;
    heads.check()?;
    LaunchError::check_limit("row_tiles", row_tiles.into(), u64::from(sequences.query_rows).div_ceil(tile_rows as u64))?;
    let blocks = heads.many().saturating_mul(row_tiles.into());
    LaunchError::check_limit("row_tiles", blocks, MOST_BLOCKS)?;
    Ok(Grid::x(blocks as u32))
}
