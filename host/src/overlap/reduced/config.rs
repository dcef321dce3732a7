//! What is computed, by which method, and why.

use std::fmt;

use oxtile_kernels::all_reduce::VECTOR;
use oxtile_kernels::sum_parts::Summed;

use super::mailbox::{MOST_BYTES, ReduceOperands};
use crate::comm::WorldSize;
use crate::gemm::{Activation, GemmConfig};
use crate::overlap::choice::Rates;
use crate::overlap::scattered::ScatterMethod;
use crate::overlap::scattered::{ReduceScatterConfig, ScatterOperands};
use crate::overlap::sizes::Global;
use crate::runtime::{Error, Result};

/// A product whose sum all ranks get: `D = activation(alpha * (A B) + bias)`. Begin with [`new`](Self::new).
///
/// Each rank has `k / ranks` columns of `A`, for all `m` rows, and the same rows of `B`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllReduceConfig {
    /// Over all ranks.
    pub sizes: Global,
    /// Whether `B` is stored as its transpose, `[n, k]`.
    pub transpose_b: bool,
    /// Factor of the whole sum.
    pub alpha: f32,
    /// What comes last, after the bias: of whole sums.
    pub activation: Activation,
    /// The method; none: [the fastest by the model](Self::choose).
    pub method: Option<AllReduceMethod>,
    /// Parts of a rank's rows, which travel one after another, at most [`ReduceScatterConfig::MOST_PANELS`]; none: as the model finds best. Each has a multiple of 256 rows, so that there may be fewer.
    pub panels: Option<u32>,
    /// Multiprocessors that a fused product leaves to other kernels, such as NCCL's.
    pub margin: u32,
}

/// How a product and an all-reduce are done together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllReduceMethod {
    /// Each rank sums some rows, a panel at a time: a kernel waits for the parts of a panel, and its finished rows travel to all ranks while the next panel is multiplied.
    Fused,
    /// Each rank sums some rows, once all parts are there, and then puts them to all ranks.
    Sequential,
    /// The plain product, then one launch a rank, in which each rank stores its part at all others and sums all of them: for results of 256 KiB at most, such as those of decoding.
    OneShot,
}

/// How a product is done.
#[derive(Clone, Debug, PartialEq)]
pub struct AllReduceChoice {
    /// The method.
    pub method: AllReduceMethod,
    /// Parts of a rank's rows, which travel one after another.
    pub panels: u32,
    /// Why this method.
    pub why: String,
    /// The methods that cannot be taken, each with the reason.
    pub refused: Vec<(AllReduceMethod, String)>,
    /// Predicted times in microseconds.
    pub predicted: AllReduceTimes,
}

/// Predicted times in microseconds; none for a method that is refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllReduceTimes {
    /// The product of one rank, alone.
    pub product: f64,
    /// The copies alone, of parts and of finished rows.
    pub wire: f64,
    /// [`AllReduceMethod::Fused`].
    pub fused: Option<f64>,
    /// [`AllReduceMethod::Sequential`].
    pub sequential: Option<f64>,
    /// [`AllReduceMethod::OneShot`].
    pub one_shot: Option<f64>,
}

impl AllReduceTimes {
    fn of(&self) -> [(AllReduceMethod, Option<f64>); 3] {
        [(AllReduceMethod::Sequential, self.sequential), (AllReduceMethod::Fused, self.fused), (AllReduceMethod::OneShot, self.one_shot)]
    }
}

impl AllReduceConfig {
    /// The product of row-major operands, and nothing after it.
    pub fn new(sizes: Global) -> Self {
        Self { sizes, transpose_b: false, alpha: 1.0, activation: Activation::Identity, method: None, panels: None, margin: 0 }
    }

    /// What one rank multiplies: all rows, its part of the sum.
    ///
    /// # Errors
    /// As [`Global::local`].
    pub fn product(&self, ranks: WorldSize) -> Result<GemmConfig> {
        self.scattered(ScatterMethod::Fused).product(ranks)
    }

    /// The bytes that the other ranks' parts take of an [`OverlapMemory`](crate::overlap::OverlapMemory): none of a small sum by [`AllReduceMethod::OneShot`].
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn bytes<T: ScatterOperands<O>, O: 'static>(&self, ranks: WorldSize) -> Result<u64> {
        match self.method {
            Some(AllReduceMethod::OneShot) => Ok(0),
            _ => self.scattered(ScatterMethod::Fused).bytes::<T, O>(ranks),
        }
    }

    /// The bytes of the result in an [`AllReduceMemory`](super::AllReduceMemory).
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn result_bytes<O>(&self) -> Result<u64> {
        let (Global { m, n, .. }, element_bytes) = (self.sizes, size_of::<O>() as u64);
        let bytes = m.checked_mul(n).and_then(|len| len.checked_mul(element_bytes));
        bytes.ok_or(Error::TooLarge { what: "AllReduceConfig", count: m.saturating_mul(n), element_bytes })
    }

    /// The product and reduce-scatter that comes first.
    pub(super) fn scattered(&self, method: ScatterMethod) -> ReduceScatterConfig {
        let Self { sizes, transpose_b, alpha, activation, panels, margin, .. } = *self;
        ReduceScatterConfig { sizes, transpose_b, alpha, beta: 0.0, activation, method: Some(method), panels, margin }
    }

    /// How the product is done by so many ranks, on devices of these rates. Depends on sizes, layout, types and rates alone.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes that the ranks do not divide, for a method that cannot do the product, or where none can, with the reasons.
    pub fn choose<T: ReduceOperands<O>, O: Summed>(&self, ranks: WorldSize, rates: &Rates) -> Result<AllReduceChoice> {
        let invalid = |why: String| Error::Invalid { what: "AllReduceConfig", why };
        self.activation.check_alone().map_err(invalid)?;
        let (product, others) = (self.product(ranks)?, f64::from(ranks.get() - 1));
        let alone = product.predicted::<T, O>(rates.multiprocessors).unwrap_or(0.0);
        let bytes = self.result_bytes::<O>()?;
        let by = |method: ScatterMethod| self.scattered(method).choose::<T, O>(ranks, rates).map_err(|error| error.to_string());
        let (fused, sequential) = (by(ScatterMethod::Fused), by(ScatterMethod::Sequential));
        let one_shot = self.takes_one_shot(bytes);
        let cuts = self.panels.map_or(vec![1, 2, 3, 4, 6, 8], |panels| vec![panels]);
        let cuts = cuts.into_iter().map(|panels| (panels, self.scattered(ScatterMethod::Fused).time_to_all::<T, O>(ranks, rates, panels)));
        let (panels, fused_time) = fewest(cuts.collect());
        let all_rows = bytes as f64 / f64::from(ranks.get());
        let to_all = others * (rates.start + all_rows / rates.put) + rates.flag + 2.0 * rates.wait;
        let predicted = AllReduceTimes {
            product: alone,
            wire: 2.0 * others * (all_rows / rates.put),
            fused: fused.is_ok().then_some(fused_time),
            sequential: sequential.as_ref().ok().map(|choice| choice.predicted.sequential + to_all + TURNS),
            one_shot: one_shot.is_ok().then(|| alone + rates.one_shot + others * bytes as f64 / rates.put),
        };
        let refusals = [
            (AllReduceMethod::Fused, fused.err()),
            (AllReduceMethod::Sequential, sequential.as_ref().err().cloned()),
            (AllReduceMethod::OneShot, one_shot.err()),
        ];
        let refused: Vec<_> = refusals.into_iter().filter_map(|(method, why)| Some((method, why?))).collect();
        let (method, why) = match self.method {
            Some(method) => match refused.iter().find(|(refused, _)| *refused == method) {
                Some((_, why)) => return Err(invalid(format!("{method:?} cannot do it: {why}"))),
                None => (method, "it is asked for".to_owned()),
            },
            None => {
                let times = predicted.of().into_iter().filter_map(|(method, time)| Some((method, time?)));
                let Some((method, time)) = times.min_by(|a, b| a.1.total_cmp(&b.1)) else {
                    let whys: Vec<_> = refused.iter().map(|(method, why)| format!("not {method:?}: {why}")).collect();
                    return Err(invalid(format!("no method takes it; sum by a communicator's all_reduce. {}", whys.join("; "))));
                };
                (method, format!("{time:.1} us predicted, of a product of {alone:.1} and copies of {:.1}", predicted.wire))
            }
        };
        let panels = match (method, &sequential) {
            (AllReduceMethod::Fused, _) => self.scattered(ScatterMethod::Fused).shards(ranks, panels).panels(),
            (AllReduceMethod::Sequential, Ok(choice)) => choice.panels,
            _ => 1,
        };
        Ok(AllReduceChoice { method, panels, why, refused, predicted })
    }

    fn takes_one_shot(&self, bytes: u64) -> Result<(), String> {
        let n = self.sizes.n;
        if bytes > MOST_BYTES {
            return Err(format!("one launch sums {MOST_BYTES} bytes at most, and the result has {bytes}: take Fused or Sequential"));
        }
        if !n.is_multiple_of(VECTOR.into()) {
            return Err(format!("n is {n}, and no multiple of {VECTOR}: sum by a communicator's all_reduce"));
        }
        Ok(())
    }
}

/// Microseconds that [`AllReduceMethod::Sequential`] takes beyond its parts, from one to the next: without them 46 of 134 shapes on two H200s took it where the fused product was
/// sooner, by up to 45 (`overlap_shapes_reduced_two_h200_8275a8f2.json`).
const TURNS: f64 = 25.0;

/// The fewest panels that take little longer than the fastest, in rising order: of launches and copies that are shorter and more the model knows too little.
fn fewest(cuts: Vec<(u32, f64)>) -> (u32, f64) {
    const LITTLE: f64 = 1.05;
    let least = cuts.iter().map(|(_, time)| *time).fold(f64::INFINITY, f64::min);
    cuts.into_iter().find(|(_, time)| *time <= LITTLE * least).unwrap_or((1, f64::INFINITY))
}

impl fmt::Display for AllReduceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, panels, why, refused, predicted } = self;
        write!(f, "{method:?}: {why}")?;
        if *method != AllReduceMethod::OneShot {
            write!(f, "\n  {panels} panels a rank")?;
        }
        let others = predicted.of().into_iter().filter(|(other, _)| other != method);
        others
            .filter_map(|(other, time)| Some((other, time?)))
            .try_for_each(|(other, time)| write!(f, "\n  {other:?}: {time:.1} us predicted"))?;
        refused.iter().try_for_each(|(method, why)| write!(f, "\n  not {method:?}: {why}"))
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
        let (alpha, activation) = (1.0, Activation::Identity);
        let expected = AllReduceConfig { sizes, transpose_b: false, alpha, activation, method: None, panels: None, margin: 0 };
        assert_eq!(AllReduceConfig::new(sizes), expected);
    }

    #[test]
    fn large_products_are_fused_and_those_of_decoding_take_one_launch() {
        let choose = |m, ranks| {
            let config = AllReduceConfig::new(Global { m, n: 8192, k: 8192 });
            config.choose::<bf16, bf16>(WorldSize::new(ranks).unwrap(), &Rates::H200).unwrap()
        };
        for ranks in [2, 4] {
            let large = choose(8192, ranks);
            assert!(large.method == AllReduceMethod::Fused && large.panels > 1, "{large}");
            let AllReduceTimes { product, wire, fused, .. } = large.predicted;
            assert!((product.max(wire)..1.4 * product.max(wire)).contains(&fused.unwrap()), "{large}");
            assert_eq!(choose(16, ranks).method, AllReduceMethod::OneShot);
        }
    }

    /// As measured on two H200s (docs/performance/overlap.md), microseconds by panels.
    #[test]
    fn panels_fill_the_device() {
        let measured = [(2048, [(1, 276.0), (2, 257.0), (4, 358.0)]), (4096, [(2, 465.0), (3, 510.0), (4, 512.0)])];
        for (m, times) in measured {
            let choose = |panels| {
                let config = AllReduceConfig { transpose_b: true, panels, ..AllReduceConfig::new(Global { m, n: 8192, k: 8192 }) };
                config.choose::<bf16, bf16>(WorldSize::new(2).unwrap(), &Rates::H200).unwrap()
            };
            for (panels, time) in times {
                let predicted = choose(Some(panels)).predicted.fused.unwrap();
                assert!((0.9..1.2).contains(&(predicted / time)), "{m} rows, {panels} panels: {predicted} us, {time} measured");
            }
            let choice = choose(None);
            assert_eq!((choice.method, choice.panels), (AllReduceMethod::Fused, 2), "{choice}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_mend() {
        let two = WorldSize::new(2).unwrap();
        let refused = |config: AllReduceConfig| config.choose::<bf16, bf16>(two, &Rates::H200).unwrap_err().to_string();
        let config = AllReduceConfig::new(Global { m: 8192, n: 64, k: 64 });
        let large = refused(AllReduceConfig { method: Some(AllReduceMethod::OneShot), ..config });
        let expected = "one launch sums 262144 bytes at most, and the result has 1048576: take Fused or Sequential";
        assert_eq!(large, format!("AllReduceConfig: OneShot cannot do it: {expected}"));
        let odd = refused(AllReduceConfig::new(Global { m: 16, n: 60, k: 64 }));
        assert!(odd.contains("no method takes it; sum by a communicator's all_reduce"), "{odd}");
        let margin = refused(AllReduceConfig { margin: 133, ..config });
        assert!(margin.contains("a margin of 133 leaves none of 132 multiprocessors"), "{margin}");
        let uneven = refused(AllReduceConfig::new(Global { m: 16, n: 64, k: 65 }));
        assert!(uneven.contains("k is 65, which 2 ranks do not divide"), "{uneven}");
    }
}
