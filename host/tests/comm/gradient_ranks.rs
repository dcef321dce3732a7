//! Ranks whose gradients are scattered, on the virtual cluster, and what they are to find.

use std::time::Duration;

use oxtile::comm::{Member, Team};
use oxtile::kernels::sum_parts::Summed;
use oxtile::num::Float;
use oxtile::sharded::{GradientConfig, GradientScatter, Weight, WeightFormat, WeightId};
use oxtile::sum_parts::{Addend, SumParts, Summand};
use oxtile::symmetric::ArenaOptions;
use oxtile::{Buffer, Graph, HostElement, PinnedBuffer, Result, Stream};

use crate::arenas::Arenas;

/// An element of gradients.
pub trait Element: Addend + Float + HostElement<Device = Self> + Summed {}

impl<E: Addend + Float + HostElement<Device = E> + Summed> Element for E {}

/// A program of every rank.
#[derive(Clone, Debug)]
pub struct Case {
    pub ranks: u32,
    pub weights: Vec<Weight>,
    pub calls: Calls,
    pub steps: u64,
    pub seed: u64,
    /// The first rank that is called in each step; the others follow round.
    pub first: usize,
    /// Whether each step replaces the main gradients.
    pub replaces: bool,
}

/// How a step is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    Eager,
    /// By the replay of a graph of one step.
    Captured,
    /// By turns.
    Mixed,
}

pub fn options() -> ArenaOptions {
    ArenaOptions { bytes: 1 << 16, deadline: Duration::from_secs(600), ..ArenaOptions::default() }
}

pub fn member(all: &Arenas, rank: usize) -> Member {
    Team::all(all.world.size()).member(all.arenas[rank].rank()).unwrap()
}

/// Weights whose rows are divided in every way: ragged, one row, fewer rows than ranks, experts, whole vectors.
pub fn weights() -> Vec<Weight> {
    vec![
        Weight::new("ragged", [7, 5]),
        Weight::new("one row", [1, 8]),
        Weight::new("experts", [6, 3]).experts(4),
        Weight::new("blocks", [33, 16]),
        Weight::new("narrow", [5, 1]),
        Weight::new("no rows", [0, 8]),
    ]
}

/// Values of other sizes, whose sums depend on their order.
pub fn values(seed: u64, len: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * f32::from_bits((120 + (state as u32 & 15)) << 23)
    };
    (0..len).map(next).collect()
}

/// The whole gradient that a rank computes.
pub fn gradient<E: Float>(weight: &Weight, number: usize, rank: u32, step: u64) -> Vec<f32> {
    let seed = 1 + number as u64 + 100 * u64::from(rank) + 10_000 * step;
    let len = weight.experts * weight.rows * weight.columns;
    values(seed, len).into_iter().map(|value| E::from_f32(value).to_f32()).collect()
}

/// The rows of an owner among `[experts, rows, columns]`.
pub fn rows_of<F: WeightFormat>(weight: &Weight, ranks: u32, owner: u32, whole: &[f32]) -> Vec<f32> {
    let world = oxtile::comm::WorldSize::new(ranks).unwrap();
    let range = weight.shards::<F>(world).range(world.ranks().nth(owner as usize).unwrap());
    let of = |expert: u64| {
        let at = |row: u64| ((expert * weight.rows + row) * weight.columns) as usize;
        whole[at(range.start)..at(range.end)].to_vec()
    };
    (0..weight.experts).flat_map(of).collect()
}

/// What an owner's main gradient is to be: of each step, the parts of all ranks in their order, times `scale`.
pub fn expected<E: Float, F: WeightFormat>(case: &Case, number: usize, owner: u32, scale: f32) -> Vec<u32> {
    let weight = &case.weights[number];
    let part = |rank, step| rows_of::<F>(weight, case.ranks, owner, &gradient::<E>(weight, number, rank, step));
    let mut main = vec![0.0_f32; part(0, 0).len()];
    for step in 0..case.steps {
        if case.replaces {
            main.fill(0.0);
        }
        let parts: Vec<_> = (0..case.ranks).map(|rank| part(rank, step)).collect();
        for (i, main) in main.iter_mut().enumerate() {
            let sum = parts.iter().map(|part| part[i]).reduce(|sum, x| sum + x).unwrap_or(0.0);
            let scaled = scale * sum;
            *main += scaled;
        }
    }
    main.into_iter().map(f32::to_bits).collect()
}

/// What a rank has.
pub struct Side<E: Element>
where
    f32: Summand<E>,
{
    pub compute: Stream,
    pub gradients: GradientScatter<E>,
    /// What it computes, by weights.
    pub computed: Vec<Buffer<f32>>,
    /// What "computes" a gradient.
    pub product: SumParts<f32, E>,
}

impl<E: Element> Side<E>
where
    f32: Summand<E>,
{
    pub fn new<F: WeightFormat>(all: &Arenas, rank: usize, member: &Member, weights: &[Weight], config: GradientConfig) -> Result<Self> {
        let compute = all.stream(rank);
        Self::of(compute, weights, GradientScatter::new::<F>(compute, &all.arenas[rank], member, weights, config)?)
    }

    /// One that has these gradients.
    pub fn of(compute: &Stream, weights: &[Weight], gradients: GradientScatter<E>) -> Result<Self> {
        let computed = weights.iter().map(|w| Buffer::named(compute, "computed", w.experts * w.rows * w.columns)).collect::<Result<_>>()?;
        Ok(Self { product: SumParts::new(&compute.device().runtime())?, compute: compute.clone(), gradients, computed })
    }

    /// Uploads what the rank of the team computes in a step.
    pub fn upload(&mut self, weights: &[Weight], rank: u32, step: u64) -> Result<()> {
        for (number, (weight, computed)) in weights.iter().zip(&mut self.computed).enumerate() {
            let values = gradient::<E>(weight, number, rank, step);
            computed.copy_from_pinned(&self.compute, &PinnedBuffer::from_slice(&self.compute, &values)?)?;
        }
        Ok(())
    }

    /// Computes a gradient and scatters it.
    pub fn scatter(&self, id: WeightId, hook: impl FnOnce(WeightId) -> Result<()>) -> Result<()> {
        let whole = self.gradients.buffer(id, &self.compute)?;
        self.product.round(&self.compute, self.computed[id.index()].view(), whole)?;
        self.gradients.scatter(id, &self.compute, hook)
    }

    /// A step of all weights, the last one first. Returns the weights that the hook was told of.
    pub fn step(&self) -> Result<Vec<WeightId>> {
        let mut told = Vec::new();
        let mut hook = |id| {
            told.push(id);
            Ok(())
        };
        self.gradients.ids().rev().try_for_each(|id| self.scatter(id, &mut hook))?;
        self.gradients.finish(&self.compute, &mut hook)?;
        Ok(told)
    }

    /// The main gradients, as bits.
    pub fn main(&self) -> Result<Vec<Vec<u32>>> {
        let bits = |id| Ok(self.gradients.main_grad(id)?.to_vec(&self.compute)?.into_iter().map(f32::to_bits).collect());
        self.gradients.ids().map(bits).collect()
    }
}

impl Case {
    pub fn new(ranks: u32, calls: Calls) -> Self {
        Self { ranks, weights: weights(), calls, steps: 3, seed: 1, first: 0, replaces: false }
    }

    pub fn seeded(self, seed: u64) -> Self {
        Self { seed, first: seed as usize % self.ranks as usize, ..self }
    }

    fn step<E: Element>(&self, side: &Side<E>) -> Result<Vec<WeightId>>
    where
        f32: Summand<E>,
    {
        if self.replaces {
            side.gradients.replace_grads(&side.compute)?;
        }
        side.step()
    }

    /// Runs it, and compares every rank's main gradients.
    pub fn run<E: Element, F: WeightFormat>(&self) -> Result<()>
    where
        f32: Summand<E>,
    {
        let scale = 1.0 / 3.0;
        let all = Arenas::with(self.ranks, self.seed, options());
        let side = |rank| Side::<E>::new::<F>(&all, rank, &member(&all, rank), &self.weights, GradientConfig { scale, arena_bytes: None });
        let mut sides = (0..self.ranks as usize).map(side).collect::<Result<Vec<_>>>()?;
        sides.iter().try_for_each(|side| side.gradients.open())?;
        let all_in_order: Vec<_> = sides[0].gradients.ids().rev().collect();
        let mut graphs = Vec::new();
        for side in sides.iter().filter(|_| self.calls != Calls::Eager) {
            let [send, sum] = side.gradients.streams();
            graphs.push(Graph::capture(&[&side.compute, send, sum], || {
                assert_eq!(self.step(side)?, all_in_order);
                Ok::<_, oxtile::Error>(())
            })?);
        }
        for step in 0..self.steps {
            for at in 0..sides.len() {
                let rank = (at + self.first) % sides.len();
                let side = &mut sides[rank];
                side.upload(&self.weights, rank as u32, step)?;
                if self.calls == Calls::Captured || (self.calls == Calls::Mixed && step % 2 == 0) {
                    graphs[rank].replay(&side.compute)?;
                } else {
                    assert_eq!(self.step(side)?, all_in_order);
                }
            }
        }
        for (rank, side) in sides.iter().enumerate() {
            all.arenas[rank].ticket(&side.compute)?.wait()?;
            for (number, found) in side.main()?.into_iter().enumerate() {
                let expected = expected::<E, F>(self, number, rank as u32, scale);
                assert!(found == expected, "{self:?}, rank {rank}, `{}`", self.weights[number].name);
            }
        }
        drop((graphs, sides));
        all.close();
        Ok(())
    }
}
