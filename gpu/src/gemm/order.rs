//! Which part of the product a cluster computes next: a compile-time policy.

use oxtile_tile::prelude::*;
use oxtile_tile::scheduler::PersistentTiles;

use super::place::Alone;

/// Rows of clusters' tiles that run together.
pub(super) const BAND: u32 = 8;

/// A tile of a cluster, or a part of its sum.
#[derive(Clone, Copy)]
pub struct Work<P> {
    /// Row and column of the tile, both counted in clusters' tiles.
    pub tile: [u32; 2],
    /// The first step along K.
    pub first: u32,
    /// The number of steps, at least one.
    pub steps: u32,
    /// Which part it is, if the tile is split.
    pub part: Option<Part>,
    /// Where its matrices are.
    pub place: P,
}

/// A part of the sum of a tile.
#[derive(Clone, Copy)]
pub struct Part {
    /// The tile's number among those that are split.
    pub tile: u32,
    /// The part's number, in the direction of K.
    pub number: u32,
}

/// Work of a cluster, one piece after another.
pub trait WorkOrder {
    /// Where matrices are.
    type Place;

    /// What comes next.
    fn next_work(&mut self) -> Option<Work<Self::Place>>;
}

/// All work in a fixed order, handed out in turn to clusters of blocks that stay: whole tiles, then the first parts of all tiles that are
/// split, then their second ones, ... Clusters that run together so share operands: neighbouring tiles at the same place along K.
#[derive(Clone, Copy)]
pub struct Order {
    tiles: PersistentTiles<BAND>,
    steps: u32,
    whole: u32,
    split: u32,
    parts: u32,
    next: u32,
    stride: u32,
}

impl Order {
    /// The work of the calling cluster for a matrix of `rows` by `columns` tiles that take `steps` steps each: so many tiles whole, the others in
    /// parts.
    #[inline(always)]
    #[track_caller]
    pub fn new<const CLUSTER: u32>([rows, columns]: [u32; 2], steps: u32, [whole, parts]: [u32; 2]) -> Self {
        Self {
            tiles: PersistentTiles::of_clusters::<CLUSTER>(rows, columns),
            steps,
            whole,
            split: rows * columns - whole,
            parts,
            next: block::index()[0] / CLUSTER,
            stride: block::count()[0] / CLUSTER,
        }
    }
}

impl Order {
    /// The same where the blocks of a cluster have the parts of one tile: one piece of work for each block.
    #[inline(always)]
    #[track_caller]
    pub fn in_clusters(self) -> Self {
        let Self { split, parts, .. } = self;
        let block = block::index()[0];
        Self { next: block / parts.max(1) + split * (block % parts.max(1)), stride: split * parts, ..self }
    }
}

impl WorkOrder for Order {
    type Place = Alone;

    #[inline(always)]
    #[track_caller]
    fn next_work(&mut self) -> Option<Work<Alone>> {
        let Self { tiles, steps, whole, split, parts, next, stride } = *self;
        if next >= whole + split * parts {
            return None;
        }
        self.next += stride;
        // No divisor is zero, as there is a part; `max(1)` saves its check.
        let is_part = next >= whole;
        let after = next.saturating_sub(whole);
        let (tile, number) = (after % split.max(1), after / split.max(1));
        let parts = if is_part { parts.max(1) } else { 1 };
        // The first parts are a step longer where steps are left over.
        let (each, longer) = (steps / parts, steps % parts);
        Some(Work {
            tile: tiles.place(if is_part { whole + tile } else { next }),
            first: number * each + number.min(longer),
            steps: each + u32::from(number < longer),
            part: is_part.then_some(Part { tile, number }),
            place: Alone,
        })
    }
}

/// Whole tiles in the order of a list in device memory, handed out in turn to clusters of blocks that stay. The next entry is loaded while a tile is computed.
pub struct TileList {
    tiles: Global<u32>,
    first: u32,
    steps: u32,
    /// Blocks of a cluster.
    cluster: u32,
    /// Where the next entry is in the list, counted in blocks: the stride is then the number of blocks, which takes no register.
    next: u32,
    /// The next entry, if there is one.
    entry: u32,
}

impl TileList {
    /// The tiles of the calling cluster, which take `steps` steps each, from `first` on. An entry is a row of tiles in the upper 16 bits and a column in the
    /// lower ones.
    #[inline(always)]
    #[track_caller]
    pub fn new<const CLUSTER: u32>(tiles: Global<u32>, first: u32, steps: u32) -> Self {
        let mut list = Self { tiles, first, steps, cluster: CLUSTER, next: block::index()[0], entry: 0 };
        list.load();
        list
    }

    /// Where the next entry is, if there is one.
    #[inline(always)]
    fn index(&self) -> Option<u64> {
        let index = u64::from(self.next / self.cluster.max(1));
        (index < self.tiles.len()).then_some(index)
    }

    /// Loads the next entry.
    #[inline(always)]
    #[track_caller]
    fn load(&mut self) {
        if let Some(index) = self.index() {
            self.entry = self.tiles.load(index);
        }
    }
}

impl WorkOrder for TileList {
    type Place = Alone;

    #[inline(always)]
    #[track_caller]
    fn next_work(&mut self) -> Option<Work<Alone>> {
        self.index()?;
        let tile = [self.entry >> 16, self.entry & 0xffff];
        self.next += block::count()[0];
        self.load();
        Some(Work { tile, first: self.first, steps: self.steps, part: None, place: Alone })
    }
}
