//! What dense and packed problems of 8 bits do not do: queries see windows of keys, scores are capped, the softmax has a sink.
//!
//! All of it is chosen at run time, by branches that all threads take together. Sequences lie as [packed](super::Fp8Packed) ones do, and dense tensors
//! are sequences too.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle;
use oxtile_tile::num::opaque;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterTile;

use super::fp8_problem::{
    FP8_KEYS, FP8_QUERIES, Fp8Inputs, Fp8Key, Fp8Policy, Fp8Problem, Fp8Query, Fp8Results, Fp8Scales, Fp8Seen, Fp8Step, LIFT, Phase,
};
use super::mask::{Mask, Window};
use super::packed::PackedTiles;
use super::problem::{Optioned, Tiles};
use super::schedule::{DIAGONAL_ITEM_WORDS, Item};
use super::scores::Scores;
use super::sequence::{Sequence, Sequences, place};
use super::shape::Heads;
use super::softmax::{Finished, Softmax};
use super::target::Spot;
use super::warpgroup_roles::Part;

impl Fp8Policy for Optioned {
    type Of<const D: usize, S: Swizzle>
        = Fp8Options<D, S>
    where
        Columns<D>: MatrixColumns;
}

/// Attention with options.
#[derive(Parameter)]
pub struct Fp8Options<const D: usize, S: Swizzle> {
    /// Queries, keys and values: tensors of `[heads, rows, size]`, as [`place`] has them.
    pub inputs: Fp8Inputs<D, S, 5>,
    /// What their elements are worth: a head's scale is that of all sequences.
    pub scales: Fp8Scales,
    /// Where the result goes. Its log-sum-exp is `[batches, heads, log_rows]`, or `[heads, query_rows]` where `log_rows` is 0.
    pub results: Fp8Results<D, 5>,
    /// Where the sequences lie.
    pub sequences: Sequences,
    /// How many heads there are.
    pub heads: Heads,
    /// Rows of the log-sum-exp of a head of a sequence; 0 if those of all sequences follow each other as the tensor's rows do.
    pub log_rows: u32,
    /// Which keys a query sees.
    pub window: Window,
    /// Factor and cap of scores.
    pub scores: Scores,
    /// A score beside those of the keys: one for each head, or one for all.
    pub sink: Option<Global<f32>>,
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// Keys whose heads are computed together.
    pub section_keys: u32,
}

/// The walk of a block along tiles with options. It reads the diagonal for each tile: no register holds that of a sequence.
pub struct Fp8OptionTiles {
    tiles: PackedTiles,
    sequences: Sequences,
}

impl Tiles<Item> for Fp8OptionTiles {
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self) -> Option<Item> {
        let Item { tile, sequence } = self.tiles.tile()?;
        let diagonal = self.sequences.diagonal(opaque(tile.batch), sequence.queries, sequence.keys);
        Some(Item { tile, sequence: Sequence { diagonal, ..sequence } })
    }

    #[inline(always)]
    #[track_caller]
    fn ask(&mut self) {
        self.tiles.ask();
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.tiles.advance();
    }

    #[inline(always)]
    #[track_caller]
    fn leave(&mut self) {
        self.tiles.leave();
    }
}

impl<const D: usize, S: Swizzle> Fp8Options<D, S> {
    /// The key head of a query head, by a branch: the thread that copies has no register for `group.max(1)`.
    #[inline(always)]
    fn key_head(&self, head: u32) -> u32 {
        head.checked_div(self.heads.group).unwrap_or_default()
    }

    /// Where a block of keys is.
    #[inline(always)]
    fn keys(&self, item: &Item, key: u32) -> [u32; 5] {
        let head = self.key_head(self.heads.of(item.tile.batch, item.tile.head));
        place(item.sequence.key_offset, item.sequence.keys, head, key)
    }
}

impl<const D: usize, S: Swizzle> Fp8Problem<D, S> for Fp8Options<D, S>
where
    Columns<D>: MatrixColumns,
{
    type Tile = Item;
    type Tiles = Fp8OptionTiles;
    type Message = SharedArray<u32, DIAGONAL_ITEM_WORDS>;
    const MASKED: bool = true;
    const WINDOWED: bool = true;

    #[inline(always)]
    #[track_caller]
    fn tiles(&self) -> Fp8OptionTiles {
        let Self { sequences, heads, section_keys, counter, .. } = *self;
        let tiles = PackedTiles::new(sequences.without_diagonals(), heads, FP8_QUERIES as u32, section_keys, counter);
        Fp8OptionTiles { tiles, sequences }
    }

    #[inline(always)]
    #[track_caller]
    fn tell(item: Option<Item>, words: Self::Message) {
        Item::store::<true, _>(item, words, 0);
    }

    #[inline(always)]
    #[track_caller]
    fn told(words: Self::Message) -> Option<Item> {
        Item::load::<true, _>(words, 0)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(words: Self::Message) -> Item {
        Item::reload::<true, _>(words, 0)
    }

    #[inline(always)]
    fn heads(&self) -> u32 {
        self.heads.heads
    }

    #[inline(always)]
    fn mask(&self, item: &Item) -> Mask {
        self.window.of(&item.sequence)
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries(&self, item: &Item, row: u32, target: Fp8Query<D, S>, full: Mbarrier) {
        let (Sequence { queries, query_offset, .. }, head) = (item.sequence, self.heads.of(item.tile.batch, item.tile.head));
        self.inputs.q.load(target, place(query_offset, queries, head, row), full);
    }

    #[inline(always)]
    #[track_caller]
    fn load_keys(&self, item: &Item, key: u32, target: Fp8Key<D, S>, full: Mbarrier) {
        self.inputs.k.load(target, self.keys(item, key), full);
    }

    #[inline(always)]
    #[track_caller]
    fn load_values(&self, item: &Item, key: u32, target: Fp8Key<D, S>, full: Mbarrier) {
        self.inputs.v.load(target, self.keys(item, key), full);
    }

    #[inline(always)]
    #[track_caller]
    fn worth(&self, item: &Item) -> f32 {
        self.scales.of_scores(item.tile.head, self.key_head(item.tile.head))
    }

    #[inline(always)]
    #[track_caller]
    fn softmax(&self, worth: f32, zero: u32) -> Softmax {
        // Capped scores are worth what they are.
        let scale = if self.scores.are_capped() { self.scores.scale } else { self.scores.scale * worth };
        Softmax::lifted(scale, LIFT).with_zero(zero)
    }

    #[inline(always)]
    fn edit<const N: usize>(&self, scores: &mut RegisterTile<N>, step: Fp8Step, seen: &Fp8Seen)
    where
        Columns<N>: MatrixColumns,
    {
        let key = step.block * FP8_KEYS as u32;
        if self.scores.are_capped() {
            Scores { cap_factor: self.scores.cap_factor * seen.worth, ..self.scores }.cap(scores);
        }
        if step.phase != Phase::Settled && step.block >= seen.whole.end {
            seen.mask.hide_after::<N>(scores, seen.row, key);
        }
        if step.block < seen.whole.begin {
            seen.mask.hide_before::<N>(scores, seen.row, key);
        }
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, item: &Item, row: u32, sum: RegisterTile<D>, finished: Finished, staging: Part<bf16, D>, part: u32) {
        let (tile, Sequence { queries, rows, query_offset: first, .. }) = (item.tile, item.sequence.cut(self.log_rows));
        let head = self.heads.of(tile.batch, tile.head);
        let statistics = match self.log_rows {
            0 => u64::from(tile.head) * u64::from(self.sequences.query_rows) + u64::from(first),
            log_rows => (u64::from(tile.batch) * u64::from(self.heads.heads) + u64::from(tile.head)) * u64::from(log_rows),
        };
        let spot = Spot { at: place(first, rows, head, row), batch: 0, head, first, row, rows, statistics };
        let worth = self.scales.of_values(self.key_head(tile.head));
        let finished = match self.sink {
            Some(sink) => finished.and_sink(sink.load(if sink.len() > 1 { u64::from(tile.head) } else { 0 }) * LOG2_E),
            None => finished,
        };
        self.results.store_sequence(sum, finished, (queries, worth), &spot, staging, part);
    }

    fn check(argument: &Self::Argument<'_>) -> Result<u64, LaunchError> {
        let Fp8OptionsArgument { scales, results, sequences, heads, log_rows, window, sink, counter, .. } = argument;
        sequences.check(heads.batches)?;
        heads.check()?;
        heads.of_row()?;
        scales.check(heads.heads, heads.group)?;
        window.check()?;
        let (of_sequence, rows) = (u64::from(heads.heads), u64::from(sequences.query_rows));
        let statistics = match log_rows {
            0 => of_sequence.saturating_mul(rows),
            log_rows => heads.many().saturating_mul((*log_rows).into()),
        };
        LaunchError::check_length("results.log_sum_exp", statistics, results.log_sum_exp.len())?;
        LaunchError::check_length("counter", 1, counter.len())?;
        if let Some(sink) = sink.as_ref().filter(|sink| sink.len() != 1) {
            LaunchError::check_length("sink", of_sequence, sink.len())?;
        }
        Ok(heads.most_tiles(rows, FP8_QUERIES as u32))
    }
}
