//! How a product is divided among the multiprocessors, and how long that takes: a model of the kernels on wgmma.
//!
//! Work is handed out in turn: whole tiles first, then parts of the sums of the others. The time of a plan is that of launching, and the longest of
//! any cluster's work, of reading each operand once from device memory, and at the end of adding parts up. The constants were fitted to times of
//! every kernel and split on an H200 (docs/performance/gemm.md).

use std::fmt;

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
    /// The time that the model predicts, in microseconds. For kernels not on wgmma there is no model: 0.
    pub microseconds: f64,
}

impl GemmPlan {
    /// That of a kernel that is not on wgmma.
    pub(super) const fn without(kernel: GemmKernel) -> Self {
        Self { kernel, whole: 0, parts: 1, microseconds: 0.0 }
    }
}

impl fmt::Display for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel: GemmKernel::Wgmma { tile, .. }, whole, parts, microseconds } = self else { return f.write_str("any shape") };
        let ([rows, columns], _) = tile.size();
        write!(f, "{rows} by {columns} tiles on wgmma")?;
        match (parts, whole) {
            (1, _) => {}
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
}

/// What the model knows of a tile shape.
struct Costs {
    /// A step of a block: the tensor cores', or what brings it its operands.
    step: f64,
    /// A tile's or a part's beginning and end, which no step covers.
    tile: f64,
}

/// Nanoseconds from a launch to the first step, and from the last result to the end.
const LAUNCH: f64 = 4000.0;
/// Bytes a nanosecond of device memory.
const MEMORY: f64 = 4200.0;
/// Nanoseconds from the last part to the sum.
const TICKET: f64 = 1500.0;
/// Bytes a nanosecond at which a block adds parts up.
const PARTS: f64 = 60.0;
/// The most parts of a sum.
pub(super) const MOST_PARTS: u64 = 32;

impl GemmTile {
    /// Rows and columns of a block's tile, and blocks of a cluster, which lie one above the other.
    pub(super) fn size(self) -> ([u64; 2], u64) {
        match self {
            Self::Tile128x256 => ([128, 256], 2),
            Self::Tile128x128 => ([128, 128], 1),
            Self::Tile64x128 => ([64, 128], 1),
        }
    }

    /// Tiles of a cluster's size of a result of so many rows and columns.
    pub fn count(self, [m, n]: [u64; 2]) -> u64 {
        let ([rows, columns], cluster) = self.size();
        m.div_ceil(rows * cluster) * n.div_ceil(columns)
    }

    fn costs(self) -> Costs {
        match self {
            Self::Tile128x256 => Costs { step: 600.0, tile: 2500.0 },
            Self::Tile128x128 => Costs { step: 340.0, tile: 1500.0 },
            Self::Tile64x128 => Costs { step: 180.0, tile: 1000.0 },
        }
    }
}

impl Problem {
    /// All divisions with this kernel, the fastest first.
    pub(super) fn plans(&self, kernel: GemmKernel, tile: GemmTile) -> Vec<GemmPlan> {
        let of = |(whole, parts)| GemmPlan { kernel, whole, parts, microseconds: self.nanoseconds(tile, whole, parts) / 1000.0 };
        let mut plans: Vec<_> = self.divisions(tile).into_iter().map(of).collect();
        plans.sort_by(|a, b| a.microseconds.total_cmp(&b.microseconds));
        plans
    }

    /// The fastest division with this kernel.
    pub(super) fn plan(&self, kernel: GemmKernel, tile: GemmTile) -> GemmPlan {
        self.plans(kernel, tile)[0]
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

    /// The time of a division.
    fn nanoseconds(&self, tile: GemmTile, whole: u64, parts: u64) -> f64 {
        let ([rows, columns], _) = tile.size();
        let (costs, clusters, split) = (tile.costs(), self.clusters(tile), tile.count([self.m, self.n]) - whole);
        // The work of a cluster in turn after `first` others.
        let share = |work: u64, first: u64, cluster: u64| {
            work.saturating_sub((cluster + clusters - first % clusters) % clusters).div_ceil(clusters)
        };
        let work = |cluster: u64| {
            let (tiles, pieces) = (share(whole, 0, cluster), share(split * parts, whole, cluster));
            (tiles * self.steps + pieces * self.steps.div_ceil(parts)) as f64 * costs.step + (tiles + pieces) as f64 * costs.tile
        };
        let longest = (0..clusters).map(work).fold(0.0, f64::max);
        let operands = (self.m + self.n) * self.steps * 128 + self.m * self.n * self.result_bytes;
        let rows = self.m.min(rows).next_multiple_of(16);
        let adding = if split > 0 { TICKET + ((parts + 1) * rows * columns * 4) as f64 / PARTS } else { 0.0 };
        LAUNCH + longest.max(operands as f64 / MEMORY) + adding
    }
}
