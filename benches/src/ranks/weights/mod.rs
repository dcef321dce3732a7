//! A rank's weights in shards: passes of a chain beside their products, what the products wait for, gradients on their way to their owners, and NCCL's gathers and reduce-scatters in
//! their place.
//!
//! A chain is the weights of some layers. A pass takes each weight and multiplies tokens by it; a step of gradients computes that of each weight, and scatters it. Before the first
//! round pulled weights are compared with the cast of the whole, and sums of gradients with what they must be.
//!
//! | file | what it holds |
//! |---|---|
//! | `layers` | the weights of layers, and data for them |
//! | `shards` | the set and the chains of a format |
//! | `passes` | a rank's passes |
//! | `gradients` | a rank's gradients |
//! | `nccl` | a rank's buffers for NCCL in their place |

mod gradients;
mod layers;
mod nccl;
mod passes;
mod shards;

pub use self::gradients::Gradients;
pub use self::layers::{Format, Layers};
pub use self::passes::Passes;

use serde::{Deserialize, Serialize};

use super::plan::{Comparison, DEVICE, HOST, Side};
use super::{Request, Work};
use crate::bench::Size;

/// What a round times. `Ahead` is the number of weights that are pulled ahead, 1 or 2, and by how many streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Pulls alone.
    Pulls,
    /// Pulls alone, of which two streams carry a half each.
    PullsByTwo,
    /// The products alone, of weights that are there.
    Products,
    /// A pass: products of pulled weights.
    Pass(Ahead),
    /// The time for which the products of a pass wait for pulls: of the first weight alone, or of all others. A wait is from the end of the product before to the end of the pull, or nothing.
    Waits(Ahead, Waited),
    /// The host's time of the pulls, until all of them are enqueued.
    Issue,
    /// NCCL's all-gathers alone.
    Nccl,
    /// Products, and NCCL's all-gather of the next weight beside each.
    NcclPass,
    /// Gradients to their owners, and their sums, alone.
    Scatter,
    /// The products of gradients alone.
    GradientProducts,
    /// Products of gradients that are scattered, and added to main gradients.
    ScatterStep,
    /// The same, which replace the main gradients.
    ReplaceStep,
    /// NCCL's reduce-scatters alone.
    ReduceScatter,
    /// Products of gradients, and NCCL's reduce-scatter of the one before beside each.
    ReduceScatterStep,
}

/// How many weights are pulled ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ahead {
    One,
    Two,
    /// One, whose pull two streams carry.
    OneByTwo,
}

/// Which weights of a pass are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Waited {
    First,
    Others,
}

impl By {
    /// Whether it is of gradients, and not of passes.
    pub fn is_of_gradients(self) -> bool {
        use By::{GradientProducts, ReduceScatter, ReduceScatterStep, ReplaceStep, Scatter, ScatterStep};
        matches!(self, Scatter | GradientProducts | ScatterStep | ReplaceStep | ReduceScatter | ReduceScatterStep)
    }
}

/// Weights in shards, beside NCCL in their place.
pub const FAMILY: &str = "sharded";

/// Bytes of a shard whose gathers are compared with NCCL's: mebibytes.
const SHARDS: [(u64, &str); 3] = [(64, "64 MiB a rank"), (256, "256 MiB a rank"), (1024, "1 GiB a rank")];

/// Passes that are enqueued one after another, to time the host: after the first few calls, which find its caches cold. The device's queues have room for them.
const PASSES: u64 = 4;

const PRODUCTS: &str = "products alone";
const PULLS: &str = "pulls alone";
const SCATTERS: &str = "scatters alone";

/// Passes in every format, gathers of some sizes, and gradients.
pub fn comparisons(world: u32, size: Size) -> Vec<Comparison> {
    let mut all: Vec<_> =
        [Format::Bf16, Format::Mxfp8, Format::Nvfp4].into_iter().flat_map(|format| of_format(world, size, format)).collect();
    all.push(gradients(world, size));
    let shards: &[_] = size.pick(&SHARDS, &[]);
    all.extend(shards.iter().map(|(mebibytes, text)| gathers(world, *mebibytes, text)));
    all
}

/// A pass, its waits and the host's time of its pulls.
fn of_format(world: u32, size: Size, format: Format) -> [Comparison; 3] {
    let layers = Layers { format, ..size.pick(Layers::LLAMA, Layers::TINY) };
    let of = |label, by, calls| Side { label, request: Request { work: Work::Weights(by, layers), bytes: 0, calls } };
    let side = |label, by| of(label, by, 1);
    let mut sides = vec![
        side("pass", By::Pass(Ahead::One)),
        side("pass, 2 ahead", By::Pass(Ahead::Two)),
        side("pass, two streams", By::Pass(Ahead::OneByTwo)),
        side(PRODUCTS, By::Products),
        side(PULLS, By::Pulls),
    ];
    // NCCL gathers what it gathers: bf16.
    if size == Size::Full && format == Format::Bf16 {
        sides.extend([side("pass, NCCL gathers", By::NcclPass), side("NCCL gathers alone", By::Nccl)]);
    }
    let (name, shape) = (format.name(), layers.text(world));
    let pass = Comparison {
        bytes: layers.bytes() / u64::from(world) * u64::from(world - 1),
        flops: layers.flops(),
        limit: &[PRODUCTS, PULLS],
        ..Comparison::of(FAMILY, &format!("forward pass, {name}"), shape.clone(), sides, &[DEVICE])
    };
    let waits = vec![
        side("for the first weight", By::Waits(Ahead::One, Waited::First)),
        side("for all others", By::Waits(Ahead::One, Waited::Others)),
        side("for all others, 2 ahead", By::Waits(Ahead::Two, Waited::Others)),
    ];
    let waits =
        Comparison { fewer: 3, ..Comparison::of(FAMILY, &format!("waits of a forward pass, {name}"), shape.clone(), waits, &[DEVICE]) };
    let issue = Comparison::of(FAMILY, &format!("host time of a pull, {name}"), shape, vec![of("pulls", By::Issue, PASSES)], &[HOST]);
    [pass, waits, Comparison { calls: PASSES * layers.places() as u64, ..issue }]
}

/// Gathers of shards of one size.
fn gathers(world: u32, mebibytes: u64, text: &str) -> Comparison {
    let layers = Layers::of_shards(world, mebibytes << 20);
    let side = |label, by| Side { label, request: Request { work: Work::Weights(by, layers), bytes: 0, calls: 2048 / mebibytes } };
    let sides = vec![side("pulls", By::Pulls), side("pulls, two streams", By::PullsByTwo), side("NCCL", By::Nccl)];
    let comparison = Comparison::of(FAMILY, "pulls of weights", text.to_owned(), sides, &[DEVICE]);
    let places = layers.places() as u64;
    // A call is a pass of some weights.
    Comparison { bytes: (mebibytes << 20) * u64::from(world - 1), calls: comparison.calls * places, ..comparison }
}

/// Gradients to their owners, beside the products that compute them and alone.
fn gradients(world: u32, size: Size) -> Comparison {
    let layers = size.pick(Layers::LLAMA, Layers::TINY);
    let side = |label, by| Side { label, request: Request { work: Work::Weights(by, layers), bytes: 0, calls: 1 } };
    let mut sides = vec![
        side("step", By::ScatterStep),
        side("step that replaces", By::ReplaceStep),
        side(PRODUCTS, By::GradientProducts),
        side(SCATTERS, By::Scatter),
    ];
    if size == Size::Full {
        sides.extend([side("step, NCCL reduce-scatters", By::ReduceScatterStep), side("NCCL reduce-scatters alone", By::ReduceScatter)]);
    }
    Comparison {
        bytes: layers.bytes() / u64::from(world) * u64::from(world - 1),
        flops: layers.flops(),
        limit: &[PRODUCTS, SCATTERS],
        ..Comparison::of(FAMILY, "gradients, bf16", layers.text(world), sides, &[DEVICE])
    }
}
