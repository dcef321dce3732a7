//! Packed sequences of one rank of several, full or causal, whose keys arrive while the kernel runs: context parallelism in one launch.
//!
//! Each sequence is cut into chunks by itself, of which the rank has two: queries are a tensor of the rank's rows, `[rows, heads, size]`. So are the keys of each rank, and
//! copy engines put those of all ranks one after another, `[ranks, rows, key heads, size]`, section of heads by section of heads; the own keys are read where the rank has them.
//! The thread that copies finds the rows of a block of keys by its chunk, and waits for the flag of the chunk's owner before it first loads from it ([`Arrivals`]).
//!
//! Keys count as if each chunk were padded to whole blocks ([`ChunkTile::keys`]), so that no block has keys of two chunks and the mask of a tile is one diagonal. What pads
//! a chunk is loaded as zero and hidden ([`Gaps`]). Where chunks are whole blocks nothing is hidden, and results have the bits of one device.
//!
//! Tiles are taken by rounds of the heads of a section: in a round all sequences, their late chunks first. Sections are equal, as little work as a copy engine allows is left when the
//! last one is there: of short sequences copies may take longer than products.
//!
//! No block waits for another, only for copies of other ranks. A wait that is not answered ends all later ones, and the block takes no further tile, as in
//! [`Arriving`](super::Arriving).

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::{Arrivals, Waits};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::tensor_map::TensorMap;

use super::arriving::{KeyMaps, PRESENT, RANK_CHUNKS};
use super::chunk_schedule::{CHUNK_TILE_WORDS, ChunkSchedule, ChunkTile, Chunks};
use super::mask::{FAR, Gaps, Mask, hide_from};
use super::problem::{Problem, ProblemTile, Seen, Staging, Tiles};
use super::rings::Producers;
use super::running::NO_LOGS;
use super::schedule::SequenceQueue;
use super::sequence::place;
use super::shape::Heads;
use super::softmax::{Finished, Softmax};
use super::target::{Rounded, Spot, Target};
use super::walk::Step;
use super::warpgroup_roles::{WARPGROUP_QUERIES, WarpgroupRoles};

/// Attention of a rank's packed queries to all keys of their sequences or, if `CAUSAL`, to those up to their own.
#[derive(Parameter)]
pub struct ArrivingPacked<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool>
where
    Columns<V>: MatrixColumns,
{
    /// The rank's queries.
    pub q: TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, 5>,
    /// The rank's keys.
    pub own: KeyMaps<T, D, V, KEYS, 5>,
    /// Those of all ranks, one after another: those of other ranks arrive here. Those of the rank are not read.
    pub gathered: KeyMaps<T, D, V, KEYS, 5>,
    /// Where the result goes; its log-sum-exp is `[heads, rows]`. All rows are written.
    pub target: Rounded<T, V, 5>,
    /// Where the sequences lie.
    pub chunks: Chunks,
    /// How many heads there are; the batches are the sequences, and the step is 0.
    pub heads: Heads,
    /// Key heads of a section, which arrive together. Their query heads are a round of tiles.
    pub section: u32,
    /// Keys whose heads are computed together in a round.
    pub section_keys: u32,
    /// The flag to wait for, of section `s` and chunk `j` at `s * chunks + j`: its number as [`Waits`] counts, or [`PRESENT`].
    pub flags: Global<u32>,
    /// The flags of the owners.
    pub waits: Waits,
    /// One zero, which is zero again after the launch.
    pub counter: GlobalMut<u32>,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// The walk of a block along the tiles, and what its thread that copies has seen to arrive.
pub struct ArrivingPackedTiles<const KEYS: usize> {
    schedule: ChunkSchedule<KEYS>,
    queue: SequenceQueue,
    index: u32,
    next: u32,
    arrivals: Arrivals,
    flags: Global<u32>,
    /// Query heads of a section.
    round: u32,
    /// The tile's keys of this chunk are there.
    there: u32,
}

impl ProblemTile for ChunkTile {
    #[inline(always)]
    fn row(&self) -> u32 {
        self.tile.row
    }
}

impl<const KEYS: usize> Tiles<ChunkTile> for ArrivingPackedTiles<KEYS> {
    #[inline(always)]
    #[track_caller]
    fn tile(&mut self) -> Option<ChunkTile> {
        self.schedule.tile(self.index).filter(|_| !self.arrivals.is_over())
    }

    #[inline(always)]
    #[track_caller]
    fn ask(&mut self) {
        self.next = self.queue.take();
        self.there = u32::MAX;
    }

    #[inline(always)]
    #[track_caller]
    fn await_block(&mut self, tile: &ChunkTile, block: u32) {
        let chunk = block / tile.blocks_of_chunk::<KEYS>();
        if chunk == self.there {
            return;
        }
        let section = tile.tile.head / self.round;
        let flag = self.flags.load(u64::from(section * self.schedule.chunks.of_sequence() + chunk));
        if flag != PRESENT {
            self.arrivals.wait(flag);
        }
        self.there = chunk;
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.index = self.next;
    }

    /// After a wait that was not answered, the tiles that are left are taken and not computed.
    #[inline(always)]
    #[track_caller]
    fn leave(&mut self) {
        while self.schedule.tile(self.index).is_some() {
            self.ask();
            self.advance();
        }
        self.queue.leave(self.index, self.schedule.tiles());
    }
}

impl<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool> ArrivingPacked<T, D, V, KEYS, CAUSAL>
where
    Columns<V>: MatrixColumns,
{
    /// The place of a warpgroup's rows.
    #[inline(always)]
    fn spot(&self, tile: &ChunkTile, row: u32) -> Spot<5> {
        let (head, ChunkTile { rows, query_offset: first, .. }) = (tile.tile.head, *tile);
        let statistics = u64::from(head) * u64::from(self.chunks.sequences.query_rows) + u64::from(first);
        Spot { at: place(first, rows, head, row), batch: 0, head, first, row, rows, statistics }
    }
}

impl<T: RegisterElement + StoredElement, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool> Problem<T, D, V, KEYS>
    for ArrivingPacked<T, D, V, KEYS, CAUSAL>
where
    Columns<V>: MatrixColumns,
{
    type Tile = ChunkTile;
    type Tiles = ArrivingPackedTiles<KEYS>;
    type Message = SharedArray<u32, { 2 * CHUNK_TILE_WORDS }>;
    type Staging<G: WarpgroupRoles> = <Rounded<T, V, 5> as Target<T, V, 5>>::Staging<G>;
    const TURN: u32 = CHUNK_TILE_WORDS as u32;
    const WINDOWED: bool = false;

    #[inline(always)]
    #[track_caller]
    fn tiles(&self, tile_rows: u32) -> ArrivingPackedTiles<KEYS> {
        // It is at least one; `max(1)` saves the check of a divisor.
        let round = (self.section * self.heads.group).max(1);
        ArrivingPackedTiles {
            schedule: ChunkSchedule::new(self.chunks, self.heads, tile_rows, [round, self.section_keys]),
            queue: SequenceQueue(self.counter),
            index: block::index()[0],
            next: 0,
            arrivals: Arrivals::new(self.waits),
            flags: self.flags,
            round,
            there: u32::MAX,
        }
    }

    #[inline(always)]
    #[track_caller]
    fn tell(_: &ArrivingPackedTiles<KEYS>, tile: Option<ChunkTile>, words: Self::Message, turn: u32) {
        ChunkTile::store(tile, words, turn);
    }

    #[inline(always)]
    #[track_caller]
    fn told(&self, _: u32, words: Self::Message, turn: u32) -> Option<ChunkTile> {
        ChunkTile::load(words, turn)
    }

    #[inline(always)]
    #[track_caller]
    fn told_again(&self, _: ChunkTile, words: Self::Message, turn: u32) -> ChunkTile {
        ChunkTile::reload(words, turn)
    }

    #[inline(always)]
    fn mask(&self, tile: &ChunkTile) -> Mask {
        let first = self.chunks.number(tile.tile.batch) * tile.blocks_of_chunk::<KEYS>() * KEYS as u32;
        Mask { last: if CAUSAL { first.cast_signed() } else { FAR }, ..Mask::full(tile.queries, tile.keys) }
    }

    #[inline(always)]
    fn gaps(&self, tile: &ChunkTile) -> Gaps {
        Gaps::of::<KEYS>(tile.chunk)
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &ChunkTile, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns,
    {
        rings.load_queries(&self.q, tell, |part| {
            place(tile.query_offset, tile.queries, tile.tile.head, tile.tile.row + part * WARPGROUP_QUERIES as u32)
        });
    }

    #[inline(always)]
    #[track_caller]
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &ChunkTile, block: u32)
    where
        Columns<D>: MatrixColumns,
    {
        let (blocks, key_head) = (tile.blocks_of_chunk::<KEYS>(), tile.tile.head / self.heads.group.max(1));
        let (chunk, row) = (block / blocks, block % blocks * KEYS as u32);
        let valid = (tile.keys - chunk * blocks * KEYS as u32).min(tile.chunk);
        let (owner, half) = self.chunks.owner(chunk);
        let first = tile.key_offset + half * tile.chunk;
        let (maps, first) = match owner == self.chunks.rank {
            true => (&self.own, first),
            false => (&self.gathered, owner * self.chunks.sequences.key_rows + first),
        };
        rings.load_block(&maps.k, &maps.v, place(first, valid, key_head, row));
    }

    #[inline(always)]
    fn fetch<G: WarpgroupRoles>(&self, _: &ChunkTile, _: u32, _: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    fn logs(&self, _: &ChunkTile, _: u32) -> Rows {
        NO_LOGS
    }

    #[inline(always)]
    fn softmax<G: WarpgroupRoles>(&self, _: &ChunkTile) -> Softmax {
        if G::SPARING { Softmax::sparing(self.scale) } else { Softmax::raising(self.scale, CAUSAL) }
    }

    #[inline(always)]
    fn edit(&self, scores: &mut RegisterTile<KEYS>, step: Step, seen: &Seen)
    where
        Columns<KEYS>: MatrixColumns,
    {
        let ends_chunk = seen.gaps.follow(step.block);
        if step.first || ends_chunk || (CAUSAL && step.block >= seen.whole.end) {
            // The first block has the last keys that are seen: chunks that end after it are whole.
            let key = step.block * KEYS as u32;
            let keys = if step.first { seen.mask.keys } else { key + if ends_chunk { seen.gaps.keys } else { KEYS as u32 } };
            match CAUSAL {
                true => Mask { keys, ..seen.mask }.hide_after::<KEYS>(scores, seen.row, key),
                false => hide_from::<KEYS>(scores, keys - key),
            }
        }
    }

    #[inline(always)]
    #[track_caller]
    fn store<G: WarpgroupRoles>(
        &self,
        tile: &ChunkTile,
        row: u32,
        sum: RegisterTile<V>,
        finished: Finished,
        staging: Staging<T, D, Self::Staging<G>>,
    ) {
        let finished = finished.of_rows(|half| row + register_tile::row(half) < tile.queries);
        self.target.store::<G, D>(sum, finished, self.spot(tile, row), staging);
    }

    #[inline(always)]
    fn begin<G: WarpgroupRoles>(_: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    fn end<G: WarpgroupRoles>(&self, _: Self::Staging<G>) {}

    fn check(argument: &Self::Argument<'_>, tile_rows: u32) -> Result<u64, LaunchError> {
        let ArrivingPackedArgument { target, chunks, heads, section, flags, counter, .. } = argument;
        heads.check()?;
        chunks.check(KEYS)?;
        LaunchError::check_length("heads.batches", chunks.batches.into(), heads.batches.into())?;
        LaunchError::check_limit("heads.step", heads.step.into(), 0)?;
        LaunchError::check_at_least("section", 1, (*section).into())?;
        LaunchError::check_length("counter", 1, counter.len())?;
        let key_heads = heads.heads / heads.group.max(1);
        let of_chunks = u64::from(RANK_CHUNKS) * u64::from(chunks.world);
        LaunchError::check_length("flags", u64::from(key_heads.div_ceil(*section)) * of_chunks, flags.len())?;
        let (of_row, rows) = (u64::from(heads.heads), u64::from(chunks.sequences.query_rows));
        <Rounded<T, V, 5> as Target<T, V, 5>>::check(target, of_row.saturating_mul(rows), [1, of_row, rows])?;
        // Each half of a sequence may end in a tile of its own, and so do the rows after all sequences.
        let pieces = Heads { batches: heads.batches.saturating_mul(RANK_CHUNKS).saturating_add(1), ..*heads };
        Ok(pieces.most_tiles(rows, tile_rows))
    }
}
