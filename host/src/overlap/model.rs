//! The times that gathered products take: a model of copies, flags and tiles.
//!
//! A product's time is that of [`GemmConfig`]'s model. A fused one is its tiles handed out to clusters in order of time, and each step waits until its slab is
//! there. Copies go one after another at the rate of the link, with a time to begin and a time to be told. No call takes less time than the host to enqueue it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::choice::Rates;
use super::config::{AllGatherConfig, Cut, Gathers};
use super::schedule::Schedule;
use super::table::GatherOperands;
use crate::comm::WorldSize;
use crate::gemm::{GemmConfig, GemmTile};
use crate::symmetric::PutOrder;

/// The cuts among which the model chooses.
const CUTS: [Cut; 14] = {
    const fn cut(panels: u32, slabs: u32, last_only: bool) -> Cut {
        Cut { panels, slabs, halving: false, last_only }
    }
    const fn halving(panels: u32, slabs: u32) -> Cut {
        Cut { halving: true, ..cut(panels, slabs, true) }
    }
    [
        Cut::WHOLE,
        cut(1, 2, false),
        cut(1, 4, false),
        cut(1, 4, true),
        cut(2, 1, false),
        cut(2, 2, true),
        cut(2, 4, true),
        cut(4, 1, false),
        cut(4, 2, true),
        cut(4, 4, true),
        halving(1, 3),
        halving(2, 3),
        halving(2, 4),
        halving(4, 3),
    ]
};

/// Bytes of an operand that stay in the L2 cache between tiles.
const CACHED: f64 = 50e6;

/// A fused product: its cut, its kernel's tile, its time.
pub(super) type Fused = (Cut, GemmTile, f64);

impl AllGatherConfig {
    /// The fastest cut and tile of those asked for.
    pub(super) fn fastest_fused<T: GatherOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        product: &GemmConfig,
        tiles: &[(GemmTile, &'static str)],
    ) -> Fused {
        let cuts = match self.overlap.cut {
            Some(cut) => vec![cut],
            None => CUTS.to_vec(),
        };
        let each = cuts.iter().flat_map(|cut| tiles.iter().map(move |(tile, _)| (*cut, *tile)));
        let timed = each.map(|(cut, tile)| (cut, tile, self.fused::<T, O>(ranks, rates, product, cut, tile)));
        timed.min_by(|a, b| a.2.total_cmp(&b.2)).unwrap_or((Cut::WHOLE, GemmTile::Tile128x256, f64::INFINITY))
    }

    /// When the units of each panel are there, by position and panel, where puts move so many bytes a microsecond.
    fn arrivals<T: GatherOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        put: f64,
        schedule: &Schedule,
    ) -> Vec<Vec<Vec<f64>>> {
        let (panels, units) = (schedule.cut.panels, schedule.units());
        let bytes = self.shard_bytes::<T, O>(ranks) as f64 / f64::from(panels);
        let mut there = vec![vec![vec![0.0; units as usize]; panels as usize]; schedule.members as usize];
        let all = |position: u32| {
            (0..panels).flat_map(move |panel| (0..schedule.slabs(position, panel)).map(move |slab| (position, panel, slab)))
        };
        // What is put between two signals.
        let together: Vec<Vec<_>> = match self.order::<T, O>(ranks) {
            PutOrder::ByPeer | PutOrder::InStep => (1..schedule.members).flat_map(all).map(|chunk| vec![chunk]).collect(),
            PutOrder::ByChunk => {
                let chunks: Vec<Vec<_>> = (1..schedule.members).map(|position| all(position).collect()).collect();
                let most = chunks.iter().map(Vec::len).max().unwrap_or(0);
                (0..most).map(|at| chunks.iter().filter_map(|of| of.get(at).copied()).collect()).collect()
            }
        };
        let mut now = 0.0;
        for chunks in together {
            let share = |(position, panel, slab): &(u32, u32, u32)| {
                let of = schedule.units_of(*position, *panel, *slab);
                let [start, end] = [of.start, of.end].map(|unit| (unit * schedule.unit).min(schedule.other));
                bytes * (end - start) as f64 / schedule.other.max(1) as f64 / put
            };
            // Codes and scales are two copies.
            let copies = if self.format.is_some() { 2.0 } else { 1.0 };
            now += copies * rates.start + chunks.iter().map(share).sum::<f64>() + rates.flag;
            for (position, panel, slab) in chunks {
                let of = schedule.units_of(position, panel, slab);
                there[position as usize][panel as usize][of.start as usize..of.end as usize].fill(now);
            }
        }
        there
    }

    /// The time of all copies.
    pub(super) fn wire<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates) -> f64 {
        let schedule = self.schedule::<T, O>(ranks, Cut::WHOLE);
        let there = self.arrivals::<T, O>(ranks, rates, rates.put, &schedule);
        there.into_iter().flatten().flatten().fold(0.0, f64::max)
    }

    /// The time of a fused product: tiles in order, each handed to the cluster that is free first.
    fn fused<T: GatherOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        product: &GemmConfig,
        cut: Cut,
        tile: GemmTile,
    ) -> f64 {
        let multiprocessors = rates.multiprocessors - self.overlap.margin;
        let Some(alone) = product.predicted_whole::<T, O>(tile, multiprocessors) else { return f64::INFINITY };
        let schedule = self.schedule::<T, O>(ranks, cut);
        let there = self.arrivals::<T, O>(ranks, rates, self.put_beside::<T, O>(ranks, rates, alone), &schedule);
        let ([rows, _], cluster) = tile.size();
        let (tiles, clusters) = (tile.count([product.m, product.n]), (u64::from(multiprocessors) / cluster).max(1));
        let of_tile = alone / tiles.div_ceil(clusters) as f64 * self.beside::<T, O>(ranks, rates, alone);
        let columns = (tiles / product.m.div_ceil(rows * cluster).max(1)) as u32;
        // Where the sum is gathered, every tile waits for one shard after another, from the own one on.
        let waits: Vec<Vec<f64>> = match self.gathers {
            Gathers::Rows => {
                let of = |tile: &u32| {
                    let panels: Vec<_> = schedule.needs(0, u64::from(tile >> 16) * rows * cluster, rows * cluster).collect();
                    let last = |unit: usize| {
                        panels.iter().map(|(position, panel)| there[*position as usize][*panel as usize][unit]).fold(0.0, f64::max)
                    };
                    (0..schedule.units() as usize).map(last).collect()
                };
                schedule.tiles(0, rows * cluster, columns).iter().map(of).collect()
            }
            Gathers::SumOfA | Gathers::SumOfB => vec![there.iter().flatten().map(|times| times[0]).collect(); tiles as usize],
        };
        // Tiles that wait for other chunks read the operand that is not gathered again.
        let arrivals = 1 + waits.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let bytes = (product.n * product.k * T::BYTES) as f64;
        let reading = if bytes > CACHED { arrivals as f64 * bytes / rates.read } else { 0.0 };
        let mut free: BinaryHeap<_> = (0..clusters).map(|_| Reverse(0_u64)).collect();
        let mut end = 0;
        for waits in waits {
            let Some(Reverse(now)) = free.pop() else { break };
            let part = of_tile / waits.len() as f64;
            let now = waits.iter().fold(now as f64 / 1000.0, |now, there| now.max(*there) + part);
            let now = (now * 1000.0) as u64;
            end = end.max(now);
            free.push(Reverse(now));
        }
        (end as f64 / 1000.0 + 2.0).max(reading)
    }

    /// How much longer a product takes whose beginning is beside puts.
    fn beside<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, alone: f64) -> f64 {
        1.0 + (rates.beside - 1.0) * (self.wire::<T, O>(ranks, rates) / alone).min(1.0)
    }

    /// Bytes a microsecond of puts, part of whose time a product runs.
    fn put_beside<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, alone: f64) -> f64 {
        let share = (alone / self.wire::<T, O>(ranks, rates)).min(1.0);
        rates.put / (1.0 + (rates.put_beside - 1.0) * share)
    }

    /// The time of a product for each shard, of which all are taken to be beside puts.
    pub(super) fn chunked<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, product: &GemmConfig) -> Option<f64> {
        let schedule = self.schedule::<T, O>(ranks, Cut::WHOLE);
        let one = GemmConfig { m: schedule.extent(), ..*product }.predicted::<T, O>(rates.multiprocessors)?;
        let put = self.put_beside::<T, O>(ranks, rates, one * f64::from(ranks.get()));
        let there = self.arrivals::<T, O>(ranks, rates, put, &schedule);
        let times = there.iter().enumerate();
        Some(times.fold(0.0, |now: f64, (position, times)| {
            now.max(times[0][0] + if position == 0 { 0.0 } else { rates.wait }) + one * rates.beside
        }))
    }

    /// The fastest cut of an operand that is dequantized a panel at a time, and the time with it: of a product after the whole gather, or for each shard. None of an operand that travels as its elements, and
    /// where there is no model.
    pub(super) fn pieces<T: GatherOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        product: &GemmConfig,
        is_chunked: bool,
    ) -> Option<(Cut, f64)> {
        self.format?;
        let alone = product.predicted::<T, O>(rates.multiprocessors)?;
        let shard = GemmConfig { m: product.m.div_ceil(ranks.get().into()), ..*product };
        let of_shard = if is_chunked { shard.predicted::<T, O>(rates.multiprocessors)? * rates.beside } else { 0.0 };
        let after = match (is_chunked, ranks) {
            (true, _) => 0.0,
            (false, WorldSize::ONE) => alone,
            (false, _) => alone * rates.beside,
        };
        let put = self.put_beside::<T, O>(ranks, rates, if is_chunked { alone } else { 0.0 });
        let dequantize = self.dequantize(ranks, rates);
        let time = |cut: Cut| {
            let schedule = self.schedule::<T, O>(ranks, cut);
            let there = self.arrivals::<T, O>(ranks, rates, put, &schedule);
            let of_panel = dequantize / f64::from(schedule.cut.panels);
            let shards = there.iter().skip(1);
            let arrive = |now: f64, panel: &Vec<f64>| now.max(panel.first().copied().unwrap_or(0.0) + rates.wait) + of_panel;
            shards.fold(dequantize + of_shard, |now, panels| panels.iter().fold(now, arrive) + of_shard) + after
        };
        let panels = |panels| Cut { panels, ..Cut::WHOLE };
        let cuts = self.overlap.cut.map_or([1, 2, 4].map(panels).to_vec(), |cut| vec![cut]);
        cuts.into_iter().map(|cut| (cut, time(cut))).min_by(|a, b| a.1.total_cmp(&b.1))
    }
}
