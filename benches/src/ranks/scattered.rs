//! A rank's products whose sum the ranks share, and whose rows are scattered: by every method, and in parts.
//!
//! Everything is made before the ranks meet at the gate: memory, kernels, expected results. What borrows it is bound once a round, before the gate too.

use anyhow::{Context, Result, bail};
use half::bf16 as Half;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, ReduceOp};
use oxtile::num::bf16;
use oxtile::overlap::{GemmReduceScatter, Global, OverlapMemory, ReduceScatterConfig, ScatterMethod, ScatteredProduct};
use oxtile::runtime::Bound;
use oxtile::symmetric::BackendName;
use oxtile::{Buffer, Graph, Runtime, Stream};
use oxtile_tile::launch::{DeviceView, DeviceViewMut};
use serde::{Deserialize, Serialize};

use super::Times;
use super::gate::Gate;
use super::gathered::Sizes;
use super::member::DEADLINE;
use super::part::{Part, Room, check, times};

/// How a scattered product is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By [`ScatterMethod::Direct`].
    Direct,
    /// By [`ScatterMethod::Whole`].
    Whole,
    /// By [`ScatterMethod::Fused`].
    Fused,
    /// By [`ScatterMethod::Sequential`].
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
    fn method(self) -> Option<ScatterMethod> {
        match self {
            Self::Direct => Some(ScatterMethod::Direct),
            Self::Whole => Some(ScatterMethod::Whole),
            Self::Fused => Some(ScatterMethod::Fused),
            Self::Sequential => Some(ScatterMethod::Sequential),
            Self::ProductAlone | Self::ProductThenNccl | Self::TorchFused | Self::TorchUnfused => None,
        }
    }
}

/// The product of row-major rows of `A` and of `B` stored as its transpose, as a linear layer has it.
pub fn config([m, n, k]: Sizes, method: Option<ScatterMethod>) -> ReduceScatterConfig {
    ReduceScatterConfig { transpose_b: true, method, ..ReduceScatterConfig::new(Global { m, n, k }) }
}

pub struct Scattered {
    part: Part,
    /// All rows of this rank's part of the sum, and its own rows of the whole.
    whole: Buffer<bf16>,
    d: Buffer<bf16>,
    /// The methods that were asked for, whose results were compared.
    methods: Vec<(ScatterMethod, GemmReduceScatter<bf16, bf16>)>,
    /// Dropped after what uses it.
    room: Room<OverlapMemory>,
}

/// What one call is.
enum Side<'a> {
    Scattered(ScatteredProduct<'a, bf16, bf16>),
    Product(Bound<'a>),
    Nccl { comm: &'a NcclCommunicator, product: Bound<'a>, whole: DeviceView<'a, bf16>, shard: (u64, &'a Buffer<bf16>) },
}

impl Scattered {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes) -> Result<Self> {
        let (world, config) = (rank.world(), config(sizes, None));
        let part = Part::new(rank, runtime, sizes, config.product(world)?)?;
        let needed = config.bytes::<bf16, bf16>(world)?;
        let room = Room::of(rank, backend, needed, &part.out)?;
        let [whole, d] = [part.local.m, config.rows(world)].map(|rows| Buffer::uninitialised(&part.compute, rows * part.local.n));
        let scattered = Self { whole: whole?, d: d?, methods: Vec::new(), room, part };
        scattered.part.compute.synchronize()?;
        Ok(scattered)
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
    fn make(&mut self, method: ScatterMethod, rank: &HostRank, gate: &Gate) -> Result<()> {
        if self.methods.iter().any(|(made, _)| *made == method) {
            return Ok(());
        }
        let expected = gate.after(DEADLINE, || self.part.expected(rank.rank().index().into()))?;
        let Self { part: Part { compute, out, sizes, a, weight, .. }, d, methods, room, .. } = self;
        let (memory, arena) = room.open()?;
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
                check(|| format!("{method:?} of {sizes:?}, {how} on {}", rank.rank()), &found, &expected)
            })?;
        }
        drop(graph);
        methods.push((method, made));
        Ok(())
    }

    fn bind<'a>(&'a mut self, by: By, comm: Option<&'a NcclCommunicator>) -> Result<Side<'a>> {
        let Self { part: Part { compute, gemm, a, weight, .. }, whole, d, methods, .. } = self;
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
