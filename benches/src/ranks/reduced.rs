//! A rank's products whose sum all ranks get: by every method, and in parts.
//!
//! Everything is made before the ranks meet at the gate: memory, kernels, expected results. What borrows it is bound once a round, before the gate too.

use anyhow::{Context, Result, bail, ensure};
use half::bf16 as Half;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, ReduceOp, Team};
use oxtile::num::bf16;
use oxtile::overlap::{AllReduceConfig, AllReduceMemory, AllReduceMethod, GemmAllReduce, Global, OverlapMemory, ReducedProduct};
use oxtile::runtime::Bound;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Graph, Runtime, Stream};
use oxtile_tile::launch::DeviceViewMut;
use serde::{Deserialize, Serialize};

use super::Times;
use super::gate::Gate;
use super::gathered::Sizes;
use super::member::DEADLINE;
use super::part::{Part, Room, check, times};

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
    /// As [`OneShot`](Self::OneShot), by the replay of a graph of [`CALLS`].
    OneShotInGraph,
    /// As [`ProductAlone`](Self::ProductAlone), by such a replay.
    ProductAloneInGraph,
    /// As [`ProductThenNccl`](Self::ProductThenNccl), by such a replay.
    ProductThenNcclInGraph,
}

/// Calls of a graph: as many as a decoding step may have, so that what a replay itself takes is shared by them.
pub const CALLS: u64 = 20;

impl By {
    fn method(self) -> Option<AllReduceMethod> {
        match self {
            Self::Fused => Some(AllReduceMethod::Fused),
            Self::Sequential => Some(AllReduceMethod::Sequential),
            Self::OneShot | Self::OneShotInGraph => Some(AllReduceMethod::OneShot),
            Self::ProductAlone | Self::ProductThenNccl | Self::TorchUnfused | Self::ProductAloneInGraph | Self::ProductThenNcclInGraph => {
                None
            }
        }
    }

    /// What a graph has calls of.
    fn captured(self) -> Option<Self> {
        match self {
            Self::OneShotInGraph => Some(Self::OneShot),
            Self::ProductAloneInGraph => Some(Self::ProductAlone),
            Self::ProductThenNcclInGraph => Some(Self::ProductThenNccl),
            _ => None,
        }
    }
}

/// The product of row-major rows of `A` and of `B` stored as its transpose, as a linear layer has it.
pub fn config([m, n, k]: Sizes, method: Option<AllReduceMethod>) -> AllReduceConfig {
    AllReduceConfig { transpose_b: true, method, ..AllReduceConfig::new(Global { m, n, k }) }
}

pub struct Reduced {
    part: Part,
    /// This rank's part of the sum, which NCCL sums in place.
    whole: Buffer<bf16>,
    /// The methods that were asked for, whose results were compared.
    methods: Vec<(AllReduceMethod, GemmAllReduce<bf16, bf16>)>,
    /// Dropped after what uses it.
    room: Room<AllReduceMemory>,
}

/// What one call is.
enum Side<'a> {
    Reduced(ReducedProduct<'a, bf16, bf16>),
    Product(Bound<'a>),
    Nccl {
        comm: &'a NcclCommunicator,
        product: Bound<'a>,
        whole: (u64, &'a Buffer<bf16>),
    },
    /// A graph of [`CALLS`] of a side, which is replayed once in so many calls.
    Graph {
        graph: Graph,
        _of: Box<Side<'a>>,
        called: u64,
    },
}

impl Reduced {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes) -> Result<Self> {
        let (world, config) = (rank.world(), config(sizes, None));
        let part = Part::new(rank, runtime, sizes, config.product(world)?)?;
        let (parts, result) = (config.bytes::<bf16, bf16>(world)?, config.result_bytes::<bf16>()?);
        // Beside parts and result, a mailbox for small sums.
        let bytes = 2 * parts + result + (u64::from(world.get()) << 20);
        let arena = Arena::open(rank, ArenaOptions { backend, bytes, deadline: DEADLINE, ..ArenaOptions::default() })?;
        let member = Team::all(world).member(rank.rank()).context("every rank is of the world")?;
        let memory = AllReduceMemory::take(&OverlapMemory::take(&arena, &member, parts, &part.out)?, result)?;
        let whole = Buffer::uninitialised(&part.compute, part.local.m * part.local.n)?;
        let reduced = Self { whole, methods: Vec::new(), room: Room::new(arena, memory), part };
        reduced.part.compute.synchronize()?;
        Ok(reduced)
    }

    pub fn is_of(&self, sizes: Sizes) -> bool {
        self.part.sizes == sizes
    }

    /// Times calls, after those that are not timed.
    pub fn round(&mut self, by: By, calls: u64, rank: &HostRank, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<Times> {
        if let Some(method) = by.method() {
            self.make(method, rank, gate)?;
        }
        let (compute, arena) = (self.part.compute.clone(), self.room.open()?.1.clone());
        let mut side = gate.after(DEADLINE, || self.bind(by, comm))?;
        times(&compute, &arena, calls, gate, |stream| side.call(stream))
    }

    /// Makes the product by a method, once, and compares its results: of a call, and of a graph of the call that is replayed.
    fn make(&mut self, method: AllReduceMethod, rank: &HostRank, gate: &Gate) -> Result<()> {
        if self.methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let Self { part: Part { compute, out, sizes, a, weight, .. }, methods, room, .. } = &mut *self;
        let (memory, arena) = room.open()?;
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
        let (sizes, len) = (self.part.sizes, (self.part.rows() * self.part.local.n) as usize);
        for shard in 0..u64::from(rank.world().get()) {
            let found = &found[shard as usize * len..(shard as usize + 1) * len];
            check(|| format!("{method:?} of {sizes:?} on {}, shard {shard}", rank.rank()), found, &self.part.expected(shard)?)?;
        }
        Ok(())
    }

    fn bind<'a>(&'a mut self, by: By, comm: Option<&'a NcclCommunicator>) -> Result<Side<'a>> {
        if let Some(by) = by.captured() {
            let compute = self.part.compute.clone();
            let mut side = self.bind(by, comm)?;
            let graph = Graph::capture(&[&compute], || (0..CALLS).try_for_each(|_| side.call(&compute)))?;
            return Ok(Side::Graph { graph, _of: Box::new(side), called: 0 });
        }
        let Self { part: Part { compute, gemm, a, weight, .. }, whole, methods, .. } = self;
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
            Self::Graph { graph, called, .. } => {
                if called.is_multiple_of(CALLS) {
                    graph.replay(stream)?;
                }
                *called += 1;
            }
        }
        Ok(())
    }
}
