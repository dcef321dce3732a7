//! What the two kernels of the backward pass of wide heads share: parameters, tiles, the warps that hand out tiles and statistics.
//!
//! Heads of 192 and 256 elements do not fit the plan of [`attention_backward`](fn@super::attention_backward): gradients of 64 keys and of their values
//! are 256 registers a thread, and sums of `dQ` in shared memory another 64 KiB. So there are two kernels, as on other GPUs
//! ([`attention_backward_portable`](fn@super::attention_backward_portable)), which compute seven products instead of five:
//!
//! | kernel | stay | pass | result |
//! |---|---|---|---|
//! | [`attention_backward_wide_keys`](fn@super::attention_backward_wide_keys) | 64 keys and their values | queries and `dO`, 96 or 64 at a time | `dK`, `dV` |
//! | [`attention_backward_wide_queries`](fn@super::attention_backward_wide_queries) | 128 queries and their `dO` | keys and values, 96 or 64 at a time | `dQ` |
//!
//! Each sum has one owner, which adds in one order: the bits are the same in every run, and no kernel waits for another block.
//!
//! A CUDA block stays on its multiprocessor and takes one tile after another. Both kernels have the same roles in the producer's warpgroup:
//!
//! | warp | does |
//! |---|---|
//! | 0 | one lane copies tiles and blocks in |
//! | 1 | brings the statistics of the queries that pass; idle where keys pass |
//! | 3 | one lane hands out the numbers of tiles |

use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline::Pipeline;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;
use oxtile_tile::sync::NamedBarrier;
use oxtile_tile::tensor_map::TensorMap;
use oxtile_tile::warpgroup::Roles;

use super::backward_schedule::{KeyQueue, KeySchedule, KeyTile};
use super::backward_sequence::{SEQUENCE_TILE_WORDS, SequenceTile};
use super::backward_statistics::{QueryStatistics, QueryStatisticsArgument};
use super::backward_workspace::Numbers;
use super::mask::Window;
use super::sequence::{Sequence, Sequences, SequencesArgument, place};
use super::shape::{Checked, Heads, MOST_BLOCKS};

/// Rows that stay: the keys of a tile, the queries of a warpgroup.
pub const WIDE_ROWS: usize = 64;
pub(super) const ROWS: u32 = WIDE_ROWS as u32;
/// Rows of a tensor, at most: the last tile may end after them.
const MOST_ROWS: u64 = (1 << 30) - 2 * WIDE_ROWS as u64;

pub(super) type WarpgroupRoles = Roles<2, 40, 232>;

/// Where each of the two warpgroups that multiply waits for the other one. One barrier for both would do, but they come to it by two instructions, which synccheck of
/// compute-sanitizer takes for divergence.
const DONE: [NamedBarrier; 2] = [NamedBarrier::new(1, 256), NamedBarrier::new(2, 256)];

/// Tells the other warpgroup that warpgroup `part` does not multiply by a tile's operands any more, and waits until the other one does not either. All threads of both call it, once a tile.
#[inline(always)]
#[track_caller]
pub(super) fn both_done(part: u32) {
    let [first, second] = DONE;
    let [own, other] = if part == 0 { [first, second] } else { [second, first] };
    other.arrive();
    own.sync();
}

/// The number of a tile, and the one before.
pub(super) type TileNumbers = Numbers<SEQUENCE_TILE_WORDS>;

/// What both kernels read, `QUERIES` queries or `KEYS` keys at a time. Tensors are `[heads, rows, size]`, as [`place`] has them, of heads of up to `D`
/// elements, of values of up to `V`.
#[derive(Clone, Copy, Parameter)]
pub struct WideTensors<T: RegisterElement, const D: usize, const V: usize, const QUERIES: usize, const KEYS: usize> {
    /// Queries.
    pub q: TensorMap<T, QUERIES, D, Swizzle128, 5>,
    /// Gradients of the result.
    pub grad_out: TensorMap<T, QUERIES, V, Swizzle128, 5>,
    /// Keys.
    pub k: TensorMap<T, KEYS, D, Swizzle128, 5>,
    /// Values.
    pub v: TensorMap<T, KEYS, V, Swizzle128, 5>,
    /// What is kept of queries.
    pub statistics: QueryStatistics,
    /// The sequences; rows of padding become zeros.
    pub sequences: Sequences,
    /// Their heads.
    pub heads: Heads,
    /// Which keys a query sees.
    pub window: Window,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// The order in which tiles are taken.
#[derive(Clone, Copy, Parameter)]
pub struct WideOrder {
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// Rows, of a number of heads, of what passes, that fit the L2 cache together.
    pub section_rows: u32,
}

impl<T: RegisterElement, const D: usize, const V: usize, const QUERIES: usize, const KEYS: usize> WideTensors<T, D, V, QUERIES, KEYS> {
    /// Key heads of a sequence.
    #[inline(always)]
    pub(super) fn key_heads(&self) -> u32 {
        // The divisor is not zero, as there is a tile; `max(1)` saves its check.
        self.heads.heads / self.heads.group.max(1)
    }

    /// Where rows of a query head from `row` on are loaded.
    #[inline(always)]
    pub(super) fn query_place(&self, item: &SequenceTile, head: u32, row: u32) -> [u32; 5] {
        place(item.query_offset, item.mask.queries, self.heads.of(item.tile.batch, head), row)
    }

    /// The same of a key head.
    #[inline(always)]
    pub(super) fn key_place(&self, item: &SequenceTile, head: u32, row: u32) -> [u32; 5] {
        place(item.key_offset, item.mask.keys, self.key_head_of(item.tile.batch, head), row)
    }

    /// The tensors' key head that is head `head` of sequence `batch`.
    #[inline(always)]
    pub(super) fn key_head_of(&self, batch: u32, head: u32) -> u32 {
        head + batch * (self.heads.step / self.heads.group.max(1))
    }

    /// The offset and the delta of a query of a head; those of no query where there is none.
    #[inline(always)]
    #[track_caller]
    pub(super) fn statistics_of(&self, item: &SequenceTile, head: u32, row: u32) -> [f32; 2] {
        if row >= item.mask.queries {
            return [f32::NEG_INFINITY, 0.0];
        }
        let of_head = [item.tile.batch, head, self.heads.heads];
        self.statistics.load(self.statistics.place(of_head, &self.sequences, item.query_offset, row))
    }

    /// The tiles of keys, `TILE_ROWS` each, or of queries.
    #[inline(always)]
    pub(super) fn tiles<const OF_KEYS: bool, const TILE_ROWS: u32>(&self, section_rows: u32) -> WideTiles<OF_KEYS, TILE_ROWS> {
        let heads = if OF_KEYS { self.key_heads() } else { self.heads.heads };
        let Self { statistics: QueryStatistics { rows: statistics_rows, .. }, sequences, window, heads: Heads { batches, .. }, .. } = *self;
        WideTiles { sequences, statistics_rows, window, batches, heads, section_rows, batch: 0, before: 0 }
    }
}

/// The tiles of one side, one sequence after the other, each as [`KeySchedule`] has it. One thread walks along them.
pub(super) struct WideTiles<const OF_KEYS: bool, const TILE_ROWS: u32> {
    sequences: Sequences,
    /// [`QueryStatistics::rows`].
    statistics_rows: u32,
    window: Window,
    batches: u32,
    /// Heads of that side.
    heads: u32,
    section_rows: u32,
    batch: u32,
    /// Tiles of the sequences before.
    before: u32,
}

impl<const OF_KEYS: bool, const TILE_ROWS: u32> WideTiles<OF_KEYS, TILE_ROWS> {
    /// Tile `index`, which is not below that of the call before. Those come first of which most of the other side is seen.
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self, index: u32) -> Option<SequenceTile> {
        while self.batch < self.batches {
            let batch = self.batch;
            let sequence = self.sequences.get(batch).cut(self.statistics_rows);
            let Sequence { queries, rows, keys, query_offset, key_offset, .. } = sequence;
            let (written, passing) = if OF_KEYS { (self.sequences.key_rows(batch, &sequence), queries) } else { (rows, keys) };
            let section = (self.section_rows / passing.max(1)).clamp(1, self.heads.max(1));
            let schedule = KeySchedule { key_blocks: written.div_ceil(TILE_ROWS), heads: self.heads, section };
            if let Some(tile) = schedule.tile(index - self.before) {
                let block = if OF_KEYS { tile.block } else { schedule.key_blocks - 1 - tile.block };
                return Some(SequenceTile {
                    tile: KeyTile { batch, block, head: tile.head },
                    mask: self.window.of(&sequence),
                    query_offset,
                    key_offset,
                    key_rows: written,
                    first_block: 0,
                });
            }
            self.before += schedule.tiles();
            self.batch += 1;
        }
        None
    }

    /// Hands out numbers until there are no more. One thread calls it.
    #[inline(always)]
    #[track_caller]
    pub fn hand_out(mut self, counter: GlobalMut<u32>, numbers: Pipeline<TileNumbers, 1>) {
        let (mut numbers, queue) = (numbers.producer(), KeyQueue(counter));
        let mut more = true;
        while more {
            let parity = numbers.parity();
            numbers.acquire_with(0, |numbers| {
                let index = queue.take();
                let item = self.tile(index);
                more = item.is_some();
                if !more {
                    queue.leave(index, self.before);
                }
                SequenceTile::store(item, numbers.tile(parity));
            });
        }
    }
}

impl<T: RegisterElement, const D: usize, const V: usize, const QUERIES: usize, const KEYS: usize>
    WideTensorsArgument<'_, T, D, V, QUERIES, KEYS>
{
    /// The sizes, and tiles of `tile_rows` rows of keys, or of queries.
    pub(super) fn check(&self, order: &WideOrderArgument<'_>, of_keys: bool, tile_rows: u64) -> Result<u64, LaunchError> {
        let Self { statistics, sequences, heads, window, .. } = self;
        heads.check()?;
        sequences.check(heads.batches)?;
        window.check()?;
        check_statistics(statistics, sequences, heads)?;
        LaunchError::check_length("order.counter", 1, order.counter.len())?;
        let row_heads = heads.of_row()?;
        let key_heads = row_heads / u64::from(heads.group).max(1);
        let (name, rows, heads_of_row) = match of_keys {
            true => ("tensors.sequences.key_rows", u64::from(sequences.key_rows), key_heads),
            false => ("tensors.sequences.query_rows", u64::from(sequences.query_rows), row_heads),
        };
        LaunchError::check_limit(name, rows, MOST_ROWS)?;
        // Each sequence may end in a tile of its own.
        let (row_tiles, batches) = (rows.div_ceil(tile_rows), u64::from(heads.batches));
        let sequences_of_row = if heads.step == 0 { 1 } else { batches };
        let tiles = heads_of_row / sequences_of_row.max(1) * if heads.step == 0 { row_tiles + batches } else { row_tiles * batches };
        LaunchError::check_limit(name, tiles, MOST_BLOCKS)?;
        Ok(tiles)
    }
}

fn check_statistics(statistics: &QueryStatisticsArgument<'_>, sequences: &SequencesArgument<'_>, heads: &Heads) -> Checked {
    statistics.check([heads.batches, heads.heads], sequences.query_rows)
}
