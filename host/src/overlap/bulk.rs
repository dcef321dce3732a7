//! Calls in two halves: what is gathered or scattered travels beside products that need nothing of it.
//!
//! This is the *bulk* form of overlap. In the backward pass of a column-parallel layer, whose input is sharded by tokens, the input is gathered again while the gradient of the input is multiplied,
//! and that one is scattered while the gradient of the weight is multiplied:
//!
//! ```text
//! dw.copy_shard(stream, &x)?;
//! let gathering = dw.begin(stream)?;   // the shards of x travel
//! let scattering = dx.begin(stream)?;  // multiplies the other members' rows of dx = dz W, which travel after x
//! gathering.finish()?;                 // waits for x, multiplies dw = dz^T x
//! scattering.finish()?;                // multiplies the own rows of dx, and adds those that came
//! ```
//!
//! The first product needs nothing that was gathered, and the second nothing that is scattered; so both are plain products, and no kernel waits ([`Method::Sequential`]). Copies go by the stream of the
//! [memory](super::OverlapMemory), which is best [of high priority](crate::Device::urgent_stream), and take no multiprocessor: no margin is needed. A memory has two places, so at most two calls are under way.

use std::fmt;

use oxtile_tile::num::Pod;

use super::call::GatheredProduct;
use super::choice::Rates;
use super::config::AllGatherConfig;
use super::memory::{Begun, Inner};
use super::scattered::{ReduceScatterConfig, ScatterCall, ScatterMethod, ScatterOperands};
use super::table::GatherOperands;
use crate::comm::WorldSize;
use crate::runtime::{Result, Stream};

/// A gathered product whose shards travel; begun by [`GatheredProduct::begin`]. The gathered operand is read by [`finish`](Self::finish) alone.
///
/// One that is dropped and not finished keeps its place: the call that would take it next is refused, and the other members, which wait for this one, name it when their deadline is over. One that is dropped
/// in the capture in which it was begun gives its place free: the capture must be given up.
#[must_use = "the product is enqueued by `finish`, and the other members wait for it"]
pub struct Gathering<'c, 'a, T: GatherOperands<O>, O: Pod> {
    product: &'c mut GatheredProduct<'a, T, O>,
    compute: &'c Stream,
    begun: UnderWay,
}

impl<'c, 'a, T: GatherOperands<O>, O: Pod> Gathering<'c, 'a, T, O> {
    pub(super) fn new(product: &'c mut GatheredProduct<'a, T, O>, compute: &'c Stream, begun: Begun) -> Self {
        Self { product, compute, begun: UnderWay(Some(begun)) }
    }

    /// Multiplies what the others put here, once it is there, and lets them write again, after the work on the stream so far. Nothing is waited for on the host.
    ///
    /// # Errors
    /// As [`GatheredProduct::run`]; [`Error::NotCapturable`](crate::Error::NotCapturable) where one half is captured and the other is not: nothing is enqueued then, and the place is kept.
    pub fn finish(mut self) -> Result<()> {
        const WHAT: &str = "Gathering::finish";
        let begun = self.begun.of(|begun| self.product.memory().check_halves(self.compute, begun, WHAT))?;
        self.product.multiply(self.compute, &begun, WHAT)
    }
}

impl<T: GatherOperands<O>, O: Pod> Drop for Gathering<'_, '_, T, O> {
    fn drop(&mut self) {
        self.begun.leave(self.product.memory());
    }
}

impl<T: GatherOperands<O>, O: Pod> fmt::Debug for Gathering<'_, '_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gathering").field("product", &self.product).finish_non_exhaustive()
    }
}

/// A scattered product of which the other members' rows travel; begun by [`ScatteredProduct::begin`](super::ScatteredProduct::begin). Own rows are written by [`finish`](Self::finish) alone.
///
/// One that is dropped and not finished keeps its place, as a dropped [`Gathering`] does.
#[must_use = "own rows are multiplied by `finish`, and the other members wait for it"]
pub struct Scattering<'c, 'a, T: ScatterOperands<O>, O: Pod> {
    call: &'c mut ScatterCall<'a, T, O>,
    compute: &'c Stream,
    begun: UnderWay,
}

impl<'c, 'a, T: ScatterOperands<O>, O: Pod> Scattering<'c, 'a, T, O> {
    pub(super) fn new(call: &'c mut ScatterCall<'a, T, O>, compute: &'c Stream, begun: Begun) -> Self {
        Self { call, compute, begun: UnderWay(Some(begun)) }
    }

    /// Multiplies own rows, and adds the others' parts in `f32` in the order of the ranks, once they are there, after the work on the stream so far. Nothing is waited for on the host.
    ///
    /// # Errors
    /// As [`ScatteredProduct::run`](super::ScatteredProduct::run); [`Error::NotCapturable`](crate::Error::NotCapturable) where one half is captured and the other is not: nothing is enqueued then, and the
    /// place is kept.
    pub fn finish(mut self) -> Result<()> {
        const WHAT: &str = "Scattering::finish";
        let begun = self.begun.of(|begun| self.call.memory().check_halves(self.compute, begun, WHAT))?;
        self.call.sum(self.compute, &begun, WHAT, true)
    }
}

impl<T: ScatterOperands<O>, O: Pod> Drop for Scattering<'_, '_, T, O> {
    fn drop(&mut self) {
        self.begun.leave(self.call.memory());
    }
}

impl<T: ScatterOperands<O>, O: Pod> fmt::Debug for Scattering<'_, '_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scattering").finish_non_exhaustive()
    }
}

/// The call that is not finished yet; none once it is.
struct UnderWay(Option<Begun>);

impl UnderWay {
    /// The call, which is finished now, if that may be done here.
    fn of(&mut self, check: impl FnOnce(&Begun) -> Result<()>) -> Result<Begun> {
        check(self.0.as_ref().expect("a call is finished once: that takes it"))?;
        Ok(self.0.take().expect("it was there"))
    }

    /// Where the capture of the call is given up, nothing of it was enqueued: its place is free.
    fn leave(&mut self, inner: &Inner) {
        if let Some(begun) = self.0.take().filter(|begun| inner.is_being_captured(begun)) {
            inner.given_up(&begun);
        }
    }
}

/// Predicted times in microseconds of a gathered and a scattered product that need nothing of each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BulkTimes {
    /// The time of both calls one after the other, each by the method that is chosen for it.
    pub apart: f64,
    /// The time of both calls begun together, the gather first, and finished in the same order.
    pub bulk: f64,
}

/// Whether a gathered and a scattered product are better begun together.
#[derive(Clone, Debug, PartialEq)]
pub struct BulkChoice {
    /// Whether the calls are better begun together.
    pub is_bulk: bool,
    /// The reason, with the predicted times.
    pub why: String,
    /// The predicted times; `None` where there is no model, and for one rank.
    pub predicted: Option<BulkTimes>,
}

impl BulkChoice {
    /// Of two products of so many ranks, on devices of these rates; `G` and `S` are the elements of their results. Depends on sizes, layouts, types and rates alone. Begun together the gathered one goes by
    /// [`Sequential`](crate::overlap::Method::Sequential).
    ///
    /// # Errors
    /// As [`AllGatherConfig::choose`] and [`ReduceScatterConfig::choose`].
    pub fn of<T, G, S>(gathered: &AllGatherConfig, scattered: &ReduceScatterConfig, ranks: WorldSize, rates: &Rates) -> Result<Self>
    where
        T: GatherOperands<G> + ScatterOperands<S>,
        G: 'static,
        S: 'static,
    {
        let (gather, scatter) = (gathered.choose::<T, G>(ranks, rates)?, scattered.choose::<T, S>(ranks, rates)?);
        let of_gather = gather.predicted.and_then(|times| times.times().into_iter().find(|(method, _)| *method == gather.method));
        let of_scatter = scatter.predicted.of(scatter.method).unwrap_or(f64::INFINITY);
        let (Some(predicted), Some((_, of_gather))) = (gather.predicted, of_gather) else {
            return Ok(Self { is_bulk: false, why: "there is no model of the gathered product".to_owned(), predicted: None });
        };
        if ranks == WorldSize::ONE {
            return Ok(Self { is_bulk: false, why: "one rank gathers and scatters nothing".to_owned(), predicted: None });
        }
        let others = f64::from(ranks.get() - 1);
        let (own, parts) = (scatter.predicted.product * rates.beside / f64::from(ranks.get()), others * f64::from(scatter.panels));
        // Other members' rows, which travel after what is gathered, and the last of which after all are multiplied; or with it, stored by the kernel that multiplies them.
        let both = predicted.wire + scatter.predicted.wire;
        let is_direct = scatter.method == ScatterMethod::Direct;
        let sent = if is_direct { both.max(others * own) } else { others * own };
        let out = if is_direct { sent } else { both.max(sent + rates.wait + scatter.predicted.wire / parts) };
        // Then the product of what was gathered, and own rows.
        let multiplied = sent.max(predicted.wire + rates.wait) + predicted.product * rates.beside;
        let bulk = (multiplied.max(out + rates.wait) + own).max(rates.host.sequential * 2.0);
        let times = BulkTimes { apart: of_gather + of_scatter, bulk };
        let is_bulk = times.bulk < 0.98 * times.apart;
        let why = format!("{:.1} us predicted begun together, {:.1} one after the other", times.bulk, times.apart);
        Ok(Self { is_bulk, why, predicted: Some(times) })
    }
}

impl fmt::Display for BulkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", if self.is_bulk { "begun together" } else { "one after the other" }, self.why)
    }
}

#[cfg(test)]
mod tests {
    use oxtile_tile::num::bf16;

    use super::*;
    use crate::overlap::{Gathers, Global};

    /// The gradients of a column-parallel layer.
    fn choose(tokens: u64, width: u64, hidden: u64, ranks: u32) -> BulkChoice {
        let gathered = AllGatherConfig::new(Global { m: hidden, n: width, k: tokens });
        let gathered = AllGatherConfig { gathers: Gathers::SumOfB, transpose_a: true, ..gathered };
        let scattered = ReduceScatterConfig::new(Global { m: tokens, n: width, k: hidden });
        BulkChoice::of::<bf16, f32, bf16>(&gathered, &scattered, WorldSize::new(ranks).unwrap(), &Rates::H200).unwrap()
    }

    #[test]
    fn bulk_takes_little_longer_than_the_products_where_they_take_longer_than_the_wire() {
        for ranks in [2, 4] {
            let choice = choose(8192, 8192, 8192 * u64::from(ranks), ranks);
            let BulkTimes { apart, bulk } = choice.predicted.unwrap();
            let gemm = crate::gemm::GemmConfig { m: 8192, n: 8192, k: 8192, ..Default::default() };
            let alone = gemm.predicted::<bf16, bf16>(132).unwrap() + gemm.predicted::<bf16, f32>(132).unwrap();
            assert!((alone..1.06 * alone).contains(&bulk), "{choice}: {alone}");
            assert!(apart > alone && choice.is_bulk == (bulk < 0.98 * apart), "{choice}");
        }
        assert_eq!(choose(8192, 8192, 8192, 1).predicted, None);
    }
}
