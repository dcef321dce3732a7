//! What forward attention is computed of, as a compile-time policy of the [kernel](fn@super::attention_forward): where tiles come from, where
//! rows lie, what is masked, where results go.
//!
//! | policy | problem | takes |
//! |---|---|---|
//! | [`Full`], [`Causal`] | [`Dense`](super::Dense) | dense tensors |
//! | [`ArrivingFull`], [`ArrivingCausal`] | [`Arriving`](super::Arriving) | dense tensors of one rank, whose keys arrive meanwhile |
//! | [`ArrivingOptioned`] | [`ArrivingOptions`](super::ArrivingOptions) | the same with windows, caps, sinks, largest logits |
//! | [`ArrivingPackedFull`], [`ArrivingPackedCausal`] | [`ArrivingPacked`](super::ArrivingPacked) | packed sequences of one rank, whose keys arrive meanwhile |
//! | [`RingFull`], [`RingCausal`] | [`Dense`](super::Dense) | a step of a ring: merges its result into a running one ([`RingStep`]) |
//! | [`PackedFull`], [`PackedCausal`] | [`Packed`](super::Packed) | packed sequences |
//! | [`PackedRingFull`], [`PackedRingCausal`] | the same | a step of a ring |
//! | [`Optioned`] | [`Options`](super::Options) | windows, caps, sinks, merged results, largest logits, of any layout |
//!
//! A policy costs nothing where it is not used: each instance is compiled alone. The one of dense tensors with windows chosen at run time
//! was 1 to 2 % slower than with the mask as a constant, and that of all options 6 to 14 % slower on packed sequences.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::Pod;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::shared::SharedStorage;

use super::arriving::Arriving;
use super::arriving_options::ArrivingOptions;
use super::arriving_packed::ArrivingPacked;
use super::dense::Dense;
use super::mask::{Gaps, Mask, Span};
use super::options::Options;
use super::packed::Packed;
use super::ring_step::RingStep;
use super::rings::Producers;
use super::softmax::{Finished, Softmax};
use super::target::Rounded;
use super::walk::Step;
use super::warpgroup_roles::{Part, WarpgroupRoles};

/// A family of problems, one for each element type and size of heads: a type parameter of the kernel.
pub trait Policy: 'static {
    /// The kernel's parameter.
    type Of<T, const D: usize, const V: usize, const KEYS: usize>: Problem<T, D, V, KEYS>
    where
        T: RegisterElement + StoredElement,
        Columns<D>: MatrixColumns,
        Columns<V>: MatrixColumns,
        Columns<KEYS>: MatrixColumns;
}

/// Some rows of one head of one sequence, with what is known of the sequence.
pub trait ProblemTile: Copy {
    /// The first query, counted from the sequence's first.
    fn row(&self) -> u32;
}

/// The tiles of a block, in order. The thread that copies holds it.
pub trait Tiles<Tile> {
    /// The tile to be computed now; none if there are no more.
    fn tile(&mut self) -> Option<Tile>;
    /// Waits until a block of the tile's keys is there; blocks come in descending order. Called once for each after [`ask`](Self::ask).
    #[inline(always)]
    fn await_block(&mut self, _: &Tile, _block: u32) {}
    /// Asks for the next one: early, as the answer takes its time.
    fn ask(&mut self);
    /// Goes on to the tile that was asked for.
    fn advance(&mut self);
    /// Called when there are no more: leaves what blocks share as it was found.
    fn leave(&mut self);
}

/// What the kernel computes. Queries are those of a tile of `G::QUERIES`, of which a warpgroup has 64.
pub trait Problem<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize>: Parameter {
    /// A tile.
    type Tile: ProblemTile;
    /// The walk along tiles.
    type Tiles: Tiles<Self::Tile>;
    /// The shared words in which the thread that copies tells the others about a tile.
    type Message: SharedStorage + Copy;
    /// Where results wait in shared memory.
    type Staging<G: WarpgroupRoles>: SharedStorage + Copy;
    /// Words from one tile's place to the next one's, which take turns; 0 where there is one place.
    const TURN: u32;
    /// Whether results are stored by TMA.
    const STORES_BY_TMA: bool = true;
    /// Whether some queries see no key of the first blocks.
    const WINDOWED: bool;

    /// The tiles of this block, each of `tile_rows` queries.
    fn tiles(&self, tile_rows: u32) -> Self::Tiles;
    /// Writes which tile comes next, or that none does, at place `turn`.
    fn tell(tiles: &Self::Tiles, tile: Option<Self::Tile>, words: Self::Message, turn: u32);
    /// Reads it. All lanes of a warp call it.
    fn told(&self, tile_rows: u32, words: Self::Message, turn: u32) -> Option<Self::Tile>;
    /// Reads again a tile that is known to be there, where registers need not hold it meanwhile.
    fn told_again(&self, tile: Self::Tile, words: Self::Message, turn: u32) -> Self::Tile;

    /// Which keys a tile's queries see.
    fn mask(&self, tile: &Self::Tile) -> Mask;
    /// What pads chunks of a tile's keys: nothing, where they are not in chunks.
    #[inline(always)]
    fn gaps(&self, _: &Self::Tile) -> Gaps {
        Gaps::NONE
    }
    /// Starts to copy a tile's queries; `tell` is called once their place is free.
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Self::Tile, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns;
    /// Starts to copy a block of a tile's keys and their values.
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Self::Tile, block: u32)
    where
        Columns<D>: MatrixColumns;

    /// Fetches what the result of warpgroup `part`, whose first query is `row`, is merged into, early. All its threads call it.
    fn fetch<G: WarpgroupRoles>(&self, tile: &Self::Tile, row: u32, staging: Self::Staging<G>, part: u32);
    /// Loads the log-sum-exps that it is merged into, of a thread's rows.
    fn logs(&self, tile: &Self::Tile, row: u32) -> Rows;
    /// The softmax of a tile's rows before any key.
    fn softmax<G: WarpgroupRoles>(&self, tile: &Self::Tile) -> Softmax;
    /// Changes the scores of a warpgroup's queries before they count.
    fn edit(&self, scores: &mut RegisterTile<KEYS>, step: Step, seen: &Seen)
    where
        Columns<KEYS>: MatrixColumns;
    /// Stores the result of a warpgroup whose first query is `row`. All its threads call it.
    fn store<G: WarpgroupRoles>(
        &self,
        tile: &Self::Tile,
        row: u32,
        sum: RegisterTile<V>,
        finished: Finished,
        staging: Staging<T, D, Self::Staging<G>>,
    ) where
        Columns<V>: MatrixColumns;
    /// Called by every warp that multiplies before its first tile.
    fn begin<G: WarpgroupRoles>(staging: Self::Staging<G>, part: u32);
    /// Called by every warp that multiplies after its last tile.
    fn end<G: WarpgroupRoles>(&self, staging: Self::Staging<G>);

    /// Checks the argument of a launch, and counts its tiles, or more.
    ///
    /// # Errors
    /// The first part that does not fit.
    fn check(argument: &Self::Argument<'_>, tile_rows: u32) -> Result<u64, LaunchError>;
}

/// What a warpgroup's queries see.
pub struct Seen {
    /// Of the sequence.
    pub mask: Mask,
    /// The warpgroup's first query.
    pub row: u32,
    /// The blocks of keys that all its queries see whole.
    pub whole: Span,
    /// Among the keys.
    pub gaps: Gaps,
}

impl Seen {
    /// Makes the scores of a block's keys that are not seen -inf, where a window may hide keys on either side.
    #[inline(always)]
    pub fn hide<const KEYS: usize>(&self, scores: &mut RegisterTile<KEYS>, step: Step)
    where
        Columns<KEYS>: MatrixColumns,
    {
        let key = step.block * KEYS as u32;
        if step.first || step.block >= self.whole.end {
            self.mask.hide_after::<KEYS>(scores, self.row, key);
        }
        if step.block < self.whole.begin {
            self.mask.hide_before::<KEYS>(scores, self.row, key);
        }
    }
}

/// The shared memory of a warpgroup at the end of a tile, and what it knows of what is there.
#[derive(Clone, Copy)]
pub struct Staging<T, const D: usize, S> {
    /// Where the queries were.
    pub queries: Part<T, D>,
    /// Where [results](super::Target::Staging) wait.
    pub memory: S,
    /// The warpgroup's number.
    pub part: u32,
    /// Whether the tile is an odd one of the block's.
    pub parity: u32,
    /// The log-sum-exps that were there.
    pub logs: Rows,
}

impl<T: Pod, const D: usize, S> Staging<T, D, S> {
    /// Where the warpgroup's part of a rounded result waits to be stored.
    #[inline(always)]
    #[track_caller]
    pub fn of_result<G: WarpgroupRoles<Staging<Part<T, V>> = S>, const V: usize>(self) -> Part<T, V> {
        G::staging(self.queries, self.memory, self.part)
    }
}

macro_rules! policies {
    ($($(#[$doc:meta])* $policy:ident = |$t:ident, $d:ident, $v:ident, $keys:ident| $problem:ty;)*) => { $(
        $(#[$doc])*
        pub struct $policy;

        impl Policy for $policy {
            type Of<$t, const $d: usize, const $v: usize, const $keys: usize>
                = $problem
            where
                $t: RegisterElement + StoredElement,
                Columns<$d>: MatrixColumns,
                Columns<$v>: MatrixColumns,
                Columns<$keys>: MatrixColumns;
        }
    )* };
}

policies! {
    /// Dense tensors, all keys.
    Full = |T, D, V, KEYS| Dense<T, D, V, KEYS, Rounded<T, V, 4>, false>;
    /// Dense tensors, a causal mask.
    Causal = |T, D, V, KEYS| Dense<T, D, V, KEYS, Rounded<T, V, 4>, true>;
    /// Dense tensors of one rank, all keys, which arrive while the kernel runs.
    ArrivingFull = |T, D, V, KEYS| Arriving<T, D, V, KEYS, false>;
    /// The same with a causal mask.
    ArrivingCausal = |T, D, V, KEYS| Arriving<T, D, V, KEYS, true>;
    /// The same with options.
    ArrivingOptioned = |T, D, V, KEYS| ArrivingOptions<T, D, V, KEYS>;
    /// Packed sequences of one rank, all keys, which arrive while the kernel runs.
    ArrivingPackedFull = |T, D, V, KEYS| ArrivingPacked<T, D, V, KEYS, false>;
    /// The same with a causal mask.
    ArrivingPackedCausal = |T, D, V, KEYS| ArrivingPacked<T, D, V, KEYS, true>;
    /// A step of a ring: dense tensors, all keys, a running result.
    RingFull = |T, D, V, KEYS| Dense<T, D, V, KEYS, RingStep<T, 4>, false>;
    /// The same with a causal mask.
    RingCausal = |T, D, V, KEYS| Dense<T, D, V, KEYS, RingStep<T, 4>, true>;
    /// Packed sequences, all keys.
    PackedFull = |T, D, V, KEYS| Packed<T, D, V, KEYS, Rounded<T, V, 5>, false>;
    /// Packed sequences, a causal mask.
    PackedCausal = |T, D, V, KEYS| Packed<T, D, V, KEYS, Rounded<T, V, 5>, true>;
    /// A step of a ring: packed sequences, all keys, a running result.
    PackedRingFull = |T, D, V, KEYS| Packed<T, D, V, KEYS, RingStep<T, 5>, false>;
    /// The same with a causal mask.
    PackedRingCausal = |T, D, V, KEYS| Packed<T, D, V, KEYS, RingStep<T, 5>, true>;
    /// Everything.
    Optioned = |T, D, V, KEYS| Options<T, D, V, KEYS>;
}
