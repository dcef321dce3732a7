//! How a product is divided among the multiprocessors, and how long that takes: a model of the kernels on wgmma.
//!
//! Work is handed out in turn: whole tiles first, then parts of the sums of the others. The time of a plan is that of launching, that of the clusters'
//! work, delayed where device memory does not bring the operands as fast, and at the end that of adding parts up. Where there are few tiles, the parts of
//! each can be the blocks of a cluster instead, which add them up in shared memory. The constants were fitted to times of every kernel and split on an H200 (docs/performance/gemm.md, `gemm_plans_h200_tiles.json` and `gemm_plans_h200_all.json`).

use std::fmt;

use oxtile_kernels::gemm::{self, CLUSTER_PARTS, FEW, MOST_FEW, TileShape};

use super::choice::{GemmKernel, GemmTile};

/// A way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmPlan {
    /// The kernel.
    pub kernel: GemmKernel,
    /// Tiles that are computed whole: those of a cluster's size that come first in the order of time.
    pub whole: u64,
    /// Parts of the sums of the others, along K.
    pub parts: u64,
    /// Whether the parts of a tile are the blocks of a cluster, which is made at launch: they add up in shared memory, and not in device memory. Then no tile is whole.
    pub in_clusters: bool,
    /// The time that the model predicts, in microseconds. For kernels not on wgmma there is no model: 0.
    pub microseconds: f64,
}

impl GemmPlan {
    /// That of a kernel that is not on wgmma.
    pub(super) const fn without(kernel: GemmKernel) -> Self {
        Self { kernel, whole: 0, parts: 1, in_clusters: false, microseconds: 0.0 }
    }
}

impl fmt::Display for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, whole, parts, in_clusters, microseconds } = self;
        let Some(tile) = kernel.tile() else { return f.write_str("not on wgmma: no prediction") };
        let ([rows, columns], _) = tile.size();
        write!(f, "{rows} by {columns} tiles on wgmma")?;
        match (parts, whole) {
            (1, _) => {}
            _ if *in_clusters => write!(f, ", in {parts} parts along k by the blocks of a cluster")?,
            (_, 0) => write!(f, ", in {parts} parts along k")?,
            _ => write!(f, ", after {whole} in {parts} parts along k")?,
        }
        write!(f, ", {microseconds:.1} us predicted")
    }
}

/// A product on a device, in units of the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    pub m: u64,
    pub n: u64,
    /// Steps along K of 128 bytes.
    pub steps: u64,
    /// Bytes of an element of the result.
    pub result_bytes: u64,
    pub multiprocessors: u64,
    /// Whether tiles of 64 rows load the rows of `A` that they have in boxes of 16.
    pub few: bool,
    /// Whether operands are of 8 bits.
    pub narrow: bool,
    /// Whether codes have a scale for every block, whose sums take longer. Their parts are never the blocks of a cluster.
    pub in_blocks: bool,
    /// The nanoseconds of operands that are transposed first.
    pub transposing: f64,
}

/// The nanoseconds in which an operand of so many bytes is transposed.
pub(super) fn transposing(bytes: u64) -> f64 {
    OTHER_LAUNCH + 2.0 * bytes as f64 / TRANSPOSE
}

/// What the model knows of a tile shape, in nanoseconds.
struct Costs {
    /// A step of a block: the tensor cores', or what brings it its operands.
    step: f64,
    /// A tile's or a part's beginning and end, which no step covers.
    tile: f64,
}

/// Nanoseconds from a launch to the first step, and from the last result to the end.
const LAUNCH: f64 = 2260.0;
/// Bytes a nanosecond of device memory.
const MEMORY: f64 = 4300.0;
/// Nanoseconds of a launch as it was fitted before: of codes in blocks, whose costs go with it, and of `fp8_transpose` ahead of a product.
const OTHER_LAUNCH: f64 = 1250.0;
/// Bytes a nanosecond that `fp8_transpose` reads and writes (docs/performance/fp8.md).
const TRANSPOSE: f64 = 3800.0;
/// What a row beyond the edge costs, which is filled with zeros, of what it costs to read it.
const FILLED: f64 = 0.135;
/// Bytes of device memory for each byte of parts, which are written and read, not all of them in the L2 cache.
const PARTS: f64 = 4.86;
/// Nanoseconds from the last part to the sum.
const TICKET: f64 = 1420.0;
/// Bytes a nanosecond at which a block leaves a part, and at which it adds parts up.
const LEAVE: f64 = 23.1;
const ADD: f64 = 94.0;
/// What 8-bit operands take of the power of as many bytes of 16-bit ones.
const NARROW: f64 = 0.8;
/// The most parts of a sum.
pub(super) const MOST_PARTS: u64 = 32;
/// Of parts that are the blocks of clusters: nanoseconds of a part's beginning and end, of the cluster's barriers, and bytes a nanosecond at which a block gets the slices of others.
const CLUSTER_PART: f64 = 1510.0;
const MEET: f64 = 650.0;
const PEER: f64 = 12.6;
/// By how much less a step takes of a block alone, whose operands no other block delays. Fitted to parts of clusters, as the three before.
const ALONE: f64 = 0.129;

impl GemmTile {
    /// Rows and columns of a block's tile, and blocks of a cluster, which lie one above the other.
    pub(crate) fn size(self) -> ([u64; 2], u64) {
        match self {
            Self::Tile128x256 => ([128, 256], 2),
            Self::Tile128x192 => ([128, 192], 1),
            Self::Tile128x176 => ([128, 176], 1),
            Self::Tile128x128 => ([128, 128], 1),
            Self::Tile128x112 => ([128, 112], 1),
            Self::Tile128x96 => ([128, 96], 1),
            Self::Tile64x144 => ([64, 144], 1),
            Self::Tile64x128 => ([64, 128], 1),
            Self::Tile64x96 => ([64, 96], 1),
            Self::Tile64x64 => ([64, 64], 1),
        }
    }

    /// Tiles of a cluster's size of a result of so many rows and columns.
    pub fn count(self, [m, n]: [u64; 2]) -> u64 {
        let ([rows, columns], cluster) = self.size();
        m.div_ceil(rows * cluster) * n.div_ceil(columns)
    }

    /// Floating-point operations a nanosecond of 16-bit operands that the card's power allows, the edges of tiles included: as fitted to short runs, and 4 % less of small tiles, so that of tiles which are as fast in short runs the large ones are taken. Small tiles bring operands
    /// from the L2 cache more often, which takes power: of 8192 x 14336 x 8192 in bf16 again and again 128x128 had 630 TFLOP/s, and 128x256 in clusters 693 (docs/performance/gemm.md).
    fn power(self) -> f64 {
        match self {
            Self::Tile128x256 => 710_000.0,
            _ => 680_000.0,
        }
    }

    /// Whether the parts of a tile can be the blocks of a cluster that is made at launch.
    pub(crate) fn takes_clusters(self) -> bool {
        match self {
            Self::Tile128x256 => gemm::Tile128x256::IN_CLUSTERS,
            Self::Tile128x192 => gemm::Tile128x192::IN_CLUSTERS,
            Self::Tile128x176 => gemm::Tile128x176::IN_CLUSTERS,
            Self::Tile128x128 => gemm::Tile128x128::IN_CLUSTERS,
            Self::Tile128x112 => gemm::Tile128x112::IN_CLUSTERS,
            Self::Tile128x96 => gemm::Tile128x96::IN_CLUSTERS,
            Self::Tile64x144 => gemm::Tile64x144::IN_CLUSTERS,
            Self::Tile64x128 => gemm::Tile64x128::IN_CLUSTERS,
            Self::Tile64x96 => gemm::Tile64x96::IN_CLUSTERS,
            Self::Tile64x64 => gemm::Tile64x64::IN_CLUSTERS,
        }
    }

    fn costs(self) -> Costs {
        match self {
            Self::Tile128x256 => Costs { step: 747.0, tile: 2470.0 },
            Self::Tile128x192 => Costs { step: 502.0, tile: 1890.0 },
            Self::Tile128x176 => Costs { step: 510.0, tile: 2500.0 },
            Self::Tile128x128 => Costs { step: 375.0, tile: 755.0 },
            Self::Tile128x112 => Costs { step: 341.0, tile: 2120.0 },
            Self::Tile128x96 => Costs { step: 297.0, tile: 1730.0 },
            Self::Tile64x144 => Costs { step: 240.0, tile: 890.0 },
            Self::Tile64x128 => Costs { step: 260.0, tile: 865.0 },
            Self::Tile64x96 => Costs { step: 196.0, tile: 1245.0 },
            Self::Tile64x64 => Costs { step: 159.0, tile: 750.0 },
        }
    }

    /// The same of the kernel of codes in blocks: of 128 rows as it was measured, of 64 as predicted.
    fn costs_in_blocks(self) -> Costs {
        match self {
            Self::Tile64x128 => Costs { step: 340.0, tile: 800.0 },
            _ => Costs { step: 473.0, tile: 1600.0 },
        }
    }
}

/// The time of clusters that begin together, of the time that each works and of that in which device memory brings what all of them read. Memory
/// delays those that work at once, by their share: few clusters that are left when the others have ended do not need all of its rate.
fn together(mut works: Vec<f64>, memory: f64) -> f64 {
    works.sort_by(f64::total_cmp);
    let all: f64 = works.iter().sum();
    if all == 0.0 {
        return memory;
    }
    let rate = memory / all;
    let (mut time, mut before) = (0.0, 0.0);
    for (ended, work) in works.iter().enumerate() {
        let working = (works.len() - ended) as f64;
        time += (work - before) * (rate * working).max(1.0);
        before = *work;
    }
    time
}

impl Problem {
    /// All divisions with this kernel, the fastest first.
    pub(super) fn plans(&self, kernel: GemmKernel, tile: GemmTile) -> Vec<GemmPlan> {
        let of = |(whole, parts)| self.divided(kernel, tile, whole, parts);
        let in_clusters = self.cluster_parts(tile).map(|parts| self.clustered(kernel, tile, parts));
        let mut plans: Vec<_> = self.divisions(tile).into_iter().map(of).chain(in_clusters).collect();
        plans.sort_by(|a, b| a.microseconds.total_cmp(&b.microseconds));
        plans
    }

    /// The fastest division with this kernel.
    pub(super) fn plan(&self, kernel: GemmKernel, tile: GemmTile) -> GemmPlan {
        self.plans(kernel, tile)[0]
    }

    /// All tiles whole.
    pub(super) fn whole(&self, kernel: GemmKernel, tile: GemmTile) -> GemmPlan {
        self.divided(kernel, tile, tile.count([self.m, self.n]), 1)
    }

    fn divided(&self, kernel: GemmKernel, tile: GemmTile, whole: u64, parts: u64) -> GemmPlan {
        GemmPlan { kernel, whole, parts, in_clusters: false, microseconds: self.nanoseconds(tile, whole, parts) / 1000.0 }
    }

    fn clustered(&self, kernel: GemmKernel, tile: GemmTile, parts: u64) -> GemmPlan {
        GemmPlan { kernel, whole: 0, parts, in_clusters: true, microseconds: self.nanoseconds_in_clusters(tile, parts) / 1000.0 }
    }

    /// Into how many parts tiles can be divided among the blocks of clusters, all of which run at once: a second wave would begin with nothing under way.
    fn cluster_parts(&self, tile: GemmTile) -> impl Iterator<Item = u64> + use<> {
        let (problem, tiles) = (*self, tile.count([self.m, self.n]));
        // Widths that fill a wave of whole tiles are of no use in parts.
        let is_taken = tile.takes_clusters() && tile.size().0[1].is_multiple_of(64) && !self.in_blocks;
        let most = if is_taken { self.steps } else { 0 };
        let fits = move |parts: &u64| *parts <= most && tiles * parts <= problem.blocks_in_clusters(*parts);
        CLUSTER_PARTS.into_iter().map(u64::from).filter(fits)
    }

    /// Whole tiles and parts of the others: all whole; what is left after full waves split; one wave more split; all split.
    fn divisions(&self, tile: GemmTile) -> Vec<(u64, u64)> {
        let (tiles, clusters) = (tile.count([self.m, self.n]), self.clusters(tile));
        let full = tiles / clusters * clusters;
        let mut whole: Vec<u64> = vec![full, full.saturating_sub(clusters), 0];
        whole.retain(|whole| *whole < tiles && tiles - whole <= 2 * clusters);
        whole.dedup();
        let parts = 2..=self.steps.min(MOST_PARTS);
        let split = whole.into_iter().flat_map(|whole| parts.clone().map(move |parts| (whole, parts)));
        std::iter::once((tiles, 1)).chain(split).collect()
    }

    fn clusters(&self, tile: GemmTile) -> u64 {
        (self.multiprocessors / tile.size().1).max(1)
    }

    /// Blocks that run at the same time in clusters of so many: those of a cluster are in one group of multiprocessors. An H200 takes 66 clusters of 2 of one block a multiprocessor, and
    /// 39, 30, 22, 17, 15 and 15 of 3 to 8 (`cuOccupancyMaxActiveClusters`).
    fn blocks_in_clusters(&self, parts: u64) -> u64 {
        let share = match parts {
            2 => 132,
            3 => 117,
            4 => 120,
            5 => 110,
            6 => 102,
            7 => 105,
            _ => 120,
        };
        (self.multiprocessors * share / 132).max(parts)
    }

    /// Rows of `A` that the tiles of a column load, those beyond the edge included.
    fn loaded_rows(&self, rows: u64, cluster: u64) -> u64 {
        let is_few = self.few && rows == 64 && self.m <= MOST_FEW.into();
        self.m.next_multiple_of(if is_few { FEW as u64 } else { rows * cluster })
    }

    /// The time of a step of a block, in nanoseconds: what brings it its operands takes as long as there are rows of boxes.
    fn step(&self, tile: GemmTile, costs: &Costs) -> f64 {
        let ([rows, columns], cluster) = tile.size();
        let loaded = self.loaded_rows(rows, cluster);
        let block_rows = loaded as f64 / self.m.div_ceil(rows * cluster).max(1) as f64 / cluster as f64;
        costs.step * (block_rows + columns as f64) / (rows + columns) as f64
    }

    /// The time in which device memory brings the operands and takes the result, and that in which the card's power allows the products.
    fn bounds(&self, tile: GemmTile, parts_bytes: f64) -> [f64; 2] {
        let ([rows, columns], cluster) = tile.size();
        let tiles = tile.count([self.m, self.n]);
        let [m, n, all_steps] = [self.m, self.n, self.steps].map(|size| size as f64);
        let operands = (m + n) * all_steps * 128.0 + m * n * self.result_bytes as f64;
        let filled = (self.loaded_rows(rows, cluster) - self.m) as f64 * self.n.div_ceil(columns) as f64 * all_steps * 128.0;
        // 128 bytes of a step are 64 elements of 16 bits, or 128 of 8 bits in the same time.
        let power = 2.0 * tiles as f64 * (rows * cluster * columns * 64) as f64 * all_steps / tile.power();
        let power = if self.narrow { NARROW * power } else { power };
        [(operands + FILLED * filled + parts_bytes) / MEMORY, power]
    }

    /// Bytes of a block's part of a sum.
    fn piece_bytes(&self, tile: GemmTile) -> f64 {
        let ([rows, columns], _) = tile.size();
        (self.m.min(rows).next_multiple_of(16) * columns * 4) as f64
    }

    /// The time of a division.
    fn nanoseconds(&self, tile: GemmTile, whole: u64, parts: u64) -> f64 {
        let (_, cluster) = tile.size();
        let costs = if self.in_blocks { tile.costs_in_blocks() } else { tile.costs() };
        let (clusters, tiles) = (self.clusters(tile), tile.count([self.m, self.n]));
        let step = self.step(tile, &costs);
        let pieces = if whole < tiles { (tiles - whole) * parts } else { 0 };
        let piece_bytes = self.piece_bytes(tile);
        // The share of a cluster, by its number, of work that is handed out in turn after `first` others.
        let share = |work: u64, first: u64, number: u64| {
            work.saturating_sub((number + clusters - first % clusters) % clusters).div_ceil(clusters) as f64
        };
        let (steps, part_steps) = (self.steps as f64 * step, self.steps.div_ceil(parts) as f64 * step);
        let work = |number: u64| {
            share(tiles.min(whole), 0, number) * (steps + costs.tile)
                + share(pieces, whole, number) * (part_steps + costs.tile + piece_bytes / LEAVE)
        };
        let [memory, power] = self.bounds(tile, PARTS * (pieces * cluster) as f64 * piece_bytes);
        let works = together((0..clusters).map(work).collect(), memory);
        let adding = if pieces > 0 { TICKET + parts as f64 * piece_bytes / ADD } else { 0.0 };
        let launch = if self.in_blocks { OTHER_LAUNCH } else { LAUNCH };
        self.transposing + launch + works.max(power) + adding
    }

    /// The time where the parts of all tiles are the blocks of clusters.
    fn nanoseconds_in_clusters(&self, tile: GemmTile, parts: u64) -> f64 {
        let costs = tile.costs();
        let blocks = self.blocks_in_clusters(parts);
        let pieces = tile.count([self.m, self.n]) * parts;
        let idle = 1.0 - (pieces as f64 / self.multiprocessors as f64).min(1.0);
        let part = self.steps.div_ceil(parts) as f64 * self.step(tile, &costs) * (1.0 - ALONE * idle) + CLUSTER_PART;
        let work = |number: u64| pieces.saturating_sub(number).div_ceil(blocks) as f64 * part;
        let [memory, power] = self.bounds(tile, 0.0);
        let works = together((0..blocks).map(work).collect(), memory);
        let adding = MEET + self.piece_bytes(tile) * (parts - 1) as f64 / parts as f64 / PEER;
        self.transposing + LAUNCH + works.max(power) + adding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: GemmKernel = GemmKernel::Wgmma { tile: GemmTile::Tile64x128, m_major: false, n_major: false };

    fn problem([m, n, k]: [u64; 3]) -> Problem {
        Problem {
            m,
            n,
            steps: k.div_ceil(64),
            result_bytes: 2,
            multiprocessors: 132,
            few: true,
            narrow: false,
            in_blocks: false,
            transposing: 0.0,
        }
    }

    #[test]
    fn six_tiles_are_split_among_the_multiprocessors_and_full_waves_are_not() {
        assert!(problem([64, 768, 4096]).plan(KERNEL, GemmTile::Tile64x128).parts > 2);
        let full = problem([64, 132 * 128, 4096]).plan(KERNEL, GemmTile::Tile64x128);
        assert_eq!((full.whole, full.parts), (132, 1));
    }

    #[test]
    fn memory_delays_those_that_work_at_once() {
        assert_eq!(together(vec![0.0; 4], 25.0), 25.0);
        // All at once: the longer of both.
        assert_eq!(together(vec![10.0; 4], 25.0), 25.0);
        assert_eq!(together(vec![10.0; 4], 5.0), 10.0);
        // Five works of the same length; in the second wave one cluster of four is left, which memory does not delay.
        assert_eq!(together(vec![10.0, 10.0, 10.0, 20.0], 25.0), 30.0);
    }

    #[test]
    fn the_largest_sizes_have_a_time() {
        for sizes in [[1 << 21; 3], [i32::MAX as u64; 3]] {
            for tile in GemmTile::ALL {
                assert!(problem(sizes).plan(KERNEL, tile).microseconds > 1e6, "{sizes:?}");
            }
        }
    }

    #[test]
    fn plans_are_sorted_and_fit_the_product() {
        for sizes in [[1, 8, 8], [64, 768, 4096], [1000, 3000, 5000], [2048, 2560, 8192], [16384, 28672, 8192]] {
            let problem = problem(sizes);
            for tile in GemmTile::ALL {
                let (plans, tiles) = (problem.plans(KERNEL, tile), tile.count([problem.m, problem.n]));
                assert!(plans.is_sorted_by(|a, b| a.microseconds <= b.microseconds), "{sizes:?}");
                let whole = problem.whole(KERNEL, tile);
                assert!((whole.whole, whole.parts) == (tiles, 1) && plans.contains(&whole), "{sizes:?}");
                for GemmPlan { whole, parts, microseconds, .. } in plans {
                    assert!(whole <= tiles && (1..=problem.steps.max(1)).contains(&parts), "{sizes:?}: {whole}, {parts}");
                    assert!(microseconds > 0.0, "{sizes:?}");
                }
            }
        }
    }
}
