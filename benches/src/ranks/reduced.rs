//! A rank's products whose sum all ranks get: by every method, and in parts.
//!
//! Everything is made before the ranks meet at the gate: memory, kernels, expected results. What borrows it is bound once a round, before the gate too.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use half::bf16 as Half;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, ReduceOp, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::overlap::{AllReduceConfig, AllReduceMemory, AllReduceMethod, GemmAllReduce, Global, OverlapMemory, ReducedProduct};
use oxtile::runtime::Bound;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Graph, Runtime, Stream};
use oxtile_tile::launch::DeviceViewMut;
use serde::{Deserialize, Serialize};

use super::Times;
use super::gate::Gate;
use super::gathered::{STEP, Sizes, pattern, values};
use super::member::DEADLINE;

/// How a product is done whose sum all ranks get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By [`AllReduceMethod::Fused`].
    Fused,
    /// By [`AllReduceMethod::Sequential`].
    Sequential,
    /// By [`AllReduceMethod::OneShot`].
    OneShot,
    /// The product of all rows of a rank's part of the sum.
    ProductAlone,
    /// The product, then NCCL's all-reduce.
    ProductThenNccl,
    /// A peer: torch's product, then its all-reduce.
    TorchUnfused,
}

impl By {
    fn method(self) -> Option<AllReduceMethod> {
        match self {
            Self::Fused => Some(AllReduceMethod::Fused),
            Self::Sequential => Some(AllReduceMethod::Sequential),
            Self::OneShot => Some(AllReduceMethod::OneShot),
            Self::ProductAlone | Self::ProductThenNccl | Self::TorchUnfused => None,
        }
    }
}

/// The product of row-major rows of `A` and of `B` stored as its transpose, as a linear layer has it.
pub fn config([m, n, k]: Sizes, method: Option<AllReduceMethod>) -> AllReduceConfig {
    AllReduceConfig { transpose_b: true, method, ..AllReduceConfig::new(Global { m, n, k }) }
}

pub struct Reduced {
    runtime: Runtime,
    compute: Stream,
    out: Stream,
    pattern: Vec<Half>,
    sizes: Sizes,
    local: GemmConfig,
    gemm: Gemm<bf16, bf16>,
    a: Buffer<bf16>,
    weight: Buffer<bf16>,
    /// This rank's part of the sum, which NCCL sums in place.
    whole: Buffer<bf16>,
    /// The methods that were asked for, whose results were compared.
    methods: Vec<(AllReduceMethod, GemmAllReduce<bf16, bf16>)>,
    /// Dropped before the arena is closed, whose memory it uses.
    room: Option<(AllReduceMemory, Arena)>,
}

/// What one call is.
enum Side<'a> {
    Reduced(ReducedProduct<'a, bf16, bf16>),
    Product(Bound<'a>),
    Nccl { comm: &'a NcclCommunicator, product: Bound<'a>, whole: (u64, &'a Buffer<bf16>) },
}

impl Reduced {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes) -> Result<Self> {
        let (compute, out, world, me) = (rank.device().stream()?, rank.device().urgent_stream()?, rank.world(), rank.rank().index());
        let (config, pattern) = (config(sizes, None), pattern());
        let (local, parts, result) = (config.product(world)?, config.bytes::<bf16, bf16>(world)?, config.result_bytes::<bf16>()?);
        ensure!(local.m.is_multiple_of(world.get().into()), "{sizes:?}: ranks have equal rows here");
        // Beside parts and result, a mailbox for small sums.
        let bytes = 2 * parts + result + (u64::from(world.get()) << 20);
        let arena = Arena::open(rank, ArenaOptions { backend, bytes, deadline: DEADLINE, ..ArenaOptions::default() })?;
        let member = Team::all(world).member(rank.rank()).context("every rank is of the world")?;
        let memory = AllReduceMemory::take(&OverlapMemory::take(&arena, &member, parts, &out)?, result)?;
        let of = |number: usize, count: u64| Buffer::from_slice(&compute, &values(&pattern, number * STEP, count));
        let reduced = Self {
            runtime: runtime.clone(),
            sizes,
            local,
            gemm: Gemm::new(runtime, local)?,
            a: of(2 * me as usize, local.m * local.k)?,
            weight: of(2 * me as usize + 1, local.n * local.k)?,
            whole: Buffer::uninitialised(&compute, local.m * local.n)?,
            methods: Vec::new(),
            room: Some((memory, arena)),
            compute,
            out,
            pattern,
        };
        reduced.compute.synchronize()?;
        Ok(reduced)
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
    fn make(&mut self, method: AllReduceMethod, rank: &HostRank, gate: &Gate) -> Result<()> {
        if self.methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let Self { compute, out, sizes, a, weight, methods, room, .. } = &mut *self;
        let Some((memory, arena)) = room else { bail!("it was opened") };
        let made = gate.after(DEADLINE, || Ok(GemmAllReduce::<bf16, bf16>::new(memory, compute, config(*sizes, Some(method)))?))?;
        let mut bound = gate.after(DEADLINE, || Ok(made.bind(compute, a.view(), weight.view(), None)?))?;
        let settle = || -> Result<()> { Ok(arena.ticket(compute)?.wait()?) };
        gate.after(DEADLINE, || bound.run(compute).map_err(Into::into).and_then(|()| settle()))?;
        let first = gate.after(DEADLINE, || Ok(bound.buffer().to_vec_as::<Half>(compute)?))?;
        let graph = gate.after(DEADLINE, || Ok(Graph::capture(&[compute, out], || bound.run(compute))?))?;
        let again = gate.after(DEADLINE, || {
            graph.replay(compute)?;
            settle()?;
            Ok(bound.buffer().to_vec_as::<Half>(compute)?)
        })?;
        drop((bound, graph));
        gate.after(DEADLINE, || {
            ensure!(first == again, "{method:?} of {sizes:?}: the bits of a replayed call differ from those of a call");
            Ok(())
        })?;
        methods.push((method, made));
        gate.after(DEADLINE, || self.check(&first, method, rank))
    }

    /// Compares all rows of a result with the sum, within bounds.
    fn check(&self, found: &[Half], method: AllReduceMethod, rank: &HostRank) -> Result<()> {
        let (ranks, n) = (u64::from(rank.world().get()), self.local.n);
        let rows = self.local.m / ranks;
        for shard in 0..ranks {
            let found = &found[(shard * rows * n) as usize..((shard + 1) * rows * n) as usize];
            // NaN is wrong too.
            let is_right = |(found, [sum, bound]): (&Half, &[f32; 2])| (found.to_f32() - sum).abs() <= *bound;
            let expected = self.expected(shard, rows, ranks)?;
            if let Some(at) = found.iter().zip(&expected).position(|both| !is_right(both)) {
                let ([sum, bound], found, sizes) = (expected[at], found[at], self.sizes);
                bail!("{method:?} of {sizes:?} on {}: element {at} of shard {shard} is {found}, not {sum} within {bound}", rank.rank());
            }
        }
        Ok(())
    }

    /// Rows of the sum, each element with a bound: the products of all ranks in `f32`. Parts are rounded, and so is the result.
    fn expected(&self, shard: u64, rows: u64, ranks: u64) -> Result<Vec<[f32; 2]>> {
        let Self { runtime, compute, local, pattern, .. } = self;
        let gemm = Gemm::<bf16, f32>::new(runtime, GemmConfig { m: rows, ..*local })?;
        let mut sums = vec![[0.0_f32; 2]; (rows * local.n) as usize];
        for of in 0..ranks as usize {
            let a = values(pattern, 2 * of * STEP + (shard * rows * local.k) as usize, rows * local.k);
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
        let Self { compute, gemm, a, weight, whole, methods, .. } = self;
        if let Some(method) = by.method() {
            let (_, made) = methods.iter().find(|(made, _)| *made == method).context("it was made")?;
            return Ok(Side::Reduced(made.bind(compute, a.view(), weight.view(), None)?));
        }
        let whole = &*whole;
        // SAFETY: the part is written by the product alone, and summed in place on the same stream after it, while the side borrows it.
        let d = unsafe { DeviceViewMut::from_raw(whole.address(), whole.len(), whole.view().access("d").owner) };
        let product = gemm.bind(compute, a.view(), weight.view(), None, d)?;
        match (by, comm) {
            (By::ProductAlone, _) => Ok(Side::Product(product)),
            (By::ProductThenNccl, Some(comm)) => Ok(Side::Nccl { comm, product, whole: (whole.address(), whole) }),
            _ => bail!("ranks of ours do not run {by:?}"),
        }
    }
}

impl Side<'_> {
    fn call(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Reduced(product) => product.run(stream)?,
            Self::Product(product) => product.run(stream)?,
            Self::Nccl { comm, product, whole: (address, whole) } => {
                product.run(stream)?;
                // SAFETY: the matrix lies there while the side borrows it, and nothing else uses it meanwhile.
                let whole = unsafe { DeviceViewMut::<bf16>::from_raw(*address, whole.len(), whole.view().access("d").owner) };
                comm.all_reduce(stream, whole, ReduceOp::Sum)?;
            }
        }
        Ok(())
    }
}

impl Drop for Reduced {
    fn drop(&mut self) {
        self.methods.clear();
        if let Some((memory, arena)) = self.room.take() {
            drop(memory);
            // An arena that cannot be closed keeps its memory, until the process ends.
            let _ = arena.close().map(|closing| closing.finish());
        }
    }
}
