//! Collectives of many ranks, a GPU a thread, in turn with torch.distributed over the same NCCL.
//!
//! One round of a side is a number of calls, one after another on one stream. Two records come of each comparison: the wall time from the
//! first call to the end of the work, on the host, and the device's time between two events. Both are of the slowest rank.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use oxtile::comm::{Communicator, NcclCommunicator, NcclOptions, Rank, ReduceOp, UniqueId, WorldSize};
use oxtile::num::bf16;
use oxtile::{Buffer, Runtime, Stream};
use serde::{Deserialize, Serialize};

use crate::machine::{self, Machine};
use crate::peers::Peers;
use crate::random::Random;
use crate::results::{Clock, Document, Missing, Record, SideRecord};

/// The bytes of the whole buffer.
const SIZES: [u64; 8] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// Rounds that are not counted.
const WARM_UP: usize = 2;
/// How long ranks wait for each other.
const DEADLINE: Duration = Duration::from_secs(60);

/// What is called.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Collective {
    AllGather,
    ReduceScatter,
    AllReduce,
}

/// One round of a side.
#[derive(Clone, Copy, Serialize)]
struct Request {
    collective: Collective,
    bytes: u64,
    calls: u64,
}

/// Milliseconds of a round.
#[derive(Clone, Copy, Deserialize)]
struct Times {
    wall: f64,
    device: f64,
}

/// Measures all collectives at all sizes. `progress` gets a line for each.
///
/// # Errors
/// Fewer GPUs than ranks, no NCCL, a rank that fails.
pub fn run(world: u32, rounds: usize, seed: u64, mut peers: Result<Peers>, progress: &mut dyn FnMut(&str)) -> Result<Document> {
    ensure!(world >= 2, "--ranks {world}: at least 2 ranks communicate");
    let found = Runtime::cuda()?.device_count();
    ensure!(found >= world, "{world} ranks need as many GPUs; there are {found}");
    let nccl = NcclCommunicator::version()?;
    progress(&format!("{world} ranks on {nccl}"));
    let ranks = Ranks::start(world)?;
    let device = format!("{world} x {}, {nccl}", Runtime::cuda()?.device(0)?.name());
    let versions = peers.as_ref().map(|peers| peers.versions.clone()).map_err(|error| format!("{error:#}"));
    let empty = machine::Readings::new();
    let machine = Machine { device, commit: machine::commit(), peers: versions, before: machine::readings(), after: empty };
    let method = "calls one after another on one stream, the slowest rank; wall: from the first call to the end of the work; device: between two events";
    let mut document = Document::new(method.into(), seed, machine);
    let mut random = Random::new(seed);
    for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
        for bytes in SIZES {
            progress(&format!("{collective:?} {}", size(bytes)));
            // A round of some milliseconds, whatever the size.
            let request = Request { collective, bytes, calls: ((4 << 30) / bytes).clamp(4, 200) };
            document.records.extend(compare(&ranks, peers.as_mut().ok(), request, rounds, &mut random)?);
        }
    }
    document.machine.after = machine::readings();
    Ok(document)
}

fn compare(ranks: &Ranks, mut peers: Option<&mut Peers>, request: Request, rounds: usize, random: &mut Random) -> Result<[Record; 2]> {
    let sides = 1 + usize::from(peers.is_some());
    let (mut times, mut orders) = (vec![Vec::new(); sides], Vec::new());
    for round in 0..WARM_UP + rounds {
        let order = random.order(sides);
        for &side in &order {
            let taken = match (side, peers.as_mut()) {
                (1, Some(peers)) => peers.ask::<Times>(&serde_json::to_value(request)?)?,
                _ => ranks.round(request)?,
            };
            if round >= WARM_UP {
                times[side].push(taken);
            }
        }
        if round >= WARM_UP {
            orders.push(order);
        }
    }
    let record = |kernel: &str, clock, of: fn(&Times) -> f64| Record {
        family: "nccl".into(),
        kernel: format!("{:?}, {kernel}", request.collective),
        shape: size(request.bytes),
        clock,
        bytes: request.bytes,
        flops: 0,
        launches: request.calls,
        ceiling: None,
        sides: ["oxtile", "torch.distributed"]
            .iter()
            .zip(&times)
            .map(|(label, times)| SideRecord { label: (*label).into(), milliseconds: times.iter().map(of).collect(), check: None })
            .collect(),
        order: orders.clone(),
        missing: if sides == 1 { vec![Missing { peer: "torch.distributed".into(), why: "it did not start".into() }] } else { Vec::new() },
    };
    // Both are drawn in one table: by the host's clock only the column of shares would be another.
    Ok([record("wall", Clock::DeviceEvents, |times| times.wall), record("device", Clock::DeviceEvents, |times| times.device)])
}

/// `64 KiB`, `16 MiB`.
fn size(bytes: u64) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}

/// The threads of our ranks.
struct Ranks(Vec<Worker>);

/// The thread of one rank, and how it is asked.
struct Worker {
    requests: SyncSender<Request>,
    results: Receiver<Result<Times>>,
    thread: JoinHandle<()>,
}

impl Ranks {
    fn start(world: u32) -> Result<Self> {
        let world = WorldSize::new(world).context("at least one rank")?;
        let (id, barrier) = (NcclCommunicator::unique_id()?, Arc::new(Barrier::new(world.get() as usize)));
        let start = |rank| {
            let (requests, incoming) = sync_channel(1);
            let (answers, results) = sync_channel(1);
            let barrier = Arc::clone(&barrier);
            let thread = thread::spawn(move || serve(id, rank, world, &barrier, &incoming, &answers));
            Worker { requests, results, thread }
        };
        Ok(Self(world.ranks().map(start).collect()))
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
        for Worker { requests, thread, .. } in self.0.drain(..) {
            drop(requests);
            let _ = thread.join();
        }
    }
}

fn serve(id: UniqueId, rank: Rank, world: WorldSize, barrier: &Barrier, requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
    let mut member = Member::join(id, rank, world);
    while let Ok(request) = requests.recv() {
        let times = match &mut member {
            Ok(member) => member.round(request, barrier),
            Err(error) => Err(anyhow::anyhow!("{rank}: {error:#}")),
        };
        let failed = times.is_err();
        if answers.send(times).is_err() || failed {
            return;
        }
    }
}

/// One rank and its buffers.
struct Member {
    comm: NcclCommunicator,
    stream: Stream,
    whole: Buffer<bf16>,
    part: Buffer<bf16>,
}

impl Member {
    fn join(id: UniqueId, rank: Rank, world: WorldSize) -> Result<Self> {
        let device = Runtime::cuda()?.device(rank.index())?;
        let comm = NcclCommunicator::join(&device, id, rank, world, &NcclOptions { deadline: DEADLINE, ..NcclOptions::default() })?;
        let stream = device.stream()?;
        Ok(Self { comm, whole: Buffer::zeros(&stream, 0)?, part: Buffer::zeros(&stream, 0)?, stream })
    }

    fn round(&mut self, request: Request, barrier: &Barrier) -> Result<Times> {
        let elements = request.bytes / 2;
        if self.whole.len() != elements {
            self.whole = Buffer::zeros(&self.stream, elements)?;
            self.part = Buffer::zeros(&self.stream, elements / u64::from(self.comm.world().get()))?;
        }
        self.call(request.collective)?;
        self.comm.synchronize(&self.stream)?;
        barrier.wait();
        let begin = Instant::now();
        let start = self.stream.record()?;
        for _ in 0..request.calls {
            self.call(request.collective)?;
        }
        let end = self.stream.record()?;
        self.stream.synchronize()?;
        let wall = begin.elapsed().as_secs_f64() * 1e3;
        Ok(Times { wall, device: end.elapsed_since(&start)?.as_secs_f64() * 1e3 })
    }

    fn call(&mut self, collective: Collective) -> Result<()> {
        match collective {
            Collective::AllGather => self.comm.all_gather(&self.stream, &self.part, &mut self.whole)?,
            Collective::ReduceScatter => self.comm.reduce_scatter(&self.stream, &self.whole, &mut self.part, ReduceOp::Sum)?,
            Collective::AllReduce => self.comm.all_reduce(&self.stream, &mut self.whole, ReduceOp::Sum)?,
        }
        Ok(())
    }
}
