//! What ranks do with the tiles of a product whose sum they share: a compile-time policy of both roles of a block.
//!
//! Each rank has a part of the sum, and is the owner of some rows, its shard. A tile of another rank's rows leaves: it is stored, rounded, at its owner in the place of this rank's part, or in memory of this rank from which a copy engine puts
//! panels. To a tile of own rows the parts of other ranks are added, in `f32` and in the order of their sources.
//!
//! Parts arrive in panels of rows, with a flag for each panel and source. The thread that loads operands waits for the flags of a tile's panels and loads the tile's parts into the ring, after its operands: they are there when the
//! product is. Warpgroups count the tiles of a panel that have left when they have landed, some steps into the next tile. The last one sets the panel's flag.

use oxtile_tile::arrivals::{Arrivals, Signals};
use oxtile_tile::prelude::*;
use oxtile_tile::{pipeline, warpgroup};

use super::arrival::Gathered;
use super::{PART, Shape};

/// Stands for no panel.
const NONE: u32 = u32::MAX;
/// Words of a member in [`Away::members`].
pub const MEMBER: u64 = 4;

/// What a thread of a block does with tiles.
pub trait Sharing {
    /// Whether ranks share the sum.
    const SHARES: bool;

    /// The row in the own shard of this row of the product; none of another rank's.
    fn own(&self, row: u32) -> Option<u32>;

    /// How many parts are added to a tile of own rows.
    fn sources(&self) -> u32;

    /// Waits for all parts of so many own rows, from `row` on: so do bulk copies that this thread issues after it.
    fn wait(&mut self, row: u32, rows: u32);

    /// Where another rank's row goes: the matrix of the map, and the row there.
    fn place(&self, row: u32) -> [u32; 2];

    /// Says that a warpgroup's tile from this row on has left. All of its threads call it.
    fn leave(&mut self, row: u32);

    /// Waits until the tile that has left last has landed, and counts it. All threads of a warpgroup call it.
    fn land(&mut self);
}

/// The product is the sum.
pub struct Complete;

impl Sharing for Complete {
    const SHARES: bool = false;

    #[inline(always)]
    fn own(&self, row: u32) -> Option<u32> {
        Some(row)
    }

    #[inline(always)]
    fn sources(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn wait(&mut self, _: u32, _: u32) {}

    #[inline(always)]
    fn place(&self, row: u32) -> [u32; 2] {
        [0, row]
    }

    #[inline(always)]
    fn leave(&mut self, _: u32) {}

    #[inline(always)]
    fn land(&mut self) {}
}

/// Where tiles of other ranks' rows go.
#[derive(Clone, Copy, Parameter)]
#[parameter(optional)]
pub struct Away {
    /// Of each member of the team: the matrix that its rows go to, the row there of its first one, the rank in the world at which the flags of its panels are set, and the first of these.
    pub members: Global<u32>,
    /// How many warpgroups' tiles of each panel have landed, `[members, panels]`: 0 before the launch and after it.
    pub landed: GlobalMut<u32>,
    /// The flags of this rank at every rank.
    pub signals: Signals,
    /// The number of flag 0 of all members, as [`Signals`] counts.
    pub flag: u32,
    /// Rows of a shard: a multiple of those of a cluster's tile.
    pub shard: u32,
    /// The number of this member.
    pub me: u32,
}

/// The product is a part of the sum.
pub struct Partial {
    gathered: Gathered,
    away: Option<Away>,
    arrivals: Arrivals,
    /// Own rows.
    rows: u32,
    /// Tiles in a row of tiles.
    columns: u32,
    /// The place of the panel in `landed` whose tile has left last, until it has landed.
    leaving: u32,
}

impl Partial {
    /// Nothing was waited for, and nothing has left, of a product in tiles of so many columns.
    #[inline(always)]
    pub fn new(gathered: Gathered, away: Option<Away>, shape: Shape, columns: u32) -> Self {
        let rows = away.map_or(shape.m, |away| away.shard);
        let columns = shape.n.div_ceil(columns);
        Self { gathered, away, arrivals: Arrivals::new(gathered.waits), rows, columns, leaving: NONE }
    }

    /// Panels of a shard.
    #[inline(always)]
    fn panels(&self) -> u32 {
        self.rows.div_ceil(self.gathered.extent.max(1))
    }
}

impl Sharing for Partial {
    const SHARES: bool = true;

    #[inline(always)]
    fn own(&self, row: u32) -> Option<u32> {
        match self.away {
            None => Some(row),
            Some(Away { shard, me, .. }) => Some(row.wrapping_sub(me * shard)).filter(|own| *own < shard),
        }
    }

    #[inline(always)]
    fn sources(&self) -> u32 {
        self.gathered.sources
    }

    #[inline(always)]
    #[track_caller]
    fn wait(&mut self, row: u32, rows: u32) {
        let Gathered { extent, sources, .. } = self.gathered;
        let (mut place, end) = (row / extent.max(1) * sources, self.rows.min(row + rows).div_ceil(extent.max(1)) * sources);
        while place < end {
            self.gathered.wait(&mut self.arrivals, place);
            place += 1;
        }
    }

    #[inline(always)]
    fn place(&self, row: u32) -> [u32; 2] {
        let Some(Away { members, shard, .. }) = self.away else { return [0, row] };
        let member = u64::from(row / shard.max(1)) * MEMBER;
        [members.load(member), members.load(member + 1) + row % shard.max(1)]
    }

    #[inline(always)]
    fn leave(&mut self, row: u32) {
        if let Some(Away { shard, .. }) = self.away {
            self.leaving = row / shard.max(1) * self.panels() + row % shard.max(1) / self.gathered.extent.max(1);
        }
    }

    #[inline(always)]
    fn land(&mut self) {
        if let Some(Away { members, landed, signals, flag, .. }) = self.away
            && self.leaving != NONE
        {
            if warpgroup::is_leader() {
                pipeline::wait_stores::<0>();
                let (panels, extent) = (self.panels().max(1), self.gathered.extent);
                let (member, panel) = (u64::from(self.leaving / panels) * MEMBER, self.leaving % panels);
                // Shards are whole tiles.
                let tiles = extent.min(self.rows - panel * extent).div_ceil(PART as u32) * self.columns;
                if atomic::take_ticket(&landed, self.leaving.into()) + 1 == tiles {
                    landed.store(self.leaving.into(), 0);
                    signals.set(members.load(member + 2), flag + members.load(member + 3) + panel);
                }
            }
            self.leaving = NONE;
        }
    }
}
