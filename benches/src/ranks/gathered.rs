//! A rank's gathered products: by every method, and in parts.
//!
//! Everything is made before the ranks meet at the gate: memory, kernels, expected results. What borrows it is bound once a round, before the gate too.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use half::bf16 as Half;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::kernels::copy::CopyWords;
use oxtile::num::bf16;
use oxtile::overlap::{AllGatherConfig, AllGatherGemm, GatheredProduct, Global, Method, OverlapConfig, OverlapMemory};
use oxtile::runtime::{Bound, Loaded};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Graph, Runtime, Stream};
use oxtile_tile::launch::DeviceViewMut;
use serde::{Deserialize, Serialize};

use super::Times;
use super::expected::{self, Sample};
use super::gate::Gate;
use super::member::DEADLINE;
use crate::random::Random;

/// M, N and K over all ranks.
pub type Sizes = [u64; 3];

/// How a gathered product is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By [`Method::Fused`].
    Fused,
    /// By [`Method::Chunked`].
    Chunked,
    /// By [`Method::Sequential`].
    Sequential,
    /// The product on an operand that is gathered already.
    ProductAlone,
    /// NCCL's all-gather, then the product.
    NcclThenProduct,
    /// A peer: torch's fused operation.
    TorchFused,
    /// A peer: torch's all-gather, then its product.
    TorchUnfused,
}

impl By {
    fn method(self) -> Option<Method> {
        match self {
            Self::Fused => Some(Method::Fused),
            Self::Chunked => Some(Method::Chunked),
            Self::Sequential => Some(Method::Sequential),
            Self::ProductAlone | Self::NcclThenProduct | Self::TorchFused | Self::TorchUnfused => None,
        }
    }
}

/// The product of row-major rows of `A` and of `B` stored as its transpose, as a linear layer has it.
pub fn config([m, n, k]: Sizes, method: Option<Method>) -> AllGatherConfig {
    let overlap = OverlapConfig { method, ..OverlapConfig::default() };
    AllGatherConfig { transpose_b: true, overlap, ..AllGatherConfig::new(Global { m, n, k }) }
}

/// Elements that matrices repeat: a prime, so that no two rows are the same.
const PATTERN: usize = 262_147;
/// The place in the pattern where a matrix begins is its number times this.
pub const STEP: usize = 104_729;

pub struct Gathered {
    runtime: Runtime,
    backend: BackendName,
    compute: Stream,
    out: Stream,
    copy: Loaded<CopyWords>,
    pattern: Vec<Half>,
    /// Dropped before the arena is closed, whose memory it uses.
    product: Option<Product>,
    /// With N and K: shapes that differ in M share it.
    weight: Option<(u64, u64, Buffer<bf16>)>,
    room: Option<(OverlapMemory, Arena)>,
}

/// All that is made of one shape.
struct Product {
    sizes: Sizes,
    local: GemmConfig,
    gemm: Gemm<bf16, bf16>,
    /// Two inputs: the operand as a whole, and this rank's shard of it.
    operands: [Buffer<bf16>; 2],
    shards: [Buffer<bf16>; 2],
    d: Buffer<bf16>,
    /// The methods that were asked for, whose results were compared.
    methods: Vec<(Method, AllGatherGemm<bf16, bf16>)>,
}

/// What one call is.
enum Side<'a> {
    Gathered(GatheredProduct<'a, bf16, bf16>),
    Product(Bound<'a>),
    Nccl { comm: &'a NcclCommunicator, shard: &'a Buffer<bf16>, whole: &'a Buffer<bf16>, address: u64, product: Bound<'a> },
}

impl Gathered {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName) -> Result<Self> {
        let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let (copy, pattern) = (runtime.load()?, pattern());
        Ok(Self { runtime: runtime.clone(), backend, compute, out, copy, pattern, product: None, weight: None, room: None })
    }

    /// Times calls, after one that is not timed: the ranks begin together, where it ends. Where a rank fails, the others wait for it until the deadline.
    pub fn round(
        &mut self,
        (by, sizes): (By, Sizes),
        calls: u64,
        rank: &HostRank,
        comm: Option<&NcclCommunicator>,
        gate: &Gate,
    ) -> Result<Times> {
        gate.after(DEADLINE, || self.prepare(sizes, rank))?;
        if let Some(method) = by.method() {
            self.make(method, rank, gate)?;
        }
        let (compute, room) = (self.compute.clone(), self.room.as_ref().map(|(_, arena)| arena.clone()));
        let mut side = gate.after(DEADLINE, || self.bind(by, comm))?;
        let settle = || -> Result<()> { Ok(room.as_ref().context("it was opened")?.ticket(&compute)?.wait()?) };
        let warm = || side.call(&compute).and_then(|()| settle());
        gate.after(DEADLINE, warm)?;
        side.call(&compute)?;
        let (begin, start) = (Instant::now(), compute.record()?);
        (0..calls).try_for_each(|_| side.call(&compute))?;
        let end = compute.record()?;
        settle()?;
        Ok(Times { wall: begin.elapsed().as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
    }

    fn values(&self, start: usize, count: u64) -> Vec<Half> {
        values(&self.pattern, start, count)
    }

    /// Memory, matrices and the plain product of a shape.
    fn prepare(&mut self, sizes: Sizes, rank: &HostRank) -> Result<()> {
        if self.product.as_ref().is_some_and(|product| product.sizes == sizes) {
            return Ok(());
        }
        self.product = None;
        let [_, n, k] = sizes;
        let config = config(sizes, None);
        let (world, me) = (rank.world(), rank.rank().index() as usize);
        let (local, needed) = (config.product(world)?, config.bytes::<bf16, bf16>()?);
        if self.room.as_ref().is_none_or(|(memory, _)| memory.bytes() < needed) {
            self.close()?;
            let options = ArenaOptions { backend: self.backend, bytes: 2 * needed + 4096, deadline: DEADLINE, ..ArenaOptions::default() };
            let arena = Arena::open(rank, options)?;
            let member = Team::all(world).member(rank.rank()).context("every rank is of the world")?;
            self.room = Some((OverlapMemory::take(&arena, &member, needed, &self.out)?, arena));
        }
        if self.weight.as_ref().is_none_or(|(of_n, of_k, _)| [*of_n, *of_k] != [n, k]) {
            self.weight = None;
            let weight = Buffer::from_slice(&self.compute, &self.values((3 + me) * STEP, local.n * k))?;
            self.weight = Some((n, k, weight));
        }
        let shard = local.m * k / u64::from(world.get());
        let operand = |number: usize| Buffer::from_slice(&self.compute, &self.values(number * STEP, local.m * k));
        let own = |number: usize| Buffer::from_slice(&self.compute, &self.values(number * STEP + me * shard as usize, shard));
        self.product = Some(Product {
            sizes,
            local,
            gemm: Gemm::new(&self.runtime, local)?,
            operands: [operand(0)?, operand(1)?],
            shards: [own(0)?, own(1)?],
            d: Buffer::uninitialised(&self.compute, local.m * local.n)?,
            methods: Vec::new(),
        });
        self.compute.synchronize()?;
        Ok(())
    }

    /// Makes the product by a method, once, and compares its results: of a call, and of a graph of the call that is replayed with other data.
    fn make(&mut self, method: Method, rank: &HostRank, gate: &Gate) -> Result<()> {
        let Self { runtime, compute, out, copy, product, weight, room, .. } = self;
        let (Some(product), Some((.., weight)), Some((memory, arena))) = (product, weight, room) else { bail!("it was prepared") };
        let Product { sizes, local, operands, shards, d, methods, .. } = product;
        if methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let sample = Sample::of(copy, compute, local.m * local.n);
        let (made, expected, mut kept) = gate.after(DEADLINE, || {
            let made = AllGatherGemm::<bf16, bf16>::new(memory, compute, config(*sizes, Some(method)))?;
            let tile = made.choice().tile;
            let mut expect = |operand: &Buffer<bf16>| {
                expected::multiply(runtime, compute, *local, (method, tile, rank.world().get()), [operand, weight], d)?;
                let mut kept = sample.room()?;
                sample.keep(d.view(), &mut kept)?;
                sample.words(&kept)
            };
            let expected = [expect(&operands[0])?, expect(&operands[1])?];
            Ok((made, expected, [sample.room()?, sample.room()?]))
        })?;
        let settle = || -> Result<()> { Ok(arena.ticket(compute)?.wait()?) };
        let mut bound = gate.after(DEADLINE, || Ok(made.bind(compute, weight.view(), None, d.view_mut())?))?;
        gate.after(DEADLINE, || {
            bound.copy_shard(compute, &shards[0])?;
            bound.run(compute)?;
            sample.keep(bound.result(), &mut kept[0])?;
            settle()
        })?;
        let graph = gate.after(DEADLINE, || {
            Ok(Graph::capture(&[compute, out], || bound.copy_shard(compute, &shards[1]).and_then(|()| bound.run(compute)))?)
        })?;
        gate.after(DEADLINE, || {
            graph.replay(compute)?;
            sample.keep(bound.result(), &mut kept[1])?;
            settle()
        })?;
        drop((graph, bound));
        for (kept, (expected, how)) in kept.iter().zip(expected.iter().zip(["a call", "a replayed call"])) {
            let differs = expected::difference(&sample.words(kept)?, expected);
            if let Some(differs) = differs {
                bail!("{method:?} of {sizes:?}, {how} on {}: not the plain product: {differs}", rank.rank());
            }
        }
        methods.push((method, made));
        Ok(())
    }

    fn bind<'a>(&'a mut self, by: By, comm: Option<&'a NcclCommunicator>) -> Result<Side<'a>> {
        let Self { compute, product, weight, .. } = self;
        let (Some(product), Some((.., weight))) = (product, weight) else { bail!("it was prepared") };
        let Product { gemm, operands: [whole, _], shards: [shard, _], d, methods, .. } = product;
        if let Some(method) = by.method() {
            let (_, made) = methods.iter().find(|(made, _)| *made == method).context("it was made")?;
            return Ok(Side::Gathered(made.bind(compute, weight.view(), None, d.view_mut())?));
        }
        let address = whole.view_mut().address();
        let whole = &*whole;
        let product = gemm.bind(compute, whole.view(), weight.view(), None, d.view_mut())?;
        match (by, comm) {
            (By::ProductAlone, _) => Ok(Side::Product(product)),
            (By::NcclThenProduct, Some(comm)) => Ok(Side::Nccl { comm, shard, whole, address, product }),
            _ => bail!("ranks of ours do not run {by:?}"),
        }
    }

    /// Every rank closes it together.
    fn close(&mut self) -> Result<()> {
        self.product = None;
        let Some((memory, arena)) = self.room.take() else { return Ok(()) };
        drop(memory);
        Ok(arena.close().map_err(oxtile::Error::from)?.finish()?)
    }
}

/// The elements that matrices repeat.
pub fn pattern() -> Vec<Half> {
    Random::new(1).normal(PATTERN)
}

/// Elements of the pattern.
pub fn values(pattern: &[Half], start: usize, count: u64) -> Vec<Half> {
    let (count, mut at) = (count as usize, start % PATTERN);
    let mut values = Vec::with_capacity(count);
    while values.len() < count {
        let end = PATTERN.min(at + count - values.len());
        values.extend_from_slice(&pattern[at..end]);
        at = 0;
    }
    values
}

impl Side<'_> {
    /// Writes nothing new into the shard.
    fn call(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Gathered(product) => {
                product.shard(stream)?;
                product.run(stream)?;
            }
            Self::Product(product) => product.run(stream)?,
            Self::Nccl { comm, shard, whole, address, product } => {
                // SAFETY: the matrix lies there while the side borrows it. Only the product reads it besides, which is enqueued on the same stream: never meanwhile.
                let target = unsafe { DeviceViewMut::from_raw(*address, whole.len(), whole.view().access("whole").owner) };
                comm.all_gather(stream, shard.view(), target)?;
                product.run(stream)?;
            }
        }
        Ok(())
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        // An arena that cannot be closed keeps its memory, until the process ends.
        let _ = self.close();
    }
}
