//! Which tile of the output a block computes next.

use crate::block;

/// Tiles of a matrix, handed out to blocks, or clusters of blocks, that stay: number `i` of `n` takes tiles `i`, `i + n`, ...
///
/// Neighbours in time are neighbours in a band of `BAND` tile rows, column by column, so that blocks that run together
/// share operands in the L2 cache.
#[derive(Clone, Copy)]
pub struct PersistentTiles<const BAND: u32> {
    rows: u32,
    columns: u32,
    next: u32,
    stride: u32,
}

impl<const BAND: u32> PersistentTiles<BAND> {
    /// The tiles of a matrix of `rows` by `columns` tiles.
    #[inline(always)]
    #[track_caller]
    pub fn new(rows: u32, columns: u32) -> Self {
        Self::of_clusters::<1>(rows, columns)
    }

    /// The same for clusters of `BLOCKS` blocks, which share a tile.
    #[inline(always)]
    #[track_caller]
    pub fn of_clusters<const BLOCKS: u32>(rows: u32, columns: u32) -> Self {
        Self { rows, columns, next: block::index()[0] / BLOCKS, stride: block::count()[0] / BLOCKS }
    }

    /// Whether there is no next tile.
    #[inline(always)]
    pub const fn is_done(&self) -> bool {
        self.next >= self.rows * self.columns
    }

    /// Row and column of the next tile, both counted in tiles.
    #[inline(always)]
    #[track_caller]
    pub fn next_tile(&mut self) -> Option<[u32; 2]> {
        if self.is_done() {
            return None;
        }
        let tile = self.place(self.next);
        self.next += self.stride;
        Some(tile)
    }

    /// Row and column of tile `index` in the order of time, below the number of tiles.
    #[inline(always)]
    pub fn place(&self, index: u32) -> [u32; 2] {
        // No divisor is zero, as there is a tile; `max(1)` saves its check.
        let tiles_of_band = (BAND * self.columns).max(1);
        let (band, inside) = (index / tiles_of_band, index % tiles_of_band);
        let height = (self.rows - band * BAND).clamp(1, BAND);
        [band * BAND + inside % height, inside / height]
    }
}
