//! A rank's part of a feed-forward layer with tensor and sequence parallelism, forward and backward: its six products overlapped, one after another, between NCCL's collectives, and alone.
//! The overlapped ones are those of the example `tensor_parallel`.
//!
//! | file | what it holds |
//! |---|---|
//! | `plain` | plain products, and NCCL's collectives around them |
//! | `expected` | what the results have to be: of one GPU |

mod expected;
mod plain;
#[allow(dead_code, reason = "the example prints what was chosen")]
#[path = "../../../../host/examples/tensor_parallel/layer.rs"]
mod products;

use anyhow::{Context, Result, bail};
use half::bf16 as Half;
use oxtile::comm::{HostRank, NcclCommunicator};
use oxtile::overlap::{Method, OverlapMemory};
use oxtile::symmetric::{Arena, BackendName};
use oxtile::{Graph, Runtime, Stream};
use serde::{Deserialize, Serialize};

use self::plain::{Plain, PlainLayer};
use self::products::{Layer, Products, Shape, Tensors, Way};
use super::gate::Gate;
use super::gathered::{STEP, pattern, values};
use super::member::DEADLINE;
use super::part::{Room, times};
use super::plan::{Comparison, DEVICE, Side as Row};
use super::products::OVERLAP;
use super::{Request, Times, Work};

/// Tokens, width and hidden of a layer, over all ranks.
pub type Sizes = [u64; 3];

/// How the layer is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// By the methods that the model takes.
    Overlapped,
    /// By a graph of the same.
    OverlappedGraph,
    /// The same, begun together: [`Way::Bulk`].
    Bulk,
    /// By a graph of the same.
    BulkGraph,
    /// By [`Method::Sequential`].
    Sequential,
    /// By a graph of the same.
    SequentialGraph,
    /// Plain products, between NCCL's gathers and reduce-scatters.
    Nccl,
    /// The plain products alone, of operands that are gathered already.
    Products,
    /// The gradients of `x` and of the first weight alone, one after the other.
    PairApart,
    /// The same, begun together.
    PairBulk,
    /// The plain products of the same.
    PairProducts,
    /// A peer: torch's fused operations.
    TorchFused,
    /// The same, where the gathered tokens are kept for the backward pass.
    TorchFusedKept,
    /// A peer: torch's collectives and products.
    TorchUnfused,
    /// The same, where the gathered tokens are kept for the backward pass.
    TorchUnfusedKept,
}

impl By {
    /// The way of the overlapped products, if they are taken.
    fn way(self) -> Option<Way> {
        match self {
            Self::Overlapped | Self::OverlappedGraph | Self::PairApart => Some(Way::Chosen),
            Self::Bulk | Self::BulkGraph | Self::PairBulk => Some(Way::Bulk),
            Self::Sequential | Self::SequentialGraph => Some(Way::By(Method::Sequential)),
            _ => None,
        }
    }

    fn is_graph(self) -> bool {
        matches!(self, Self::OverlappedGraph | Self::BulkGraph | Self::SequentialGraph)
    }

    fn is_pair(self) -> bool {
        matches!(self, Self::PairApart | Self::PairBulk | Self::PairProducts)
    }
}

const SIDES: [(&str, By); 8] = [
    ("overlapped", By::Overlapped),
    ("overlapped, in a graph", By::OverlappedGraph),
    ("bulk", By::Bulk),
    ("bulk, in a graph", By::BulkGraph),
    ("sequential", By::Sequential),
    ("sequential, in a graph", By::SequentialGraph),
    ("NCCL and products", By::Nccl),
    (PRODUCTS, By::Products),
];
const PAIR: [(&str, By); 3] = [("bulk", By::PairBulk), ("one after the other", By::PairApart), (PRODUCTS, By::PairProducts)];
const TORCH: [(&str, By); 4] = [
    ("torch fused", By::TorchFused),
    ("torch fused, tokens kept", By::TorchFusedKept),
    ("torch unfused", By::TorchUnfused),
    ("torch unfused, tokens kept", By::TorchUnfusedKept),
];
const PRODUCTS: &str = "products alone";
const WIRE: &str = "wire alone";
/// About the operations that a GPU does in a microsecond.
const RATE: f64 = 7e8;

/// The layer by every way, beside what it is made of; a round has about so many microseconds. Virtual GPUs have no NCCL.
pub fn comparison(world: u32, sizes: Sizes, round: f64, has_nccl: bool) -> Comparison {
    let ([tokens, width, hidden], peers) = (sizes, u64::from(world - 1));
    // Six products; four gathers of tokens and two scatters.
    let (flops, shard) = (12 * tokens * width * hidden / u64::from(world), tokens * width * 2 / u64::from(world));
    let calls = ((round * RATE / flops as f64).ceil() as u64).clamp(3, 100);
    let side = |(label, by)| Row { label, request: Request { work: Work::Layer(by, sizes), bytes: 0, calls } };
    let mut sides: Vec<_> = SIDES.into_iter().filter(|(_, by)| has_nccl || *by != By::Nccl).map(side).collect();
    sides.push(Row { label: WIRE, request: Request { work: Work::Put, bytes: shard, calls: 6 * calls * peers } });
    Comparison {
        bytes: 6 * shard * peers,
        flops,
        limit: &[PRODUCTS, WIRE],
        chosen: Some(SIDES[0].0),
        peers: TORCH.map(side).into(),
        fewer: 2,
        ..Comparison::of(OVERLAP, "layer bf16", format!("{tokens}x{width}x{hidden}, {world} ranks"), sides, &[DEVICE])
    }
}

/// The backward pass of the first weight: the gradient of the weight gathers tokens, which lie in their place, beside that of the input, whose rows travel beside it.
pub fn pair(world: u32, sizes: Sizes, round: f64) -> Comparison {
    let ([tokens, width, hidden], peers) = (sizes, u64::from(world - 1));
    let (flops, shard) = (4 * tokens * width * hidden / u64::from(world), tokens * width * 2 / u64::from(world));
    let calls = ((round * RATE / flops as f64).ceil() as u64).clamp(3, 100);
    let side = |(label, by)| Row { label, request: Request { work: Work::Layer(by, sizes), bytes: 0, calls } };
    let mut sides: Vec<_> = PAIR.map(side).into();
    sides.push(Row { label: WIRE, request: Request { work: Work::Put, bytes: shard, calls: 2 * calls * peers } });
    Comparison {
        bytes: 2 * shard * peers,
        flops,
        limit: &[PRODUCTS, WIRE],
        fewer: 2,
        ..Comparison::of(OVERLAP, "dx and dW1 bf16", format!("{tokens}x{width}x{hidden}, {world} ranks"), sides, &[DEVICE])
    }
}

/// A rank's part of the layer.
pub struct Layers {
    runtime: Runtime,
    compute: Stream,
    out: Stream,
    shape: Shape,
    tensors: Tensors,
    plain: Plain,
    /// The overlapped products by the ways that were asked for.
    made: Vec<(Way, Products)>,
    /// What the results have to be, and whose were compared.
    exact: Option<[Vec<f32>; 5]>,
    compared: Vec<By>,
    pattern: Vec<Half>,
    /// Dropped after what uses it.
    room: Room<OverlapMemory>,
}

/// What one call is.
enum Side<'a> {
    Layer(Box<Layer<'a>>),
    /// A pair, and whether `x` is in its place, where calls leave it.
    Pair {
        layer: Box<Layer<'a>>,
        is_in_place: bool,
    },
    Graph(Graph),
    Plain {
        layer: PlainLayer<'a>,
        is_pair: bool,
    },
}

impl Layers {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, sizes: Sizes) -> Result<Self> {
        let (compute, out) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let (world, shape, pattern) = (rank.world(), shape(sizes), pattern());
        let needed = shape.bytes(world)?;
        let room = Room::of(rank, backend, needed, &out)?;
        let tensors = Tensors::new(&compute, shape, world.get(), given(&pattern, shape, rank.rank().index(), world.get()))?;
        let plain = Plain::new(runtime, &compute, shape, world.get(), |rank| given(&pattern, shape, rank, world.get()))?;
        compute.synchronize()?;
        let (made, exact, compared) = (Vec::new(), None, Vec::new());
        Ok(Self { runtime: runtime.clone(), compute, out, shape, tensors, plain, made, exact, compared, pattern, room })
    }

    pub fn is_of(&self, [tokens, width, hidden]: Sizes) -> bool {
        let Shape { tokens: of_tokens, width: of_width, hidden: of_hidden } = self.shape;
        [of_tokens, of_width, of_hidden] == [tokens, width, hidden]
    }

    /// Times calls, after those that are not timed. The results of the first one are compared with those of one GPU.
    pub fn round(&mut self, by: By, calls: u64, rank: &HostRank, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<Times> {
        // A pair reads what both passes have written.
        let whole = if by.is_pair() { By::Bulk } else { by };
        for way in [by, whole].into_iter().filter_map(By::way) {
            self.make(way, gate)?;
        }
        let (compute, arena) = (self.compute.clone(), self.room.open()?.1.clone());
        if whole != By::Products && !self.compared.contains(&whole) {
            self.compare(whole, &arena, rank, comm, gate)?;
            self.compared.push(whole);
        }
        let mut side = gate.after(DEADLINE, || self.bind(by, comm))?;
        times(&compute, &arena, calls, gate, |stream| side.call(stream))
    }

    /// Makes the products of a way, once.
    fn make(&mut self, way: Way, gate: &Gate) -> Result<()> {
        if self.made.iter().all(|(made, _)| *made != way) {
            let (memory, _) = self.room.open()?;
            let products = gate.after(DEADLINE, || Ok(Products::new(memory, &self.compute, self.shape, way)?))?;
            self.made.push((way, products));
        }
        Ok(())
    }

    /// Compares the results of a call with those of one GPU.
    fn compare(&mut self, by: By, arena: &Arena, rank: &HostRank, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<()> {
        let (me, ranks) = (rank.rank().index(), rank.world().get());
        gate.after(DEADLINE, || {
            let of_rank = |rank| given(&self.pattern, self.shape, rank, ranks);
            if self.exact.is_none() {
                self.exact = Some(expected::results(&self.runtime, &self.compute, self.shape, [me, ranks], of_rank)?);
            }
            let Tensors { y, dx, dup, dbias, ddown, .. } = &mut self.tensors;
            [y, dx].into_iter().try_for_each(|result| result.fill_zero(&self.compute))?;
            [dup, dbias, ddown].into_iter().try_for_each(|result| result.fill_zero(&self.compute))?;
            Ok(())
        })?;
        let mut side = gate.after(DEADLINE, || self.bind(by, comm))?;
        gate.after(DEADLINE, || {
            side.call(&self.compute)?;
            Ok(arena.ticket(&self.compute)?.wait()?)
        })?;
        drop(side);
        gate.after(DEADLINE, || {
            let found = self.tensors.results(&self.compute)?;
            let exact = self.exact.as_ref().context("they were computed")?;
            let mut named = ["y", "dx", "dW1", "the bias's gradient", "dW2"].into_iter().zip(found.iter().zip(exact));
            named.try_for_each(|(name, (found, exact))| {
                expected::check(found, exact).with_context(|| format!("{name} by {by:?} of {:?} on {}", self.shape, rank.rank()))
            })
        })
    }

    fn bind<'a>(&'a self, by: By, comm: Option<&'a NcclCommunicator>) -> Result<Side<'a>> {
        let Self { compute, out, tensors, plain, made, .. } = self;
        let is_pair = by.is_pair();
        let Some(way) = by.way() else {
            let comm = match (by, comm) {
                (By::Products | By::PairProducts, _) => None,
                (By::Nccl, Some(comm)) => Some(comm),
                _ => bail!("ranks of ours do not run {by:?}"),
            };
            return Ok(Side::Plain { layer: plain.bind(compute, tensors, comm)?, is_pair });
        };
        let (_, products) = made.iter().find(|(made, _)| *made == way).context("they were made")?;
        let mut layer = products.bind(compute, tensors)?;
        if by.is_graph() {
            return Ok(Side::Graph(Graph::capture(&[compute, out], || step(&mut layer, compute))?));
        }
        let layer = Box::new(layer);
        Ok(if is_pair { Side::Pair { layer, is_in_place: false } } else { Side::Layer(layer) })
    }
}

impl Side<'_> {
    fn call(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Layer(layer) => step(layer, stream)?,
            Self::Pair { layer, is_in_place } => layer.backward_of_up_where(stream, std::mem::replace(is_in_place, true))?,
            Self::Graph(graph) => graph.replay(stream)?,
            Self::Plain { layer, is_pair: false } => layer.call(stream)?,
            Self::Plain { layer, is_pair: true } => layer.pair(stream)?,
        }
        Ok(())
    }
}

/// Both passes.
fn step(layer: &mut Layer<'_>, stream: &Stream) -> oxtile::Result<()> {
    layer.forward(stream)?;
    layer.backward(stream)
}

fn shape([tokens, width, hidden]: Sizes) -> Shape {
    Shape { tokens, width, hidden }
}

/// The tensors that a rank is given: `x`, `dy`, and its part of `W1`, of the bias and of `W2`, whose products are about as large as what they are made of.
fn given(pattern: &[Half], Shape { tokens, width, hidden }: Shape, rank: u32, ranks: u32) -> [Vec<Half>; 5] {
    let part = |size: u64| size / u64::from(ranks);
    let tensor = |number: usize, count: u64, scale: f32| {
        let scaled: Vec<_> = pattern.iter().map(|value| Half::from_f32(scale * value.to_f32())).collect();
        values(&scaled, (5 * rank as usize + number) * STEP, count)
    };
    let of_sum = |terms: u64| 1.0 / (terms as f32).sqrt();
    [
        tensor(0, part(tokens) * width, 1.0),
        tensor(1, part(tokens) * width, 1.0),
        tensor(2, part(hidden) * width, of_sum(width)),
        tensor(3, part(hidden), 0.5),
        tensor(4, width * part(hidden), of_sum(hidden)),
    ]
}
