//! When the operands of a step are there: a compile-time policy of the producer.

use oxtile_tile::arrivals::{Arrivals, Waits};
use oxtile_tile::prelude::*;

/// Stands for the flag of a chunk that is there when the kernel begins, such as the rank's own.
pub const PRESENT: u32 = u32::MAX;

/// How an operand arrives, and in which order tiles are computed.
#[derive(Clone, Copy, Parameter)]
pub struct Gathered {
    /// The tiles of a cluster in the order in which they are computed: the row in the upper 16 bits, the column in the lower ones, both counted in tiles.
    /// Every tile is in it once, where parts are added at most once. They are not checked: rows and columns beyond the matrix are loaded as zeros and not stored.
    pub tiles: Global<u32>,
    /// The flag to wait for, of slab `j` and source `s` at `j * sources + s`, or of panel `j` and source `s` where [parts are added](super::GemmScattered): its number as [`Waits`] counts, or [`PRESENT`].
    pub flags: Global<u32>,
    /// The flags of the chunks.
    pub waits: Waits,
    /// Rows of `A`, or elements of the sum, that each source has; the last sources may have fewer, or none. Where parts are added, rows of a panel.
    pub extent: u32,
    /// The number of sources.
    pub sources: u32,
    /// By rows: the steps of a slab along K; the last slab may have fewer. Else this is not read.
    pub slab: u32,
    /// By the sum: the step with which the sum of each tile begins; after the last step it goes on with step 0. Else it is 0.
    pub first: u32,
    /// Multiprocessors that the kernel leaves free. Only its grid depends on it.
    pub margin: u32,
}

impl Gathered {
    /// Waits for the chunk of which the flag is listed at this place.
    #[inline(always)]
    pub(super) fn wait(&self, arrivals: &mut Arrivals, at: u32) {
        let flag = self.flags.load(at.into());
        if flag != PRESENT {
            arrivals.wait(flag);
        }
    }
}

/// Waits for operands before they are loaded.
pub trait Arrival {
    /// A tile of `rows` rows of `A` begins, the first of which is `row()`.
    fn begin(&mut self, row: impl FnOnce() -> u32, rows: u32);

    /// Waits until the operands of a step are there. Returns their place along K, in steps.
    fn wait(&mut self, step: u32) -> u32;
}

/// All operands are there when the kernel begins.
pub struct Present;

impl Arrival for Present {
    #[inline(always)]
    fn begin(&mut self, _: impl FnOnce() -> u32, _: u32) {}

    #[inline(always)]
    fn wait(&mut self, step: u32) -> u32 {
        step
    }
}

/// Rows of `A` come from several sources, each in slabs along K. A tile waits at the first step of each slab, for every source of which it has rows.
pub struct RowArrival {
    gathered: Gathered,
    arrivals: Arrivals,
    /// Rows of `A`.
    m: u32,
    /// The tile's sources, of which the second is the first one that it does not have.
    sources: [u32; 2],
    /// The first step of the next slab, and the place of its flags.
    next: u32,
    flags: u32,
}

impl RowArrival {
    /// Nothing was waited for yet.
    #[inline(always)]
    pub fn new(gathered: Gathered, m: u32) -> Self {
        Self { gathered, arrivals: Arrivals::new(gathered.waits), m, sources: [0; 2], next: 0, flags: 0 }
    }
}

impl Arrival for RowArrival {
    #[inline(always)]
    fn begin(&mut self, row: impl FnOnce() -> u32, rows: u32) {
        let (extent, row) = (self.gathered.extent.max(1), row());
        let end = self.m.min(row + rows);
        // Rows beyond the edge have no source.
        self.sources = if row < end { [row / extent, end.div_ceil(extent)] } else { [0; 2] };
        (self.next, self.flags) = (0, 0);
    }

    #[inline(always)]
    fn wait(&mut self, step: u32) -> u32 {
        if step == self.next {
            let [mut source, end] = self.sources;
            while source < end {
                self.gathered.wait(&mut self.arrivals, self.flags + source);
                source += 1;
            }
            self.flags += self.gathered.sources;
            self.next = self.next.saturating_add(self.gathered.slab);
        }
        step
    }
}

/// Elements of the sum come from several sources. The sum begins with the step `first`; after the last step it goes on with step 0. A step waits for every
/// source of which it has elements. Once a tile has waited for all sources, later ones wait for none.
pub struct SumArrival {
    gathered: Gathered,
    arrivals: Arrivals,
    /// Elements of the sum.
    k: u32,
    /// Elements of a step.
    depth: u32,
    /// The next step that waits.
    next: u32,
}

impl SumArrival {
    /// Nothing was waited for yet.
    #[inline(always)]
    pub fn new(gathered: Gathered, k: u32, depth: u32) -> Self {
        Self { gathered, arrivals: Arrivals::new(gathered.waits), k, depth, next: gathered.first }
    }
}

impl Arrival for SumArrival {
    #[inline(always)]
    fn begin(&mut self, _: impl FnOnce() -> u32, _: u32) {}

    #[inline(always)]
    fn wait(&mut self, step: u32) -> u32 {
        let Self { ref gathered, k, depth, .. } = *self;
        let steps = k.div_ceil(depth);
        // The steps that come before the one at place 0.
        let before = if step < steps { 0 } else { steps };
        let place = step - before;
        if step == self.next {
            let (extent, end) = (gathered.extent.max(1), k.min((place + 1) * depth));
            let mut source = place * depth / extent;
            // The elements before this one are there.
            let mut there = source * extent;
            while there < end {
                gathered.wait(&mut self.arrivals, source);
                source += 1;
                there += extent;
            }
            self.next = before + if there < k { there / depth } else { steps };
        }
        place
    }
}
