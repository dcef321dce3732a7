//! By which method a scattered product is done, and why.

use std::fmt;

use super::config::{ReduceScatterConfig, ScatterMethod};
use super::kernels::ScatterOperands;
use super::shards::Shards;
use crate::comm::WorldSize;
use crate::gemm::{GemmConfig, GemmTile};
use crate::overlap::choice::Rates;
use crate::overlap::config::Cut;
use crate::overlap::memory::PLACES;
use crate::overlap::schedule::check_numbered;
use crate::runtime::{Error, Result};

/// Flags of a memory that say here that panels of other ranks are there.
const SENT_FLAGS: u32 = PLACES as u32 * Cut::CHUNKS;
/// Rows of 2^16 of the smallest tiles: an entry of a list of tiles has 16 bits for each.
const MOST_ROWS: u64 = 1 << 23;

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
        check_numbered(of_own, [self.rows(ranks), product.n]).map_err(invalid)?;
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
        // On four H200s no copy was hidden: 615, 1142 and 175 us, of products of 371, 419 and 95 and copies of 269, 524 and 75.
        let whole = whole.map(|(panels, time)| (panels, if ranks.get() > 2 { time.max(alone + wire) } else { time }));
        let predicted =
            ScatterTimes { product: alone, wire, direct, whole: whole.map(|of| of.1), fused: fused.1, sequential: sequential.1 };
        if let Some((method, why)) = refused.iter().find(|(method, _)| self.method == Some(*method)) {
            return Err(invalid(format!("{method:?} is not to be had: {why}: take Fused or Sequential")));
        }
        let (method, why) = match self.method {
            Some(method) => (method, "it is asked for".to_owned()),
            None if ranks == WorldSize::ONE => (ScatterMethod::Sequential, "one rank adds nothing".to_owned()),
            None => {
                // What waits in the stream alone is taken where a kernel that waits is not clearly faster. Among four ranks `Whole` was the slowest at
                // all shapes that were measured, and `Direct` never faster than `Fused` (`overlap_scattered_four_h200_cc514996.json`): beyond two ranks both are taken where they are asked for.
                let waits: &[_] = match ranks.get() {
                    ..=2 => &[ScatterMethod::Whole, ScatterMethod::Direct, ScatterMethod::Fused],
                    _ => &[ScatterMethod::Fused],
                };
                let waits = waits.iter().copied().filter_map(|method| Some((method, predicted.of(method)?)));
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
            _ if u64::from(self.panels.unwrap_or(1)) * (ranks - 1) > u64::from(SENT_FLAGS) => {
                Err(format!("{SENT_FLAGS} flags say that panels of {} other ranks are there: take fewer panels or ranks", ranks - 1))
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
    use crate::overlap::sizes::Global;

    #[test]
    fn large_products_are_in_panels_and_of_four_ranks_never_one_kernel() {
        let of = |sizes, ranks| {
            let config = ReduceScatterConfig::new(sizes);
            config.choose::<bf16, bf16>(WorldSize::new(ranks).unwrap(), &Rates::H200).unwrap()
        };
        let choose = |m, ranks| of(Global { m, n: 8192, k: 8192 }, ranks);
        let short = of(Global { m: 16384, n: 8192, k: 4096 }, 4);
        assert!(short.method == ScatterMethod::Fused && short.panels > 1, "{short}");
        let asked =
            ReduceScatterConfig { method: Some(ScatterMethod::Whole), ..ReduceScatterConfig::new(Global { m: 16384, n: 8192, k: 4096 }) };
        assert_eq!(asked.choose::<bf16, bf16>(WorldSize::new(4).unwrap(), &Rates::H200).unwrap().method, ScatterMethod::Whole);
        for ranks in [2, 4] {
            let large = choose(8192, ranks);
            assert!(large.method == ScatterMethod::Fused && large.panels > 1, "{large}");
            let ScatterTimes { product, wire, whole, fused, .. } = large.predicted;
            assert!(whole.unwrap() > product.max(wire), "{large}");
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
        let whole = |ranks: u32| {
            let sizes = Global { m: 256 * u64::from(ranks), n: 8, k: 8 * u64::from(ranks) };
            let config = ReduceScatterConfig { method: Some(ScatterMethod::Whole), ..ReduceScatterConfig::new(sizes) };
            config.choose::<bf16, bf16>(WorldSize::new(ranks).unwrap(), &Rates::H200)
        };
        assert!(whole(33).is_ok());
        let error = whole(34).unwrap_err().to_string();
        assert!(error.contains("32 flags say that panels of 33 other ranks are there: take fewer panels or ranks"), "{error}");
        let long = ReduceScatterConfig { sizes: Global { m: 1 << 26, n: 8, k: 16 }, ..config };
        assert!(refused(long).contains("its tiles are too many to be numbered in 16 bits a side"), "{}", refused(long));
        let odd = ReduceScatterConfig { sizes: Global { m: 64, n: 64, k: 65 }, ..config };
        assert!(refused(odd).contains("k is 65, which 2 ranks do not divide"), "{}", refused(odd));
    }
}
