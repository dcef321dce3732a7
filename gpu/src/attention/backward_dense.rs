//! Dense tensors in the backward pass: a tile is known by its number, a mask is that of all.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};

use super::backward_mask::{BlockMask, NoGap};
use super::backward_problem::{Common, KeyProblem, KeyTiles, Number};
use super::backward_reduce::{partial_elements, partial_start, store_fragments};
use super::backward_schedule::{KeyHeads, KeySchedule, KeyTile, TILE_WORDS};
use super::backward_tensors::{BackwardTensors, KeyGradients, KeyOrder, QuerySums};
use super::backward_walk::{Sums, Walk};
use super::backward_workspace::{BACKWARD_KEYS, Keys, MOST_KEYS, Rows, WARPGROUP_KEYS};
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
pub(super) struct DenseKeyTiles {
    schedule: KeySchedule,
    heads: u32,
}

impl DenseKeyTiles {
    /// At the first one, with so many heads a batch.
    #[inline(always)]
    pub const fn new(schedule: KeySchedule, heads: u32) -> Self {
        Self { schedule, heads }
    }
}

impl KeyTiles<KeyTile> for DenseKeyTiles {
    #[inline(always)]
    fn tile(&mut self, index: u32) -> Option<KeyTile> {
        self.schedule.tile(index).map(|tile| tile.in_batch(self.heads))
    }

    #[inline(always)]
    fn tiles(&self) -> u32 {
        self.schedule.tiles()
    }
}

/// The tensors, and what all roles compute of their sizes.
#[derive(Clone, Copy)]
pub(super) struct DenseProblem<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> {
    keys: DenseKeys<T, D, QUERIES, MASKED>,
    /// Blocks of queries of a head.
    blocks: u32,
    schedule: KeySchedule,
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> DenseProblem<T, D, QUERIES, MASKED> {
    #[inline(always)]
    pub fn new(keys: DenseKeys<T, D, QUERIES, MASKED>) -> Self {
        let (key_blocks, heads) = (keys.mask.keys.div_ceil(BACKWARD_KEYS as u32), keys.heads.heads * keys.heads.batches);
        let schedule = KeySchedule { key_blocks, heads, section: keys.order.section };
        Self { keys, blocks: keys.mask.queries.div_ceil(QUERIES as u32), schedule }
    }
}

impl<T, const D: usize, const QUERIES: usize, const MASKED: bool> KeyProblem<T, D, QUERIES, TILE_WORDS, MASKED>
    for DenseProblem<T, D, QUERIES, MASKED>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    type Item = KeyTile;
    type Tiles = DenseKeyTiles;
    type Gap = NoGap;

    #[inline(always)]
    fn common(&self) -> Common {
        let BackwardTensors { offsets, deltas, .. } = self.keys.tensors;
        let Self { keys, .. } = self;
        Common { offsets, deltas, sums: keys.sums, order: keys.order, group: keys.heads.group, scale: keys.scale }
    }

    #[inline(always)]
    fn tiles(&self) -> DenseKeyTiles {
        DenseKeyTiles::new(self.schedule, self.keys.heads.heads)
    }

    #[inline(always)]
    fn store_item(item: Option<KeyTile>, number: Number<TILE_WORDS>) {
        KeyTile::store(item, number);
    }

    #[inline(always)]
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
        BlockMask::new(self.keys.mask)
    }

    #[inline(always)]
    fn read_result(number: Number<TILE_WORDS>) -> KeyTile {
        KeyTile::load_alone(number)
    }

    #[inline(always)]
    fn tile(item: &KeyTile) -> KeyTile {
        *item
    }

    #[inline(always)]
    fn mask(&self, _: &KeyTile) -> BlockMask<QUERIES, MASKED> {
        BlockMask::new(self.keys.mask)
    }

    #[inline(always)]
    fn query_block(&self, tile: &KeyTile, member: u32, block: u32) -> u32 {
        ((tile.batch * self.keys.heads.heads + tile.head) * self.keys.heads.group + member) * self.blocks + block
    }

    #[inline(always)]
    fn load_keys(&self, tile: &KeyTile, _: impl Fn() -> KeyTile, stage: Keys<T, D>, full: Mbarrier) {
        // The divisor is not zero; `max(1)` saves its check.
        let at = [tile.batch, tile.head / self.keys.heads.splits.max(1), tile.key(), 0];
        self.keys.tensors.k.load(stage.keys, at, full);
        self.keys.tensors.v.load(stage.values, at, full);
    }

    #[inline(always)]
    fn load_rows(&self, tile: &KeyTile, _: impl Fn() -> KeyTile, [member, block]: [u32; 2], stage: Rows<T, D, QUERIES>, full: Mbarrier) {
        let at = [tile.batch, tile.head * self.keys.heads.group + member, block * QUERIES as u32, 0];
        self.keys.tensors.q.load(stage.queries, at, full);
        self.keys.tensors.grad_out.load(stage.gradients, at, full);
    }

    #[inline(always)]
    fn edit(&self, _: &mut RegisterTile<QUERIES>) {}

    #[inline(always)]
    fn bend(&self, _: &mut RegisterTile<QUERIES>, _: &RegisterTile<QUERIES>, _: SharedArray<f32, QUERIES>) {}

    #[inline(always)]
    fn store<const SPAN: usize>(&self, walk: &Walk<T, D, QUERIES, SPAN>, mut sums: Sums<D>, tile: KeyTile, part: u32)
    where
        Columns<SPAN>: MatrixColumns,
    {
        sums.keys.map(|x| x * core::f32::consts::LN_2 * self.keys.scale);
        let Some(gradients) = &self.keys.gradients else {
            let partials = &self.keys.partials.unwrap_or_default();
            let place = (tile.batch * self.keys.heads.heads + tile.head) * self.schedule.key_blocks + tile.block;
            store_fragments(&sums.keys, partials, partial_start::<D>(place, false, part));
            store_fragments(&sums.values, partials, partial_start::<D>(place, true, part));
            return;
        };
        walk.store(&sums, gradients, [tile.batch, tile.head, tile.key() + part * WARPGROUP_KEYS as u32, 0]);
    }
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool> DenseKeysArgument<'_, T, D, QUERIES, MASKED> {
    /// A block for each multiprocessor, or for each tile.
    pub(super) fn grid(&self, device: &DeviceLimits) -> Result<Grid, LaunchError> {
        let Self { tensors, sums, gradients, partials, heads, mask, order, .. } = self;
        heads.check()?;
        mask.check()?;
        let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], heads.query_heads(), QUERIES * D)?;
        LaunchError::check_length("problem.sums.blocks", mask.queries.div_ceil(QUERIES as u32).into(), sums.blocks.into())?;
        tensors.check(blocks * QUERIES as u64)?;
        LaunchError::check_limit("problem.mask.keys", mask.keys.into(), MOST_KEYS)?;
        let key_blocks = u64::from(mask.keys.div_ceil(BACKWARD_KEYS as u32));
        order.check_heads(key_blocks)?;
        let tiles = heads.tile_heads().saturating_mul(key_blocks);
        LaunchError::check_limit("problem.mask.keys", tiles, MOST_BLOCKS)?;
        let in_parts = if gradients.is_some() { 0 } else { tiles * partial_elements(D as u64) };
        let (length, address) = partials.as_ref().map_or((0, 0), |partials| (partials.len(), partials.address()));
        LaunchError::check_length("problem.partials", in_parts, length)?;
        LaunchError::check_alignment("problem.partials", 16, address)?;
        Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
    }
}
