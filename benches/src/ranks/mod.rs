//! What many ranks do together, a GPU a thread: collectives of NCCL, symmetric memory moved by copy engines, messages by kernels, and products
//! of gathered operands; in turn with torch.distributed over the same NCCL.
//!
//! One round of a side is a number of calls, one after another. Both the wall time from the first call to the end of the work, on the host,
//! and the device's time between two events are taken, of the slowest rank.
//!
//! | file | what it holds |
//! |---|---|
//! | `plan` | which comparisons are made |
//! | `member` | one rank: its buffers, and what it does in a round |
//! | `products` | which gathered products are compared |
//! | `symmetric` | a rank's symmetric memory |
//! | `gathered` | a rank's gathered products |
//! | `expected` | what these have to be |
//! | `messages` | a rank's mailboxes: messages by kernels |
//! | `gate` | a barrier with a time limit |

mod expected;
mod gate;
mod gathered;
mod member;
mod messages;
mod plan;
mod products;
mod symmetric;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, ensure};
use oxtile::comm::{HostRank, NcclCommunicator};
use oxtile::overlap::Rates;
use oxtile::{Device, Runtime};
use serde::{Deserialize, Serialize};

use self::gate::Gate;
use self::gathered::{By, Sizes};
use self::member::Member;
use self::plan::{Comparison, Side};
use crate::bench::Size;
use crate::machine::{self, Machine};
use crate::peers::Peers;
use crate::random::Random;
use crate::results::{Document, Missing, Record, SideRecord};
use crate::run::Options;

/// The families that ranks have.
pub const NAMES: [&str; 5] = [plan::NCCL, plan::SYMMETRIC, plan::EXCHANGE, products::OVERLAP, products::SHAPES];
/// How the numbers are made; printed in every results file.
const METHOD: &str = "Calls one after another, the slowest rank; wall: from the first call to the end of the work; device: between two events. Products of gathered \
operands: random normal data, one call that is not timed before the first event; before the first round the results of a call and of a replayed call are compared with plain \
products, byte by byte, of results over 64 MiB the first and last 32 MiB. The slowest side of `limit` is the limit of the others; `chosen` is the side that the model takes.";
/// Rounds that are not counted.
const WARM_UP: usize = 2;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
}

/// One round of a side.
#[derive(Clone, Copy, Debug, Serialize)]
struct Request {
    #[serde(rename = "collective")]
    work: Work,
    /// Bytes of the whole buffer; of what is put or got.
    bytes: u64,
    calls: u64,
}

/// Milliseconds of a round.
#[derive(Clone, Copy, Deserialize)]
struct Times {
    wall: f64,
    device: f64,
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
    ensure!(found >= world, "{world} ranks need as many GPUs; there are {found}");
    let library = if is_smoke { "no NCCL".to_owned() } else { NcclCommunicator::version()?.to_string() };
    progress(&format!("{world} ranks on {library}"));
    let ranks = Ranks::start(world, &runtime)?;
    let device = format!("{world} x {}, {library}", runtime.device(0)?.name());
    let versions = peers.as_ref().map(|peers| peers.versions.clone()).map_err(|error| format!("{error:#}"));
    let empty = machine::Readings::new();
    let machine = Machine { device, commit: machine::commit(), peers: versions, before: machine::readings(), after: empty };
    let mut document = Document::new(METHOD.into(), options.seed, machine);
    let mut random = Random::new(options.seed);
    let rates = Rates { multiprocessors: runtime.device(0)?.limits().multiprocessors, ..Rates::H200 };
    for comparison in plan::comparisons(world, &rates, options.size, &options.families)? {
        progress(&format!("{} {}", comparison.kernel, comparison.shape));
        let asked = peers.as_mut().map_err(|error| format!("{error:#}"));
        let rounds = options.rounds.div_ceil(comparison.fewer);
        let records = match compare(&ranks, asked, &comparison, rounds, &mut random) {
            Err(error) if !comparison.peers.is_empty() && peers.is_ok() => {
                // It may have been a peer: then ours run alone.
                let why = format!("a round failed: {error:#}");
                progress(&why);
                compare(&ranks, Err(why), &comparison, rounds, &mut random)?
            }
            records => records?,
        };
        document.records.extend(records);
        document.machine.after = machine::readings();
        save(&document)?;
    }
    Ok(document)
}

/// `peers`, or why there are none.
fn compare(
    ranks: &Ranks,
    mut peers: Result<&mut Peers, String>,
    comparison: &Comparison,
    rounds: usize,
    random: &mut Random,
) -> Result<Vec<Record>> {
    let mut missing = comparison.missing.clone();
    let asked: Vec<_> = comparison.peers.iter().filter(|peer| is_there(&mut peers, peer, &mut missing)).collect();
    let all: Vec<_> = comparison.sides.iter().chain(asked).collect();
    let (mut times, mut orders) = (vec![Vec::new(); all.len()], Vec::new());
    for round in 0..WARM_UP + rounds {
        let order = random.order(all.len());
        for &side in &order {
            let taken = match &mut peers {
                Ok(peers) if side >= comparison.sides.len() => ask(peers, all[side])?,
                _ => ranks.round(all[side].request)?,
            };
            if round >= WARM_UP {
                times[side].push(taken);
            }
        }
        if round >= WARM_UP {
            orders.push(order);
        }
    }
    let side = |(side, times): (&&Side, &Vec<Times>), clock: &plan::Taken| SideRecord {
        milliseconds: times.iter().map(clock.of).collect(),
        // Beside products, copies alone.
        flops: (comparison.flops > 0 && side.request.work == Work::Put).then_some(0),
        ..SideRecord::new(side.label)
    };
    let record = |clock: &plan::Taken| Record {
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
        sides: all.iter().zip(&times).map(|of| side(of, clock)).collect(),
        order: orders.clone(),
        missing: missing.clone(),
    };
    Ok(comparison.taken.iter().map(record).collect())
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

/// The threads of our ranks.
struct Ranks(Vec<Worker>);

/// The thread of one rank, and the channel of its requests.
struct Worker {
    requests: SyncSender<Request>,
    results: Receiver<Result<Times>>,
    thread: JoinHandle<()>,
}

impl Ranks {
    fn start(world: u32, runtime: &Runtime) -> Result<Self> {
        let is_virtual = runtime.kind() == oxtile::runtime::Kind::Emulated;
        // A runtime each on GPUs: nothing of one rank is ordered after another's.
        let of = |_| if is_virtual { Ok(runtime.clone()) } else { Runtime::cuda() };
        let runtimes: Vec<Runtime> = (0..world).map(of).collect::<oxtile::Result<_>>()?;
        let devices: Vec<Device> = (0..).zip(&runtimes).map(|(rank, runtime)| runtime.device(rank)).collect::<oxtile::Result<_>>()?;
        let id = if is_virtual { None } else { Some(NcclCommunicator::unique_id()?) };
        let gate = Arc::new(Gate::new(world));
        let start = |(rank, runtime): (HostRank, Runtime)| {
            let (requests, incoming) = sync_channel(1);
            let (answers, results) = sync_channel(1);
            let gate = Arc::clone(&gate);
            let thread = thread::spawn(move || {
                let name = rank.rank();
                serve(Member::join(id, rank, runtime).with_context(|| format!("{name} joins")), &gate, &incoming, &answers);
            });
            Worker { requests, results, thread }
        };
        Ok(Self(HostRank::threads(&devices)?.into_iter().zip(runtimes).map(start).collect()))
    }

    fn round(&self, request: Request) -> Result<Times> {
        self.0.iter().try_for_each(|worker| worker.requests.send(request)).context("a rank has ended")?;
        let mut slowest = Times { wall: 0.0, device: 0.0 };
        for worker in &self.0 {
            let times = worker.results.recv().context("a rank has ended")??;
            slowest = Times { wall: slowest.wall.max(times.wall), device: slowest.device.max(times.device) };
        }
        Ok(slowest)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        let (requests, threads): (Vec<_>, Vec<_>) = self.0.drain(..).map(|worker| (worker.requests, worker.thread)).unzip();
        // All first: they give their arenas back together.
        drop(requests);
        threads.into_iter().for_each(|thread| _ = thread.join());
    }
}

fn serve(mut member: Result<Member>, gate: &Gate, requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
    while let Ok(request) = requests.recv() {
        let times = match &mut member {
            Ok(member) => member.round(request, gate),
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        };
        let failed = times.is_err();
        if answers.send(times).is_err() || failed {
            return;
        }
    }
}
