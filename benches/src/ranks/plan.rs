//! The comparisons among ranks.

use anyhow::Result;
use oxtile::overlap::Rates;

use super::products::{self, OVERLAP};
use super::shapes::{self, SHAPES};
use super::{Request, Times, Work, weights};
use crate::bench::Size;
use crate::peers::Check;
use crate::results::{Clock, Divided, Missing, RanksRecord};

/// Collectives of NCCL.
pub const NCCL: &str = "nccl";
/// Symmetric memory and copy engines.
pub const SYMMETRIC: &str = "symmetric";
/// Messages by kernels.
pub const EXCHANGE: &str = "exchange";

/// Sides that do the same.
pub struct Comparison {
    pub family: &'static str,
    pub kernel: String,
    pub shape: String,
    /// Bytes that one call brings to each rank.
    pub bytes: u64,
    pub flops: u64,
    pub sides: Vec<Side>,
    /// What torch is asked for.
    pub peers: Vec<Side>,
    /// Sides that cannot be.
    pub missing: Vec<Missing>,
    /// Calls in the time of a round.
    pub calls: u64,
    /// Rounds are divided by this: there are many shapes.
    pub fewer: usize,
    /// The side that takes part in the first round alone, where calls take seconds: then every round counts.
    pub once: Option<&'static str>,
    pub taken: Vec<Taken>,
    /// The sides of which the slowest is the limit.
    pub limit: &'static [&'static str],
    /// The side that a model takes for the fastest.
    pub chosen: Option<&'static str>,
    /// The ranks that share the work, and the side that does all of it on one GPU.
    pub divided: Option<Divided>,
    /// What sides planned, and whether they compute what they should, by their labels.
    pub details: Vec<(&'static str, RanksRecord, Option<Check>)>,
}

impl Comparison {
    /// One without numbers of work, peers and limits.
    pub fn of(family: &'static str, kernel: &str, shape: String, sides: Vec<Side>, taken: &[Taken]) -> Self {
        Self {
            family,
            kernel: kernel.into(),
            shape,
            bytes: 0,
            flops: 0,
            calls: sides.first().map_or(0, |side| side.request.calls),
            sides,
            peers: Vec::new(),
            missing: Vec::new(),
            fewer: 1,
            once: None,
            taken: taken.to_vec(),
            limit: &[],
            chosen: None,
            divided: None,
            details: Vec::new(),
        }
    }
}

/// One of ours, or of torch.
pub struct Side {
    pub label: &'static str,
    pub request: Request,
}

/// One of the times of a round.
#[derive(Clone, Copy)]
pub struct Taken {
    pub name: &'static str,
    pub clock: Clock,
    pub of: fn(&Times) -> f64,
}

const WALL: Taken = Taken { name: "wall", clock: Clock::Host, of: |times| times.wall };
pub const DEVICE: Taken = Taken { name: "device", clock: Clock::DeviceEvents, of: |times| times.device };
pub const HOST: Taken = Taken { name: "host", clock: Clock::Host, of: |times| times.wall };

/// M, N and K of the product that a gather goes on beside.
pub const PRODUCT: u64 = 8192;
/// A round has so many.
const PRODUCTS: u64 = 10;

/// Whole buffers of NCCL's collectives.
const BUFFERS: [u64; 8] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// Shards of gathers.
const SHARDS: [u64; 8] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// Shards of messages.
const MESSAGES: [u64; 5] = [256, 4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// The size from which on a gather in chunks is measured too.
const CHUNKED: u64 = 16 << 20;
const COPIES: [u64; 5] = [64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30];

/// What torch's collectives are called.
const TORCH: &str = "torch.distributed";

/// The comparisons of the chosen families; if none is chosen, of all but the grid of products.
pub fn comparisons(world: u32, rates: &Rates, size: Size, families: &[String]) -> Result<Vec<Comparison>> {
    let is_chosen = |family: &str| families.is_empty() || families.iter().any(|chosen| chosen == family);
    let mut all = Vec::new();
    if size == Size::Smoke {
        all.extend([3 << 10].map(|shard| gather(world, shard, false)));
        all.extend([issue(world, false), round_trip(), copy(Work::Put, 2 << 10, false), copy(Work::Get, 2 << 10, false)]);
        all.extend(products::tiny(world, rates)?);
        all.extend(weights::comparisons(world, size));
        all.retain(|comparison| is_chosen(comparison.family));
        return Ok(all);
    }
    if is_chosen(SYMMETRIC) {
        all.extend(SHARDS.map(|shard| gather(world, shard, true)));
        all.extend([issue(world, true), round_trip(), product(world)]);
        all.extend(COPIES.into_iter().flat_map(|bytes| [copy(Work::Put, bytes, true), copy(Work::Get, bytes, true)]));
    }
    if is_chosen(EXCHANGE) {
        all.extend(MESSAGES.map(|shard| message(world, shard)));
    }
    if is_chosen(NCCL) {
        for work in [Work::AllGather, Work::ReduceScatter, Work::AllReduce] {
            all.extend(BUFFERS.map(|bytes| collective(work, bytes)));
        }
    }
    if is_chosen(OVERLAP) {
        all.extend(products::main(world, rates)?);
    }
    if is_chosen(weights::FAMILY) {
        all.extend(weights::comparisons(world, size));
    }
    if families.iter().any(|family| family == SHAPES) {
        all.extend(shapes::grid(world, rates)?);
    }
    Ok(all)
}

/// The number of calls with which a round takes some milliseconds, whatever the size.
fn calls(bytes: u64) -> u64 {
    ((4 << 30) / bytes).clamp(4, 200)
}

fn torch(request: Request) -> Vec<Side> {
    vec![Side { label: TORCH, request }]
}

fn collective(work: Work, bytes: u64) -> Comparison {
    let request = Request { work, bytes, calls: calls(bytes) };
    let sides = vec![Side { label: "oxtile", request }];
    Comparison { bytes, peers: torch(request), ..Comparison::of(NCCL, &format!("{work:?}"), text(bytes), sides, &[WALL, DEVICE]) }
}

/// The rate of `bytes` is that of the bus: the bytes from other ranks, over the time.
fn gather(world: u32, shard: u64, has_nccl: bool) -> Comparison {
    let whole = shard * u64::from(world);
    let request = |work| Request { work, bytes: whole, calls: if has_nccl { calls(whole) } else { 3 } };
    let side = |label, work| Side { label, request: request(work) };
    let mut sides = vec![side("push", Work::Push(0)), side("push in place", Work::PushInPlace), side("pull", Work::Pull(0))];
    if shard >= CHUNKED || !has_nccl {
        sides.extend([side("push in 4 chunks", Work::Push(1)), side("pull in 4 chunks", Work::Pull(1))]);
    }
    let mut peers = Vec::new();
    if has_nccl {
        sides.push(side("NCCL through Oxtile", Work::AllGather));
        peers = torch(request(Work::AllGather));
    }
    let shape = format!("{} a rank", text(shard));
    Comparison { bytes: whole - shard, peers, ..Comparison::of(SYMMETRIC, "all-gather", shape, sides, &[DEVICE, WALL]) }
}

/// The rate of `bytes` is that of the bus, as with [`gather`].
fn message(world: u32, shard: u64) -> Comparison {
    let whole = shard * u64::from(world);
    let request = |work| Request { work, bytes: whole, calls: calls(whole) };
    let side = |label, work| Side { label, request: request(work) };
    let sides = vec![
        side("8 lanes of 8 KiB", Work::Exchange(1)),
        side("1 lane of 16 KiB", Work::Exchange(0)),
        side("NCCL through Oxtile", Work::AllGather),
    ];
    let (shape, peers) = (format!("{} a rank", text(shard)), torch(request(Work::AllGather)));
    Comparison { bytes: whole - shard, peers, ..Comparison::of(EXCHANGE, "all-gather of messages", shape, sides, &[DEVICE, WALL]) }
}

/// Few enough calls that no queue of the driver is full.
fn issue(world: u32, is_full: bool) -> Comparison {
    let shard = if is_full { 64 << 10 } else { 1 << 10 };
    let request = Request { work: Work::Issue, bytes: shard * u64::from(world), calls: 20 };
    let sides = vec![Side { label: "push, unchunked, its release with it", request }];
    Comparison::of(SYMMETRIC, "all-gather, enqueuing", format!("{} a rank", text(shard)), sides, &[HOST])
}

fn round_trip() -> Comparison {
    let side = |label, is_batch| Side { label, request: Request { work: Work::RoundTrip { is_batch }, bytes: 1 << 10, calls: 100 } };
    let sides = vec![side("a batch a rank", true), side("two calls a rank", false)];
    Comparison::of(SYMMETRIC, "signal there and back", "2 ranks".into(), sides, &[DEVICE])
}

/// To, or from, the next rank, all ranks at once.
fn copy(work: Work, bytes: u64, has_peer: bool) -> Comparison {
    let request = Request { work, bytes, calls: if has_peer { calls(bytes) } else { 2 } };
    let (kernel, sides) = (if work == Work::Put { "put" } else { "get" }, vec![Side { label: "oxtile", request }]);
    let peers = if has_peer { torch(request) } else { Vec::new() };
    Comparison { bytes, peers, ..Comparison::of(SYMMETRIC, kernel, text(bytes), sides, &[DEVICE, WALL]) }
}

fn product(world: u32) -> Comparison {
    let side = |label, work| Side { label, request: Request { work, bytes: u64::from(world) * (256 << 20), calls: PRODUCTS } };
    let sides = vec![
        side("alone", Work::Gemm),
        side("beside a push all-gather", Work::GemmWithPush),
        side("beside a push all-gather in place", Work::GemmWithPushInPlace),
        side("beside NCCL's all-gather", Work::GemmWithNccl),
    ];
    let shape = format!("{PRODUCT}x{PRODUCT}x{PRODUCT}");
    Comparison { flops: 2 * PRODUCT.pow(3), ..Comparison::of(SYMMETRIC, "gemm bf16 nt", shape, sides, &[DEVICE]) }
}

/// `256 B`, `64 KiB`, `16 MiB`.
fn text(bytes: u64) -> String {
    match bytes {
        ..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}
