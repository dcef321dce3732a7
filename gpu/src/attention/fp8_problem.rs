//! What attention of 8 bits is computed of, as a compile-time policy of [its kernel](fn@super::attention_forward_fp8): where tiles come from, where rows
//! lie, what is masked. The policies are those of the [16-bit kernel](fn@super::attention_forward).
//!
//! | policy | problem | takes |
//! |---|---|---|
//! | [`Full`](super::Full), [`Causal`](super::Causal) | [`Fp8Dense`](super::Fp8Dense) | dense tensors |
//! | [`PackedFull`](super::PackedFull), [`PackedCausal`](super::PackedCausal) | [`Fp8Packed`](super::Fp8Packed) | packed sequences |
//! | [`Optioned`](super::Optioned) | [`Fp8Options`](super::Fp8Options) | windows, caps, sinks, of any layout |
//!
//! The problems are not those of the 16-bit kernel: tiles are swizzled by the head size, the result has another type than the inputs, scales stand
//! beside them, and a tile's words are in the ring of its queries.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::{Swizzle, Swizzle128};
use oxtile_tile::num::e4m3;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile};
use oxtile_tile::shared::{SharedStorage, SharedTile};
use oxtile_tile::tensor_map::{TensorMap, TensorMapMut};

use super::epilogue::{store, store_rows};
use super::mask::{Mask, Span};
use super::problem::{ProblemTile, Tiles};
use super::shape::Checked;
use super::softmax::{Finished, Softmax};
use super::target::Spot;
use super::warpgroup_roles::{Pair, Part, WARPGROUP_QUERIES};

/// Keys of a block.
pub const FP8_KEYS: usize = 96;
/// Warpgroups that multiply, each for a part of a tile.
pub(super) const PARTS: usize = 3;
/// Queries of a tile.
pub const FP8_QUERIES: usize = PARTS * WARPGROUP_QUERIES;

/// Weights are 2^4 times as large as they are worth, up to 2^8.
pub(super) const LIFT: f32 = 4.0;

/// The queries of a warpgroup in shared memory.
pub type Fp8Query<const D: usize, S> = SharedTile<e4m3, WARPGROUP_QUERIES, D, S>;
/// A block of keys, or of values.
pub type Fp8Key<const D: usize, S> = SharedTile<e4m3, FP8_KEYS, D, S>;

/// A family of problems, one for each size of heads: a type parameter of the kernel.
pub trait Fp8Policy: 'static {
    /// The kernel's parameter.
    type Of<const D: usize, S: Swizzle>: Fp8Problem<D, S>
    where
        Columns<D>: MatrixColumns;
}

/// A block's place in the walk of a warpgroup.
#[derive(Clone, Copy)]
pub struct Fp8Step {
    /// The block.
    pub block: u32,
    /// How its scores become weights, a constant.
    pub phase: Phase,
}

/// Blocks of a walk, in order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first.
    First,
    /// Those in which maxima are looked for: all that a causal mask or a window's right edge may cut are among them.
    Thorough,
    /// Those in which weights tell.
    Settled,
}

/// What a warpgroup's queries see.
pub struct Fp8Seen {
    /// Of the sequence.
    pub mask: Mask,
    /// The warpgroup's first query.
    pub row: u32,
    /// The blocks of keys that all its queries see whole.
    pub whole: Span,
    /// What a product of a query and a key is worth.
    pub worth: f32,
}

/// What the kernel computes, of tiles of [`FP8_QUERIES`] queries.
pub trait Fp8Problem<const D: usize, S: Swizzle>: Parameter
where
    Columns<D>: MatrixColumns,
{
    /// A tile.
    type Tile: ProblemTile;
    /// The walk along tiles.
    type Tiles: Tiles<Self::Tile>;
    /// The shared words in which the thread that copies tells the others about a tile.
    type Message: SharedStorage + Copy;
    /// Whether a mask may cut other blocks of keys than the last.
    const MASKED: bool;
    /// Whether some queries see no key of the first blocks.
    const WINDOWED: bool;

    /// The tiles of this block.
    fn tiles(&self) -> Self::Tiles;
    /// Writes which tile comes next, or that none does.
    fn tell(tile: Option<Self::Tile>, words: Self::Message);
    /// Reads it. All lanes of a warp call it.
    fn told(words: Self::Message) -> Option<Self::Tile>;
    /// Reads again a tile that is known to be there: registers need not hold it meanwhile.
    fn told_again(words: Self::Message) -> Self::Tile;

    /// Query heads of a sequence, below 2^31.
    fn heads(&self) -> u32;
    /// Which keys a tile's queries see.
    fn mask(&self, tile: &Self::Tile) -> Mask;
    /// Starts to copy the queries of a warpgroup, from `row` on.
    fn load_queries(&self, tile: &Self::Tile, row: u32, target: Fp8Query<D, S>, full: Mbarrier);
    /// Starts to copy a block of keys, from `key` on.
    fn load_keys(&self, tile: &Self::Tile, key: u32, target: Fp8Key<D, S>, full: Mbarrier);
    /// Starts to copy its values.
    fn load_values(&self, tile: &Self::Tile, key: u32, target: Fp8Key<D, S>, full: Mbarrier);

    /// What a product of a query and a key of a tile is worth.
    fn worth(&self, tile: &Self::Tile) -> f32;
    /// The softmax of rows before any key, where a product is worth so much; `zero` is a zero that the compiler does not know.
    fn softmax(&self, worth: f32, zero: u32) -> Softmax;
    /// Changes the scores of a warpgroup's queries, of the first `N` keys of a block, before they count: hides what queries do not see.
    #[inline(always)]
    fn edit<const N: usize>(&self, scores: &mut RegisterTile<N>, step: Fp8Step, seen: &Fp8Seen)
    where
        Columns<N>: MatrixColumns,
    {
        let may_cut = match step.phase {
            Phase::First => true,
            Phase::Thorough => Self::MASKED,
            Phase::Settled => false,
        };
        if may_cut && step.block >= seen.whole.end {
            seen.mask.hide_after::<N>(scores, seen.row, step.block * FP8_KEYS as u32);
        }
    }
    /// Stores the result of warpgroup `part`, whose first query is `row`. All its threads call it.
    fn store(&self, tile: &Self::Tile, row: u32, sum: RegisterTile<D>, finished: Finished, staging: Part<bf16, D>, part: u32);

    /// Checks the argument of a launch, and counts its tiles, or more.
    ///
    /// # Errors
    /// The first part that does not fit.
    fn check(argument: &Self::Argument<'_>) -> Result<u64, LaunchError>;
}

/// Queries, keys and values as [`attention_forward`](fn@super::attention_forward) has them; `S` is the swizzle of rows of `D` bytes.
#[derive(Clone, Copy, Parameter)]
pub struct Fp8Inputs<const D: usize, S: Swizzle, const RANK: usize> {
    /// Queries.
    pub q: TensorMap<e4m3, WARPGROUP_QUERIES, D, S, RANK>,
    /// Keys.
    pub k: TensorMap<e4m3, FP8_KEYS, D, S, RANK>,
    /// Values.
    pub v: TensorMap<e4m3, FP8_KEYS, D, S, RANK>,
}

/// What an element of each input is worth: one number for the tensor, or one for each of its heads, whatever the sequence.
#[derive(Clone, Copy, Parameter)]
pub struct Fp8Scales {
    /// Of queries.
    pub q: Global<f32>,
    /// Of keys.
    pub k: Global<f32>,
    /// Of values.
    pub v: Global<f32>,
}

impl Fp8Scales {
    /// What a product of a query and a key is worth, of a query head and its key head.
    #[inline(always)]
    #[track_caller]
    pub(super) fn of_scores(&self, head: u32, key_head: u32) -> f32 {
        of_head(&self.q, head) * of_head(&self.k, key_head)
    }

    /// What a value is worth.
    #[inline(always)]
    #[track_caller]
    pub(super) fn of_values(&self, key_head: u32) -> f32 {
        of_head(&self.v, key_head)
    }
}

/// The scale of a head, or of all.
#[inline(always)]
#[track_caller]
fn of_head(scales: &Global<f32>, head: u32) -> f32 {
    scales.load(if scales.len() == 1 { 0 } else { head.into() })
}

impl Fp8ScalesArgument<'_> {
    /// One, or one for each head; the sizes were checked.
    pub(super) fn check(&self, heads: u32, group: u32) -> Checked {
        let key_heads = heads.checked_div(group).unwrap_or_default();
        for (name, scales, heads) in [("scales.q", self.q, heads), ("scales.k", self.k, key_heads), ("scales.v", self.v, key_heads)] {
            if scales.len() != 1 {
                LaunchError::check_length(name, heads.into(), scales.len())?;
            }
        }
        Ok(())
    }
}

/// The result and its log-sum-exp.
#[derive(Clone, Copy, Parameter)]
pub struct Fp8Results<const D: usize, const RANK: usize> {
    /// The result.
    pub out: TensorMapMut<bf16, WARPGROUP_QUERIES, D, Swizzle128, RANK>,
    /// The natural logarithm of each row's sum of exponentials.
    pub log_sum_exp: GlobalMut<f32>,
}

impl<const D: usize, const RANK: usize> Fp8Results<D, RANK>
where
    Columns<D>: MatrixColumns,
{
    /// Stores a warpgroup's weighted means of values and its log-sum-exp. All its threads call it.
    #[inline(always)]
    #[track_caller]
    pub(super) fn store(&self, means: &RegisterTile<D>, finished: &Finished, spot: &Spot<RANK>, staging: Part<bf16, D>, part: u32) {
        store::<Pair, _, _, _>(&self.out, means, staging, part, spot.at);
        store_rows(&self.log_sum_exp, spot.statistics, spot.row, spot.rows, finished.log_sum_exp());
    }

    /// The same of a sequence of `queries` rows, after which its padding begins, of a sum that is not divided yet and whose values are worth `worth`.
    /// Rows of padding become zeros, whatever was computed of them.
    #[inline(always)]
    #[track_caller]
    pub(super) fn store_sequence(
        &self,
        mut sum: RegisterTile<D>,
        finished: Finished,
        (queries, worth): (u32, f32),
        spot: &Spot<RANK>,
        staging: Part<bf16, D>,
        part: u32,
    ) {
        let finished = finished.of_rows(|half| spot.row + register_tile::row(half) < queries);
        Finished { factor: finished.factor.map(|factor| factor * worth), ..finished }.divide(&mut sum);
        self.store(&sum, &finished, spot, staging, part);
    }
}
