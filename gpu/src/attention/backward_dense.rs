//! Dense tensors in the backward pass: a tile is known by its number, a mask is that of all.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};

use super::backward_mask::BlockMask;
use super::backward_problem::{Common, KeyProblem, KeyTiles, Number};
use super::backward_reduce::{partial_elements, partial_start, store_fragments};
use super::backward_schedule::{KeyHeads, KeySchedule, KeyTile, TILE_WORDS};
use super::backward_tensors::{BackwardTensors, KeyGradients, KeyOrder, QuerySums};
use super::backward_walk::{Sums, Walk};
use super::backward_workspace::{KEYS, Keys, MOST_KEYS, PART, Rows};
use super::mask::Mask;
use super::shape::MOST_BLOCKS;

/// Dense tensors: `Q`, `dO` and `dQ` are `[batches, heads group, queries, D]`, the others `[batches, heads / splits, keys, D]`, of any strides.
#[derive(Clone, Copy, Parameter)]
pub struct DenseKeys<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> {
    /// What is read; statistics are `[batches, heads group, blocks QUERIES]`.
    pub tensors: BackwardTensors<T, D, QUERIES, 4>,
    /// Sums of `dQ / scale`.
    pub sums: QuerySums,
    /// The gradients; none if tiles are [parts](Self::partials).
    pub gradients: Option<KeyGradients<T, D, 4>>,
    /// Room for [`partial_elements`] of each tile, `[batches, heads, blocks of keys]`: [`AttentionBackwardReduce`](super::AttentionBackwardReduce)
    /// adds them up.
    pub partials: Option<GlobalMut<f32>>,
    /// Heads of tiles.
    pub heads: KeyHeads,
    /// If `MASKED`, which keys a query sees; else how many there are, of which it sees all.
    pub mask: Mask,
    /// The order of tiles.
    pub order: KeyOrder,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// The tiles, whose heads the schedule counts over all batches.
pub(super) struct DenseTiles {
    schedule: KeySchedule,
    heads: u32,
}

impl KeyTiles<KeyTile> for DenseTiles {
    #[inline(always)]
    fn tile(&mut self, index: u32) -> Option<KeyTile> {
        self.schedule.tile(index).map(|tile| tile.in_batch(self.heads))
    }

    #[inline(always)]
    fn tiles(&self) -> u32 {
        self.schedule.tiles()
    }
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> DenseKeys<T, D, QUERIES, MASKED> {
    #[inline(always)]
    fn key_blocks(&self) -> u32 {
        self.mask.keys.div_ceil(KEYS as u32)
    }
}

impl<T, const D: usize, const QUERIES: usize, const MASKED: bool> KeyProblem<T, D, QUERIES, TILE_WORDS, MASKED>
    for DenseKeys<T, D, QUERIES, MASKED>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    type Item = KeyTile;
    type Tiles = DenseTiles;

    #[inline(always)]
    fn common(&self) -> Common {
        let BackwardTensors { offsets, deltas, .. } = self.tensors;
        Common { offsets, deltas, sums: self.sums, order: self.order, group: self.heads.group, scale: self.scale }
    }

    #[inline(always)]
    fn tiles(&self) -> DenseTiles {
        let KeyHeads { batches, heads, .. } = self.heads;
        DenseTiles { schedule: KeySchedule { key_blocks: self.key_blocks(), heads: heads * batches, section: self.order.section }, heads }
    }

    #[inline(always)]
    #[track_caller]
    fn store_item(item: Option<KeyTile>, number: Number<TILE_WORDS>) {
        KeyTile::store(item, number);
    }

    #[inline(always)]
    #[track_caller]
    fn read(number: Number<TILE_WORDS>) -> KeyTile {
        KeyTile::load_alone(number)
    }

    #[inline(always)]
    fn read_of(tile: KeyTile, _: Number<TILE_WORDS>) -> KeyTile {
        tile
    }

    #[inline(always)]
    fn read_together(tile: KeyTile, _: Number<TILE_WORDS>) -> KeyTile {
        tile
    }

    #[inline(always)]
    fn read_mask(&self, _: Number<TILE_WORDS>) -> BlockMask<QUERIES, MASKED> {
        BlockMask(self.mask)
    }

    #[inline(always)]
    #[track_caller]
    fn read_result(number: Number<TILE_WORDS>) -> KeyTile {
        KeyTile::load_alone(number)
    }

    #[inline(always)]
    fn tile(item: &KeyTile) -> KeyTile {
        *item
    }

    #[inline(always)]
    fn mask(&self, _: &KeyTile) -> BlockMask<QUERIES, MASKED> {
        BlockMask(self.mask)
    }

    #[inline(always)]
    fn first_block(&self, tile: &KeyTile, member: u32) -> u32 {
        ((tile.batch * self.heads.heads + tile.head) * self.heads.group + member) * self.sums.blocks
    }

    #[inline(always)]
    #[track_caller]
    fn load_keys(&self, tile: &KeyTile, stage: Keys<T, D>, full: Mbarrier) {
        // The divisor is not zero; saying so keeps the check out.
        let at = [tile.batch, tile.head / self.heads.splits.max(1), tile.key(), 0];
        self.tensors.k.load(stage.keys, at, full);
        self.tensors.v.load(stage.values, at, full);
    }

    #[inline(always)]
    #[track_caller]
    fn load_rows(&self, tile: &KeyTile, member: u32, block: u32, stage: Rows<T, D, QUERIES>, full: Mbarrier) {
        let at = [tile.batch, tile.head * self.heads.group + member, block * QUERIES as u32, 0];
        self.tensors.q.load(stage.queries, at, full);
        self.tensors.grad_out.load(stage.gradients, at, full);
    }

    #[inline(always)]
    fn edit(&self, _: &mut RegisterTile<QUERIES>) {}

    #[inline(always)]
    fn bend(&self, _: &mut RegisterTile<QUERIES>, _: &RegisterTile<QUERIES>, _: SharedArray<f32, QUERIES>) {}

    #[inline(always)]
    #[track_caller]
    fn store<const SPAN: usize>(&self, walk: &Walk<T, D, QUERIES, SPAN>, mut sums: Sums<D>, tile: KeyTile, part: u32)
    where
        Columns<SPAN>: MatrixColumns,
    {
        sums.keys.map(|x| x * core::f32::consts::LN_2 * self.scale);
        if let Some(partials) = &self.partials {
            let place = (tile.batch * self.heads.heads + tile.head) * self.key_blocks() + tile.block;
            store_fragments(&sums.keys, partials, partial_start::<D>(place, false, part));
            store_fragments(&sums.values, partials, partial_start::<D>(place, true, part));
        } else if let Some(gradients) = &self.gradients {
            walk.store(&sums, gradients, [tile.batch, tile.head, tile.key() + part * PART as u32, 0]);
        }
    }
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> DenseKeysArgument<'_, T, D, QUERIES, MASKED> {
    /// A block for each multiprocessor, or for each tile.
    pub(super) fn grid(&self, device: &DeviceLimits) -> Result<Grid, LaunchError> {
        let Self { tensors, sums, partials, heads, mask, order, .. } = self;
        heads.check()?;
        mask.check()?;
        let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], heads.query_heads(), QUERIES * D)?;
        LaunchError::check_limit("problem.mask.queries", mask.queries.into(), u64::from(sums.blocks) * QUERIES as u64)?;
        LaunchError::check_length("problem.tensors.offsets", blocks * QUERIES as u64, tensors.offsets.len())?;
        LaunchError::check_length("problem.tensors.deltas", blocks * QUERIES as u64, tensors.deltas.len())?;
        LaunchError::check_length("problem.order.counter", 1, order.counter.len())?;
        let tiles = heads.tile_heads().saturating_mul(mask.keys.div_ceil(KEYS as u32).into());
        LaunchError::check_limit("problem.mask.keys", mask.keys.into(), MOST_KEYS)?;
        LaunchError::check_limit("problem.mask.keys", tiles, MOST_BLOCKS)?;
        if let Some(partials) = partials {
            LaunchError::check_length("problem.partials", tiles * partial_elements(D as u64), partials.len())?;
        }
        Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
    }
}
