//! Tiles whose sum is split along K among clusters.
//!
//! Each warpgroup leaves the sum of its part in device memory, as its registers hold it, and takes a ticket of its 64 rows. The one that takes the
//! last ticket adds the parts up, in the order of K: bits do not depend on which comes last. No warpgroup waits for another.
//! Where there is no memory for parts, those of a tile are blocks of a [cluster](super::cluster_sum).

use oxtile_tile::arch::{Columns, MatrixColumns};
use oxtile_tile::atomic;
use oxtile_tile::prelude::*;
use oxtile_tile::register_tile::{self, RegisterTile};
use oxtile_tile::vector::Vector;
use oxtile_tile::warpgroup;

use super::order::Part;

/// Which tiles are split, and into what.
#[derive(Clone, Copy, Parameter)]
pub struct Split {
    /// Clusters' tiles, the first in the order of time, that are computed whole.
    pub whole: u32,
    /// The number of parts of each of the others, at most the number of steps along K.
    pub parts: u32,
    /// The parts' sums, in pieces of a warpgroup's tile: by tile, block of the cluster, warpgroup and part. None if no tile is split, or all are among the blocks of clusters.
    pub sums: Option<GlobalMut<f32>>,
    /// Tickets taken, one counter for each warpgroup of each of these tiles. All are zero before and after a launch. None as `sums`.
    pub tickets: Option<GlobalMut<u32>>,
}

/// The numbers of parts that the blocks of a cluster can have: 8 blocks are the most that every device takes, and the slices of 7 do not fit a block's memory.
pub const CLUSTER_PARTS: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// Elements from one pair of a thread's columns to its next in a piece: those of all threads of a warpgroup.
const PAIR: u64 = 4 * warpgroup::THREADS as u64;

/// Pairs that are loaded together: the registers hold their addends beside the sum.
const TOGETHER: usize = 16;

impl Split {
    /// No tile is split.
    pub const NONE: Self = Self { whole: u32::MAX, parts: 1, sums: None, tickets: None };

    /// Whether the parts of each tile are the blocks of a cluster, which add them up in shared memory.
    #[inline(always)]
    pub fn is_in_clusters(&self) -> bool {
        self.whole == 0 && self.parts > 1 && self.tickets.is_none()
    }

    /// Brings the counter of a part into the L2 cache before it is needed: it was last written in another launch. A hint; any threads call it.
    #[inline(always)]
    #[track_caller]
    pub fn prefetch(&self, part: Part, [number, warpgroups]: [u32; 2]) {
        if let Some(tickets) = self.tickets {
            tickets.prefetch(u64::from(part.tile) * u64::from(warpgroups) + u64::from(number));
        }
    }

    /// Leaves the `tile` of warpgroup `number` of all `warpgroups` of the cluster, of which `rows` rows are in the matrix. Returns true, and
    /// the sum of all parts, to the warpgroup that comes last. All threads of the warpgroup call it; `word` is its own.
    #[inline(always)]
    pub fn add<const COLUMNS: usize>(
        &self,
        tile: &mut RegisterTile<COLUMNS>,
        part: Part,
        [number, warpgroups]: [u32; 2],
        rows: u32,
        (word, barrier): (SharedArray<u32, 1>, u32),
    ) -> bool
    where
        Columns<COLUMNS>: MatrixColumns,
    {
        let (Some(sums), Some(tickets)) = (self.sums, self.tickets) else { return true };
        let counter = u64::from(part.tile) * u64::from(warpgroups) + u64::from(number);
        let piece = const { (register_tile::ROWS * COLUMNS) as u64 };
        let first = counter * u64::from(self.parts) * piece + 4 * u64::from(thread::index() % warpgroup::THREADS);
        // Warps whose rows are all beyond the edge have nothing to add.
        let inside = warp::shuffle(thread::warp(), 0) % 4 * 16 < rows;
        if inside {
            let mut at = first + u64::from(part.number) * piece;
            let mut pair = 0;
            while pair < RegisterTile::<COLUMNS>::PAIRS {
                let ([a, b], [c, d]) = (tile.pair(0, pair), tile.pair(1, pair));
                sums.store_vector(at, Vector::<f32>::from_f32([a, b, c, d]));
                at += PAIR;
                pair += 1;
            }
        }
        warpgroup::sync(barrier);
        if warpgroup::is_leader() {
            let last = atomic::take_ticket(&tickets, counter) + 1 == self.parts;
            if last {
                tickets.store(counter, 0);
            }
            word.store(0, u32::from(last));
        }
        warpgroup::sync(barrier);
        let last = warp::any(word.load(0) != 0);
        if last && inside {
            *tile = RegisterTile::zero();
            for part in 0..self.parts {
                let mut at = first + u64::from(part) * piece;
                let mut pair = 0;
                while pair < RegisterTile::<COLUMNS>::PAIRS {
                    let values = sums.load_vector(at);
                    for half in 0..2 {
                        let [a, b] = tile.pair(half, pair);
                        tile.set_pair(half, pair, [a + values.lane(2 * half), b + values.lane(2 * half + 1)]);
                    }
                    at += PAIR;
                    pair += 1;
                    if pair.is_multiple_of(TOGETHER) {
                        warp::sync();
                    }
                }
            }
        }
        warp::sync();
        last
    }
}

impl SplitArgument<'_> {
    /// Whether the parts of each tile are the blocks of a cluster, made at launch.
    pub(super) fn is_in_clusters(&self) -> bool {
        self.whole == 0 && self.parts > 1 && self.sums.is_none() && self.tickets.is_none()
    }

    /// Refuses parts that do not fit clusters, of a product of so many tiles and steps. Returns the grid.
    pub(super) fn clusters(&self, tiles: u64, steps: u32) -> Result<Grid, LaunchError> {
        let most = CLUSTER_PARTS[CLUSTER_PARTS.len() - 1];
        LaunchError::check_limit("split.parts", self.parts.into(), steps.min(most).into())?;
        if !CLUSTER_PARTS.contains(&self.parts) {
            LaunchError::check_limit("split.parts", self.parts.into(), u64::from(self.parts) - 1)?;
        }
        // Indices of work are words.
        LaunchError::check_limit("split.parts", tiles * u64::from(self.parts), u64::from(u32::MAX / 2))?;
        Ok(Grid::x(tiles as u32 * self.parts).in_clusters(self.parts))
    }

    /// Refuses what does not fit a product of so many clusters' tiles and steps, for warpgroups of a cluster and elements of the tile of each. Returns how
    /// many pieces of work there are.
    pub(super) fn check(&self, tiles: u64, steps: u32, [warpgroups, piece]: [u32; 2]) -> Result<u64, LaunchError> {
        let (whole, parts) = (u64::from(self.whole), u64::from(self.parts));
        LaunchError::check_limit("split.whole", whole, tiles)?;
        let split = tiles - whole;
        if split > 0 {
            LaunchError::check_at_least("split.parts", 1, parts)?;
            LaunchError::check_limit("split.parts", parts, steps.into())?;
            let counters = split * u64::from(warpgroups);
            LaunchError::check_length("split.sums", counters * parts * u64::from(piece), self.sums.as_ref().map_or(0, |sums| sums.len()))?;
            if let Some(sums) = &self.sums {
                LaunchError::check_alignment("split.sums", 16, sums.address())?;
            }
            LaunchError::check_length("split.tickets", counters, self.tickets.as_ref().map_or(0, |tickets| tickets.len()))?;
        }
        // Indices of work are words.
        LaunchError::check_limit("split.parts", whole + split * parts, u64::from(u32::MAX / 2))?;
        Ok(whole + split * parts)
    }
}
