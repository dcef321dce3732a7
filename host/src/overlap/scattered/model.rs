//! The times that scattered products take: a model of tiles, copies and flags.

use super::config::ReduceScatterConfig;
use super::kernels::ScatterOperands;
use super::shards::Shards;
use crate::comm::WorldSize;
use crate::gemm::{GemmConfig, GemmTile};
use crate::overlap::choice::Rates;
use crate::runtime::Result;

/// Microseconds from the last tile of a panel to its put, and from the put to the kernel that waits, beyond what each step takes: where short products wait for their last panel (`overlap_shapes_scattered_two_h200_97a3f4a3.json`).
const PASSED_ON: f64 = 20.0;

impl ReduceScatterConfig {
    /// The time of the kernel of all rows alone, and of one of its tiles.
    fn kernel_of_all<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, tile: GemmTile) -> Option<[f64; 2]> {
        let (product, ([height, width], cluster)) = (self.product(ranks).ok()?, tile.size());
        let tiles = product.m.div_ceil(height * cluster) * product.n.div_ceil(width) * cluster;
        let at_once = rates.multiprocessors.saturating_sub(self.margin).max(1);
        let alone = product.predicted_whole::<T, O>(tile, at_once)?;
        Some([alone, alone / tiles.div_ceil(at_once.into()).max(1) as f64])
    }

    /// The time where tiles are stored at their owner: stores of all multiprocessors at once go at the rate of the link, half of which no product hides, as two H200s showed.
    pub(super) fn time_direct<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, tile: GemmTile) -> f64 {
        let Some([alone, _]) = self.kernel_of_all::<T, O>(ranks, rates, tile) else { return f64::INFINITY };
        rates.beside * alone + 0.5 * self.wire::<T, O>(ranks, rates) + rates.flag
    }

    /// The time of one kernel whose panels are put when their tiles are there: of the product, or until the last own tiles have what came last.
    pub(super) fn time_whole<T: ScatterOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        tile: GemmTile,
        panels: u32,
    ) -> f64 {
        let Some([alone, of_tile]) = self.kernel_of_all::<T, O>(ranks, rates, tile) else { return f64::INFINITY };
        let (shards, others) = (self.shards(ranks, panels), ranks.get() - 1);
        let count = f64::from(others * shards.panels());
        // Own tiles of two waves come last.
        let end = rates.beside * alone;
        let last = (end - 2.0 * of_tile).max(end * f64::from(others) / f64::from(ranks.get()));
        let bytes = (self.rows(ranks) * self.sizes.n * T::RESULT_BYTES) as f64 / f64::from(shards.panels());
        // A tile is counted eight steps into the next one. Waits and flags go beside copies, on three streams; in a graph, which has one, they do not.
        let landed = of_tile * (8.0 * 64.0 * f64::from(ranks.get()) / self.sizes.k as f64).min(1.0);
        let ready = |number: u32| last * f64::from(number) / count + landed + rates.wait;
        let out = (1..=others * shards.panels())
            .fold(0.0_f64, |out, number| out.max(ready(number)) + rates.start + rates.put_beside * bytes / rates.put);
        // An own tile adds parts when its product is there.
        (end.max(out + rates.flag + PASSED_ON) + 0.25 * of_tile).max(rates.host.scattered + 6.0 * count)
    }

    /// The time of all copies.
    pub(super) fn wire<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates) -> f64 {
        let bytes = (self.rows(ranks) * self.sizes.n * T::RESULT_BYTES) as f64;
        f64::from(ranks.get() - 1) * (rates.start + bytes / rates.put + rates.flag)
    }

    /// The time by a method: the products of a rank's panels one after another, copies after each, and own rows as their parts come.
    pub(super) fn time<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, is_fused: bool, panels: u32) -> f64 {
        let Ok(Progress { shards, now, out, there }) = self.progress::<T, O>(ranks, rates, panels) else { return f64::INFINITY };
        let own = self.beside::<T, O>(ranks, rates, shards.extent());
        let end = if is_fused {
            let each = own / f64::from(shards.panels());
            // A tile whose part is not there keeps its multiprocessor.
            there.iter().fold(now, |now, there| now.max(*there) + each)
        } else {
            now.max(out + rates.wait) + own
        };
        end.max(rates.host.scattered + 6.0 * f64::from((ranks.get() - 1) * shards.panels()))
    }

    /// The time until all ranks have all rows: own rows are multiplied a panel at a time, which is put to the others while the next is multiplied.
    pub(in crate::overlap) fn time_to_all<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, panels: u32) -> f64 {
        let Ok(progress) = self.progress::<T, O>(ranks, rates, panels) else { return f64::INFINITY };
        let (Progress { shards, mut now, mut out, there }, others) = (progress, f64::from(ranks.get() - 1));
        for (panel, there) in (0..).zip(there) {
            let rows = shards.panel(0, panel);
            let rows = rows.end - rows.start;
            now = now.max(there) + self.summed::<T, O>(ranks, rates, rows);
            let bytes = (rows * self.sizes.n * T::RESULT_BYTES) as f64;
            out = now.max(out) + rates.wait + others * (rates.start + rates.put_beside * bytes / rates.put) + rates.flag;
        }
        let calls = f64::from((ranks.get() - 1) * shards.panels()) + f64::from(shards.panels());
        (out + rates.wait).max(rates.host.sequential + 6.0 * calls)
    }

    /// The products of other members' rows, and what comes from them meanwhile.
    fn progress<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, panels: u32) -> Result<Progress> {
        self.product(ranks)?;
        let (shards, others) = (self.shards(ranks, panels), ranks.get() - 1);
        let (mut now, mut out, mut there) = (0.0_f64, 0.0_f64, vec![0.0; shards.panels() as usize]);
        for panel in (0..others).flat_map(|_| 0..shards.panels()) {
            let rows = shards.panel(0, panel);
            let rows = rows.end - rows.start;
            now += self.beside::<T, O>(ranks, rates, rows);
            let bytes = (rows * self.sizes.n * T::RESULT_BYTES) as f64;
            out = now.max(out) + rates.wait + rates.start + rates.put_beside * bytes / rates.put + rates.flag;
            // Other members' parts come as this one's go.
            there[panel as usize] = out;
        }
        Ok(Progress { shards, now, out, there })
    }

    /// The tile of the kernel that computes a product of some rows fastest.
    pub(super) fn fastest_tile<T: ScatterOperands<O>, O: 'static>(&self, rates: &Rates, product: &GemmConfig) -> Option<GemmTile> {
        let tiles = GemmTile::ALL.into_iter().filter(|tile| T::kernel(*tile, !self.transpose_b).is_some());
        let timed = tiles
            .filter_map(|tile| Some((tile, product.predicted_whole::<T, O>(tile, rates.multiprocessors.saturating_sub(self.margin))?)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(tile, _)| tile)
    }

    /// The time of a product of so many own rows, to which parts are added: tiles of one size, however few there are.
    fn summed<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, m: u64) -> f64 {
        let Ok(product) = self.product(ranks) else { return f64::INFINITY };
        let tile = self.fastest_tile::<T, O>(rates, &GemmConfig { m: self.rows(ranks), ..product });
        let time = |tile| GemmConfig { m, ..product }.predicted_whole::<T, O>(tile, rates.multiprocessors.saturating_sub(self.margin));
        tile.and_then(time).map_or(f64::INFINITY, |time| rates.beside * time)
    }

    /// The time of a product of so many rows beside puts.
    fn beside<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, m: u64) -> f64 {
        let product = self.product(ranks).ok().map(|product| GemmConfig { m, ..product });
        product.and_then(|product| product.predicted::<T, O>(rates.multiprocessors)).map_or(f64::INFINITY, |time| rates.beside * time)
    }
}

/// Times in microseconds once the products of other members' rows are done.
struct Progress {
    shards: Shards,
    /// When they are.
    now: f64,
    /// When the last one was put.
    out: f64,
    /// When the last part of each own panel is there.
    there: Vec<f64>,
}
