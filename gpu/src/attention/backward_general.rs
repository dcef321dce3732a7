//! Sequences and options in the backward pass: what dense tensors do not have.
//!
//! The kernel is that of [`attention_backward`](fn@super::attention_backward), by another problem; the entry is its own, as its parameters,
//! shared memory and instances are. A policy of one entry would cost no instruction, as each instance is compiled alone; it was not tried.
//!
//! Sequences lie anywhere in their tensors and differ in length ([`Sequences`]), queries see windows of keys, scores are capped,
//! gradients are added to `f32` tensors, heads are smaller than tiles. All of it but caps is chosen at run time, outside the loop over
//! blocks of queries or by a branch that all threads take together. A tile comes with its sequence, and the tensor maps end
//! where the sequence ends ([`place`]). Caps take registers: with heads of up to 64 a block then has three quarters of the queries.
//!
//! Rows of padding are keys that no query sees: their gradients become zeros.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::num::{fma, log2, reciprocal};
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, StoredElement};

use super::backward::differentiate;
use super::backward_mask::{BlockMask, NoGap};
use super::backward_problem::{Common, KeyProblem, KeyTiles, Number};
use super::backward_schedule::{KeyHeads, KeyTile};
use super::backward_sequence::{QueryBlocks, SEQUENCE_TILE_WORDS, SequenceKeySchedule, SequenceTile};
use super::backward_sums::{KeySums, KeySumsArgument, add_rows};
use super::backward_tensors::{BackwardTensors, KeyGradients, KeyOrder, QuerySums};
use super::backward_walk::{Sums, Walk};
use super::backward_workspace::{BACKWARD_KEYS, Keys, MOST_KEYS, Rows, Shared as Workspace, WARPGROUP_KEYS, WarpgroupRoles};
use super::mask::Window;
use super::scores::Scores;
use super::sequence::{Sequences, place};
use super::shape::{MOST_BLOCKS, check_one};

type Shared<T, const D: usize, const QUERIES: usize, const SPAN: usize> = Workspace<T, D, QUERIES, SPAN, SEQUENCE_TILE_WORDS>;

/// Sequences, and options. Tensors are `[heads, rows, size]`, as [`place`] has them, of heads of up to `D` elements.
#[derive(Clone, Copy, Parameter)]
pub struct SequenceKeys<T: RegisterElement, const D: usize, const QUERIES: usize, const CAPPED: bool> {
    /// What is read; statistics are `[heads group, blocks QUERIES]`, laid out as [`QueryBlocks`].
    pub tensors: BackwardTensors<T, D, QUERIES, 5>,
    /// Sums of `dQ` but for its factor.
    pub sums: QuerySums,
    /// The gradients.
    pub gradients: Option<KeyGradients<T, D, 5>>,
    /// The tensors that the gradients are added to instead.
    pub added: Option<KeySums>,
    /// The factor of scores, and so of their gradients.
    pub grad_scale: f32,
    /// The sequences; rows of padding become zeros.
    pub sequences: Sequences,
    /// Heads of tiles.
    pub heads: KeyHeads,
    /// Which keys a query sees.
    pub window: Window,
    /// How scores are made; they are capped if `CAPPED`.
    pub scores: Scores,
    /// The order of tiles.
    pub order: KeyOrder,
}

/// Computes the gradients of keys and values, and sums of `dQ` but for its factor.
///
/// `QUERIES` are computed together; a warpgroup's part of `dQ'` is 64 by `SPAN`.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Shared<T, D, QUERIES, SPAN>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64], CAPPED = [false])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [96], SPAN = [48], CAPPED = [true])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64], CAPPED = [false, true])]
pub fn attention_backward_general<
    T: RegisterElement + StoredElement,
    const D: usize,
    const QUERIES: usize,
    const SPAN: usize,
    const CAPPED: bool,
>(
    problem: SequenceKeys<T, D, QUERIES, CAPPED>,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    differentiate::<_, T, D, QUERIES, SPAN, SEQUENCE_TILE_WORDS, true>(problem);
}

impl KeyTiles<SequenceTile> for SequenceKeySchedule {
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self, index: u32) -> Option<SequenceTile> {
        SequenceKeySchedule::tile(self, index)
    }

    #[inline(always)]
    fn tiles(&self) -> u32 {
        SequenceKeySchedule::tiles(self)
    }
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const CAPPED: bool> SequenceKeys<T, D, QUERIES, CAPPED> {
    /// The tensors' key head.
    #[inline(always)]
    fn head_of(&self, tile: KeyTile) -> u32 {
        tile.head + tile.batch * self.heads.step
    }
}

impl<T, const D: usize, const QUERIES: usize, const CAPPED: bool> KeyProblem<T, D, QUERIES, SEQUENCE_TILE_WORDS, true>
    for SequenceKeys<T, D, QUERIES, CAPPED>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    type Item = SequenceTile;
    type Tiles = SequenceKeySchedule;
    type Gap = NoGap;

    #[inline(always)]
    fn common(&self) -> Common {
        let BackwardTensors { offsets, deltas, .. } = self.tensors;
        Common { offsets, deltas, sums: self.sums, order: self.order, group: self.heads.group, scale: self.scores.scale }
    }

    #[inline(always)]
    fn tiles(&self) -> SequenceKeySchedule {
        let KeyHeads { batches, heads, .. } = self.heads;
        let blocks = QueryBlocks { query_ends: self.sequences.query_ends, batches, size: QUERIES as u32, blocks: self.sums.blocks };
        SequenceKeySchedule::new(self.sequences, self.window, blocks, heads, self.order.section)
    }

    #[inline(always)]
    fn store_item(item: Option<SequenceTile>, number: Number<SEQUENCE_TILE_WORDS>) {
        SequenceTile::store(item, number);
    }

    #[inline(always)]
    fn read(number: Number<SEQUENCE_TILE_WORDS>) -> SequenceTile {
        SequenceTile::load_alone(number)
    }

    #[inline(always)]
    fn read_of(tile: KeyTile, number: Number<SEQUENCE_TILE_WORDS>) -> SequenceTile {
        SequenceTile { tile, ..SequenceTile::load_alone(number) }
    }

    #[inline(always)]
    fn read_together(tile: KeyTile, number: Number<SEQUENCE_TILE_WORDS>) -> SequenceTile {
        SequenceTile { tile, ..SequenceTile::load(number) }
    }

    #[inline(always)]
    fn read_mask(&self, number: Number<SEQUENCE_TILE_WORDS>) -> BlockMask<QUERIES, true> {
        BlockMask::new(SequenceTile::load_mask(number))
    }

    #[inline(always)]
    fn read_result(number: Number<SEQUENCE_TILE_WORDS>) -> SequenceTile {
        SequenceTile::load(number)
    }

    #[inline(always)]
    fn tile(item: &SequenceTile) -> KeyTile {
        item.tile
    }

    #[inline(always)]
    fn mask(&self, item: &SequenceTile) -> BlockMask<QUERIES, true> {
        BlockMask::new(item.mask)
    }

    #[inline(always)]
    fn query_block(&self, item: &SequenceTile, member: u32, block: u32) -> u32 {
        (item.tile.head * self.heads.group + member) * self.sums.blocks + item.first_block + block
    }

    #[inline(always)]
    fn load_keys(&self, item: &SequenceTile, _: impl Fn() -> SequenceTile, stage: Keys<T, D>, full: Mbarrier) {
        let at = place(item.key_offset, item.mask.keys, self.head_of(item.tile), item.tile.key());
        self.tensors.k.load(stage.keys, at, full);
        self.tensors.v.load(stage.values, at, full);
    }

    #[inline(always)]
    fn load_rows(
        &self,
        item: &SequenceTile,
        _: impl Fn() -> SequenceTile,
        [member, block]: [u32; 2],
        stage: Rows<T, D, QUERIES>,
        full: Mbarrier,
    ) {
        let head = self.head_of(item.tile) * self.heads.group + member;
        let at = place(item.query_offset, item.mask.queries, head, block * QUERIES as u32);
        self.tensors.q.load(stage.queries, at, full);
        self.tensors.grad_out.load(stage.gradients, at, full);
    }

    #[inline(always)]
    fn edit(&self, products: &mut RegisterTile<QUERIES>) {
        if CAPPED {
            self.scores.cap(products);
        }
    }

    #[inline(always)]
    fn bend(&self, gradients: &mut RegisterTile<QUERIES>, weights: &RegisterTile<QUERIES>, offsets: SharedArray<f32, QUERIES>) {
        if CAPPED {
            bend(gradients, weights, offsets, reciprocal(self.scores.cap_limit));
        }
    }

    #[inline(always)]
    fn store<const SPAN: usize>(&self, walk: &Walk<T, D, QUERIES, SPAN>, mut sums: Sums<D>, item: SequenceTile, part: u32)
    where
        Columns<SPAN>: MatrixColumns,
    {
        sums.keys.map(|x| x * self.grad_scale);
        let (head, key) = (self.head_of(item.tile), item.tile.key() + part * WARPGROUP_KEYS as u32);
        if let Some(KeySums { k, v, size, value_size }) = self.added {
            let row_heads = self.heads.heads * if self.heads.step == 0 { 1 } else { self.heads.batches };
            let first = u64::from(item.key_offset) * u64::from(row_heads) + u64::from(head);
            let (stride, rows) = (u64::from(row_heads), [key, item.mask.keys]);
            add_rows(&sums.keys, &k, first, stride, rows, size);
            add_rows(&sums.values, &v, first, stride, rows, value_size);
            // Seen to meet again, a warp's numbers that all lanes share stay in registers of the warp.
            warp::sync();
        } else if let Some(gradients) = &self.gradients {
            walk.store(&sums, gradients, place(item.key_offset, item.key_rows, head, key));
        }
    }
}

/// Gradients of capped scores become those of the scores before: times `1 - t^2`, where the hyperbolic tangent `t` is what the
/// weight's logarithm says of the capped score, times `slope`. So nothing need be kept of the scores.
#[inline(always)]
#[track_caller]
pub(super) fn bend<const QUERIES: usize>(
    gradients: &mut RegisterTile<QUERIES>,
    weights: &RegisterTile<QUERIES>,
    offsets: SharedArray<f32, QUERIES>,
    slope: f32,
) where
    Columns<QUERIES>: MatrixColumns,
{
    gradients.map_pairs(|half, pair, values| {
        // Read where they are used: registers are full.
        let (weights, offsets) = (weights.pair(half, pair), offsets.load_pair(register_tile::column(pair as u32)));
        [0, 1].map(|i| {
            let tangent = (log2(weights[i]) - offsets[i]) * slope;
            // No weight, no gradient: its logarithm says nothing. A weight that is NaN makes the gradient NaN.
            if weights[i] == 0.0 { 0.0 } else { values[i] * fma(-tangent, tangent, 1.0) }
        })
    });
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize, const CAPPED: bool>(
    args: &AttentionBackwardGeneralArgs<'_, T, D, QUERIES, SPAN, CAPPED>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    let SequenceKeysArgument { tensors, sums, gradients, added, sequences, heads, window, order, .. } = &args.problem;
    heads.check()?;
    sequences.check(heads.batches)?;
    window.check()?;
    let query_heads = u64::from(heads.heads) * u64::from(heads.group);
    let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], query_heads, QUERIES * D)?;
    tensors.check(blocks * QUERIES as u64)?;
    order.check()?;
    let key_rows = u64::from(sequences.key_rows);
    LaunchError::check_limit("problem.sequences.key_rows", key_rows, MOST_KEYS)?;
    check_one("problem.gradients", [gradients.is_some(), added.is_some()])?;
    if let Some(KeySumsArgument { k, v, size, value_size }) = added {
        let row_heads = if heads.step == 0 { heads.heads.into() } else { heads.tile_heads() };
        for (name, sum, size) in [("problem.added.k", k, *size), ("problem.added.v", v, *value_size)] {
            LaunchError::check_multiple(name, 8, size.into())?;
            LaunchError::check_limit(name, size.into(), D as u64)?;
            LaunchError::check_length(name, (key_rows * row_heads).saturating_mul(size.into()), sum.len())?;
            LaunchError::check_alignment(name, 8, sum.address())?;
        }
    }
    // Each sequence may end in a tile of its own.
    let (row_tiles, batches) = (key_rows.div_ceil(BACKWARD_KEYS as u64), u64::from(heads.batches));
    let tiles = u64::from(heads.heads) * if heads.step == 0 { row_tiles + batches } else { row_tiles * batches };
    LaunchError::check_limit("problem.sequences.key_rows", tiles, MOST_BLOCKS)?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
