//! What dense and packed problems do not do: queries see windows of keys, scores are capped, the softmax has a sink, the result is merged
//! into a running one, each head's largest score is found.
//!
//! All of it is chosen at run time, outside the loop over blocks of keys or by a branch that all threads take together. Sequences lie as
//! [packed](super::Packed) ones do, and dense tensors are sequences too.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::tensor_map::TensorMap;

use super::mask::{Mask, Window};
use super::problem::{Problem, Seen, Staging, Tiles};
use super::rings::Producers;
use super::running::NO_LOGS;
use super::schedule::{DIAGONAL_ITEM_WORDS, Item, SequenceSchedule};
use super::scores::Scores;
use super::sequence::{Sequence, Sequences, place};
use super::shape::Heads;
use super::softmax::{Finished, Softmax};
use super::target::{Chosen, Spot, Target};
use super::walk::Step;
use super::warpgroup_roles::{WARPGROUP_QUERIES, WarpgroupRoles};
use super::workspace::Workspace;

/// Attention with options.
#[derive(Parameter)]
pub struct Options<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize>
where
    Columns<V>: MatrixColumns,
{
    /// Queries: a tensor of `[heads, rows, size]`, as [`place`] has it.
    pub q: TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, 5>,
    /// Keys.
    pub k: TensorMap<T, KEYS, D, Swizzle128, 5>,
    /// Values.
    pub v: TensorMap<T, KEYS, V, Swizzle128, 5>,
    /// Where the result goes. Its log-sum-exp is `[batches, heads, log_rows]`, or `[heads, query_rows]` where `log_rows` is 0.
    pub target: Chosen<T, V>,
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
    /// Each head's largest scaled score, `[heads]`.
    pub max_logit: Option<GlobalMut<f32>>,
    /// What blocks share: as many words as [`Workspace::words`] says.
    pub workspace: GlobalMut<u32>,
    /// Keys whose heads are computed together.
    pub section_keys: u32,
}

/// The walk of a block along tiles with options.
pub struct OptionTiles {
    schedule: SequenceSchedule,
    workspace: Workspace,
    index: u32,
    next: u32,
}

impl Tiles<Item> for OptionTiles {
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self) -> Option<Item> {
        self.schedule.tile(self.index)
    }

    #[inline(always)]
    #[track_caller]
    fn ask(&mut self) {
        self.next = self.workspace.take();
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.index = self.next;
    }

    #[inline(always)]
    fn leave(&mut self) {}
}

impl<T, const D: usize, const V: usize, const KEYS: usize> Problem<T, D, V, KEYS> for Options<T, D, V, KEYS>
where
    T: RegisterElement + StoredElement,
    Columns<V>: MatrixColumns,
{
    type Tile = Item;
    type Tiles = OptionTiles;
    type Message = SharedArray<u32, { 2 * DIAGONAL_ITEM_WORDS }>;
    type Staging<G: WarpgroupRoles> = <Chosen<T, V> as Target<T, V, 5>>::Staging<G>;
    const TURN: u32 = DIAGONAL_ITEM_WORDS as u32;
    const WINDOWED: bool = true;

    #[inline(always)]
    #[track_caller]
    fn tiles(&self, tile_rows: u32) -> OptionTiles {
        let schedule = SequenceSchedule::new(self.sequences, self.heads, tile_rows, self.section_keys);
        OptionTiles { schedule, workspace: Workspace { words: self.workspace }, index: block::index()[0], next: 0 }
    }

    #[inline(always)]
    #[track_caller]
    fn tell(_: &OptionTiles, tile: Option<Item>, words: Self::Message, turn: u32) {
        Item::store::<true, _>(tile, words, turn);
    }

    #[inline(always)]
    #[track_caller]
    fn told(&self, _: u32, words: Self::Message, turn: u32) -> Option<Item> {
        Item::load::<true, _>(words, turn)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(&self, _: Item, words: Self::Message, turn: u32) -> Item {
        Item::reload::<true, _>(words, turn)
    }

    #[inline(always)]
    fn mask(&self, item: &Item) -> Mask {
        self.window.of(&item.sequence)
    }

    #[inline(always)]
    fn fetch<G: WarpgroupRoles>(&self, _: &Item, _: u32, _: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    fn logs(&self, _: &Item, _: u32) -> Rows {
        NO_LOGS
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, item: &Item, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns,
    {
        let (Item { tile, sequence }, head) = (*item, self.heads.of(item.tile.batch, item.tile.head));
        rings.load_queries(&self.q, tell, |part| {
            place(sequence.query_offset, sequence.queries, head, tile.row + part * WARPGROUP_QUERIES as u32)
        });
    }

    #[inline(always)]
    #[track_caller]
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, item: &Item, block: u32)
    where
        Columns<D>: MatrixColumns,
    {
        let (sequence, head) = (item.sequence, self.heads.of(item.tile.batch, item.tile.head));
        let key_head = head / self.heads.group.max(1);
        rings.load_block(&self.k, &self.v, place(sequence.key_offset, sequence.keys, key_head, block * KEYS as u32));
    }

    #[inline(always)]
    #[track_caller]
    fn softmax<G: WarpgroupRoles>(&self, item: &Item) -> Softmax {
        let sink = match self.sink {
            Some(sink) => sink.load(if sink.len() > 1 { u64::from(item.tile.head) } else { 0 }) * LOG2_E,
            None => f32::NEG_INFINITY,
        };
        Softmax::with_sink(self.scores.scale, sink)
    }

    #[inline(always)]
    fn edit(&self, scores: &mut RegisterTile<KEYS>, step: Step, seen: &Seen)
    where
        Columns<KEYS>: MatrixColumns,
    {
        if self.scores.are_capped() {
            self.scores.cap(scores);
        }
        seen.hide(scores, step);
    }

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles>(
        &self,
        item: &Item,
        row: u32,
        sum: RegisterTile<V>,
        finished: Finished,
        staging: Staging<T, D, Self::Staging<G>>,
    ) {
        let (tile, Sequence { queries, rows, query_offset, .. }) = (item.tile, item.sequence.cut(self.log_rows));
        let (finished, head) = (finished.of_rows(|half| row + register_tile::row(half) < queries), self.heads.of(tile.batch, tile.head));
        if self.max_logit.is_some() {
            Workspace { words: self.workspace }.raise(tile.head, finished.largest_of_warp());
        }
        let at = place(query_offset, rows, head, row);
        let statistics = match self.log_rows {
            0 => u64::from(tile.head) * u64::from(self.sequences.query_rows) + u64::from(query_offset),
            log_rows => (u64::from(tile.batch) * u64::from(self.heads.heads) + u64::from(tile.head)) * u64::from(log_rows),
        };
        let spot = Spot { at, batch: 0, head, first: query_offset, row, rows, statistics };
        self.target.store::<G, D>(sum, finished, spot, staging);
    }

    #[inline(always)]
    fn begin<G: WarpgroupRoles>(_: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    #[track_caller]
    fn end<G: WarpgroupRoles>(&self, _: Self::Staging<G>) {
        Workspace { words: self.workspace }.leave(G::CONSUMER_WARPS, self.max_logit);
    }

    fn check(argument: &Self::Argument<'_>, tile_rows: u32) -> Result<u64, LaunchError> {
        let OptionsArgument { target, sequences, heads, log_rows, window, sink, max_logit, workspace, .. } = argument;
        sequences.check(heads.batches)?;
        heads.check()?;
        window.check()?;
        let (of_sequence, rows) = (u64::from(heads.heads), u64::from(sequences.query_rows));
        let statistics = match log_rows {
            0 => of_sequence.saturating_mul(rows),
            log_rows => (of_sequence * u64::from(heads.batches)).saturating_mul((*log_rows).into()),
        };
        <Chosen<T, V> as Target<T, V, 5>>::check(target, statistics, [1, heads.of_row()?, rows])?;
        LaunchError::check_length("workspace", Workspace::words(of_sequence), workspace.len())?;
        if let Some(max_logit) = max_logit {
            LaunchError::check_length("max_logit", of_sequence, max_logit.len())?;
        }
        if let Some(sink) = sink.as_ref().filter(|sink| sink.len() != 1) {
            LaunchError::check_length("sink", of_sequence, sink.len())?;
        }
        Ok(heads.most_tiles(rows, tile_rows))
    }
}
