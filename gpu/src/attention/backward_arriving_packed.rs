//! The backward pass of packed sequences of one rank of several, whose keys arrive while the kernel runs: context parallelism in one launch.
//!
//! As in the [forward pass](super::ArrivingPacked) keys are those of all ranks one after another, each chunk of a sequence is padded to whole blocks, and tiles are taken by
//! rounds of heads. A tile meets the blocks of queries of both of the rank's chunks of its sequence, between which some are [missing](Missing). It adds to sums of `dQ` in the order
//! of keys; its own gradients go to the rank's slot at the owner of its keys, as of [dense tensors](super::ArrivingRows).
//!
//! Every rank stores all tiles of the chunks that its last chunk may see, those of padding too. So an owner knows by the numbers of ranks alone which slots hold a tile.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::{Arrivals, Waits};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::pipeline::Mbarrier;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, StoredElement};
use oxtile_tile::tensor_map::TensorMap;

use super::arriving::{PRESENT, RANK_CHUNKS};
use super::backward::differentiate;
use super::backward_arriving::Slots;
use super::backward_chunks::{CHUNK_KEY_WORDS, ChunkKeySchedule, ChunkKeyTile};
use super::backward_mask::{BlockMask, Missing};
use super::backward_problem::{Common, KeyProblem, KeyTiles, Number};
use super::backward_reduce::{partial_elements, partial_start, store_fragments};
use super::backward_schedule::{KeyHeads, KeyTile};
use super::backward_tensors::{BackwardTensors, KeyOrder, QuerySums};
use super::backward_walk::{Sums, Walk};
use super::backward_workspace::{BACKWARD_KEYS, Keys, Rows, Shared as Workspace, WarpgroupRoles};
use super::chunk_schedule::Chunks;
use super::sequence::place;
use super::shape::MOST_BLOCKS;

/// The tensors of a rank, and what arrives.
#[derive(Clone, Copy, Parameter)]
pub struct ArrivingChunks<T: RegisterElement, const D: usize, const QUERIES: usize> {
    /// What is read, with the keys and values of all ranks; statistics are `[heads group, blocks QUERIES]`, laid out as [`QueryBlocks`](super::QueryBlocks).
    pub tensors: BackwardTensors<T, D, QUERIES, 5>,
    /// The rank's keys.
    pub own_k: TensorMap<T, BACKWARD_KEYS, D, Swizzle128, 5>,
    /// Its values.
    pub own_v: TensorMap<T, BACKWARD_KEYS, D, Swizzle128, 5>,
    /// Sums of `dQ / scale`.
    pub sums: QuerySums,
    /// Where the gradients of keys and values go: [`Chunks::slot_tiles`] of each head.
    pub slots: Slots,
    /// Where the sequences lie.
    pub chunks: Chunks,
    /// Heads of tiles, not split; the step is 0.
    pub heads: KeyHeads,
    /// Whether a query sees no key after it.
    pub is_causal: bool,
    /// Key heads of a section, which arrive together and are a round of tiles.
    pub section: u32,
    /// The flag to wait for, of section `s` and chunk `j` at `s * chunks + j`: its number as [`Waits`] counts, or [`PRESENT`].
    pub flags: Global<u32>,
    /// The flags of the owners.
    pub waits: Waits,
    /// The order of tiles, which add in the order of keys whatever it says.
    pub order: KeyOrder,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

type Mask<const QUERIES: usize> = BlockMask<QUERIES, true, BACKWARD_KEYS, Missing>;

impl<const QUERIES: usize> KeyTiles<ChunkKeyTile> for ChunkKeySchedule<QUERIES> {
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self, index: u32) -> Option<ChunkKeyTile> {
        ChunkKeySchedule::tile(self, index)
    }

    #[inline(always)]
    fn tiles(&self) -> u32 {
        ChunkKeySchedule::tiles(self)
    }
}

impl<T: RegisterElement, const D: usize, const QUERIES: usize> ArrivingChunks<T, D, QUERIES> {
    /// The place of a tile's keys, where those of their owner begin at row `first`.
    #[inline(always)]
    fn place_of(&self, item: &ChunkKeyTile, first: u32) -> [u32; 5] {
        let (_, half) = self.chunks.owner(item.number);
        place(first + item.key_offset + half * item.chunk, item.keys, item.tile.head, item.row())
    }
}

impl<T, const D: usize, const QUERIES: usize> KeyProblem<T, D, QUERIES, CHUNK_KEY_WORDS, true> for ArrivingChunks<T, D, QUERIES>
where
    T: RegisterElement + StoredElement,
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
{
    type Item = ChunkKeyTile;
    type Tiles = ChunkKeySchedule<QUERIES>;
    type Gap = Missing;

    #[inline(always)]
    fn common(&self) -> Common {
        let BackwardTensors { offsets, deltas, .. } = self.tensors;
        // A constant: the registers of another order are not there beside a wait.
        let order = KeyOrder { ordered: true, ..self.order };
        Common { offsets, deltas, sums: self.sums, order, group: self.heads.group, scale: self.scale }
    }

    #[inline(always)]
    fn tiles(&self) -> ChunkKeySchedule<QUERIES> {
        ChunkKeySchedule::new(self.chunks, self.is_causal, self.sums.blocks, [self.heads.heads, self.section, self.order.section])
    }

    #[inline(always)]
    fn store_item(item: Option<ChunkKeyTile>, number: Number<CHUNK_KEY_WORDS>) {
        ChunkKeyTile::store(item, number);
    }

    #[inline(always)]
    fn read(number: Number<CHUNK_KEY_WORDS>) -> ChunkKeyTile {
        ChunkKeyTile::load_alone(number)
    }

    #[inline(always)]
    fn read_of(tile: KeyTile, number: Number<CHUNK_KEY_WORDS>) -> ChunkKeyTile {
        ChunkKeyTile { tile, ..ChunkKeyTile::load_alone(number) }
    }

    #[inline(always)]
    fn read_together(tile: KeyTile, number: Number<CHUNK_KEY_WORDS>) -> ChunkKeyTile {
        ChunkKeyTile { tile, ..ChunkKeyTile::load(number) }
    }

    #[inline(always)]
    fn read_mask(&self, number: Number<CHUNK_KEY_WORDS>) -> Mask<QUERIES> {
        self.mask(&ChunkKeyTile::load_alone(number))
    }

    #[inline(always)]
    fn read_result(number: Number<CHUNK_KEY_WORDS>) -> ChunkKeyTile {
        ChunkKeyTile::load(number)
    }

    #[inline(always)]
    fn tile(item: &ChunkKeyTile) -> KeyTile {
        item.tile
    }

    #[inline(always)]
    fn mask(&self, item: &ChunkKeyTile) -> Mask<QUERIES> {
        let (mask, missing) = item.mask::<QUERIES>(&self.chunks, self.is_causal);
        BlockMask::with(mask, missing)
    }

    #[inline(always)]
    fn query_block(&self, item: &ChunkKeyTile, member: u32, block: u32) -> u32 {
        let (is_late, block) = item.query_block::<QUERIES>(block);
        let [early, late] = item.first_blocks;
        (item.tile.head * self.heads.group + member) * self.sums.blocks + block + if is_late { late } else { early }
    }

    /// Waits for them first, unless they are the rank's. Nothing is remembered between tiles, and of the item nothing is held over the wait, as the warp has no registers for it.
    #[inline(always)]
    fn load_keys(&self, item: &ChunkKeyTile, again: impl Fn() -> ChunkKeyTile, stage: Keys<T, D>, full: Mbarrier) {
        let Self { tensors, own_k, own_v, chunks, section, .. } = self;
        if chunks.owner(item.number).0 == chunks.rank {
            let at = self.place_of(item, 0);
            own_k.load(stage.keys, at, full);
            own_v.load(stage.values, at, full);
            return;
        }
        // The divisor is not zero; `max(1)` saves its check.
        let flag = self.flags.load(u64::from(item.tile.head / (*section).max(1) * chunks.of_sequence() + item.number));
        if flag != PRESENT {
            Arrivals::new(self.waits).wait(flag);
        }
        let item = again();
        let at = self.place_of(&item, chunks.owner(item.number).0 * chunks.sequences.key_rows);
        tensors.k.load(stage.keys, at, full);
        tensors.v.load(stage.values, at, full);
    }

    #[inline(always)]
    fn load_rows(
        &self,
        _: &ChunkKeyTile,
        again: impl Fn() -> ChunkKeyTile,
        [member, block]: [u32; 2],
        stage: Rows<T, D, QUERIES>,
        full: Mbarrier,
    ) {
        let item = again();
        let ((is_late, block), head) = (item.query_block::<QUERIES>(block), item.tile.head * self.heads.group + member);
        let ([early, late], [of_early, of_late]) = (item.query_offsets, item.queries);
        let (first, queries) = if is_late { (late, of_late) } else { (early, of_early) };
        let at = place(first, queries, head, block * QUERIES as u32);
        self.tensors.q.load(stage.queries, at, full);
        self.tensors.grad_out.load(stage.gradients, at, full);
    }

    #[inline(always)]
    fn edit(&self, _: &mut RegisterTile<QUERIES>) {}

    #[inline(always)]
    fn bend(&self, _: &mut RegisterTile<QUERIES>, _: &RegisterTile<QUERIES>, _: SharedArray<f32, QUERIES>) {}

    #[inline(always)]
    fn store<const SPAN: usize>(&self, _: &Walk<T, D, QUERIES, SPAN>, mut sums: Sums<D>, item: ChunkKeyTile, part: u32)
    where
        Columns<SPAN>: MatrixColumns,
    {
        sums.keys.map(|x| x * core::f32::consts::LN_2 * self.scale);
        let (owner, half) = self.chunks.owner(item.number);
        let tile = self.chunks.slot_tile(item.tile.batch, half, item.key_offset + half * item.chunk) + item.row() / BACKWARD_KEYS as u32;
        let place = item.tile.head * self.chunks.tiles_of_slot() + tile;
        let start = u64::from(owner) * self.slots.step;
        store_fragments(&sums.keys, &self.slots.values, start + partial_start::<D>(place, false, part));
        store_fragments(&sums.values, &self.slots.values, start + partial_start::<D>(place, true, part));
    }
}

/// Computes the gradients of keys and values of all ranks by the packed queries of one, and sums of its `dQ / scale`, as
/// [`attention_backward`](fn@super::attention_backward) does.
#[kernel(threads = WarpgroupRoles::THREADS, grid = grid, shared = Workspace<T, D, QUERIES, SPAN, CHUNK_KEY_WORDS>, requires = sm_90a)]
#[instances(T = [bf16, f16], D = [128], QUERIES = [64], SPAN = [64])]
#[instances(T = [bf16, f16], D = [64], QUERIES = [128], SPAN = [64])]
pub fn attention_backward_arriving_packed<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    problem: ArrivingChunks<T, D, QUERIES>,
) where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    differentiate::<_, T, D, QUERIES, SPAN, CHUNK_KEY_WORDS, true>(problem);
}

fn grid<T: RegisterElement + StoredElement, const D: usize, const QUERIES: usize, const SPAN: usize>(
    args: &AttentionBackwardArrivingPackedArgs<'_, T, D, QUERIES, SPAN>,
    device: &DeviceLimits,
) -> Result<Grid, LaunchError>
where
    Columns<D>: MatrixColumns,
    Columns<QUERIES>: MatrixColumns,
    Columns<SPAN>: MatrixColumns,
{
    const { assert!(BACKWARD_KEYS.is_multiple_of(QUERIES), "chunks of whole blocks of keys are whole blocks of queries") };
    let ArrivingChunksArgument { tensors, sums, slots, chunks, heads, section, flags, order, .. } = &args.problem;
    heads.check()?;
    chunks.check(BACKWARD_KEYS)?;
    LaunchError::check_limit("problem.heads.splits", heads.splits.into(), 1)?;
    LaunchError::check_limit("problem.heads.step", heads.step.into(), 0)?;
    LaunchError::check_length("problem.heads.batches", chunks.batches.into(), heads.batches.into())?;
    LaunchError::check_at_least("problem.section", 1, (*section).into())?;
    LaunchError::check_limit("problem.slots.ranks", slots.ranks.into(), chunks.world.into())?;
    let query_heads = u64::from(heads.heads) * u64::from(heads.group);
    let blocks = sums.check(["problem.sums.values", "problem.sums.turns", "problem.sums.blocks"], query_heads, QUERIES * D)?;
    tensors.check(blocks * QUERIES as u64)?;
    order.check()?;
    let of_sequence = u64::from(RANK_CHUNKS) * u64::from(chunks.world);
    LaunchError::check_length("problem.flags", u64::from(heads.heads.div_ceil(*section)) * of_sequence, flags.len())?;
    let of_slot = Chunks::slot_tiles(chunks.sequences.key_rows.into(), chunks.batches.into()) * u64::from(heads.heads);
    LaunchError::check_limit("problem.chunks.sequences.key_rows", of_slot.saturating_mul(chunks.world.into()), MOST_BLOCKS)?;
    let all = u64::from(chunks.world).saturating_sub(1).saturating_mul(slots.step).saturating_add(of_slot * partial_elements(D as u64));
    LaunchError::check_length("problem.slots.values", all, slots.values.len())?;
    LaunchError::check_alignment("problem.slots.values", 16, slots.values.address())?;
    // A slot of each rank has room for all of its tiles.
    Ok(Grid::x((of_slot * u64::from(chunks.world)).min(device.multiprocessors.into()) as u32))
}
