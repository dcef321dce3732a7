//! What a CUDA block of the backward pass has in shared memory.

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::fragment_tile::FragmentTile;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::Pod;
use oxtile_tile::pipeline::{self, Mbarrier, Pipeline};
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::RegisterElement;
use oxtile_tile::shared::{Overlay, SharedTile, Tiles};
use oxtile_tile::sync::NamedBarrier;
use oxtile_tile::warpgroup::Roles;

/// Keys of a tile.
pub const BACKWARD_KEYS: usize = 2 * WARPGROUP_KEYS;
/// Keys of a sequence, at most: the last tile may end after them.
pub(super) const MOST_KEYS: u64 = (1 << 30) - BACKWARD_KEYS as u64;
/// Keys of a warpgroup.
pub const WARPGROUP_KEYS: usize = 64;
/// Columns of a panel: one of `dQ'` belongs to a warpgroup.
pub(super) const PANEL: usize = 64;

pub(super) type WarpgroupRoles = Roles<2, 24, 240>;

/// Both warpgroups.
pub(super) const EXCHANGE: NamedBarrier = NamedBarrier::new(1, 256);

type Key<T, const D: usize> = SharedTile<T, BACKWARD_KEYS, D, Swizzle128>;

/// What a tile multiplies by.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Keys<T: Pod, const D: usize> {
    pub keys: Key<T, D>,
    pub values: Key<T, D>,
}

/// A block of queries.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Rows<T: Pod, const D: usize, const QUERIES: usize> {
    pub queries: SharedTile<T, QUERIES, D, Swizzle128>,
    pub gradients: SharedTile<T, QUERIES, D, Swizzle128>,
}

/// What is known of each query of a block.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Statistics<const QUERIES: usize> {
    /// `-log2(sum of exponentials)`, -inf where nothing counts.
    pub offsets: SharedArray<f32, QUERIES>,
    pub deltas: SharedArray<f32, QUERIES>,
    /// The place of the block if the mask hides any of the tile's keys from any of its queries, else [`UNCUT`].
    pub cut: SharedArray<u32, 1>,
}

/// No block's number.
pub(super) const UNCUT: u32 = u32::MAX;

impl<const QUERIES: usize> Statistics<QUERIES> {
    /// Bytes that are copied.
    pub const COPIED: u32 = 2 * SharedArray::<f32, QUERIES>::SIZE;
}

/// The result for a warpgroup's keys.
pub(super) type Finished<T, const D: usize> = SharedTile<T, WARPGROUP_KEYS, D, Swizzle128>;

/// The warpgroups' parts of `dQ'`.
pub(super) type Parts<const SPAN: usize> = Tiles<FragmentTile<SPAN>, 2>;

/// Gradients of the scores of two blocks of queries in turn; at last the gradients of each warpgroup's keys.
pub(super) type Scores<T, const D: usize, const QUERIES: usize> =
    Tiles<Overlay<SharedTile<T, QUERIES, BACKWARD_KEYS, Swizzle128>, Finished<T, D>>, 2>;

/// Parts of `dQ'`; at last the gradients of each warpgroup's values.
pub(super) type Outgoing<T, const D: usize, const SPAN: usize> = Overlay<Parts<SPAN>, Tiles<Finished<T, D>, 2>>;

/// The numbers of tiles, in turn: one can be read until all have taken the next and the one after that is there.
pub(super) type Numbers<const WORDS: usize> = Tiles<SharedArray<u32, WORDS>, 2>;

/// A tile's number is `WORDS` words. What is only small comes last: tiles are aligned to 1024 bytes.
#[derive(SharedStorage)]
pub(super) struct Shared<T: Pod, const D: usize, const QUERIES: usize, const SPAN: usize, const WORDS: usize> {
    pub rows: Pipeline<Rows<T, D, QUERIES>, 2>,
    pub scores: Scores<T, D, QUERIES>,
    pub outgoing: Outgoing<T, D, SPAN>,
    pub keys: Pipeline<Keys<T, D>, 1>,
    /// Of both stages of rows, with which they come and go.
    pub statistics: Tiles<Statistics<QUERIES>, 2>,
    pub tiles: Pipeline<Numbers<WORDS>, 1>,
    pub handoff: Handoff,
}

/// Warps that have parts of `dQ'` added up, in turn: what takes one longer than a block of queries does no harm.
pub(super) const ADDERS: u32 = 2;

/// Between the warpgroups that write `dQ'` and the warps that have it added up.
#[derive(SharedStorage, Clone, Copy)]
pub(super) struct Handoff {
    /// One for each of those warps.
    pub full: Tiles<Mbarrier, { ADDERS as usize }>,
    pub empty: Mbarrier,
    /// Where a step is added, in any order: it is known which tile adds to the step's block of queries first.
    pub claimed: Mbarrier,
}

impl<T, const D: usize, const QUERIES: usize, const SPAN: usize, const WORDS: usize> Shared<T, D, QUERIES, SPAN, WORDS>
where
    T: RegisterElement,
    Columns<D>: MatrixColumns,
{
    /// The number of the tile that a role has taken, the last or the one before, by the parity of its round.
    #[inline(always)]
    pub fn number(&self, parity: u32) -> SharedArray<u32, WORDS> {
        self.tiles.memory::<0>().tile(parity)
    }

    /// Readies all barriers. One thread calls it, then the block meets.
    #[inline(always)]
    #[track_caller]
    pub fn init(&self) {
        self.tiles.init(ADDERS + 1);
        self.keys.init(WarpgroupRoles::CONSUMER_WARPS);
        self.rows.init(WarpgroupRoles::CONSUMER_WARPS);
        for adder in 0..ADDERS {
            self.handoff.full.tile(adder).init(WarpgroupRoles::CONSUMER_WARPS);
        }
        self.handoff.empty.init(1);
        self.handoff.claimed.init(1);
        pipeline::publish_barriers();
    }
}
