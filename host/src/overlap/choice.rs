//! Which method a gathered product takes, and why.

use std::fmt;

use super::config::{AllGatherConfig, Cut, Gathers, Method};
use super::schedule::{Schedule, check_numbered};
use super::table::{GatherOperands, GatheredKernel};
use crate::choice::Entry;
use crate::comm::WorldSize;
use crate::gemm::{GemmConfig, GemmTile};
use crate::runtime::{Device, Error, Result};
use crate::symmetric::PutOrder;

/// What the model knows of devices and their links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes a microsecond that a put moves.
    pub put: f64,
    /// Microseconds from one put to the beginning of the next.
    pub start: f64,
    /// Microseconds from a put's end until its flag is seen.
    pub flag: f64,
    /// Microseconds by which a stream that waits begins later than what it waits for.
    pub wait: f64,
    /// How much longer a product takes beside puts, and after them than when it is done again and again on one operand.
    pub beside: f64,
    /// How much longer a put takes beside a product.
    pub put_beside: f64,
    /// Microseconds that a sum in one launch takes after the product, but for its bytes. Of 256 KiB 5.7 were measured with them, in a graph (docs/performance/overlap.md).
    pub one_shot: f64,
    /// Bytes a microsecond that a product reads of an operand which the L2 cache does not hold.
    pub read: f64,
    /// Bytes a microsecond that kernels that dequantize read and write.
    pub dequantize: f64,
    /// Microseconds of the host for a call by each method: what a call takes at least where it is not in a graph.
    pub host: HostTimes,
    /// Multiprocessors of a device.
    pub multiprocessors: u32,
}

/// Microseconds that the host takes to enqueue a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostTimes {
    /// [`Method::Fused`].
    pub fused: f64,
    /// [`Method::Chunked`].
    pub chunked: f64,
    /// [`Method::Sequential`].
    pub sequential: f64,
    /// A scattered product, but for its puts, each of which takes 6 more: of up to 384 rows of 4096 columns calls of one put took 30 to 39 on two H200s, K of 4096 and 7168 (`overlap_shapes_scattered_two_h200_97a3f4a3.json`).
    pub scattered: f64,
}

impl Rates {
    /// Measured on H200s of one host, by puts alone, by gathered products (docs/performance/overlap.md) and by kernels that dequantize (docs/performance/mxfp8.md, nvfp4.md).
    pub const H200: Self = Self {
        put: 385_000.0,
        start: 3.0,
        flag: 2.6,
        wait: 4.0,
        beside: 1.03,
        put_beside: 1.09,
        one_shot: 7.0,
        read: 3_600_000.0,
        dequantize: 4_000_000.0,
        host: HostTimes { fused: 50.0, chunked: 43.0, sequential: 37.0, scattered: 24.0 },
        multiprocessors: 132,
    };

    /// Those of [`H200`](Self::H200), on a device with its number of multiprocessors.
    pub(super) fn of(device: &Device) -> Self {
        Self { multiprocessors: device.limits().multiprocessors, ..Self::H200 }
    }
}

/// Predicted times in microseconds; none for a method that is refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    /// The product on a gathered operand, alone.
    pub product: f64,
    /// The copies alone.
    pub wire: f64,
    /// The kernels that dequantize the whole operand; 0 of one that travels as its elements.
    pub dequantize: f64,
    /// [`Method::Fused`].
    pub fused: Option<f64>,
    /// [`Method::Chunked`].
    pub chunked: Option<f64>,
    /// [`Method::Sequential`].
    pub sequential: f64,
}

/// How a gathered product is done.
#[derive(Clone, Debug, PartialEq)]
pub struct OverlapChoice {
    /// The method.
    pub method: Method,
    /// How shards are cut.
    pub cut: Cut,
    /// The order of the copies.
    pub order: PutOrder,
    /// The tile of a fused product.
    pub tile: Option<GemmTile>,
    /// Why this method.
    pub why: String,
    /// The methods that cannot be taken, each with the reason.
    pub refused: Vec<(Method, String)>,
    /// None where there is no model: for elements or devices without `wgmma`.
    pub predicted: Option<Predicted>,
}

impl AllGatherConfig {
    /// How the product is done by so many ranks, on devices of these rates. Depends on sizes, layouts, types and rates alone. What an [`Epilogue`](crate::gemm::Epilogue) launches after the product is not counted: it is the same by every method.
    ///
    /// A rank is not taken for a number of ranks:
    ///
    /// ```compile_fail,E0308
    /// # use oxtile::comm::{Rank, WorldSize};
    /// # use oxtile::num::bf16;
    /// # use oxtile::overlap::{AllGatherConfig, Global, Rates};
    /// let config = AllGatherConfig::new(Global { m: 8192, n: 8192, k: 8192 });
    /// let last = Rank::new(3, WorldSize::new(4).unwrap()).unwrap();
    /// config.choose::<bf16, bf16>(last, &Rates::H200);
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes that the ranks do not divide, a margin of all multiprocessors, more than [`Cut::MOST`] slabs, or a method
    /// that cannot do the product, with the reason.
    pub fn choose<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize, rates: &Rates) -> Result<OverlapChoice> {
        self.choose_where::<T, O>(ranks, rates, Ok(()))
    }

    /// The choice where the fused kernels can be taken, or cannot, whatever is multiplied.
    pub(super) fn choose_where<T: GatherOperands<O>, O: 'static>(
        &self,
        ranks: WorldSize,
        rates: &Rates,
        wgmma: Result<(), String>,
    ) -> Result<OverlapChoice> {
        let invalid = |why: String| Error::Invalid { what: "AllGatherConfig", why };
        self.overlap.check(rates.multiprocessors).map_err(invalid)?;
        let product = self.product(ranks)?;
        self.check_format::<T>().map_err(invalid)?;
        if let Some(format) = self.format {
            format.parts(self.gathered())?;
        }
        let has_model = wgmma.is_ok();
        let dequantizes = |format| format!("kernels that dequantize {format} would need multiprocessors that a kernel that waits holds");
        let wgmma = self.format.map_or(wgmma, |format| Err(dequantizes(format)));
        let fused = match wgmma.and_then(|()| self.find_fused::<T, O>(&product)) {
            Ok(tiles) if ranks == WorldSize::ONE => Err(format!("one rank gathers nothing, and {} would wait for nothing", tiles[0].1)),
            Ok(tiles) => Ok(self.fastest_fused::<T, O>(ranks, rates, &product, &tiles)),
            Err(why) => Err(why),
        };
        let shards_are_rows = self.shards_are_rows();
        let chunked = match self.gathers {
            _ if ranks == WorldSize::ONE => Err("one rank gathers nothing".to_owned()),
            Gathers::Rows if shards_are_rows => Ok(()),
            Gathers::Rows => Err("rows of a transposed A are no matrix without gaps: store it as [m, k]".to_owned()),
            Gathers::SumOfA | Gathers::SumOfB => Err("the parts of a sum would be added up in the result's type".to_owned()),
        };
        let alone = product.predicted::<T, O>(rates.multiprocessors).filter(|_| has_model);
        let (whole, chunked_pieces) =
            (self.pieces::<T, O>(ranks, rates, &product, false), self.pieces::<T, O>(ranks, rates, &product, true));
        let predicted = alone.map(|alone| {
            let (wire, dequantize) = (self.wire::<T, O>(ranks, rates), self.dequantize(ranks, rates) * f64::from(ranks.get()));
            let fused = fused.as_ref().ok().map(|fused| fused.2.max(rates.host.fused));
            let chunked = chunked.as_ref().ok().and_then(|()| match chunked_pieces {
                Some((_, time)) => Some(time),
                None => self.chunked::<T, O>(ranks, rates, &product),
            });
            let chunked = chunked.map(|chunked| chunked.max(rates.host.chunked));
            let sequential = match whole {
                Some((_, time)) => time.max(rates.host.sequential),
                None if ranks == WorldSize::ONE => alone,
                None => (wire + rates.wait + alone * rates.beside).max(rates.host.sequential),
            };
            Predicted { product: alone, wire, dequantize, fused, chunked, sequential }
        });
        let refusals = [(Method::Fused, fused.as_ref().err()), (Method::Chunked, chunked.as_ref().err())];
        let refused: Vec<_> = refusals.into_iter().filter_map(|(method, why)| Some((method, why?.clone()))).collect();
        let (method, why) = match self.overlap.method {
            Some(method) => match refused.iter().find(|(refused, _)| *refused == method) {
                Some((_, why)) => {
                    return Err(invalid(format!("{method:?} cannot do it: {why}; leave the method to the model, or take Sequential")));
                }
                None => (method, "it is asked for".to_owned()),
            },
            None => fastest(predicted.as_ref()),
        };
        let (cut, tile) = match (method, &fused) {
            (Method::Fused, Ok((cut, tile, _))) => (*cut, Some(*tile)),
            (Method::Chunked, _) => (chunked_pieces.map_or(self.whole_or_asked(), |(cut, _)| cut), None),
            _ => (whole.map_or(self.whole_or_asked(), |(cut, _)| cut), None),
        };
        let order = self.order::<T, O>(ranks);
        Ok(OverlapChoice { method, cut, order, tile, why, refused, predicted })
    }

    /// Shards as a stream waits for them: in one piece, but where they are dequantized in as many as are asked for.
    fn whole_or_asked(&self) -> Cut {
        self.overlap.cut.filter(|_| self.format.is_some()).unwrap_or(Cut::WHOLE)
    }

    /// Whether a shard is rows of the gathered matrix as it is stored.
    pub(super) fn shards_are_rows(&self) -> bool {
        match self.gathers {
            Gathers::Rows => !self.transpose_a,
            Gathers::SumOfA => self.transpose_a,
            Gathers::SumOfB => !self.transpose_b,
        }
    }

    /// Elements of the gathered operand along the dimension that is gathered, and along the other.
    pub(super) fn gathered(&self) -> [u64; 2] {
        let (m, n, k) = (self.sizes.m, self.sizes.n, self.sizes.k);
        match self.gathers {
            Gathers::Rows => [m, k],
            Gathers::SumOfA => [k, m],
            Gathers::SumOfB => [k, n],
        }
    }

    /// The time of the kernels that dequantize one shard.
    pub(super) fn dequantize(&self, ranks: WorldSize, rates: &Rates) -> f64 {
        let [rows, columns] = self.gathered();
        let rows = rows.div_ceil(ranks.get().into());
        let narrow = self.format.and_then(|format| format.parts([rows, columns]).ok());
        narrow.map_or(0.0, |parts| (parts.bytes as f64 + 2.0 * rows as f64 * columns as f64) / rates.dequantize)
    }

    /// The bytes that the gathered operand takes of an [`OverlapMemory`](super::OverlapMemory).
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::Invalid`] for rows that the format cannot hold.
    pub fn bytes<T: GatherOperands<O>, O: 'static>(&self) -> Result<u64> {
        let [gathered, other] = self.gathered();
        if let Some(format) = self.format {
            return Ok(format.parts([gathered, other])?.bytes);
        }
        let bytes = gathered.checked_mul(other).and_then(|len| len.checked_mul(T::BYTES));
        bytes.ok_or(Error::TooLarge { what: "AllGatherConfig", count: gathered.saturating_mul(other), element_bytes: T::BYTES })
    }

    pub(super) fn shard_bytes<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize) -> u64 {
        let [gathered, other] = self.gathered();
        let rows = gathered.div_ceil(ranks.get().into());
        match self.format.and_then(|format| format.parts([rows, other]).ok()) {
            Some(parts) => rows * (parts.row[0] + parts.row[1]),
            None => rows.saturating_mul(other).saturating_mul(T::BYTES),
        }
    }

    pub(super) fn order<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize) -> PutOrder {
        self.overlap.order.unwrap_or_else(|| PutOrder::of(self.shard_bytes::<T, O>(ranks)))
    }

    /// The schedule of a cut. Slabs are of the sum: where that is gathered, there are panels alone.
    pub(super) fn schedule<T: GatherOperands<O>, O: 'static>(&self, ranks: WorldSize, cut: Cut) -> Schedule {
        let by_sum = self.gathers != Gathers::Rows;
        // Codes and scales are of whole rows.
        let cut = if by_sum || self.format.is_some() { Cut { slabs: 1, halving: false, ..cut } } else { cut };
        Schedule::new(ranks.get(), self.gathered(), [self.shards_are_rows(), by_sum], cut, T::STEP)
    }

    /// The fused kernels that take the product, or why there is none.
    fn find_fused<T: GatherOperands<O>, O: 'static>(&self, product: &GemmConfig) -> Result<Vec<(GemmTile, &'static str)>, String> {
        let [m_major, n_major] = product.majors();
        product.takes_wgmma::<T, O>()?;
        let by_sum = self.gathers != Gathers::Rows;
        let of = |tile| {
            let decision = GatheredKernel { by_sum, tile, m_major, n_major };
            Entry::find(T::GATHERED, &decision).ok().map(|entry| (tile, entry.name))
        };
        let found: Vec<_> = GemmTile::ALL.into_iter().filter_map(of).collect();
        check_numbered(GemmTile::Tile128x128, [product.m, product.n])?;
        if found.is_empty() {
            let how = if by_sum { "gathered along the sum" } else { "gathered by rows" };
            let is_such = |entry: &&Entry<GatheredKernel, _>| entry.decision.by_sum == by_sum;
            let mut layouts: Vec<_> = T::GATHERED.iter().copied().flatten().filter(is_such).map(|entry| entry.decision.layout()).collect();
            layouts.sort_unstable();
            layouts.dedup();
            return Err(match layouts.as_slice() {
                [] => format!("no kernel that waits takes these elements {how}"),
                _ => format!("no kernel that waits takes this layout {how}: store them as {}", layouts.join(" or ")),
            });
        }
        Ok(found)
    }
}

/// The fastest method, and why.
fn fastest(predicted: Option<&Predicted>) -> (Method, String) {
    let Some(predicted) = predicted else {
        return (Method::Sequential, "there is no model of this product: no kernel on wgmma takes it".to_owned());
    };
    let (mut best, mut time) = (Method::Sequential, predicted.sequential);
    // What waits in the stream alone is taken where another method is not clearly faster.
    for (method, other) in predicted.times().into_iter().filter(|(_, other)| *other < 0.98 * predicted.sequential) {
        if other < time {
            (best, time) = (method, other);
        }
    }
    (best, format!("{time:.1} us predicted, of a product of {:.1} and copies of {:.1}", predicted.product, predicted.wire))
}

impl Predicted {
    /// The methods that have a time.
    pub(super) fn times(&self) -> Vec<(Method, f64)> {
        let times = [(Method::Fused, self.fused), (Method::Chunked, self.chunked), (Method::Sequential, Some(self.sequential))];
        times.into_iter().filter_map(|(method, time)| Some((method, time?))).collect()
    }
}

impl fmt::Display for OverlapChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, cut, order, tile, why, refused, predicted } = self;
        write!(f, "{method:?}: {why}")?;
        if let Some(tile) = tile {
            write!(f, "\n  tiles {tile:?}, shards cut {cut:?}, puts {order:?}")?;
        }
        let others = predicted.iter().flat_map(Predicted::times).filter(|(other, _)| other != method);
        others.into_iter().try_for_each(|(other, time)| write!(f, "\n  {other:?}: {time:.1} us predicted"))?;
        refused.iter().try_for_each(|(method, why)| write!(f, "\n  not {method:?}: {why}"))
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::{bf16, e4m3, f16};

    use super::super::config::OverlapConfig;
    use super::super::sizes::Global;
    use super::*;

    fn config([m, n, k]: [u64; 3]) -> AllGatherConfig {
        AllGatherConfig { transpose_b: true, ..AllGatherConfig::new(Global { m, n, k }) }
    }

    fn choose(sizes: [u64; 3], ranks: u32) -> OverlapChoice {
        config(sizes).choose::<bf16, bf16>(WorldSize::new(ranks).unwrap(), &Rates::H200).unwrap()
    }

    #[test]
    fn large_products_are_fused_and_small_ones_are_not() {
        for ranks in [2, 4, 8] {
            let large = choose([8192; 3], ranks);
            assert_eq!(large.method, Method::Fused, "{large}");
            let Predicted { product, wire, fused, sequential, .. } = large.predicted.unwrap();
            let limit = product.max(wire);
            assert!(fused.unwrap() < 1.15 * limit && sequential > 1.15 * limit, "{large}");
            let small = choose([16, 8192, 8192], ranks);
            assert_eq!(small.method, Method::Sequential, "{small}");
        }
        assert_eq!(choose([8192; 3], 1).method, Method::Sequential);
        // What the host takes to enqueue it decides: measured on two H200s (docs/performance/overlap.md).
        for sizes in [[512, 6144, 4096], [384, 6144, 4096], [128, 6144, 4096], [128, 28672, 4096]] {
            assert_eq!(choose(sizes, 2).method, Method::Sequential, "{sizes:?}");
        }
    }

    /// With as much wire as product, short slabs come last.
    #[test]
    fn the_last_slabs_are_short_where_the_wire_binds() {
        let choice = choose([16384, 2048, 8192], 2);
        assert_eq!((choice.method, choice.cut), (Method::Fused, Cut { panels: 2, slabs: 3, halving: true, last_only: true }), "{choice}");
    }

    /// Elsewhere than on Hopper nothing is predicted by the times of kernels that are not taken.
    #[test]
    fn without_wgmma_there_is_no_prediction() {
        let refusal = Err("the kernels on wgmma need sm_90".to_owned());
        let choice = config([8192; 3]).choose_where::<bf16, bf16>(WorldSize::new(4).unwrap(), &Rates::H200, refusal).unwrap();
        assert_eq!((choice.method, choice.predicted), (Method::Sequential, None));
    }

    /// More work is not predicted to take less time, and no method to be faster than what it waits for.
    #[test]
    fn times_grow_with_sizes_and_keep_their_floor() {
        for ranks in [2, 3, 4, 8] {
            let mut before = 0.0;
            for m in [64, 256, 1000, 2048, 4096, 8192, 16384] {
                let choice = choose([m, 1536 * u64::from(ranks), 8192], ranks);
                let Predicted { product, wire, fused, sequential, .. } = choice.predicted.unwrap();
                assert!(sequential >= before, "{m} rows, {ranks} ranks: {choice}");
                assert!(fused.unwrap() >= product.max(wire) * 0.97, "{m} rows, {ranks} ranks: {choice}");
                before = sequential;
            }
        }
    }

    #[test]
    fn every_refusal_has_its_reason() {
        let two = WorldSize::new(2).unwrap();
        let refused = |choice: OverlapChoice, method: Method| {
            let why = choice.refused.into_iter().find(|(refused, _)| *refused == method);
            why.unwrap_or_else(|| panic!("{method:?} is not refused")).1
        };
        let transposed = AllGatherConfig { transpose_a: true, ..config([512; 3]) };
        let transposed = transposed.choose::<bf16, bf16>(two, &Rates::H200).unwrap();
        assert_eq!(refused(transposed, Method::Chunked), "rows of a transposed A are no matrix without gaps: store it as [m, k]");
        let f32s = config([512; 3]).choose::<bf16, f32>(two, &Rates::H200).unwrap();
        assert_eq!(refused(f32s, Method::Fused), "no kernel that waits takes these elements gathered by rows");
        let portable = config([512; 3]).choose_where::<f16, f16>(two, &Rates::H200, Err("the kernels on wgmma need sm_90".into())).unwrap();
        assert_eq!((portable.method, refused(portable, Method::Fused)), (Method::Sequential, "the kernels on wgmma need sm_90".to_owned()));
        let n_major = AllGatherConfig { transpose_b: false, ..config([512; 3]) };
        let n_major = n_major.choose::<e4m3, bf16>(two, &Rates::H200).unwrap();
        let why = "no kernel that waits takes this layout gathered by rows: store them as transpose_a false, transpose_b true";
        assert_eq!(refused(n_major, Method::Fused), why);
    }

    #[test]
    fn what_is_asked_for_is_taken() {
        for method in [Method::Fused, Method::Chunked, Method::Sequential] {
            let overlap = OverlapConfig {
                method: Some(method),
                cut: Some(Cut { panels: 2, slabs: 3, halving: true, last_only: false }),
                order: Some(PutOrder::ByChunk),
                margin: 4,
            };
            let choice =
                AllGatherConfig { overlap, ..config([4096; 3]) }.choose::<bf16, bf16>(WorldSize::new(4).unwrap(), &Rates::H200).unwrap();
            assert_eq!((choice.method, choice.order), (method, PutOrder::ByChunk));
            assert_eq!(
                choice.cut,
                if method == Method::Fused { Cut { panels: 2, slabs: 3, halving: true, last_only: false } } else { Cut::WHOLE }
            );
        }
    }
}
