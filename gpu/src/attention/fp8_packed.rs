//! Packed sequences of 8 bits, full or causal, as [`Packed`](super::Packed) has them: they lie anywhere in their tensors and differ in length; tensor maps
//! end where a sequence ends, so that what is after it is loaded as zeros.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::layout::Swizzle;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterTile;

use super::fp8_problem::{FP8_QUERIES, Fp8Inputs, Fp8Key, Fp8Policy, Fp8Problem, Fp8Query, Fp8Results, Fp8Scales, LIFT};
use super::mask::{FAR, Mask};
use super::packed::PackedTiles;
use super::problem::{PackedCausal, PackedFull};
use super::schedule::{ITEM_WORDS, Item};
use super::sequence::{Sequence, Sequences, place};
use super::shape::Heads;
use super::softmax::{Finished, Softmax};
use super::target::Spot;
use super::warpgroup_roles::Part;

impl Fp8Policy for PackedFull {
    type Of<const D: usize, S: Swizzle>
        = Fp8Packed<D, S, false>
    where
        Columns<D>: MatrixColumns;
}

impl Fp8Policy for PackedCausal {
    type Of<const D: usize, S: Swizzle>
        = Fp8Packed<D, S, true>
    where
        Columns<D>: MatrixColumns;
}

/// Attention of packed sequences to all keys or, if `CAUSAL`, to those up to the diagonal.
#[derive(Parameter)]
pub struct Fp8Packed<const D: usize, S: Swizzle, const CAUSAL: bool> {
    /// Queries, keys and values: tensors of `[heads, rows, size]`, as [`place`] has them.
    pub inputs: Fp8Inputs<D, S, 5>,
    /// What their elements are worth: a head's scale is that of all sequences.
    pub scales: Fp8Scales,
    /// Where the result goes; its log-sum-exp is `[heads, query_rows]`.
    pub results: Fp8Results<D, 5>,
    /// Where the sequences lie; without diagonals.
    pub sequences: Sequences,
    /// How many heads there are; the step is 0.
    pub heads: Heads,
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// Keys whose heads are computed together.
    pub section_keys: u32,
    /// If `CAUSAL`: whether query 0 is aligned with key 0, or the last query with the last key.
    pub top_left: bool,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

impl<const D: usize, S: Swizzle, const CAUSAL: bool> Fp8Packed<D, S, CAUSAL> {
    /// The key head of a tile.
    #[inline(always)]
    fn key_head(&self, item: &Item) -> u32 {
        // By a branch, as the thread that copies has no register for `group.max(1)`.
        item.tile.head.checked_div(self.heads.group).unwrap_or_default()
    }

    /// Where a block of keys is.
    #[inline(always)]
    fn keys(&self, item: &Item, key: u32) -> [u32; 5] {
        place(item.sequence.key_offset, item.sequence.keys, self.key_head(item), key)
    }
}

impl<const D: usize, S: Swizzle, const CAUSAL: bool> Fp8Problem<D, S> for Fp8Packed<D, S, CAUSAL>
where
    Columns<D>: MatrixColumns,
{
    type Tile = Item;
    type Tiles = PackedTiles;
    type Message = SharedArray<u32, ITEM_WORDS>;
    const MASKED: bool = CAUSAL;
    const WINDOWED: bool = false;

    #[inline(always)]
    #[track_caller]
    fn tiles(&self) -> PackedTiles {
        PackedTiles::new(self.sequences.without_diagonals(), self.heads, FP8_QUERIES as u32, self.section_keys, self.counter)
    }

    #[inline(always)]
    #[track_caller]
    fn tell(item: Option<Item>, words: Self::Message) {
        Item::store::<false, _>(item, words, 0);
    }

    #[inline(always)]
    #[track_caller]
    fn told(words: Self::Message) -> Option<Item> {
        Item::load::<false, _>(words, 0)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(words: Self::Message) -> Item {
        Item::reload::<false, _>(words, 0)
    }

    #[inline(always)]
    fn heads(&self) -> u32 {
        self.heads.heads
    }

    #[inline(always)]
    fn mask(&self, item: &Item) -> Mask {
        // Not the sequence's own diagonal, for which that thread has no register either.
        let Sequence { queries, keys, .. } = item.sequence;
        let diagonal = if self.top_left { 0 } else { keys.cast_signed() - queries.cast_signed() };
        Mask { last: if CAUSAL { diagonal } else { FAR }, ..Mask::full(queries, keys) }
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries(&self, item: &Item, row: u32, target: Fp8Query<D, S>, full: Mbarrier) {
        let Sequence { queries, query_offset, .. } = item.sequence;
        self.inputs.q.load(target, place(query_offset, queries, item.tile.head, row), full);
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
        self.scales.of_scores(item.tile.head, self.key_head(item))
    }

    #[inline(always)]
    #[track_caller]
    fn softmax(&self, worth: f32, zero: u32) -> Softmax {
        Softmax::lifted(self.scale * worth, LIFT).with_zero(zero)
    }

    #[inline(always)]
    #[track_caller]
    fn store(&self, item: &Item, row: u32, sum: RegisterTile<D>, finished: Finished, staging: Part<bf16, D>, part: u32) {
        let (head, Sequence { queries, rows, query_offset: first, .. }) = (item.tile.head, item.sequence);
        let statistics = u64::from(head) * u64::from(self.sequences.query_rows) + u64::from(first);
        let spot = Spot { at: place(first, rows, head, row), batch: 0, head, first, row, rows, statistics };
        let worth = self.scales.of_values(self.key_head(item));
        self.results.store_sequence(sum, finished, (queries, worth), &spot, staging, part);
    }

    fn check(argument: &Self::Argument<'_>) -> Result<u64, LaunchError> {
        let Fp8PackedArgument { scales, results, sequences, heads, counter, .. } = argument;
        sequences.check(heads.batches)?;
        heads.check()?;
        scales.check(heads.heads, heads.group)?;
        LaunchError::check_limit("heads.step", heads.step.into(), 0)?;
        LaunchError::check_length("sequences.diagonals", 0, sequences.diagonals.map_or(0, |diagonals| diagonals.len()))?;
        LaunchError::check_length("counter", 1, counter.len())?;
        let rows = u64::from(sequences.query_rows);
        let results_of = u64::from(heads.heads).saturating_mul(rows);
        LaunchError::check_length("results.log_sum_exp", results_of, results.log_sum_exp.len())?;
        Ok(heads.most_tiles(rows, FP8_QUERIES as u32))
    }
}
