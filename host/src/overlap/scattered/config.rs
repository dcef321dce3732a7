//! What is computed, by which method, and why.

use std::fmt;

use super::kernels::ScatterOperands;
use super::shards::Shards;
use crate::comm::WorldSize;
use crate::gemm::{Activation, GemmConfig, GemmTile};
use crate::overlap::choice::Rates;
use crate::overlap::config::Cut;
use crate::overlap::memory::PLACES;
use crate::overlap::sizes::{Global, Split};
use crate::runtime::{Error, Result};

/// Flags of a memory that say here that panels of other ranks are there.
pub(super) const SENT_FLAGS: u32 = PLACES as u32 * Cut::CHUNKS;
/// Rows of 2^16 of the smallest tiles: an entry of a list of tiles has 16 bits for each.
const MOST_ROWS: u64 = 1 << 23;

/// Microseconds that the host takes for a call without puts: of up to 384 rows of 4096 columns calls of one put took 30 to 39 on two H200s, K of 4096 and 7168 (`overlap_shapes_scattered_two_h200_97a3f4a3.json`).
const HOST: f64 = 24.0;
/// Microseconds from the last tile of a panel to its put, and from the put to the kernel that waits, beyond what each step takes: where short products wait for their last panel (the same file).
const PASSED_ON: f64 = 20.0;

/// How a product and a reduce-scatter are done together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScatterMethod {
    /// One kernel, which stores tiles of other members' rows at their owner as soon as they are there, and adds to own tiles what the others have stored here. Takes ranks whose shards are equal and whole tiles of 256 rows, in memory
    /// that lies [in one range of addresses](crate::symmetric::Capabilities::contiguous).
    ///
    /// Kernels of several ranks wait for each other: all their blocks must be resident. Beside kernels of another stream that wait for other ranks, such as NCCL's collectives or products on another memory, leave a
    /// [margin](ReduceScatterConfig::margin) for those, or take another method, which waits for copies alone; else each may hold the multiprocessors that the other one needs, until the deadline.
    Direct,
    /// One kernel of all rows. Copy engines put panels of the other members' rows as soon as their tiles are there, and own tiles wait for what the others put. Takes ranks as [`Direct`](Self::Direct) does, in any memory, and a margin beside
    /// other kernels that wait for ranks as that.
    Whole,
    /// Products of panels, which copy engines put to their owner, and a kernel of own rows, which waits for each panel before it adds it.
    Fused,
    /// The same, and the stream waits for all panels before the kernel of own rows.
    Sequential,
}

/// A product whose sum the ranks share, and of which each gets some rows: `D = activation(alpha * (A B) + beta * D + bias)`. Begin with [`new`](Self::new).
///
/// Each rank has `k / ranks` columns of `A`, for all `m` rows, and the same rows of `B`. `m` may be any: the last ranks then get fewer rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReduceScatterConfig {
    /// Over all ranks.
    pub sizes: Global,
    /// Whether `B` is stored as its transpose, `[n, k]`.
    pub transpose_b: bool,
    /// Factor of the whole sum.
    pub alpha: f32,
    /// Factor of `D` as it was: 0, which leaves it unread, or `alpha`. What it was is then a part of the sum as those of other ranks are, added last in `f32`: it is copied beside them first.
    pub beta: f32,
    /// What comes last, after the bias: of whole sums.
    pub activation: Activation,
    /// The method; none: [the fastest by the model](Self::choose).
    pub method: Option<ScatterMethod>,
    /// Parts of a rank's rows, each of which has a flag, at most [`MOST_PANELS`](Self::MOST_PANELS); none: as the model finds best. Each has a multiple of 256 rows, so that
    /// there may be fewer.
    pub panels: Option<u32>,
    /// Multiprocessors that a fused product leaves to other kernels, such as NCCL's.
    pub margin: u32,
}

/// How a scattered product is done.
#[derive(Clone, Debug, PartialEq)]
pub struct ScatterChoice {
    /// The method.
    pub method: ScatterMethod,
    /// Parts of a rank's rows, which travel one after another.
    pub panels: u32,
    /// The tile of the kernel that adds.
    pub tile: GemmTile,
    /// Why this method.
    pub why: String,
    /// The methods that cannot be taken, each with the reason.
    pub refused: Vec<(ScatterMethod, String)>,
    /// Predicted times in microseconds.
    pub predicted: ScatterTimes,
}

/// Predicted times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScatterTimes {
    /// The product of one rank, alone.
    pub product: f64,
    /// The copies alone.
    pub wire: f64,
    /// [`ScatterMethod::Direct`]; none where it is refused.
    pub direct: Option<f64>,
    /// [`ScatterMethod::Whole`]; none where it is refused.
    pub whole: Option<f64>,
    /// [`ScatterMethod::Fused`].
    pub fused: f64,
    /// [`ScatterMethod::Sequential`].
    pub sequential: f64,
}

impl ScatterTimes {
    /// That of a method.
    pub fn of(&self, method: ScatterMethod) -> Option<f64> {
        match method {
            ScatterMethod::Direct => self.direct,
            ScatterMethod::Whole => self.whole,
            ScatterMethod::Fused => Some(self.fused),
            ScatterMethod::Sequential => Some(self.sequential),
        }
    }
}

impl ReduceScatterConfig {
    /// The most panels.
    pub const MOST_PANELS: u32 = Cut::CHUNKS;

    /// The product of row-major operands, and nothing after it.
    pub fn new(sizes: Global) -> Self {
        Self { sizes, transpose_b: false, alpha: 1.0, beta: 0.0, activation: Activation::Identity, method: None, panels: None, margin: 0 }
    }

    /// What one rank multiplies: all rows, its part of the sum.
    ///
    /// # Errors
    /// As [`Global::local`].
    pub fn product(&self, ranks: WorldSize) -> Result<GemmConfig> {
        let local = self.sizes.local(ranks, Split::Sum)?;
        Ok(GemmConfig { m: local.m(), n: local.n(), k: local.k(), transpose_b: self.transpose_b, ..GemmConfig::default() })
    }

    /// Rows that each rank gets; the last ones may get fewer, or none.
    pub fn rows(&self, ranks: WorldSize) -> u64 {
        self.sizes.m.div_ceil(ranks.get().into())
    }

    /// The bytes that the other ranks' parts take of an [`OverlapMemory`](crate::overlap::OverlapMemory).
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn bytes<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize) -> Result<u64> {
        let (rows, parts) = (self.rows(ranks), u64::from(ranks.get() - 1 + self.old_parts()));
        let bytes = rows.checked_mul(self.sizes.n).and_then(|len| len.checked_mul(parts)).and_then(|len| len.checked_mul(T::RESULT_BYTES));
        bytes.ok_or(Error::TooLarge {
            what: "ReduceScatterConfig",
            count: rows.saturating_mul(self.sizes.n),
            element_bytes: T::RESULT_BYTES,
        })
    }

    /// Parts of a sum that are no other rank's: what the result was, if it is added.
    pub(super) fn old_parts(&self) -> u32 {
        u32::from(self.beta != 0.0)
    }

    pub(in crate::overlap) fn shards(&self, ranks: WorldSize, panels: u32) -> Shards {
        Shards::new(ranks.get(), self.sizes.m, panels)
    }

    /// How the product is done by so many ranks, on devices of these rates, in memory that lies in one range of addresses. Depends on sizes, layout, types and rates alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes that the ranks do not divide or that the kernels on `wgmma` do not take, and for panels, a margin or a method that cannot be, with the reason.
    pub fn choose<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates) -> Result<ScatterChoice> {
        self.choose_where::<T, O>(ranks, rates, [Ok(()), Ok(())])
    }

    /// The choice where the kernel may store at the other members, or may not, and where all rows may be one kernel.
    pub(super) fn choose_where<T: ScatterOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        [direct, whole]: [Result<(), String>; 2],
    ) -> Result<ScatterChoice> {
        let invalid = |why: String| Error::Invalid { what: "ReduceScatterConfig", why };
        if self.margin >= rates.multiprocessors {
            return Err(invalid(format!("a margin of {} leaves none of {} multiprocessors", self.margin, rates.multiprocessors)));
        }
        if self.beta != 0.0 && self.beta != self.alpha {
            let Self { alpha, beta, .. } = self;
            let mend = "what D was is a part of the sum, and has its factor: take 0 or alpha, or add D by a kernel after the product";
            return Err(invalid(format!("beta is {beta} and alpha {alpha}: {mend}")));
        }
        if let Some(panels) = self.panels.filter(|panels| !(1..=Self::MOST_PANELS).contains(panels)) {
            return Err(invalid(format!("{panels} panels: take 1 to {}", Self::MOST_PANELS)));
        }
        let product = self.product(ranks)?;
        product.takes_wgmma::<T, O>().map_err(|why| {
            invalid(format!("parts are added by kernels on wgmma: {why}; or multiply by Gemm, and sum by a communicator's reduce_scatter"))
        })?;
        let fastest = |rows| self.fastest_tile::<T, O>(rates, &GemmConfig { m: rows, ..product });
        let [of_own, of_all] = [self.rows(ranks), product.m].map(fastest);
        let (Some(of_own), Some(of_all)) = (of_own, of_all) else {
            return Err(invalid("no kernel that adds takes this layout: store B as its transpose, [n, k]".to_owned()));
        };
        let choices = self.panels.map_or(vec![1, 2, 3, 4, 6, 8], |panels| vec![panels]);
        let of = |is_fused| {
            let times = choices.iter().map(|panels| (*panels, self.time::<T, O>(ranks, rates, is_fused, *panels)));
            times.min_by(|a, b| a.1.total_cmp(&b.1)).expect("there is a choice")
        };
        let [fused, sequential] = [true, false].map(of);
        let (alone, wire) = (product.predicted::<T, O>(rates.multiprocessors).unwrap_or(0.0), self.wire::<T, O>(ranks, rates));
        let whole = whole.and_then(|()| self.why_not_whole(ranks));
        let refused = [(ScatterMethod::Direct, whole.clone().and(direct)), (ScatterMethod::Whole, whole)];
        let refused: Vec<_> = refused.into_iter().filter_map(|(method, of)| Some((method, of.err()?))).collect();
        let is_taken = |method| refused.iter().all(|(of, _)| *of != method);
        let direct = is_taken(ScatterMethod::Direct).then(|| self.time_direct::<T, O>(ranks, rates, of_all));
        let panels = self.panels.map_or_else(|| self.whole_panels(ranks), |panels| vec![panels]);
        let times = panels.into_iter().map(|panels| (panels, self.time_whole::<T, O>(ranks, rates, of_all, panels)));
        let whole = times.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|_| is_taken(ScatterMethod::Whole));
        let predicted =
            ScatterTimes { product: alone, wire, direct, whole: whole.map(|of| of.1), fused: fused.1, sequential: sequential.1 };
        if let Some((method, why)) = refused.iter().find(|(method, _)| self.method == Some(*method)) {
            return Err(invalid(format!("{method:?} is not to be had: {why}: take Fused or Sequential")));
        }
        let (method, why) = match self.method {
            Some(method) => (method, "it is asked for".to_owned()),
            None if ranks == WorldSize::ONE => (ScatterMethod::Sequential, "one rank adds nothing".to_owned()),
            None => {
                // What waits in the stream alone is taken where a kernel that waits is not clearly faster.
                let waits = [ScatterMethod::Whole, ScatterMethod::Direct, ScatterMethod::Fused];
                let waits = waits.into_iter().filter_map(|method| Some((method, predicted.of(method)?)));
                let faster = waits.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, time)| *time < 0.98 * sequential.1);
                let (method, time) = faster.unwrap_or((ScatterMethod::Sequential, sequential.1));
                (method, format!("{time:.1} us predicted, of a product of {alone:.1} and copies of {wire:.1}"))
            }
        };
        let panels = match method {
            ScatterMethod::Direct => self.panels.unwrap_or_else(|| self.whole_panels(ranks).pop().unwrap_or(1)),
            ScatterMethod::Whole => whole.map_or(1, |of| of.0),
            ScatterMethod::Fused => fused.0,
            ScatterMethod::Sequential => sequential.0,
        };
        let tile = if matches!(method, ScatterMethod::Direct | ScatterMethod::Whole) { of_all } else { of_own };
        Ok(ScatterChoice { method, panels: self.shards(ranks, panels).panels(), tile, why, refused, predicted })
    }

    /// Why all rows cannot be one kernel.
    fn why_not_whole(&self, ranks: WorldSize) -> Result<(), String> {
        let (rows, ranks) = (self.sizes.m, u64::from(ranks.get()));
        match ranks {
            1 => Err("there is one rank".to_owned()),
            _ if rows > MOST_ROWS => Err(format!("{rows} rows are more than the {MOST_ROWS} of a list of tiles")),
            _ if self.panels.is_some_and(|panels| u64::from(panels) * (ranks - 1) > u64::from(SENT_FLAGS)) => {
                Err(format!("{SENT_FLAGS} flags say that panels of other ranks are there: take fewer panels"))
            }
            _ if rows > 0 && rows.is_multiple_of(ranks * Shards::UNIT) => Ok(()),
            _ => Err(format!("{rows} rows are no multiple of {} for each of {ranks} ranks", Shards::UNIT)),
        }
    }

    /// Numbers of panels of a shard of one kernel, each of which has a flag here and at its owner.
    fn whole_panels(&self, ranks: WorldSize) -> Vec<u32> {
        let most = (SENT_FLAGS / (ranks.get() - 1).max(1)).clamp(1, Self::MOST_PANELS);
        [1, 2, 3, 4, 6, 8].into_iter().filter(|panels| *panels <= most).collect()
    }

    /// The time of the kernel of all rows alone, and of one of its tiles.
    fn kernel_of_all<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, tile: GemmTile) -> Option<[f64; 2]> {
        let (product, ([height, width], cluster)) = (self.product(ranks).ok()?, tile.size());
        let tiles = product.m.div_ceil(height * cluster) * product.n.div_ceil(width) * cluster;
        let at_once = rates.multiprocessors.saturating_sub(self.margin).max(1);
        let alone = product.predicted_whole::<T, O>(tile, at_once)?;
        Some([alone, alone / tiles.div_ceil(at_once.into()).max(1) as f64])
    }

    /// The time where tiles are stored at their owner: stores of all multiprocessors at once go at the rate of the link, half of which no product hides, as two H200s showed.
    fn time_direct<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, tile: GemmTile) -> f64 {
        let Some([alone, _]) = self.kernel_of_all::<T, O>(ranks, rates, tile) else { return f64::INFINITY };
        rates.beside * alone + 0.5 * self.wire::<T, O>(ranks, rates) + rates.flag
    }

    /// The time of one kernel whose panels are put when their tiles are there: of the product, or until the last own tiles have what came last.
    fn time_whole<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, tile: GemmTile, panels: u32) -> f64 {
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
        (end.max(out + rates.flag + PASSED_ON) + 0.25 * of_tile).max(HOST + 6.0 * count)
    }

    /// The time of all copies.
    fn wire<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates) -> f64 {
        let bytes = (self.rows(ranks) * self.sizes.n * T::RESULT_BYTES) as f64;
        f64::from(ranks.get() - 1) * (rates.start + bytes / rates.put + rates.flag)
    }

    /// The time by a method: the products of a rank's panels one after another, copies after each, and own rows as their parts come.
    fn time<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates, is_fused: bool, panels: u32) -> f64 {
        let Ok(Progress { shards, now, out, there }) = self.progress::<T, O>(ranks, rates, panels) else { return f64::INFINITY };
        let own = self.beside::<T, O>(ranks, rates, shards.extent());
        let end = if is_fused {
            let each = own / f64::from(shards.panels());
            // A tile whose part is not there keeps its multiprocessor.
            there.iter().fold(now, |now, there| now.max(*there) + each)
        } else {
            now.max(out + rates.wait) + own
        };
        end.max(HOST + 6.0 * f64::from((ranks.get() - 1) * shards.panels()))
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
    fn fastest_tile<T: ScatterOperands<O>, O: 'static>(&self, rates: &Rates, product: &GemmConfig) -> Option<GemmTile> {
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

impl fmt::Display for ScatterChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, panels, tile, why, refused, predicted } = self;
        write!(f, "{method:?}: {why}\n  own rows in tiles {tile:?}, {panels} panels a rank")?;
        let methods = [ScatterMethod::Direct, ScatterMethod::Whole, ScatterMethod::Fused, ScatterMethod::Sequential];
        let others = methods.into_iter().filter(|other| other != method).filter_map(|other| Some((other, predicted.of(other)?)));
        others.into_iter().try_for_each(|(other, time)| write!(f, "\n  {other:?}: {time:.1} us predicted"))?;
        refused.iter().try_for_each(|(method, why)| write!(f, "\n  {method:?}: refused, {why}"))
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::bf16;

    use super::*;

    /// Another default is another program: it is a line of the changelog.
    #[test]
    fn defaults_are_pinned() {
        let sizes = Global { m: 1, n: 2, k: 3 };
        let expected = ReduceScatterConfig {
            sizes,
            transpose_b: false,
            alpha: 1.0,
            beta: 0.0,
            activation: Activation::Identity,
            method: None,
            panels: None,
            margin: 0,
        };
        assert_eq!(ReduceScatterConfig::new(sizes), expected);
    }

    #[test]
    fn large_products_are_in_panels_and_short_sums_of_four_ranks_one_kernel() {
        let of = |sizes, ranks| {
            let config = ReduceScatterConfig::new(sizes);
            config.choose::<bf16, bf16>(WorldSize::new(ranks).unwrap(), &Rates::H200).unwrap()
        };
        let choose = |m, ranks| of(Global { m, n: 8192, k: 8192 }, ranks);
        let short = of(Global { m: 16384, n: 8192, k: 4096 }, 4);
        assert!(short.method == ScatterMethod::Whole && short.panels > 1, "{short}");
        for ranks in [2, 4] {
            let large = choose(8192, ranks);
            assert!(large.method == ScatterMethod::Fused && large.panels > 1, "{large}");
            let ScatterTimes { product, wire, whole, fused, .. } = large.predicted;
            assert!((product.max(wire)..1.2 * product.max(wire)).contains(&whole.unwrap()), "{large}");
            assert!((product.max(wire)..1.25 * product.max(wire)).contains(&fused), "{large}");
            // Shards of no whole tiles.
            let ragged = choose(8000, ranks);
            assert!(ragged.method == ScatterMethod::Fused && ragged.panels > 1 && ragged.predicted.whole.is_none(), "{ragged}");
            assert_eq!(choose(16, ranks).panels, 1);
        }
        assert_eq!(choose(8192, 1).method, ScatterMethod::Sequential);
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_mend() {
        let config = ReduceScatterConfig::new(Global { m: 64, n: 60, k: 64 });
        let refused =
            |config: ReduceScatterConfig| config.choose::<bf16, bf16>(WorldSize::new(2).unwrap(), &Rates::H200).unwrap_err().to_string();
        assert!(refused(config).contains("multiply by Gemm, and sum by a communicator's reduce_scatter"), "{}", refused(config));
        let sized = ReduceScatterConfig { sizes: Global { m: 64, n: 64, k: 64 }, ..config };
        assert_eq!(refused(ReduceScatterConfig { panels: Some(17), ..sized }), "ReduceScatterConfig: 17 panels: take 1 to 16");
        assert_eq!(
            refused(ReduceScatterConfig { margin: 132, ..sized }),
            "ReduceScatterConfig: a margin of 132 leaves none of 132 multiprocessors"
        );
        assert_eq!(
            refused(ReduceScatterConfig { method: Some(ScatterMethod::Direct), ..sized }),
            "ReduceScatterConfig: Direct is not to be had: 64 rows are no multiple of 256 for each of 2 ranks: take Fused or Sequential"
        );
        let scaled = refused(ReduceScatterConfig { beta: 0.5, ..sized });
        assert!(scaled.starts_with("ReduceScatterConfig: beta is 0.5 and alpha 1: what D was is a part of the sum"), "{scaled}");
        let odd = ReduceScatterConfig { sizes: Global { m: 64, n: 64, k: 65 }, ..config };
        assert!(refused(odd).contains("k is 65, which 2 ranks do not divide"), "{}", refused(odd));
    }
}
