//! A rank's weights in shards: a forward pass of a chain beside its products, its parts, and NCCL's gathers in their place.
//!
//! A chain is the weights of some layers. A pass takes each weight and multiplies tokens by it. Before the first round the pulled weights are compared with the cast of the whole.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use half::bf16 as Half;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, Team};
use oxtile::gemm::{Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::quantize::{Direction, Mxfp8 as Mxfp8Casts};
use oxtile::sharded::{Bf16, Chain, ChainConfig, Mxfp8, Published, ShardSet, Weight, WeightFormat, WeightId};
use oxtile::sum_parts::SumParts;
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};
use oxtile::{Buffer, Runtime, Stream};
use oxtile_tile::launch::DeviceViewMut;
use serde::Serialize;

use super::gate::Gate;
use super::member::DEADLINE;
use super::plan::{Comparison, DEVICE, HOST, Side};
use super::{Request, Times, Work};
use crate::bench::Size;
use crate::random::Random;

/// What a round times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Pulls alone.
    Pulls,
    /// The products alone, of weights that are there.
    Products,
    /// A pass: products of pulled weights.
    Pass,
    /// The host's time of the pulls, until all of them are enqueued.
    Issue,
    /// NCCL's all-gathers alone.
    Nccl,
    /// Products, and NCCL's all-gather of the next weight beside each.
    NcclPass,
}

impl By {
    fn has_products(self) -> bool {
        matches!(self, Self::Products | Self::Pass | Self::NcclPass)
    }
}

/// Which layers, and how wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Layers {
    pub count: u64,
    /// Elements of a token.
    pub width: u64,
    /// Key heads' elements, and those of the gated layer.
    pub keys: u64,
    pub gated: u64,
    pub tokens: u64,
    pub is_quantized: bool,
}

impl Layers {
    /// The weights of a layer: query, key and value, output, gate and up, and down projections.
    fn shapes(self) -> [(&'static str, [u64; 2]); 4] {
        let Self { width, keys, gated, .. } = self;
        [("qkv", [width + 2 * keys, width]), ("out", [width, width]), ("gate_up", [2 * gated, width]), ("down", [width, gated])]
    }

    fn weights(self) -> Vec<Weight> {
        let of = |layer| self.shapes().map(|(name, shape)| Weight::new(format!("{layer}.{name}"), shape));
        (0..self.count).flat_map(of).collect()
    }

    /// Bytes of the whole weights.
    pub fn bytes(self) -> u64 {
        let elements: u64 = self.shapes().iter().map(|(_, [rows, columns])| rows * columns).sum();
        self.count * if self.is_quantized { elements + elements / 32 } else { 2 * elements }
    }

    /// The weights of all layers.
    fn places(self) -> usize {
        4 * self.count as usize
    }

    /// Rows and columns of the weight at a place.
    fn shape(self, at: usize) -> [u64; 2] {
        self.shapes()[at % 4].1
    }

    pub fn flops(self) -> u64 {
        self.count * self.shapes().iter().map(|(_, [rows, columns])| 2 * self.tokens * rows * columns).sum::<u64>()
    }
}

/// Weights in shards, beside NCCL's gathers in their place.
pub const FAMILY: &str = "sharded";

/// Layers of Llama 70B (<https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json>), and 8192 tokens a rank.
const LLAMA: Layers = Layers { count: 4, width: 8192, keys: 1024, gated: 28672, tokens: 8192, is_quantized: false };
/// What virtual GPUs multiply.
const TINY: Layers = Layers { count: 2, width: 64, keys: 32, gated: 96, tokens: 16, is_quantized: false };

/// Both formats, each by every side.
pub fn comparisons(world: u32, size: Size) -> Vec<Comparison> {
    let of = |is_quantized: bool| {
        let layers = Layers { is_quantized, ..size.pick(LLAMA, TINY) };
        let calls = size.pick(4, 1);
        let side = |label, by| Side { label, request: Request { work: Work::Weights(by, layers), bytes: 0, calls } };
        let mut sides = vec![side("pass", By::Pass), side(PRODUCTS, By::Products), side(PULLS, By::Pulls)];
        // NCCL gathers what it gathers: bf16.
        if size == Size::Full && !is_quantized {
            sides.extend([side("pass, NCCL gathers", By::NcclPass), side("NCCL gathers alone", By::Nccl)]);
        }
        let format = if is_quantized { "mxfp8" } else { "bf16" };
        let Layers { count, width, gated, tokens, .. } = layers;
        let shape = format!("{count} layers of {width} and {gated}, {tokens} tokens, {world} ranks");
        let issue = Comparison {
            bytes: 0,
            ..Comparison::of(FAMILY, &format!("issue of the pulls, {format}"), shape.clone(), vec![side("pulls", By::Issue)], &[HOST])
        };
        let pass = Comparison {
            bytes: layers.bytes() / u64::from(world) * u64::from(world - 1),
            flops: layers.flops(),
            limit: &[PRODUCTS, PULLS],
            ..Comparison::of(FAMILY, &format!("forward pass, {format}"), shape, sides, &[DEVICE])
        };
        [pass, issue]
    };
    [false, true].into_iter().flat_map(of).collect()
}

const PRODUCTS: &str = "products alone";
const PULLS: &str = "pulls alone";

/// A rank's weights of one kind of layers.
pub struct Weights {
    runtime: Runtime,
    compute: Stream,
    gathers: Stream,
    layers: Layers,
    set: Set,
    /// A product for each of a layer's weights, its operands and result; the largest of each serves all.
    gemms: Vec<Gemm<bf16, bf16>>,
    input: Buffer<bf16>,
    resident: Buffer<bf16>,
    output: Buffer<bf16>,
    /// Two whole weights and a shard, for NCCL.
    whole: Option<[Buffer<bf16>; 2]>,
    shard: Option<Buffer<bf16>>,
    /// Reads an element of what NCCL gathers.
    touch: SumParts<bf16, bf16>,
    first: Buffer<bf16>,
    arena: Arena,
}

enum Set {
    Wide(Box<ShardSet<Bf16>>, Box<Chain<Bf16>>),
    Narrow(Box<ShardSet<Mxfp8>>, Box<Chain<Mxfp8>>),
}

impl Weights {
    pub fn new(rank: &HostRank, runtime: &Runtime, backend: BackendName, layers: Layers, has_nccl: bool) -> Result<Self> {
        let (compute, gathers) = (rank.device().stream()?, rank.device().urgent_stream()?);
        let team = Team::all(rank.world());
        let member = team.member(rank.rank()).context("every rank is of the world")?;
        let weights = layers.weights();
        let bytes = match layers.is_quantized {
            true => ShardSet::<Mxfp8>::arena_bytes(&team, &weights)?,
            false => ShardSet::<Bf16>::arena_bytes(&team, &weights)?,
        };
        let arena = Arena::open(rank, ArenaOptions { backend, bytes: bytes + (1 << 20), deadline: DEADLINE, ..ArenaOptions::default() })?;
        let pattern = Random::new(7).normal(1 << 20);
        let set = match layers.is_quantized {
            true => {
                let (set, chain) = published(&compute, ShardSet::new(&compute, &arena, &member, weights)?, &pattern)?;
                Set::Narrow(Box::new(set), Box::new(chain))
            }
            false => {
                let (set, chain) = published(&compute, ShardSet::new(&compute, &arena, &member, weights)?, &pattern)?;
                Set::Wide(Box::new(set), Box::new(chain))
            }
        };
        let product = |(_, [n, k]): &(&str, [u64; 2])| {
            let config = GemmConfig { m: layers.tokens, n: *n, k: *k, transpose_b: true, ..GemmConfig::default() };
            Gemm::new(runtime, config)
        };
        let shapes = layers.shapes();
        let most = |of: fn(&[u64; 2]) -> u64| shapes.iter().map(|(_, shape)| of(shape)).max().unwrap_or(0);
        let filled = |len: u64| Buffer::from_slice(&compute, &repeated(&pattern, 0, len));
        let (largest, world) = (most(|[rows, columns]| rows * columns), u64::from(rank.world().get()));
        let empty = || Buffer::uninitialised(&compute, largest);
        let (whole, shard) = match has_nccl && !layers.is_quantized {
            true => (Some([empty()?, empty()?]), Some(filled(largest.div_ceil(world))?)),
            false => (None, None),
        };
        Ok(Self {
            runtime: runtime.clone(),
            gemms: shapes.iter().map(product).collect::<oxtile::Result<_>>()?,
            input: filled(layers.tokens * most(|[_, columns]| *columns))?,
            resident: filled(largest)?,
            output: Buffer::uninitialised(&compute, layers.tokens * most(|[rows, _]| *rows))?,
            whole,
            shard,
            touch: SumParts::new(runtime)?,
            first: Buffer::uninitialised(&compute, 1)?,
            compute,
            gathers,
            layers,
            set,
            arena,
        })
    }

    /// Whether it is of these layers.
    pub fn is_of(&self, layers: Layers) -> bool {
        self.layers == layers
    }

    /// Compares what is pulled with the cast of the whole: the first weight and the last.
    pub fn check(&mut self, rank: &HostRank) -> Result<()> {
        let pattern = Random::new(7).normal(1 << 20);
        let (runtime, stream) = (&self.runtime, &self.compute);
        match &mut self.set {
            Set::Wide(set, chain) => each(set, chain, stream, |at, weight, tensor| {
                let found = tensor.data.to_vec_as::<Half>(stream)?;
                ensure!(
                    found == repeated(&pattern, at, weight.rows * weight.columns),
                    "`{}` on {}: not the whole weight",
                    weight.name,
                    rank.rank()
                );
                Ok(())
            }),
            Set::Narrow(set, chain) => {
                let casts = Mxfp8Casts::<bf16>::new(runtime)?;
                each(set, chain, stream, |at, weight, tensor| {
                    let values = Buffer::<bf16>::from_slice(stream, &repeated(&pattern, at, weight.rows * weight.columns))?;
                    let whole = casts.quantize(stream, values.view(), [weight.rows, weight.columns], Direction::Rows)?;
                    let is_equal = tensor.data.to_vec(stream)? == whole.data.to_vec(stream)?
                        && tensor.scales.to_vec(stream)? == whole.scales.to_vec(stream)?;
                    ensure!(is_equal, "`{}` on {}: not the cast of the whole weight", weight.name, rank.rank());
                    Ok(())
                })
            }
        }
    }

    /// Times passes, after one that is not timed. Products are bound before.
    pub fn round(&mut self, by: By, calls: u64, comm: Option<&NcclCommunicator>, gate: &Gate) -> Result<Times> {
        let Self { compute, gathers, layers, set, gemms, input, resident, output, whole, shard, touch, first, arena, .. } = self;
        let settle = || -> Result<()> {
            arena.ticket(compute)?.wait()?;
            comm.map_or(Ok(()), |comm| Ok(comm.synchronize(gathers)?))
        };
        let address = output.view_mut().address();
        let places = match &*set {
            Set::Wide(_, chain) => Some(chain.places()),
            Set::Narrow(..) => None,
        };
        let mut bound = Vec::new();
        gate.after(DEADLINE, || {
            let count = if by.has_products() { layers.places() } else { 0 };
            for at in 0..count {
                let [n, k] = layers.shape(at);
                // Products of narrow weights are those of one that is there: what they take beside pulls is measured.
                let weight = match (by, &places, &*whole) {
                    (By::Pass, Some(places), _) => &places.forward(at)?[0].data,
                    (By::NcclPass, _, Some(whole)) => &whole[at % 2],
                    _ => &*resident,
                };
                // SAFETY: the results lie there while the products are bound; each is overwritten by the next one, on one stream, and none is read.
                let d = unsafe { DeviceViewMut::from_raw(address, layers.tokens * n, output.view().access("results").owner) };
                let (a, b) = (input.view().slice(0, layers.tokens * k), weight.view().slice(0, n * k));
                bound.push(gemms[at % 4].bind(compute, a, b, None, d)?);
            }
            Ok(())
        })?;
        let mut pass = || -> Result<()> {
            let product = |at: usize| bound.get_mut(at).map_or(Ok(()), |product| Ok(product.run(compute)?));
            match (by, comm, &mut *set) {
                (By::Pulls | By::Pass | By::Issue, _, Set::Wide(set, chain)) => take(set, chain, compute, product),
                (By::Pulls | By::Pass | By::Issue, _, Set::Narrow(set, chain)) => take(set, chain, compute, product),
                (By::Products, ..) => (0..layers.places()).try_for_each(product),
                (By::Nccl | By::NcclPass, Some(comm), _) => {
                    let (Some(whole), Some(shard)) = (&*whole, &*shard) else { bail!("it has no buffers for NCCL") };
                    gathered(*layers, comm, [compute, gathers], (whole, shard), (touch, first), product)
                }
                (By::Nccl | By::NcclPass, None, _) => bail!("there is no NCCL"),
            }
        };
        gate.after(DEADLINE, || pass().and_then(|()| settle()))?;
        let (begin, start) = (Instant::now(), compute.record()?);
        (0..calls).try_for_each(|_| pass())?;
        let issued = begin.elapsed();
        compute.wait(&gathers.record()?)?;
        let end = compute.record()?;
        settle()?;
        let wall = if by == By::Issue { issued } else { begin.elapsed() };
        Ok(Times { wall: wall.as_secs_f64() * 1e3, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3, ..Times::default() })
    }

    /// Every rank closes it together.
    pub fn close(self) -> Result<()> {
        let Self { set, arena, .. } = self;
        drop(set);
        Ok(arena.close().map_err(oxtile::Error::from)?.finish()?)
    }
}

/// NCCL's gather of each weight, the next one beside the products of the one before, into two buffers in turn.
fn gathered(
    layers: Layers,
    comm: &NcclCommunicator,
    [compute, gathers]: [&Stream; 2],
    (whole, shard): (&[Buffer<bf16>; 2], &Buffer<bf16>),
    (touch, first): (&SumParts<bf16, bf16>, &mut Buffer<bf16>),
    mut product: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let ranks = u64::from(comm.world().get());
    let gather = |at: usize| -> Result<()> {
        let ([rows, columns], whole) = (layers.shape(at), &whole[at % 2]);
        let elements = rows * columns / ranks;
        let access = whole.view().access("whole");
        // SAFETY: the matrix lies there. Only the products of its turn read it besides, which the runtime orders.
        let target = unsafe { DeviceViewMut::from_raw(access.address, elements * ranks, access.owner) };
        Ok(comm.all_gather(gathers, shard.view().slice(0, elements), target)?)
    };
    gather(0)?;
    for at in 0..layers.places() {
        // The first read waits for this gather alone: the next one is not enqueued yet.
        touch.round(compute, whole[at % 2].view().slice(0, 1), first.view_mut())?;
        if at + 1 < layers.places() {
            gather(at + 1)?;
        }
        product(at)?;
    }
    Ok(())
}

/// Elements of the pattern, over and over, those of weight `at`.
fn repeated(pattern: &[Half], at: usize, len: u64) -> Vec<Half> {
    pattern.iter().cycle().skip(at * 104_729 % pattern.len()).take(len as usize).copied().collect()
}

/// Publishes this rank's rows, and makes the chain of all weights.
fn published<F: WeightFormat>(stream: &Stream, mut set: ShardSet<F>, pattern: &[Half]) -> Result<(ShardSet<F>, Chain<F>)> {
    let weights: Vec<(WeightId, Weight)> = set.weights().map(|(id, weight)| (id, weight.clone())).collect();
    let rows = weights.iter().map(|(id, _)| set.own_rows(*id)).collect::<oxtile::Result<Vec<_>>>()?;
    let mut updating = set.update(stream)?;
    for ((id, weight), rows) in weights.iter().zip(rows) {
        let whole = repeated(pattern, id.index(), weight.rows * weight.columns);
        let own = &whole[(rows.start * weight.columns) as usize..(rows.end * weight.columns) as usize];
        updating.write(*id, 0, own)?;
    }
    updating.publish()?;
    let config = ChainConfig::new(&set, weights.iter().map(|(id, _)| *id))?;
    let chain = Chain::new(stream, &set, &config)?;
    Ok((set, chain))
}

/// A forward pass.
fn take<F: WeightFormat>(
    set: &ShardSet<F>,
    chain: &mut Chain<F>,
    stream: &Stream,
    mut product: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    let published = Published::of(set)?;
    let (mut pass, mut at) = (published.forward(chain)?, 0);
    while let Some(weight) = pass.next_weight() {
        pass.take(weight, stream)?;
        product(at)?;
        at += 1;
    }
    Ok(pass.finish()?)
}

/// The first and the last weight of a pass.
fn each<F: WeightFormat>(
    set: &ShardSet<F>,
    chain: &mut Chain<F>,
    stream: &Stream,
    look: impl Fn(usize, &Weight, &F::Tensor) -> Result<()>,
) -> Result<()> {
    let (weights, places) = (set.weights().map(|(_, weight)| weight.clone()).collect::<Vec<_>>(), chain.places());
    take(set, chain, stream, |at| match at == 0 || at + 1 == weights.len() {
        true => look(at, &weights[at], &places.forward(at)?[0]),
        false => Ok(()),
    })
}
