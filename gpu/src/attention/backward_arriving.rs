//! The backward pass of a rank of several, whose keys arrive while the kernel runs: context parallelism in one launch.
//!
//! The rank has two chunks of the sequence: its queries are tensors of `[batches, heads, 2 chunk, D]`. It takes the blocks of keys of the whole sequence that any
//! of its queries sees, in their order, so that sums of `dQ` have the bits of one device. The warp that copies waits for the flag of a chunk of other ranks
//! before it loads from it; own keys are read where the rank has them. What a block of keys gets of this rank's queries is stored, as fragments of `f32`, in
//! this rank's slot in the memory of the block's owner, which adds the slots of all ranks up in their order ([`AttentionBackwardReduce`](super::AttentionBackwardReduce)).
//!
//! A mask sees the queries of both chunks where they are in the sequence: blocks of queries between the two are [missing](Missing). Of the keys, a window hides
//! those that are far from both: blocks that no query sees are not [visited](Visited), and nothing is stored for them.
//!
//! A slot is written only after keys of its owner's have arrived, which the owner sends when it has read all slots of the pass before. A wait that is not
//! answered ends all later ones: what is stored then is garbage, and the stream tells no owner of it.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::Arrivals;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::reciprocal;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::tensor_map::TensorMap;

use super::arriving::{ArrivingKeys, PRESENT, RANK_CHUNKS};
use super::backward::differentiate;
use super::backward_dense::DenseKeyTiles;
use super::backward_general::bend;
use super::backward_mask::{BlockMask, Gap, Missing};
use super::backward_problem::{Common, KeyProblem, KeyTiles, Number};
use super::backward_reduce::{partial_elements, partial_start, store_fragments};
use super::backward_schedule::{KeyHeads, KeySchedule, KeyTile, TILE_WORDS};
use super::backward_tensors::{BackwardTensors, KeyOrder, QuerySums};
use super::backward_walk::{Sums, Walk};
use super::backward_workspace::{BACKWARD_KEYS, Keys, Rows, Shared as Workspace, WarpgroupRoles};
use super::mask::Mask;
use super::scores::Scores;
use super::shape::MOST_BLOCKS;

/// The tensors of a rank, and what arrives. The mask's queries are those from the first chunk's first one to the second chunk's last.
#[derive(Clone, Copy, Parameter)]
pub struct ArrivingRows<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool, const CAPPED: bool> {
    /// What is read, with the keys and values of all ranks; statistics are `[batches, heads, blocks QUERIES]`.
    pub tensors: BackwardTensors<T, D, QUERIES, 4>,
    /// The rank's keys, `[batches, key heads, 2 chunk, D]`.
    pub own_k: TensorMap<T, BACKWARD_KEYS, D, Swizzle128, 4>,
    /// Its values.
    pub own_v: TensorMap<T, BACKWARD_KEYS, D, Swizzle128, 4>,
    /// Sums of `dQ / scale`.
    pub sums: QuerySums,
    /// Where the gradients of keys and values go.
    pub slots: Slots,
    /// Heads of tiles, not split.
    pub heads: KeyHeads,
    /// If `MASKED`, which keys a query sees; else how many there are.
    pub mask: Mask,
    /// If `MASKED`, the blocks of the mask's queries that are not there.
    pub missing: Missing,
    /// The blocks of keys that any query sees.
    pub visited: Visited,
    /// What arrives: chunks of whole blocks of keys, own ones apart.
    pub arriving: ArrivingKeys,
    /// The order of tiles.
    pub order: KeyOrder,
    /// How scores are made; they are capped if `CAPPED`.
    pub scores: Scores,
    /// If `CAPPED`, the factor of gradients of scores.
    pub grad_scale: f32,
}

/// Blocks of keys, in their order: so many from one on, without those that are hidden.
#[derive(Clone, Copy, Parameter)]
pub struct Visited {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// Blocks that are not among them, by their numbers.
    pub hidden: Missing,
}

/// The tiles of the blocks of keys that are visited.
pub(super) struct VisitedTiles {
    tiles: DenseKeyTiles,
    visited: Visited,
}

impl KeyTiles<KeyTile> for VisitedTiles {
    #[inline(always)]
    fn tile(&mut self, index: u32) -> Option<KeyTile> {
        let Visited { first, hidden, .. } = self.visited;
        self.tiles.tile(index).map(|tile| KeyTile { block: hidden.place(first + tile.block), ..tile })
    }

    #[inline(always)]
    fn tiles(&self) -> u32 {
        self.tiles.tiles()
    }
}

/// The slot of this rank at each rank: [`partial_elements`] of each tile, `[2, batches key heads, blocks of a chunk]`, of the owner's first chunk and of the second.
#[derive(Clone, Copy, Parameter)]
pub struct Slots {
    /// From the slot at rank 0 on.
    pub values: GlobalMut<f32>,
    /// Elements from the slot at one rank to that at the next.
    pub step: u64,
    /// Ranks, of two chunks each: chunk `i` and the one that is as far from the end.
    pub ranks: u32,
}

/// The tensors, and what all roles compute of their sizes.
#[derive(Clone, Copy)]
struct Problem<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool, const CAPPED: bool> {
    rows: ArrivingRows<T, D, QUERIES, MASKED, CAPPED>,
    /// Blocks of queries of a head.
    blocks: u32,
    schedule: KeySchedule,
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize, const MASKED: bool, const CAPPED: bool>
    Problem<T, D, QUERIES, MASKED, CAPPED>
{
    #[inline(always)]
    fn new(rows: ArrivingRows<T, D, QUERIES, MASKED, CAPPED>) -> Self {
        let schedule =
            KeySchedule { key_blocks: rows.visited.count, heads: rows.heads.heads * rows.heads.batches, section: rows.order.section };
        Self { rows, blocks: (RANK_CHUNKS * rows.arriving.chunk).div_ceil(QUERIES as u32), schedule }
    }
}

impl<T, const D: usize, const QUERIES: usize, const MASKED: bool, const CAPPED: bool> KeyProblem<T, D, QUERIES, TILE_WORDS, MASKED>
    for Problem<T, D, QUERIES, MASKED, CAPPED>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    type Item = KeyTile;
    type Tiles = VisitedTiles;
    type Gap = Missing;

    #[inline(always)]
    fn common(&self) -> Common {
        let ArrivingRows { tensors: BackwardTensors { offsets, deltas, .. }, sums, order, heads, scores, .. } = self.rows;
        Common { offsets, deltas, sums, order, group: heads.group, scale: scores.scale }
    }

    #[inline(always)]
    fn tiles(&self) -> VisitedTiles {
        VisitedTiles { tiles: DenseKeyTiles::new(self.schedule, self.rows.heads.heads), visited: self.rows.visited }
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
    fn read_mask(&self, _: Number<TILE_WORDS>) -> BlockMask<QUERIES, MASKED, BACKWARD_KEYS, Missing> {
        BlockMask::with(self.rows.mask, self.rows.missing)
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
    fn mask(&self, _: &KeyTile) -> BlockMask<QUERIES, MASKED, BACKWARD_KEYS, Missing> {
        BlockMask::with(self.rows.mask, self.rows.missing)
    }

    #[inline(always)]
    fn query_block(&self, tile: &KeyTile, member: u32, block: u32) -> u32 {
        let KeyHeads { heads, group, .. } = self.rows.heads;
        ((tile.batch * heads + tile.head) * group + member) * self.blocks + block
    }

    /// Waits for them first, unless they are the rank's. Nothing is remembered between tiles, as the warp has no registers for it.
    #[inline(always)]
    fn load_keys(&self, tile: &KeyTile, _: impl Fn() -> KeyTile, stage: Keys<T, D>, full: Mbarrier) {
        let ArrivingRows { tensors, own_k, own_v, arriving, heads, slots, .. } = &self.rows;
        let key = tile.key();
        if let Some((half, row)) = arriving.own(key) {
            let at = [tile.batch, tile.head, half * arriving.chunk + row, 0];
            own_k.load(stage.keys, at, full);
            own_v.load(stage.values, at, full);
            return;
        }
        let section = arriving.section_of(tile.batch * heads.heads + tile.head);
        let flag = arriving.flags.load(u64::from(section * RANK_CHUNKS * slots.ranks + key / arriving.chunk.max(1)));
        if flag != PRESENT {
            Arrivals::new(arriving.waits).wait(flag);
        }
        let at = [tile.batch, tile.head, key, 0];
        tensors.k.load(stage.keys, at, full);
        tensors.v.load(stage.values, at, full);
    }

    #[inline(always)]
    fn load_rows(&self, tile: &KeyTile, _: impl Fn() -> KeyTile, [member, block]: [u32; 2], stage: Rows<T, D, QUERIES>, full: Mbarrier) {
        let at = [tile.batch, tile.head * self.rows.heads.group + member, block * QUERIES as u32, 0];
        self.rows.tensors.q.load(stage.queries, at, full);
        self.rows.tensors.grad_out.load(stage.gradients, at, full);
    }

    #[inline(always)]
    fn edit(&self, products: &mut RegisterTile<QUERIES>) {
        if CAPPED {
            self.rows.scores.cap(products);
        }
    }

    #[inline(always)]
    fn bend(&self, gradients: &mut RegisterTile<QUERIES>, weights: &RegisterTile<QUERIES>, offsets: SharedArray<f32, QUERIES>) {
        if CAPPED {
            bend(gradients, weights, offsets, reciprocal(self.rows.scores.cap_limit));
        }
    }

    #[inline(always)]
    fn store<const SPAN: usize>(&self, _: &Walk<T, D, QUERIES, SPAN>, mut sums: Sums<D>, tile: KeyTile, part: u32)
    where
        Columns<SPAN>: MatrixColumns,
    {
        let ArrivingRows { arriving: ArrivingKeys { chunk, .. }, slots: Slots { values, step, ranks }, heads, scores, grad_scale, .. } =
            self.rows;
        sums.keys.map(|x| if CAPPED { x * grad_scale } else { x * core::f32::consts::LN_2 * scores.scale });
        let number = tile.key() / chunk.max(1);
        let (half, owner) = if number < ranks { (0, number) } else { (1, RANK_CHUNKS * ranks - 1 - number) };
        let (of_chunk, head) = (chunk / BACKWARD_KEYS as u32, tile.batch * heads.heads + tile.head);
        let place = (half * heads.heads * heads.batches + head) * of_chunk + tile.block - number * of_chunk;
        let start = u64::from(owner) * step;
        store_fragments(&sums.keys, &values, start + partial_start::<D>(place, false, part));
        store_fragments(&sums.values, &values, start + partial_start::<D>(place, true, part));
    }
}

/// Computes the gradients of keys and values of all ranks by the queries of one, and sums of its `dQ / scale`, as
/// [`attention_backward`](fn@super::attention_backward) does.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Workspace<T, D, QUERIES, SPAN, TILE_WORDS>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [128], QUERIES = [80], SPAN = [80], MASKED = [false], CAPPED = [false])]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64], MASKED = [true], CAPPED = [false, true])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64], MASKED = [true], CAPPED = [false])]
pub fn attention_backward_arriving<
    T: RegisterElement + StoredElement,
    const D: usize,
    const QUERIES: usize,
    const SPAN: usize,
    const MASKED: bool,
    const CAPPED: bool,
>(
    problem: ArrivingRows<T, D, QUERIES, MASKED, CAPPED>,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    differentiate::<_, T, D, QUERIES, SPAN, TILE_WORDS, MASKED>(Problem::new(problem));
}

fn grid<T, const D: usize, const QUERIES: usize, const SPAN: usize, const MASKED: bool, const CAPPED: bool>(
    args: &AttentionBackwardArrivingArgs<'_, T, D, QUERIES, SPAN, MASKED, CAPPED>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    let ArrivingRowsArgument { tensors, sums, slots, heads, mask, missing, visited, arriving, order, .. } = &args.problem;
    let (keys, queries) = (BACKWARD_KEYS as u64, QUERIES as u64);
    heads.check()?;
    mask.check()?;
    LaunchError::check_limit("problem.heads.splits", heads.splits.into(), 1)?;
    LaunchError::check_at_least("problem.arriving.chunk", 1, arriving.chunk.into())?;
    LaunchError::check_multiple("problem.arriving.chunk", keys, arriving.chunk.into())?;
    LaunchError::check_at_least("problem.arriving.section", 1, arriving.section.into())?;
    LaunchError::check_at_least("problem.arriving.own_apart", 1, arriving.own_apart.into())?;
    let (chunk, chunks) = (u64::from(arriving.chunk), u64::from(RANK_CHUNKS) * u64::from(slots.ranks));
    for (name, number) in [("problem.arriving.first", arriving.first), ("problem.arriving.second", arriving.second)] {
        LaunchError::check_limit(name, number.into(), chunks.saturating_sub(1))?;
    }
    LaunchError::check_limit("problem.mask.keys", mask.keys.into(), chunks * chunk)?;
    LaunchError::check_multiple("problem.mask.keys", keys, mask.keys.into())?;
    let of_rank = u64::from(RANK_CHUNKS) * chunk;
    if MASKED {
        // Blocks of queries are of one chunk.
        LaunchError::check_multiple("problem.arriving.chunk", queries, chunk)?;
        let there = u64::from(mask.queries).saturating_sub(u64::from(missing.count) * queries);
        LaunchError::check_length("problem.mask.queries", of_rank, there)?;
    }
    let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], heads.query_heads(), QUERIES * D)?;
    LaunchError::check_length("problem.sums.blocks", of_rank.div_ceil(queries), sums.blocks.into())?;
    tensors.check(blocks * queries)?;
    let key_blocks = u64::from(visited.count);
    LaunchError::check_at_least("problem.visited.count", 1, key_blocks)?;
    let last = u64::from(visited.first) + key_blocks - 1;
    let last = if last < u64::from(visited.hidden.begin) { last } else { last + u64::from(visited.hidden.count) };
    LaunchError::check_limit("problem.visited.count", last + 1, u64::from(mask.keys) / keys)?;
    order.check_heads(key_blocks)?;
    let tiles = heads.tile_heads().saturating_mul(key_blocks);
    LaunchError::check_limit("problem.mask.keys", tiles, MOST_BLOCKS)?;
    let sections = (heads.tile_heads() as u32).div_ceil(arriving.section);
    LaunchError::check_length("problem.arriving.flags", u64::from(sections) * chunks, arriving.flags.len())?;
    let slot = heads.tile_heads().saturating_mul(of_rank / keys).saturating_mul(partial_elements(D as u64));
    let all = u64::from(slots.ranks).saturating_sub(1).saturating_mul(slots.step).saturating_add(slot);
    LaunchError::check_length("problem.slots.values", all, slots.values.len())?;
    LaunchError::check_alignment("problem.slots.values", 16, slots.values.address())?;
    Ok(Grid::x(tiles.min(u64::from(device.multiprocessors)) as u32))
}
