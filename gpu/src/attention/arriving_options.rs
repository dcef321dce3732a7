//! Dense tensors of one rank of several whose keys arrive while the kernel runs, with windows, caps, sinks and largest logits: what
//! [`Arriving`] does not do. Tiles, maps and waits are those of [`Arriving`]; masks, scores and the softmax those of [`Options`](super::Options), so that
//! results have the bits of one device where a chunk is a multiple of a block of keys.

use core::f32::consts::LOG2_E;

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::shared::SharedArray;

use super::arriving::{Arriving, ArrivingTiles};
use super::mask::{FAR, Mask, Window};
use super::problem::{Problem, Seen, Staging};
use super::rings::Producers;
use super::running::NO_LOGS;
use super::schedule::Tile;
use super::scores::Scores;
use super::softmax::{Finished, Softmax};
use super::target::{Rounded, Target};
use super::walk::Step;
use super::warpgroup_roles::WarpgroupRoles;
use super::workspace::Workspace;

/// Attention of a rank's queries to the keys of all ranks, with options.
#[derive(Parameter)]
pub struct ArrivingOptions<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize>
where
    Columns<V>: MatrixColumns,
{
    /// The tensors and what arrives. Its factor of scores is not read.
    pub arriving: Arriving<T, D, V, KEYS, false>,
    /// Which keys a query sees, by their places in the sequence.
    pub window: Window,
    /// Factor and cap of scores.
    pub scores: Scores,
    /// A score beside those of the keys: of some heads, which repeat.
    pub sink: Option<Global<f32>>,
    /// The largest scaled score of as many heads, which repeat too.
    pub max_logit: Option<GlobalMut<f32>>,
    /// What blocks share: as many words as [`Workspace::words`] says of `max_logit`.
    pub workspace: GlobalMut<u32>,
}

impl<T: RegisterElement + StoredElement, const D: usize, const V: usize, const KEYS: usize> Problem<T, D, V, KEYS>
    for ArrivingOptions<T, D, V, KEYS>
where
    Columns<V>: MatrixColumns,
{
    type Tile = Tile;
    type Tiles = ArrivingTiles<KEYS>;
    type Message = SharedArray<u32, 1>;
    type Staging<G: WarpgroupRoles> = <Rounded<T, V, 4> as Target<T, V, 4>>::Staging<G>;
    const TURN: u32 = 0;
    const WINDOWED: bool = true;

    #[inline(always)]
    fn tiles(&self, tile_rows: u32) -> ArrivingTiles<KEYS> {
        self.arriving.tiles(tile_rows)
    }

    #[inline(always)]
    #[track_caller]
    fn tell(tiles: &ArrivingTiles<KEYS>, tile: Option<Tile>, words: Self::Message, turn: u32) {
        Arriving::<T, D, V, KEYS, false>::tell(tiles, tile, words, turn);
    }

    #[inline(always)]
    #[track_caller]
    fn told(&self, tile_rows: u32, words: Self::Message, turn: u32) -> Option<Tile> {
        self.arriving.told(tile_rows, words, turn)
    }

    #[inline(always)]
    fn told_again(&self, tile: Tile, _: Self::Message, _: u32) -> Tile {
        tile
    }

    #[inline(always)]
    fn mask(&self, tile: &Tile) -> Mask {
        let Mask { queries, keys, .. } = self.arriving.mask(tile);
        let (Window { left, right, top_left }, place) = (self.window, self.arriving.token(tile));
        let last = place + right.min(if top_left { 0 } else { FAR });
        Mask { queries, keys, first: (place - left).max(-FAR), last: last.min(FAR) }
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Tile, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns,
    {
        self.arriving.load_queries(rings, tile, tell);
    }

    #[inline(always)]
    #[track_caller]
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Tile, block: u32)
    where
        Columns<D>: MatrixColumns,
    {
        self.arriving.load_block(rings, tile, block);
    }

    #[inline(always)]
    fn fetch<G: WarpgroupRoles>(&self, _: &Tile, _: u32, _: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    fn logs(&self, _: &Tile, _: u32) -> Rows {
        NO_LOGS
    }

    #[inline(always)]
    #[track_caller]
    fn softmax<G: WarpgroupRoles>(&self, tile: &Tile) -> Softmax {
        let sink = match self.sink {
            Some(sink) => sink.load(u64::from(tile.head) % sink.len().max(1)) * LOG2_E,
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
        tile: &Tile,
        row: u32,
        sum: RegisterTile<V>,
        finished: Finished,
        staging: Staging<T, D, Self::Staging<G>>,
    ) {
        let spot = self.arriving.spot(tile, row);
        let finished = finished.of_rows(|half| spot.row + register_tile::row(half) < spot.rows);
        if let Some(largest) = self.max_logit {
            let head = u64::from(tile.head) % largest.len().max(1);
            Workspace { words: self.workspace }.raise(head as u32, finished.largest_of_warp());
        }
        self.arriving.target.store::<G, D>(sum, finished, spot, staging);
    }

    #[inline(always)]
    fn begin<G: WarpgroupRoles>(_: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    #[track_caller]
    fn end<G: WarpgroupRoles>(&self, _: Self::Staging<G>) {
        Workspace { words: self.workspace }.leave(G::CONSUMER_WARPS, self.max_logit);
    }

    fn check(argument: &Self::Argument<'_>, tile_rows: u32) -> Result<u64, LaunchError> {
        let ArrivingOptionsArgument { arriving, window, sink, max_logit, workspace, .. } = argument;
        window.check()?;
        let heads = max_logit.as_ref().map_or(0, |largest| largest.len());
        LaunchError::check_length("workspace", Workspace::words(heads), workspace.len())?;
        for (name, numbers) in [("max_logit", max_logit.as_ref().map(|of| of.len())), ("sink", sink.as_ref().map(|of| of.len()))] {
            if let Some(numbers) = numbers {
                LaunchError::check_at_least(name, 1, numbers)?;
                LaunchError::check_multiple("arriving.shape.heads", numbers, arriving.shape.heads.into())?;
            }
        }
        Arriving::check(arriving, tile_rows)
    }
}
