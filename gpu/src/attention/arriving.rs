//! Dense tensors of one rank of several, full or causal, whose keys arrive while the kernel runs: context parallelism in one launch.
//!
//! The sequence is cut into chunks of equal length, of which the rank has two: its queries and its own keys are tensors of `[2 batches, heads, chunk, size]`.
//! The keys of the other ranks arrive in a tensor of the whole sequence, `[batches, heads, keys, size]`, where copy engines put them chunk by chunk and section of heads by
//! section of heads; the own keys are read where the rank has them. The thread that copies waits for the flag of a chunk before it first loads from it
//! ([`Arrivals`]). Nothing else differs from [`Dense`](super::Dense): where a chunk is a multiple of the queries of a tile and of the keys of a block, results have
//! the bits of one device.
//!
//! Rows of a tile count as if each chunk were padded to whole tiles, so that no tile has rows of both chunks. Tiles are taken in the order of
//! [`Schedule`]: the rows of the later chunk come first, and the first wave needs the first sections alone.
//!
//! No block waits for another, only for copies of other ranks. A wait that is not answered ends all later ones, and the block takes no further tile:
//! what is stored then is garbage, and the host finds the verdict.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::arrivals::{Arrivals, Waits};
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{RegisterElement, RegisterTile, Rows, StoredElement};
use oxtile_tile::shared::SharedArray;
use oxtile_tile::tensor_map::TensorMap;

use super::dense::DenseTiles;
use super::mask::{FAR, Mask};
use super::problem::{Problem, Seen, Staging, Tiles};
use super::rings::Producers;
use super::running::NO_LOGS;
use super::schedule::{Schedule, Tile, TileOrder, ToldTile};
use super::shape::{MOST_BLOCKS, Shape};
use super::softmax::{Finished, Softmax};
use super::target::{Rounded, Spot, Target};
use super::walk::Step;
use super::warpgroup_roles::{WARPGROUP_QUERIES, WarpgroupRoles};

/// Chunks of a rank.
pub const RANK_CHUNKS: u32 = 2;
/// Stands for the flag of a chunk that is there when the kernel begins.
pub const PRESENT: u32 = u32::MAX;

/// Keys and their values.
#[derive(Clone, Copy, Parameter)]
pub struct KeyMaps<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, const RANK: usize> {
    /// Keys.
    pub k: TensorMap<T, KEYS, D, Swizzle128, RANK>,
    /// Values.
    pub v: TensorMap<T, KEYS, V, Swizzle128, RANK>,
}

/// Attention of a rank's queries to all keys or, if `CAUSAL`, to those up to their own.
#[derive(Parameter)]
pub struct Arriving<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool>
where
    Columns<V>: MatrixColumns,
{
    /// The rank's queries, `[2 batches, heads, chunk, size]`.
    pub q: TensorMap<T, WARPGROUP_QUERIES, D, Swizzle128, 4>,
    /// The rank's keys, `[2 batches, key heads, chunk, size]`.
    pub own: KeyMaps<T, D, V, KEYS, 4>,
    /// All keys, `[batches, key heads, keys, size]`: those of other ranks arrive here. Those of the rank are not read, unless blocks of keys straddle its chunks.
    pub gathered: KeyMaps<T, D, V, KEYS, 4>,
    /// Where the result goes, `[2 batches, heads, chunk, size]`; its log-sum-exp is `[batches, heads, 2 chunk]`.
    pub target: Rounded<T, V, 4>,
    /// The sizes: the queries are those of both chunks, the keys those of all ranks.
    pub shape: Shape,
    /// What arrives.
    pub arriving: ArrivingKeys,
    /// The order of tiles.
    pub order: TileOrder,
    /// The factor of scores, with `log2(e)`.
    pub scale: f32,
}

/// The chunks of the sequence, and by which flags they arrive.
#[derive(Clone, Copy, Parameter)]
pub struct ArrivingKeys {
    /// Rows of a chunk, at least one.
    pub chunk: u32,
    /// The same, padded to whole tiles: rows from the first tile of one chunk to that of the next.
    pub padded: u32,
    /// The numbers of the rank's chunks, in order.
    pub first: u32,
    /// The second one.
    pub second: u32,
    /// Key heads of a section, counted over all batches.
    pub section: u32,
    /// The flag to wait for, of section `s` and chunk `j` at `s * chunks + j`: its number as [`Waits`] counts, or [`PRESENT`].
    pub flags: Global<u32>,
    /// The flags of the chunks.
    pub waits: Waits,
    /// Whether the rank's own keys are read where the rank has them: its chunks are whole blocks of keys.
    pub own_apart: bool,
}

impl ArrivingKeys {
    /// The section of a key head.
    #[inline(always)]
    pub(super) fn section_of(&self, key_head: u32) -> u32 {
        key_head / self.section.max(1)
    }

    /// The chunk of the rank in which a block of keys lies that begins with this one, and the key's row there.
    #[inline(always)]
    pub(super) fn own(&self, key: u32) -> Option<(u32, u32)> {
        let rows = [self.first, self.second].map(|chunk| key.wrapping_sub(chunk * self.chunk));
        match () {
            () if !self.own_apart => None,
            () if rows[0] < self.chunk => Some((0, rows[0])),
            () if rows[1] < self.chunk => Some((1, rows[1])),
            () => None,
        }
    }
}

/// The walk of a block along the tiles, and what its thread that copies has seen to arrive.
pub struct ArrivingTiles<const KEYS: usize> {
    tiles: DenseTiles,
    arrivals: Arrivals,
    keys: ArrivingKeys,
    shape: Shape,
    /// The tile's keys from this one on are there.
    there: u32,
}

impl<const KEYS: usize> Tiles<Tile> for ArrivingTiles<KEYS> {
    #[inline(always)]
    fn tile(&mut self) -> Option<Tile> {
        self.tiles.tile().filter(|_| !self.arrivals.is_over())
    }

    #[inline(always)]
    #[track_caller]
    fn ask(&mut self) {
        self.tiles.ask();
        self.there = u32::MAX;
    }

    #[inline(always)]
    #[track_caller]
    fn await_block(&mut self, tile: &Tile, block: u32) {
        let ArrivingKeys { chunk, flags, .. } = self.keys;
        let begin = block * KEYS as u32;
        if self.there <= begin {
            return;
        }
        let key_heads = self.shape.heads / self.shape.group.max(1);
        let section = self.keys.section_of(tile.batch * key_heads + tile.head / self.shape.group.max(1));
        let (chunk, chunks) = (chunk.max(1), self.shape.keys / chunk.max(1));
        self.there = self.there.min(begin + KEYS as u32).min(self.shape.keys);
        while self.there > begin {
            let last = (self.there - 1) / chunk;
            let flag = flags.load(u64::from(section * chunks + last));
            if flag != PRESENT {
                self.arrivals.wait(flag);
            }
            self.there = last * chunk;
        }
    }

    #[inline(always)]
    #[track_caller]
    fn advance(&mut self) {
        self.tiles.advance();
    }

    /// After a wait that was not answered, the tiles that are left are taken and not computed.
    #[inline(always)]
    #[track_caller]
    fn leave(&mut self) {
        while self.tiles.tile().is_some() {
            self.tiles.ask();
            self.tiles.advance();
        }
    }
}

impl<T: RegisterElement, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool> Arriving<T, D, V, KEYS, CAUSAL>
where
    Columns<V>: MatrixColumns,
{
    #[inline(always)]
    fn schedule(&self, tile_rows: u32) -> Schedule {
        let Shape { batches, heads, .. } = self.shape;
        let row_tiles = RANK_CHUNKS * (self.arriving.padded / tile_rows);
        Schedule { tile_rows, row_tiles, heads, batches, section: self.order.section }
    }

    /// The chunk of a row of a tile, and its row there.
    #[inline(always)]
    fn place(&self, row: u32) -> (u32, u32) {
        let padded = self.arriving.padded;
        if row < padded { (0, row) } else { (1, row - padded) }
    }

    /// The token that row 0 of tiles would be, if all rows were as far from it as the tile's are.
    #[inline(always)]
    pub(super) fn token(&self, tile: &Tile) -> i32 {
        let ArrivingKeys { chunk, padded, first, second, .. } = self.arriving;
        let (half, _) = self.place(tile.row);
        let [before, number] = if half == 0 { [0, first] } else { [padded, second] };
        (number * chunk).cast_signed() - before.cast_signed()
    }

    /// The place of a warpgroup's rows.
    #[inline(always)]
    pub(super) fn spot(&self, tile: &Tile, row: u32) -> Spot<4> {
        let (Tile { batch, head, .. }, Shape { heads, queries, .. }, chunk) = (*tile, self.shape, self.arriving.chunk);
        let (half, row) = self.place(row);
        let statistics = u64::from(batch * heads + head) * u64::from(queries) + u64::from(half * chunk);
        let at = [batch * RANK_CHUNKS + half, head, row, 0];
        Spot { at, batch, head, first: 0, row, rows: chunk, statistics }
    }
}

impl<T: RegisterElement + StoredElement, const D: usize, const V: usize, const KEYS: usize, const CAUSAL: bool> Problem<T, D, V, KEYS>
    for Arriving<T, D, V, KEYS, CAUSAL>
where
    Columns<V>: MatrixColumns,
{
    type Tile = Tile;
    type Tiles = ArrivingTiles<KEYS>;
    type Message = SharedArray<u32, 1>;
    type Staging<G: WarpgroupRoles> = <Rounded<T, V, 4> as Target<T, V, 4>>::Staging<G>;
    const TURN: u32 = 0;
    const WINDOWED: bool = false;

    #[inline(always)]
    fn tiles(&self, tile_rows: u32) -> ArrivingTiles<KEYS> {
        let tiles = DenseTiles::new(self.schedule(tile_rows), self.order);
        ArrivingTiles { tiles, arrivals: Arrivals::new(self.arriving.waits), keys: self.arriving, shape: self.shape, there: u32::MAX }
    }

    #[inline(always)]
    #[track_caller]
    fn tell(tiles: &ArrivingTiles<KEYS>, tile: Option<Tile>, words: Self::Message, turn: u32) {
        // The others know the last tile by its number; one that is not computed has none.
        words.tell(if tile.is_some() { tiles.tiles.index() } else { u32::MAX }, tile, turn);
    }

    #[inline(always)]
    #[track_caller]
    fn told(&self, tile_rows: u32, words: Self::Message, turn: u32) -> Option<Tile> {
        words.told(self.schedule(tile_rows), turn)
    }

    #[inline(always)]
    fn told_again(&self, tile: Tile, _: Self::Message, _: u32) -> Tile {
        tile
    }

    #[inline(always)]
    fn mask(&self, tile: &Tile) -> Mask {
        let ArrivingKeys { chunk, padded, .. } = self.arriving;
        let (half, _) = self.place(tile.row);
        let last = if CAUSAL { self.token(tile) } else { FAR };
        Mask { last, ..Mask::full(half * padded + chunk, self.shape.keys) }
    }

    #[inline(always)]
    #[track_caller]
    fn load_queries<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Tile, tell: impl FnOnce())
    where
        Columns<D>: MatrixColumns,
    {
        let (half, row) = self.place(tile.row);
        let at = tile.batch * RANK_CHUNKS + half;
        rings.load_queries(&self.q, tell, |part| [at, tile.head, row + part * WARPGROUP_QUERIES as u32, 0]);
    }

    #[inline(always)]
    #[track_caller]
    fn load_block<G: WarpgroupRoles>(&self, rings: &mut Producers<T, D, V, KEYS, G>, tile: &Tile, block: u32)
    where
        Columns<D>: MatrixColumns,
    {
        let (key, key_head) = (block * KEYS as u32, tile.head / self.shape.group.max(1));
        let (maps, batch, row) = match self.arriving.own(key) {
            Some((half, row)) => (&self.own, tile.batch * RANK_CHUNKS + half, row),
            None => (&self.gathered, tile.batch, key),
        };
        rings.load_block(&maps.k, &maps.v, [batch, key_head, row, 0]);
    }

    #[inline(always)]
    fn fetch<G: WarpgroupRoles>(&self, _: &Tile, _: u32, _: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    fn logs(&self, _: &Tile, _: u32) -> Rows {
        NO_LOGS
    }

    #[inline(always)]
    fn softmax<G: WarpgroupRoles>(&self, _: &Tile) -> Softmax {
        if G::SPARING { Softmax::sparing(self.scale) } else { Softmax::raising(self.scale, CAUSAL) }
    }

    #[inline(always)]
    fn edit(&self, scores: &mut RegisterTile<KEYS>, step: Step, seen: &Seen)
    where
        Columns<KEYS>: MatrixColumns,
    {
        if step.first || (CAUSAL && step.block >= seen.whole.end) {
            seen.mask.hide_after::<KEYS>(scores, seen.row, step.block * KEYS as u32);
        }
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
        self.target.store::<G, D>(sum, finished, self.spot(tile, row), staging);
    }

    #[inline(always)]
    fn begin<G: WarpgroupRoles>(_: Self::Staging<G>, _: u32) {}

    #[inline(always)]
    fn end<G: WarpgroupRoles>(&self, _: Self::Staging<G>) {}

    fn check(argument: &Self::Argument<'_>, tile_rows: u32) -> Result<u64, LaunchError> {
        let ArrivingArgument { target, shape, arriving, order, .. } = argument;
        let ArrivingKeysArgument { chunk, padded, first, second, section, .. } = *arriving;
        shape.check()?;
        LaunchError::check_at_least("arriving.chunk", 1, chunk.into())?;
        LaunchError::check_at_least("arriving.section", 1, section.into())?;
        LaunchError::check_at_least("arriving.padded", chunk.next_multiple_of(tile_rows).into(), padded.into())?;
        LaunchError::check_multiple("arriving.padded", tile_rows.into(), padded.into())?;
        LaunchError::check_multiple("shape.keys", chunk.into(), shape.keys.into())?;
        LaunchError::check_at_least("shape.queries", (RANK_CHUNKS * chunk).into(), shape.queries.into())?;
        LaunchError::check_limit("shape.queries", shape.queries.into(), (RANK_CHUNKS * chunk).into())?;
        let chunks = shape.keys / chunk;
        for (name, number) in [("arriving.first", first), ("arriving.second", second)] {
            LaunchError::check_limit(name, number.into(), chunks.saturating_sub(1).into())?;
        }
        let row_tiles = u64::from(RANK_CHUNKS) * u64::from(padded / tile_rows);
        let tiles = shape.many_heads().saturating_mul(row_tiles);
        LaunchError::check_limit("shape.queries", tiles, MOST_BLOCKS)?;
        order.check(row_tiles)?;
        let key_heads = shape.batches.saturating_mul(shape.heads / shape.group.max(1));
        let flags = u64::from(key_heads.div_ceil(section)) * u64::from(chunks);
        LaunchError::check_length("arriving.flags", flags, arriving.flags.len())?;
        let rows = shape.many_heads().saturating_mul(shape.queries.into());
        <Rounded<T, V, 4> as Target<T, V, 4>>::check(target, rows, [shape.batches, shape.heads, shape.queries].map(u64::from))?;
        Ok(tiles)
    }
}
