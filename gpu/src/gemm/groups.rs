//! The groups of a grouped product, and which tile of which of them a cluster computes next.

use oxtile_tile::prelude::*;
use oxtile_tile::scheduler::PersistentTiles;

use super::Shape;
use super::arrival::Present;
use super::division::Division;
use super::order::{BAND, Work, WorkOrder};
use super::place::{Group, Range};
use super::sharing::Complete;
use super::split::Split;

/// Every group is a product of its own; no tile is split.
#[derive(Clone, Copy)]
pub struct Groups<const BY_SUM: bool> {
    /// Tokens of each group: rows of `A`, or elements of the sum.
    pub sizes: Global<u32>,
    /// Rows of a group's weights as they are stored.
    pub weights: u32,
}

impl<const BY_SUM: bool> Division<4> for Groups<BY_SUM> {
    type Order = GroupOrder<BY_SUM>;
    type Arrival = Present;
    type Sharing = Complete;

    #[inline(always)]
    #[track_caller]
    fn order<const CLUSTER: u32>(&self, shape: Shape, tile: [u32; 2], depth: u32) -> GroupOrder<BY_SUM> {
        let (next, stride) = (block::index()[0] / CLUSTER, block::count()[0] / CLUSTER);
        let mut order = GroupOrder { groups: *self, shape, tile, depth, number: 0, first: 0, size: 0, next, stride };
        order.load();
        order
    }

    #[inline(always)]
    fn arrival(&self, _: Shape, _: u32) -> Present {
        Present
    }

    #[inline(always)]
    fn sharing(&self, _: Shape, _: u32) -> Complete {
        Complete
    }

    #[inline(always)]
    fn split(&self) -> Split {
        Split::NONE
    }
}

/// Tiles group by group, handed out in turn to clusters of blocks that stay; those of a group as [`PersistentTiles`] orders them.
///
/// By rows, all tiles take the same time, those too of which a warpgroup has no rows: it multiplies zeros. So blocks keep step, and those that share operands find them in the L2
/// cache. Where such warpgroups gave their stages back at once, some blocks ran groups ahead of others (docs/performance/gemm.md, "Groups").
///
/// Only the device knows the sizes. Each thread walks through them as it comes to a group's tiles, which costs a cached load for each group that it passes: little
/// beside a tile. Sizes that are more than all tokens together are cut there, so that no tile lies beyond the matrix.
pub struct GroupOrder<const BY_SUM: bool> {
    groups: Groups<BY_SUM>,
    /// The product of all tokens.
    shape: Shape,
    /// Rows and columns of a cluster's tile.
    tile: [u32; 2],
    /// Elements of a step.
    depth: u32,
    /// The group's number, its first token, and its number of tokens.
    number: u32,
    first: u32,
    size: u32,
    /// The next tile, counted from the group's first one, and from one to the next.
    next: u32,
    stride: u32,
}

impl<const BY_SUM: bool> GroupOrder<BY_SUM> {
    /// Loads the group's size, if there is such a group.
    #[inline(always)]
    #[track_caller]
    fn load(&mut self) {
        let tokens = if BY_SUM { self.shape.k } else { self.shape.m };
        if u64::from(self.number) < self.groups.sizes.len() {
            self.size = self.groups.sizes.load(self.number.into()).min(tokens - self.first);
        }
    }

    /// The group's product.
    #[inline(always)]
    fn product(&self) -> Shape {
        if BY_SUM { Shape { k: self.size, ..self.shape } } else { Shape { m: self.size, ..self.shape } }
    }
}

impl<const BY_SUM: bool> WorkOrder for GroupOrder<BY_SUM> {
    type Place = Group<BY_SUM>;

    #[inline(always)]
    #[track_caller]
    fn next_work(&mut self) -> Option<Work<Group<BY_SUM>>> {
        while u64::from(self.number) < self.groups.sizes.len() {
            let product = self.product();
            let [rows, columns] = product.tiles(self.tile);
            if self.next < rows * columns {
                let (weights, tile) = (self.number * self.groups.weights, PersistentTiles::<BAND>::new(rows, columns).place(self.next));
                self.next += self.stride;
                return Some(Work {
                    tile,
                    first: 0,
                    // An empty sum has a step, which loads zeros.
                    steps: product.k.div_ceil(self.depth).max(1),
                    part: None,
                    place: Group {
                        tokens: Range { first: self.first, end: self.first + self.size },
                        weights: Range { first: weights, end: weights + self.groups.weights },
                    },
                });
            }
            self.next -= rows * columns;
            self.first += self.size;
            self.number += 1;
            self.load();
        }
        None
    }
}
