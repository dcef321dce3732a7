//! A rank's products whose sum the ranks share, and whose rows are scattered: by every method, and in parts.
//!
//! Everything is made before the ranks meet at the gate: memory, kernels, expected results. What borrows it is bound once a round, before the gate too.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use half::bf16 as Half;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, ReduceOp, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::overlap::{GemmReduceScatter, Global, Method, OverlapMemory, ReduceScatterConfig, ScatteredProduct};
use oxtile::runtime::Bound;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Graph, Runtime, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use serde::{Deserialize, Serialize};

use super::Times;
use super::gate::Gate;
use super::gathered::{STEP, Sizes, pattern, values};
use super::member::DEADLINE;

/// How a scattered product is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By [`Method::Fused`].
    Fused,
    /// By [`Method::Sequential`].
    Sequential,
    /// The product of all rows of a rank's part of the sum.
    ProductAlone,
    /// The product, then NCCL's reduce-scatter.
    ProductThenNccl,
    /// A peer: torch's fused operation.
    TorchFused,
    /// A peer: torch's product, then its reduce-scatter.
    TorchUnfused,
}

impl By {
    fn method(self) -> Option<Method> {
        match self {
            Self::Fused => Some(Method::Fused),
            Self::Sequential => Some(Method::Sequential),
            Self::ProductAlone | Self::ProductThenNccl | Self::TorchFused | Self::TorchUnfused => None,
        }
    }
}

/// The product of row-major rows of `A` and of `B` stored as its transpose, as a linear layer has it.
pub fn config([m, n, k]: Sizes, method: Option<Method>) -> ReduceScatterConfig {
    ReduceScatterConfig { transpose_b: true, method, ..ReduceScatterConfig::new(Global { m, n, k }) }
}

pub struct Scattered {
    runtime: Runtime,
    compute: Stream,
    out: Stream,
    pattern: Vec<Half>,
    sizes: Sizes,
    local: GemmConfig,
    gemm: Gemm<bf16, bf16>,
    a: Buffer<bf16>,
    weight: Buffer<bf16>,
    /// All rows of this rank's part of the sum, and its own rows of the whole.
    whole: Buffer<bf16>,
    d: Buffer<bf16>,
    /// The methods that were asked for, whose results were compared.
    methods: Vec<(Method, GemmReduceScatter<bf16, bf16>)>,
    /// Dropped before the arena is closed, whose memory it uses.
    room: Option<(OverlapMemory, Arena)>,
}

/// What one call is.
enum Side<'a> {
    Scattered(ScatteredProduct<'a, bf16, bf16>),
    Product(Bound<'a>),
    Nccl { comm: &'a NcclCommunicator, product: Bound<'a>, whole: DeviceView<'a, bf16>, shard: (u64, &'a Buffer<bf16>) },
}

impl Scattered {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes) -> Result<Self> {
        let (compute, out, world, me) = (rank.device().stream()?, rank.device().urgent_stream()?, rank.world(), rank.rank().index());
        let (config, pattern) = (config(sizes, None), pattern());
        let (local, needed) = (config.product(world)?, config.bytes::<bf16, bf16>(world)?);
        ensure!(local.m.is_multiple_of(world.get().into()), "{sizes:?}: ranks have equal rows here");
        let options = ArenaOptions { backend, bytes: 2 * needed + 4096, deadline: DEADLINE, ..ArenaOptions::default() };
        let arena = Arena::open(rank, options)?;
        let member = Team::all(world).member(rank.rank()).context("every rank is of the world")?;
        let memory = OverlapMemory::take(&arena, &member, needed, &out)?;
        let of = |number: usize, count: u64| Buffer::from_slice(&compute, &values(&pattern, number * STEP, count));
        let scattered = Self {
            runtime: runtime.clone(),
            sizes,
            local,
            gemm: Gemm::new(runtime, local)?,
            a: of(2 * me as usize, local.m * local.k)?,
            weight: of(2 * me as usize + 1, local.n * local.k)?,
            whole: Buffer::uninitialised(&compute, local.m * local.n)?,
            d: Buffer::uninitialised(&compute, config.rows(world) * local.n)?,
            methods: Vec::new(),
            room: Some((memory, arena)),
            compute,
            out,
            pattern,
        };
        scattered.compute.synchronize()?;
        Ok(scattered)
    }

    pub fn is_of(&self, sizes: Sizes) -> bool {
        self.sizes == sizes
    }

    /// Times calls, after one that is not timed: the ranks begin together, where it ends. Where a rank fails, the others wait for it until the deadline.
    pub fn round(&mut self, by: By, calls: u64, rank: &HostRank, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<Times> {
        if let Some(method) = by.method() {
            self.make(method, rank, gate)?;
        }
        let (compute, room) = (self.compute.clone(), self.room.as_ref().map(|(_, arena)| arena.clone()));
        let mut side = gate.after(DEADLINE, || self.bind(by, comm))?;
        let settle = || -> Result<()> { Ok(room.as_ref().context("it was opened")?.ticket(&compute)?.wait()?) };
        gate.after(DEADLINE, || side.call(&compute).and_then(|()| settle()))?;
        side.call(&compute)?;
        let (begin, start) = (Instant::now(), compute.record()?);
        (0..calls).try_for_each(|_| side.call(&compute))?;
        let end = compute.record()?;
        settle()?;
        Ok(Times { wall: begin.elapsed().as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
    }

    /// Makes the product by a method, once, and compares its results: of a call, and of a graph of the call that is replayed.
    fn make(&mut self, method: Method, rank: &HostRank, gate: &Gate) -> Result<()> {
        if self.methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let expected = gate.after(DEADLINE, || self.expected(rank))?;
        let Self { compute, out, sizes, a, weight, d, methods, room, .. } = self;
        let Some((memory, arena)) = room else { bail!("it was opened") };
        let made = gate.after(DEADLINE, || Ok(GemmReduceScatter::<bf16, bf16>::new(memory, compute, config(*sizes, Some(method)))?))?;
        let mut bound = gate.after(DEADLINE, || Ok(made.bind(compute, a.view(), weight.view(), None, d.view_mut())?))?;
        let settle = || -> Result<()> { Ok(arena.ticket(compute)?.wait()?) };
        gate.after(DEADLINE, || bound.run(compute).map_err(Into::into).and_then(|()| settle()))?;
        let graph = gate.after(DEADLINE, || Ok(Graph::capture(&[compute, out], || bound.run(compute))?))?;
        drop(bound);
        for how in ["a call", "a replayed call"] {
            gate.after(DEADLINE, || {
                if how != "a call" {
                    d.fill_zero(compute)?;
                    graph.replay(compute)?;
                    settle()?;
                }
                let found = d.to_vec_as::<Half>(compute)?;
                // NaN is wrong too.
                let is_right = |(found, [sum, bound]): (&Half, &[f32; 2])| (found.to_f32() - sum).abs() <= *bound;
                let wrong = found.iter().zip(&expected).position(|both| !is_right(both));
                if let Some(at) = wrong {
                    let ([sum, bound], found) = (expected[at], found[at]);
                    bail!("{method:?} of {sizes:?}, {how} on {}: element {at} is {found}, not {sum} within {bound}", rank.rank());
                }
                Ok(())
            })?;
        }
        drop(graph);
        methods.push((method, made));
        Ok(())
    }

    /// The own rows of the sum, each with a bound: the products of all ranks in `f32`. Parts are rounded, and so is the result.
    fn expected(&self, rank: &HostRank) -> Result<Vec<[f32; 2]>> {
        let Self { runtime, compute, local, pattern, .. } = self;
        let (ranks, me) = (rank.world().get(), u64::from(rank.rank().index()));
        let rows = local.m / u64::from(ranks);
        let config = GemmConfig { m: rows, ..*local };
        let gemm = Gemm::<bf16, f32>::new(runtime, config)?;
        let mut sums = vec![[0.0_f32; 2]; (rows * local.n) as usize];
        for of in 0..ranks as usize {
            let a = values(pattern, 2 * of * STEP + (me * rows * local.k) as usize, rows * local.k);
            let weight = values(pattern, (2 * of + 1) * STEP, local.n * local.k);
            let (a, weight) = (Buffer::from_slice(compute, &a)?, Buffer::from_slice(compute, &weight)?);
            let mut part = Buffer::<f32>::uninitialised(compute, rows * local.n)?;
            gemm.run(compute, a.view(), weight.view(), None, part.view_mut())?;
            for ([sum, size], part) in sums.iter_mut().zip(part.to_vec(compute)?) {
                (*sum, *size) = (*sum + part, *size + part.abs());
            }
        }
        Ok(sums.into_iter().map(|[sum, size]| [sum, (size + sum.abs()) / 256.0 + 1e-3]).collect())
    }

    fn bind<'a>(&'a mut self, by: By, comm: Option<&'a NcclCommunicator>) -> Result<Side<'a>> {
        let Self { compute, gemm, a, weight, whole, d, methods, .. } = self;
        if let Some(method) = by.method() {
            let (_, made) = methods.iter().find(|(made, _)| *made == method).context("it was made")?;
            return Ok(Side::Scattered(made.bind(compute, a.view(), weight.view(), None, d.view_mut())?));
        }
        let (address, len, d) = (whole.address(), whole.len(), &*d);
        let owner = d.view().access("d").owner;
        let product = gemm.bind(compute, a.view(), weight.view(), None, whole.view_mut())?;
        match (by, comm) {
            (By::ProductAlone, _) => Ok(Side::Product(product)),
            (By::ProductThenNccl, Some(comm)) => {
                // SAFETY: the product's result lies there while the side borrows it, and is read on the same stream after the product alone.
                let whole = unsafe { DeviceView::from_raw(address, len, owner) };
                Ok(Side::Nccl { comm, product, whole, shard: (d.address(), d) })
            }
            _ => bail!("ranks of ours do not run {by:?}"),
        }
    }
}

impl Side<'_> {
    fn call(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Scattered(product) => product.run(stream)?,
            Self::Product(product) => product.run(stream)?,
            Self::Nccl { comm, product, whole, shard: (address, shard) } => {
                product.run(stream)?;
                // SAFETY: the matrix lies there while the side borrows it, and nothing else uses it meanwhile.
                let target = unsafe { DeviceViewMut::from_raw(*address, shard.len(), shard.view().access("d").owner) };
                comm.reduce_scatter(stream, *whole, target, ReduceOp::Sum)?;
            }
        }
        Ok(())
    }
}

impl Drop for Scattered {
    fn drop(&mut self) {
        self.methods.clear();
        if let Some((memory, arena)) = self.room.take() {
            drop(memory);
            // An arena that cannot be closed keeps its memory, until the process ends.
            let _ = arena.close().map(|closing| closing.finish());
        }
    }
}
