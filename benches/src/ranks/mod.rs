//! What many ranks do together, a GPU a process: collectives of NCCL, symmetric memory moved by copy engines, messages by kernels, and products
//! of gathered operands, and attention to a sequence that is spread over ranks; in turn with torch.distributed over the same NCCL. Ranks of virtual GPUs are threads.
//!
//! One round of a side is a number of calls, one after another. Both the wall time from the first call to the end of the work, on the host,
//! and the device's time between two events are taken, of the slowest rank.
//!
//! | file | what it holds |
//! |---|---|
//! | `plan` | which comparisons are made |
//! | `member` | one rank: its buffers, and what it does in a round |
//! | `products` | which gathered products are compared |
//! | `shapes` | the methods of products at many shapes |
//! | `symmetric` | a rank's symmetric memory |
//! | `gathered` | a rank's gathered products |
//! | `quantized` | those whose operand is gathered as codes and scales |
//! | `expected` | what these have to be |
//! | `reduced` | a rank's products whose sum all ranks get |
//! | `scattered` | a rank's products whose rows are scattered |
//! | `scattered_quantized` | those of operands that are codes and scales |
//! | `part` | a rank's part of either |
//! | `layer` | a rank's part of a feed-forward layer: all of its products, forward and backward |
//! | `weights` | a rank's weights in shards |
//! | `context_parallel` | attention to a sequence that is spread over ranks: ranks of its own for each row |
//! | `messages` | a rank's mailboxes: messages by kernels |
//! | `workers` | our ranks, and what each serves |
//! | `process` | a rank that is a process: its start, its end, and the messages between |
//! | `gate` | a barrier with a time limit |

mod context_parallel;
mod expected;
mod gate;
mod gathered;
mod layer;
mod member;
mod messages;
mod part;
mod plan;
mod process;
mod products;
mod quantized;
mod reduced;
mod scattered;
mod scattered_quantized;
mod shapes;
mod symmetric;
mod weights;
mod workers;

use std::time::Duration;

use anyhow::{Result, ensure};
use oxtile::Runtime;
use oxtile::comm::NcclCommunicator;
use oxtile::overlap::Rates;
use serde::{Deserialize, Serialize};

use self::context_parallel::{Row, RowRanks, auto};
use self::gathered::{By, Sizes};
use self::plan::{Comparison, Side};
pub use self::process::{FLAG, serve_process};
use self::workers::{Errand, Home, Ranks};
use crate::bench::Size;
use crate::machine::{self, Machine};
use crate::peers::Peers;
use crate::random::Random;
use crate::results::{Divided, Document, Missing, RanksAre, RanksRecord, Record, SideRecord};
use crate::run::Options;

/// The families that ranks have.
pub const NAMES: [&str; 8] = [
    plan::NCCL,
    plan::SYMMETRIC,
    plan::EXCHANGE,
    products::OVERLAP,
    shapes::SHAPES,
    weights::FAMILY,
    context_parallel::FAMILY,
    auto::FAMILY,
];
/// How the numbers are made; printed in every results file.
const METHOD: &str = "Calls one after another, the slowest rank; wall: from the first call to the end of the work; device: between two events. Products of gathered \
operands: random normal data, one call that is not timed before the first event; before the first round the results of a call and of a replayed call are compared with plain \
products, byte by byte, of results over 64 MiB the first and last 32 MiB. The slowest side of `limit` is the limit of the others; `chosen` is the side that the model takes. The layer: random normal data, eager calls of torch and NCCL, whose gathers and sums come one after the products; before the first round all \
results of a call, or of a replayed graph, are compared with plain products of one GPU, within 1 % and 2 % of a usual element; torch's has the same bias, its gradient and gradients of weights in f32, what is between its products is compiled, and its results are not compared, nor are those of the pair apart. Context parallelism: random normal data, one call that is not timed before the \
first event; before the first round both passes of each schedule are compared with our single GPU's, in the first and last rows of rank 0. `divided.alone` is our single GPU, rank 0's, on the whole \
sequence: its time over `divided.ranks`, over a side's, is the side's efficiency, of 512k tokens and more beside one time of the single GPU, and without the call that is not timed; `divided.each` is the same of every rank at once, by the slowest. `ranks.idle` is from the end of each rank's last call to the last rank's, by the host's clock. \
What `auto` chooses: each pass alone, by every schedule that can be taken; the plan of the chosen side has the times of all by the model; the first and last rows of rank 0 are compared with those of the side that was made first.";
/// Rounds that are not counted.
const WARM_UP: usize = 2;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Work {
    /// NCCL's.
    AllGather,
    /// NCCL's.
    ReduceScatter,
    /// NCCL's.
    AllReduce,
    /// The all-gather whose members put, in one of the ways that `symmetric` has.
    Push(usize),
    /// The same in one chunk, in place: nothing is copied within a device.
    PushInPlace,
    /// The same in one chunk, its host time alone.
    Issue,
    /// The all-gather whose members get.
    Pull(usize),
    /// The all-gather of a kernel a rank, cut as one of [`messages::CUTS`].
    Exchange(usize),
    /// Puts to the next rank, all at once.
    Put,
    /// Gets from the next rank.
    Get,
    /// A signal of rank 0 to rank 1 and one back, in batches or call by call.
    RoundTrip { is_batch: bool },
    /// Products of matrices with nothing beside them.
    Gemm,
    /// The same while shards are pushed.
    GemmWithPush,
    /// The same while shards are pushed in place.
    GemmWithPushInPlace,
    /// The same while NCCL gathers.
    GemmWithNccl,
    /// Products of which one operand is gathered.
    GatheredProduct(By, Sizes),
    /// The same of an operand that is gathered as codes and scales.
    QuantizedProduct(quantized::By, quantized::Travels, Sizes),
    /// Products whose sum the ranks share, and whose rows are scattered.
    ScatteredProduct(scattered::By, Sizes),
    /// The same of operands that are codes and scales.
    ScatteredCodes(scattered_quantized::By, quantized::Travels, Sizes),
    /// Products whose sum all ranks get.
    ReducedProduct(reduced::By, Sizes),
    /// Both passes of a feed-forward layer.
    Layer(layer::By, layer::Sizes),
    /// A pass over weights in shards, or its parts.
    Weights(weights::By, weights::Layers),
    /// Attention to a sequence that is spread over ranks.
    ContextParallel { by: context_parallel::By, passes: context_parallel::Passes, row: Row },
    /// The same by a schedule that is chosen, and by all others.
    Choice { of: auto::Configuration, step: auto::Step },
}

/// One round of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Request {
    #[serde(rename = "collective")]
    work: Work,
    /// Bytes of the whole buffer; of what is put or got.
    bytes: u64,
    calls: u64,
}

/// Milliseconds of a round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Times {
    wall: f64,
    device: f64,
    /// From each rank's end to that of the last, where ranks tell it.
    #[serde(default)]
    idle: Vec<f64>,
    /// When a rank of ours ended, since 1970: ranks that are processes share that clock alone.
    #[serde(default)]
    ended: Option<Duration>,
}

/// Measures the chosen families, all without any. `progress` gets a line for each comparison, `save` the document after each. A smoke run is of
/// symmetric memory on virtual GPUs.
///
/// # Errors
/// Fewer GPUs than ranks, no NCCL, a rank that fails.
pub fn run(
    world: u32,
    options: &Options,
    mut peers: Result<Peers>,
    progress: &mut dyn FnMut(&str),
    save: &mut dyn FnMut(&Document) -> Result<()>,
) -> Result<Document> {
    ensure!(world >= 2, "--ranks {world}: at least 2 ranks communicate");
    let is_smoke = options.size == Size::Smoke;
    let runtime = if is_smoke { Runtime::emulated_fast(world)? } else { Runtime::cuda()? };
    let found = runtime.device_count();
    ensure!(
        found >= world,
        "{world} ranks need as many GPUs; there are {found}: ask for fewer, or for --smoke, which runs on virtual GPUs"
    );
    let library = if is_smoke { "no NCCL".to_owned() } else { NcclCommunicator::version()?.to_string() };
    progress(&format!("{world} ranks on {library}"));
    let device = format!("{world} x {}, {library}", runtime.device(0)?.name());
    let versions = peers.as_ref().map(|peers| peers.versions.clone()).map_err(|error| format!("{error:#}"));
    let empty = machine::Readings::new();
    let machine = Machine { device, commit: machine::commit(), peers: versions, before: machine::readings(), after: empty };
    let (are, home) = if is_smoke { (RanksAre::Threads, Home::Threads(runtime.clone())) } else { (RanksAre::Processes, Home::Processes) };
    let mut document = Document { ranks: Some(are), ..Document::new(METHOD.into(), options.seed, machine) };
    let mut random = Random::new(options.seed);
    let rates = Rates { multiprocessors: runtime.device(0)?.limits().multiprocessors, ..Rates::H200 };
    // Of GPUs the ranks alone have any memory.
    drop(runtime);
    let mut measure = |ranks: &Ranks, comparison: &Comparison, progress: &mut dyn FnMut(&str)| -> Result<Vec<Record>> {
        progress(&format!("{} {}", comparison.kernel, comparison.shape));
        let asked = peers.as_mut().map_err(|error| format!("{error:#}"));
        let rounds = options.rounds.div_ceil(comparison.fewer);
        let rounds = [if comparison.once.is_some() { 0 } else { options.size.pick(WARM_UP, 0) }, rounds];
        match compare(ranks, asked, comparison, rounds, &mut random) {
            Err(error) if !comparison.peers.is_empty() && peers.is_ok() => {
                // It may have been a peer: then ours run alone.
                let why = format!("a round failed: {error:#}");
                progress(&why);
                compare(ranks, Err(why), comparison, rounds, &mut random)
            }
            records => records,
        }
    };
    let mut keep = |records: Vec<Record>| {
        document.records.extend(records);
        document.machine.after = machine::readings();
        save(&document)
    };
    let comparisons = plan::comparisons(world, &rates, options.size, &options.families)?;
    let comparisons = options.only(comparisons, |of| format!("{} {}", of.kernel, of.shape))?;
    if !comparisons.is_empty() {
        let ranks = Ranks::start(world, &home, &Errand::Comparisons)?;
        for comparison in &comparisons {
            keep(measure(&ranks, comparison, progress)?)?;
        }
    }
    let is_named = |name: &str| options.families.iter().any(|family| family == name) || (is_smoke && options.families.is_empty());
    let rows = if is_named(context_parallel::FAMILY) { context_parallel::rows(options.size, world) } else { Vec::new() };
    for row in options.only(rows, |row| row.label(world))? {
        let records = RowRanks::start(world, &home, row, progress).and_then(|of| {
            let comparisons = of.comparisons(options.size);
            let records = comparisons.iter().map(|comparison| measure(&of.ranks, comparison, progress));
            Ok(records.collect::<Result<Vec<_>>>()?.concat())
        });
        // The other rows run all the same.
        let divided = Some(Divided { ranks: world, ..Divided::default() });
        keep(records.unwrap_or_else(|error| vec![failed(context_parallel::FAMILY, row.label(world), divided, &error)]))?;
    }
    let configurations = if is_named(auto::FAMILY) { auto::configurations(options.size, world) } else { Vec::new() };
    let mut free: Option<Ranks> = None;
    for of in options.only(configurations, |of| of.label(world))? {
        let ranks = match free.take() {
            Some(ranks) => ranks,
            None => Ranks::start(world, &home, &Errand::Choices)?,
        };
        let records = auto::comparisons(&ranks, of, world, options.size).and_then(|comparisons| {
            let records = comparisons.iter().map(|comparison| measure(&ranks, comparison, progress));
            Ok(records.collect::<Result<Vec<_>>>()?.concat())
        });
        // After a failure the next configuration has other ranks.
        free = records.is_ok().then_some(ranks);
        keep(records.unwrap_or_else(|error| vec![failed(auto::FAMILY, of.label(world), None, &error)]))?;
    }
    Ok(document)
}

/// A record of attention that could not run.
fn failed(family: &'static str, shape: String, divided: Option<Divided>, error: &anyhow::Error) -> Record {
    let missing = vec![Missing { peer: "oxtile".into(), why: format!("{error:#}") }];
    let comparison = Comparison::of(family, "context parallel", shape, Vec::new(), &[plan::DEVICE]);
    record(&Comparison { missing, divided, ..comparison }, &plan::DEVICE, Vec::new(), Vec::new())
}

/// `peers`, or why there are none. Rounds that are not counted come first.
fn compare(
    ranks: &Ranks,
    mut peers: Result<&mut Peers, String>,
    comparison: &Comparison,
    [warm_up, rounds]: [usize; 2],
    random: &mut Random,
) -> Result<Vec<Record>> {
    let mut missing = comparison.missing.clone();
    let asked: Vec<_> = comparison.peers.iter().filter(|peer| is_there(&mut peers, peer, &mut missing)).collect();
    let all: Vec<_> = comparison.sides.iter().chain(asked).collect();
    let (mut times, mut orders) = (vec![Vec::new(); all.len()], Vec::new());
    for round in 0..warm_up + rounds {
        let mut order = random.order(all.len());
        order.retain(|side| round == 0 || comparison.once != Some(all[*side].label));
        for &side in &order {
            let taken = match &mut peers {
                Ok(peers) if side >= comparison.sides.len() => ask(peers, all[side])?,
                _ => ranks.round(all[side].request)?,
            };
            if round >= warm_up {
                times[side].push(taken);
            }
        }
        if round >= warm_up {
            orders.push(order);
        }
    }
    let side = |(side, times): (&&Side, &Vec<Times>), clock: &plan::Taken| {
        let detail = comparison.details.iter().find(|(label, ..)| *label == side.label);
        let idle: Vec<_> = times.iter().map(|times| times.idle.clone()).filter(|idle| !idle.is_empty()).collect();
        let planned = detail.map(|(_, ranks, _)| ranks.clone());
        SideRecord {
            milliseconds: times.iter().map(clock.of).collect(),
            // Beside other work, copies alone.
            flops: (comparison.flops > 0 && side.request.work.is_copy()).then_some(0),
            check: detail.and_then(|(.., check)| check.clone()),
            ranks: (!idle.is_empty()).then(|| RanksRecord { idle, ..planned.unwrap_or_default() }),
            ..SideRecord::new(side.label)
        }
    };
    let of = |clock: &plan::Taken| {
        let sides = all.iter().zip(&times).map(|of| side(of, clock)).collect();
        Record { missing: missing.clone(), ..record(comparison, clock, sides, orders.clone()) }
    };
    Ok(comparison.taken.iter().map(of).collect())
}

fn record(comparison: &Comparison, clock: &plan::Taken, sides: Vec<SideRecord>, order: Vec<Vec<usize>>) -> Record {
    Record {
        family: comparison.family.into(),
        kernel: format!("{}, {}", comparison.kernel, clock.name),
        shape: comparison.shape.clone(),
        clock: clock.clock,
        bytes: comparison.bytes,
        flops: comparison.flops,
        launches: comparison.calls,
        ceiling: None,
        limit: comparison.limit.iter().map(|&label| label.to_owned()).collect(),
        chosen: comparison.chosen.map(str::to_owned),
        divided: comparison.divided.clone(),
        sides,
        order,
        missing: comparison.missing.clone(),
    }
}

impl Work {
    /// Whether it is nothing but copies.
    fn is_copy(self) -> bool {
        matches!(self, Self::Put | Self::ContextParallel { by: context_parallel::By::Wire, .. })
    }
}

/// Whether a peer answers. If it does not it is missing, for the reason that it gives.
fn is_there(peers: &mut Result<&mut Peers, String>, peer: &Side, missing: &mut Vec<Missing>) -> bool {
    let why = match peers {
        Ok(peers) => ask(peers, peer).err().map(|error| format!("{error:#}")),
        Err(why) => Some(why.clone()),
    };
    missing.extend(why.clone().map(|why| Missing { peer: peer.label.into(), why }));
    why.is_none()
}

fn ask(peers: &mut Peers, peer: &Side) -> Result<Times> {
    peers.ask(&serde_json::to_value(peer.request)?)
}
