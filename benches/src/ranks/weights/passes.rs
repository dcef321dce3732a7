//! A rank's passes over weights in shards.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use half::bf16 as Half;
use oxtile::comm::{HostRank, NcclCommunicator, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Event, Runtime, Stream};
use oxtile_tile::launch::DeviceViewMut;

use super::layers::{Layers, repeated};
use super::nccl::InPlace;
use super::shards::{self, Shards};
use super::{Ahead, By};
use crate::random::Random;
use crate::ranks::Times;
use crate::ranks::gate::Gate;
use crate::ranks::member::DEADLINE;

/// A rank's weights of one kind of layers.
pub struct Passes {
    runtime: Runtime,
    compute: Stream,
    /// Of NCCL.
    gathers: Stream,
    layers: Layers,
    shards: Box<dyn Shards>,
    /// A product for each of a layer's weights, its operands and result; the largest of each serves all.
    gemms: Vec<Gemm<bf16, bf16>>,
    input: Buffer<bf16>,
    resident: Buffer<bf16>,
    output: Buffer<bf16>,
    in_place: Option<InPlace>,
    pattern: Vec<Half>,
    arena: Arena,
}

impl Passes {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, layers: Layers, has_nccl: bool) -> Result<Self> {
        let (compute, gathers) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let member = Team::all(rank.world()).member(rank.rank()).context("every rank is of the world")?;
        let bytes = shards::arena_bytes(&member, layers)? + (1 << 20);
        let arena = Arena::open(rank, ArenaOptions { backend, bytes, deadline: DEADLINE, ..ArenaOptions::default() })?;
        let pattern = Random::new(7).normal(1 << 20);
        let product = |[n, k]: &[u64; 2]| {
            let config = GemmConfig { m: layers.tokens, n: *n, k: *k, transpose_b: true, ..GemmConfig::default() };
            Gemm::new(runtime, config)
        };
        let filled = |len: u64| Buffer::from_slice(&compute, &repeated(&pattern, 0, 0, len));
        let in_place = has_nccl.then(|| InPlace::new(&compute, layers, rank.world().get().into(), &pattern)).transpose()?;
        let (gemms, input) =
            (layers.shapes.iter().map(product).collect::<oxtile::Result<_>>()?, filled(layers.tokens * layers.most(|[_, k]| k))?);
        let (resident, output) = (filled(layers.largest())?, Buffer::uninitialised(&compute, layers.tokens * layers.most(|[n, _]| n))?);
        // Last: from the first publish on streams wait for other ranks.
        let shards = shards::published(&compute, &arena, &member, layers, &pattern)?;
        let [taken, planned] = shards.slots();
        ensure!(taken == planned, "the slots took {taken} bytes, {planned} were planned");
        Ok(Self { runtime: runtime.clone(), compute, gathers, layers, shards, gemms, input, resident, output, in_place, pattern, arena })
    }

    /// Whether it is of these layers.
    pub fn is_of(&self, layers: Layers) -> bool {
        self.layers == layers
    }

    /// Compares what is pulled with the cast of the whole: the first weight and the last.
    pub fn check(&mut self, rank: &HostRank) -> Result<()> {
        self.shards.check(&self.runtime, &self.compute, &self.pattern).with_context(|| format!("on {}", rank.rank()))
    }

    /// Times passes, after one that is not timed. Products are bound before.
    pub fn round(&mut self, by: By, calls: u64, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<Times> {
        let Self { compute, gathers, layers, shards, gemms, input, resident, output, in_place, arena, .. } = self;
        let settle = || -> Result<()> {
            arena.ticket(compute)?.wait()?;
            comm.map_or(Ok(()), |comm| Ok(comm.synchronize(gathers)?))
        };
        let (ahead, has_products) = match by {
            By::Pass(ahead) | By::Waits(ahead, _) => (ahead, true),
            By::Products | By::NcclPass => (Ahead::One, true),
            By::PullsByTwo => (Ahead::OneByTwo, false),
            _ => (Ahead::One, false),
        };
        let places = shards.places(ahead);
        let in_place = in_place.as_ref();
        let address = output.view_mut().address();
        let mut bound = Vec::new();
        gate.after(DEADLINE, || {
            for at in 0..if has_products { layers.places() } else { 0 } {
                let [n, k] = layers.shape(at);
                // Products of narrow weights are those of one that is there: what they take beside pulls is measured.
                let weight = match (by, &places, in_place) {
                    (By::Pass(_) | By::Waits(..), Some(places), _) => places.forward(at)?[0].data.view(),
                    (By::NcclPass, _, Some(in_place)) => in_place.whole(at).view(),
                    _ => resident.view(),
                };
                // SAFETY: the results lie there while the products are bound; each is overwritten by the next one, on one stream, and none is read.
                let d = unsafe { DeviceViewMut::from_raw(address, layers.tokens * n, output.view().access("results").owner) };
                bound.push(gemms[at % 4].bind(compute, input.view().slice(0, layers.tokens * k), weight.slice(0, n * k), None, d)?);
            }
            Ok(())
        })?;
        let mut waits = Vec::new();
        let mut pass = |waits: &mut Vec<[Event; 2]>| -> Result<()> {
            let mut product = |at: usize| bound.get_mut(at).map_or(Ok(()), |product| Ok(product.run(compute)?));
            match by {
                By::Pulls | By::PullsByTwo | By::Pass(_) | By::Issue => shards.pass(ahead, compute, &mut product),
                By::Waits(_, waited) => {
                    waits.extend(shards.waits(ahead, waited, compute, &mut product)?);
                    Ok(())
                }
                By::Products => (0..layers.places()).try_for_each(&mut product),
                By::Nccl | By::NcclPass => {
                    in_place.context("it has no buffers for NCCL")?.gathers(*layers, comm, [compute, gathers], &mut product)
                }
                _ => bail!("it is of gradients"),
            }
        };
        gate.after(DEADLINE, || pass(&mut waits).and_then(|()| settle()))?;
        waits.clear();
        let usage = compute.device().usage();
        let (begin, start) = (Instant::now(), compute.record()?);
        (0..calls).try_for_each(|_| pass(&mut waits))?;
        let issued = begin.elapsed();
        let now = compute.device().usage();
        ensure!(now == usage, "passes allocate nothing, and no host waits: {usage:?} before, {now:?} after");
        compute.wait(&gathers.record()?)?;
        let end = compute.record()?;
        settle()?;
        let wall = if by == By::Issue { issued } else { begin.elapsed() };
        let waited = || waits.iter().map(|[came, end]| Ok(end.elapsed_since(came)?.as_secs_f64())).sum::<Result<f64>>();
        let device = if matches!(by, By::Waits(..)) { waited()? } else { end.elapsed_since(&start)?.as_secs_f64() };
        Ok(Times { wall: wall.as_secs_f64() * 1e3, device: device * 1e3, ..Times::default() })
    }

    /// Every rank closes it together.
    pub fn close(self) -> Result<()> {
        let Self { shards, arena, .. } = self;
        drop(shards);
        Ok(arena.close().map_err(oxtile::Error::from)?.finish()?)
    }
}
