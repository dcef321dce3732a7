//! The comparisons among ranks.

use super::{Request, Times, Work};
use crate::bench::Size;
use crate::results::Clock;

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
    pub peer: Option<Request>,
    pub taken: Vec<Taken>,
}

/// One of ours.
pub struct Side {
    pub label: &'static str,
    pub request: Request,
}

/// One of the times of a round.
pub struct Taken {
    pub name: &'static str,
    pub clock: Clock,
    pub of: fn(&Times) -> f64,
}

const WALL: Taken = Taken { name: "wall", clock: Clock::Host, of: |times| times.wall };
const DEVICE: Taken = Taken { name: "device", clock: Clock::DeviceEvents, of: |times| times.device };
const HOST: Taken = Taken { name: "host", clock: Clock::Host, of: |times| times.wall };

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

/// The comparisons of the chosen families, or of all families if none is chosen.
pub fn comparisons(world: u32, size: Size, families: &[String]) -> Vec<Comparison> {
    let is_chosen = |family: &str| families.is_empty() || families.iter().any(|chosen| chosen == family);
    let mut all = Vec::new();
    if size == Size::Smoke {
        all.extend([3 << 10].map(|shard| gather(world, shard, false)));
        all.extend([issue(world, false), round_trip(), copy(Work::Put, 2 << 10, false), copy(Work::Get, 2 << 10, false)]);
        return all;
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
    all
}

/// The number of calls with which a round takes some milliseconds, whatever the size.
fn calls(bytes: u64) -> u64 {
    ((4 << 30) / bytes).clamp(4, 200)
}

fn collective(work: Work, bytes: u64) -> Comparison {
    let request = Request { work, bytes, calls: calls(bytes) };
    Comparison {
        family: NCCL,
        kernel: format!("{work:?}"),
        shape: text(bytes),
        bytes,
        flops: 0,
        sides: vec![Side { label: "oxtile", request }],
        peer: Some(request),
        taken: vec![WALL, DEVICE],
    }
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
    if has_nccl {
        sides.push(side("NCCL through Oxtile", Work::AllGather));
    }
    Comparison {
        family: SYMMETRIC,
        kernel: "all-gather".into(),
        shape: format!("{} a rank", text(shard)),
        bytes: whole - shard,
        flops: 0,
        sides,
        peer: has_nccl.then(|| request(Work::AllGather)),
        taken: vec![DEVICE, WALL],
    }
}

/// The rate of `bytes` is that of the bus, as with [`gather`].
fn message(world: u32, shard: u64) -> Comparison {
    let whole = shard * u64::from(world);
    let request = |work| Request { work, bytes: whole, calls: calls(whole) };
    let side = |label, work| Side { label, request: request(work) };
    Comparison {
        family: EXCHANGE,
        kernel: "all-gather of messages".into(),
        shape: format!("{} a rank", text(shard)),
        bytes: whole - shard,
        flops: 0,
        sides: vec![
            side("8 lanes of 8 KiB", Work::Exchange(1)),
            side("1 lane of 16 KiB", Work::Exchange(0)),
            side("NCCL through Oxtile", Work::AllGather),
        ],
        peer: Some(request(Work::AllGather)),
        taken: vec![DEVICE, WALL],
    }
}

/// Few enough calls that no queue of the driver is full.
fn issue(world: u32, is_full: bool) -> Comparison {
    let shard = if is_full { 64 << 10 } else { 1 << 10 };
    let side = |label, work| Side { label, request: Request { work, bytes: shard * u64::from(world), calls: 20 } };
    Comparison {
        family: SYMMETRIC,
        kernel: "all-gather, enqueuing".into(),
        shape: format!("{} a rank", text(shard)),
        bytes: 0,
        flops: 0,
        sides: vec![side("push, unchunked, its release with it", Work::Issue)],
        peer: None,
        taken: vec![HOST],
    }
}

fn round_trip() -> Comparison {
    let side = |label, is_batch| Side { label, request: Request { work: Work::RoundTrip { is_batch }, bytes: 1 << 10, calls: 100 } };
    Comparison {
        family: SYMMETRIC,
        kernel: "signal there and back".into(),
        shape: "2 ranks".into(),
        bytes: 0,
        flops: 0,
        sides: vec![side("a batch a rank", true), side("two calls a rank", false)],
        peer: None,
        taken: vec![DEVICE],
    }
}

/// To, or from, the next rank, all ranks at once.
fn copy(work: Work, bytes: u64, has_peer: bool) -> Comparison {
    let request = Request { work, bytes, calls: if has_peer { calls(bytes) } else { 2 } };
    Comparison {
        family: SYMMETRIC,
        kernel: if work == Work::Put { "put" } else { "get" }.into(),
        shape: text(bytes),
        bytes,
        flops: 0,
        sides: vec![Side { label: "oxtile", request }],
        peer: has_peer.then_some(request),
        taken: vec![DEVICE, WALL],
    }
}

fn product(world: u32) -> Comparison {
    let side = |label, work| Side { label, request: Request { work, bytes: u64::from(world) * (256 << 20), calls: PRODUCTS } };
    Comparison {
        family: SYMMETRIC,
        kernel: "gemm bf16 nt".into(),
        shape: format!("{PRODUCT}x{PRODUCT}x{PRODUCT}"),
        bytes: 0,
        flops: 2 * PRODUCT.pow(3),
        sides: vec![
            side("alone", Work::Gemm),
            side("beside a push all-gather", Work::GemmWithPush),
            side("beside a push all-gather in place", Work::GemmWithPushInPlace),
            side("beside NCCL's all-gather", Work::GemmWithNccl),
        ],
        peer: None,
        taken: vec![DEVICE],
    }
}

/// `256 B`, `64 KiB`, `16 MiB`.
fn text(bytes: u64) -> String {
    match bytes {
        ..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}
