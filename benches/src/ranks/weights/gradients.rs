//! A rank's gradients: products that compute them, and their way to the owners of their rows.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use half::bf16 as Half;
use oxtile::comm::{HostRank, NcclCommunicator, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::sharded::{Bf16, GradientConfig, GradientScatter, WeightId};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Runtime, Stream};

use super::By;
use super::layers::{Layers, repeated};
use super::nccl::InPlace;
use crate::random::Random;
use crate::ranks::Times;
use crate::ranks::gate::Gate;
use crate::ranks::member::DEADLINE;

/// A rank's gradients of one kind of layers.
pub struct Gradients {
    compute: Stream,
    /// Of NCCL.
    reductions: Stream,
    layers: Layers,
    scatter: GradientScatter<bf16>,
    ids: Vec<WeightId>,
    /// A product for each of a layer's weights, and its operands; the largest of each serves all.
    gemms: Vec<Gemm<bf16, bf16>>,
    outputs: Buffer<bf16>,
    inputs: Buffer<bf16>,
    in_place: Option<InPlace>,
    round: SumParts<bf16, bf16>,
    pattern: Vec<Half>,
    arena: Arena,
}

impl Gradients {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, layers: Layers, has_nccl: bool) -> Result<Self> {
        let (compute, reductions) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let member = Team::all(rank.world()).member(rank.rank()).context("every rank is of the world")?;
        let weights = layers.weights();
        let bytes = GradientScatter::<bf16>::arena_bytes::<Bf16>(member.team(), &weights)? + (1 << 20);
        let arena = Arena::open(rank, ArenaOptions { backend, bytes, deadline: DEADLINE, ..ArenaOptions::default() })?;
        let scatter = GradientScatter::new::<Bf16>(&compute, &arena, &member, &weights, GradientConfig::default())?;
        let pattern = Random::new(7).normal(1 << 20);
        let product = |[rows, columns]: &[u64; 2]| {
            let config = GemmConfig { m: *rows, n: *columns, k: layers.tokens, transpose_a: true, ..GemmConfig::default() };
            Gemm::new(runtime, config)
        };
        let filled = |len: u64| Buffer::from_slice(&compute, &repeated(&pattern, 0, 0, len));
        Ok(Self {
            gemms: layers.shapes.iter().map(product).collect::<oxtile::Result<_>>()?,
            outputs: filled(layers.tokens * layers.most(|[rows, _]| rows))?,
            inputs: filled(layers.tokens * layers.most(|[_, columns]| columns))?,
            in_place: has_nccl.then(|| InPlace::new(&compute, layers, rank.world().get().into(), &pattern)).transpose()?,
            round: SumParts::new(runtime)?,
            ids: scatter.ids().collect(),
            compute,
            reductions,
            layers,
            scatter,
            pattern,
            arena,
        })
    }

    /// Whether it is of these layers.
    pub fn is_of(&self, layers: Layers) -> bool {
        self.layers == layers
    }

    /// Compares sums with what they must be where all ranks have the same gradients: those times the ranks, which is exact. The first weight and the last.
    pub fn check(&mut self, rank: &HostRank) -> Result<()> {
        let Self { compute, layers, scatter, ids, round, pattern, arena, .. } = self;
        let at_once = Buffer::<bf16>::from_slice(compute, &repeated(pattern, 0, 0, layers.largest()))?;
        scatter.open()?;
        scatter.zero_grads(compute)?;
        for (at, id) in ids.iter().enumerate().rev() {
            let [rows, columns] = layers.shape(at);
            let whole = scatter.buffer(*id, compute)?;
            round.round(compute, at_once.view().slice(0, rows * columns), whole)?;
            scatter.scatter(*id, compute, |_| Ok(()))?;
        }
        scatter.finish(compute, |_| Ok(()))?;
        arena.ticket(compute)?.wait()?;
        let ranks = rank.world().get();
        for at in [0, ids.len() - 1] {
            let [rows, columns] = layers.shape(at);
            let own = oxtile::sharded::EqualShards::<Bf16>::new(rows, rank.world()).range(rank.rank());
            let one = repeated(pattern, 0, own.start * columns, (own.end - own.start) * columns);
            let found = scatter.main_grad(ids[at])?.to_vec(compute)?;
            let is_sum = found.iter().zip(&one).all(|(found, one)| *found == ranks as f32 * one.to_f32()) && found.len() == one.len();
            ensure!(is_sum, "gradient {at} on {}: not the sum over {ranks} ranks", rank.rank());
        }
        Ok(())
    }

    /// Times steps, after one that is not timed. Products are bound before.
    pub fn round(&mut self, by: By, calls: u64, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<Times> {
        let Self { compute, reductions, layers, scatter, ids, gemms, outputs, inputs, in_place, arena, .. } = self;
        let (scatter, in_place) = (&*scatter, in_place.as_ref());
        let settle = || -> Result<()> {
            arena.ticket(compute)?.wait()?;
            comm.map_or(Ok(()), |comm| Ok(comm.synchronize(reductions)?))
        };
        let has_products = matches!(by, By::GradientProducts | By::ScatterStep | By::ReplaceStep | By::ReduceScatterStep);
        let mut bound = Vec::new();
        gate.after(DEADLINE, || {
            for at in 0..if has_products { layers.places() } else { 0 } {
                let [rows, columns] = layers.shape(at);
                let d = match (by, in_place) {
                    (By::ReduceScatterStep, Some(in_place)) => InPlace::target(in_place.whole(at), rows * columns),
                    _ => scatter.target(ids[at])?,
                };
                let (a, b) = (outputs.view().slice(0, layers.tokens * rows), inputs.view().slice(0, layers.tokens * columns));
                bound.push(gemms[at % 4].bind(compute, a, b, None, d)?);
            }
            Ok(())
        })?;
        let mut step = || -> Result<()> {
            let mut product = |at: usize| bound.get_mut(at).map_or(Ok(()), |product| Ok(product.run(compute)?));
            match by {
                By::Scatter | By::ScatterStep | By::ReplaceStep => {
                    if by == By::ReplaceStep {
                        scatter.replace_grads(compute)?;
                    }
                    for (at, id) in ids.iter().enumerate().rev() {
                        // The product is bound to what this returns.
                        scatter.buffer(*id, compute)?;
                        product(at)?;
                        scatter.scatter(*id, compute, |_| Ok(()))?;
                    }
                    Ok(scatter.finish(compute, |_| Ok(()))?)
                }
                By::GradientProducts => (0..layers.places()).rev().try_for_each(product),
                By::ReduceScatter | By::ReduceScatterStep => {
                    in_place.context("it has no buffers for NCCL")?.reductions(*layers, comm, reductions, &mut product)
                }
                _ => bail!("it is of passes"),
            }
        };
        gate.after(DEADLINE, || step().and_then(|()| settle()))?;
        let usage = compute.device().usage();
        let (begin, start) = (Instant::now(), compute.record()?);
        (0..calls).try_for_each(|_| step())?;
        let now = compute.device().usage();
        ensure!(now == usage, "steps allocate nothing, and no host waits: {usage:?} before, {now:?} after");
        compute.wait(&reductions.record()?)?;
        let end = compute.record()?;
        settle()?;
        Ok(Times { wall: begin.elapsed().as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
    }

    /// Every rank closes it together.
    pub fn close(self) -> Result<()> {
        let Self { scatter, arena, .. } = self;
        drop(scatter);
        Ok(arena.close().map_err(oxtile::Error::from)?.finish()?)
    }
}
