//! What a rank does: it makes every operation, tries each, and times what it is asked for.
//!
//! Ranks meet at a gate before and after whatever takes memory, loads kernels or waits on the host, since work that waits for other ranks may delay those.

use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use oxtile::attention::{Attention, AttentionBackward, Order};
use oxtile::comm::{ArenaRank, Communicator, Member, NcclCommunicator, NcclOptions, Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, ContextParallelFp8, Plan, Transport};
use oxtile::kernels::copy::CopyWords;
use oxtile::num::bf16;
use oxtile::runtime::{Bound, Kind, Loaded};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, SymmetricBuffer};
use oxtile::{Buffer, Event, Stream};

use super::super::member::DEADLINE;
use super::super::workers::Seat;
use super::super::{Request, Times, Work};
use super::rows::Row;
use super::tensors::{Place, Tensors, Views, places};
use super::{By, Made, Passes, planned};
use crate::peers::Check;
use crate::random::Random;

/// How long ranks may take to fill tensors.
const PREPARATION: Duration = Duration::from_secs(120);
/// Random values that tensors repeat: a prime, so that no two tokens are the same.
const VALUES: usize = 262_147;
/// A put is of so many shards of keys and values at most.
const PUT: u64 = 2;
/// The relative error in L2 of a result in `bf16`, of other sums than our single GPU's.
const TOLERANCE: f64 = 1e-2;
/// The same of 8 bits, whose probabilities have 3 bits after the first.
const TOLERANCE_FP8: f64 = 6e-2;

/// Values of the result and of the gradients of queries, keys and values.
type Sampled = [Vec<f32>; 4];

/// Serves requests of one row. The first answer says that the rank is ready.
pub fn serve(seat: &Seat, row: Row, left_out: &[(By, String)], requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
    let place = Serving { seat, row, left_out, requests, answers };
    let (rank, world) = (seat.rank.rank(), seat.rank.world());
    let result = match (&seat.id, &seat.emulated) {
        (Some(id), _) => {
            let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
            let joined = NcclCommunicator::join(seat.rank.device(), *id, rank, world, &options);
            joined.map_err(anyhow::Error::from).and_then(|comm| place.run(&comm, &seat.rank, BackendName::Vmm))
        }
        (None, Some(comm)) => place.run(comm, comm, BackendName::Emulated),
        (None, None) => Err(anyhow::anyhow!("{rank} has neither NCCL nor a virtual cluster")),
    };
    if let Err(error) = result {
        // The last one: the thread ends with it.
        _ = answers.send(Err(error.context(format!("{rank} of {}", row.label(world.get())))));
    }
}

/// What a rank serves.
struct Serving<'s> {
    seat: &'s Seat,
    row: Row,
    left_out: &'s [(By, String)],
    requests: &'s Receiver<Request>,
    answers: &'s SyncSender<Result<Times>>,
}

/// A rank that is ready.
struct Ready<'t> {
    rank: Rank,
    stream: Stream,
    copy: Loaded<CopyWords>,
    operations: Vec<(By, Operation<'t>)>,
    part: Tensors,
    /// What a rank does alone.
    alone: Alone,
    wire: Option<Wire>,
}

/// Attention to all tokens on one GPU.
struct Alone {
    forward: Attention<bf16>,
    backward: AttentionBackward<bf16>,
    whole: Tensors,
}

/// Copies to the next rank.
struct Wire {
    next: Rank,
    source: Buffer<u8>,
    target: SymmetricBuffer<u8>,
}

/// Attention of all ranks.
enum Operation<'t> {
    Bf16(Box<ContextParallel<'t, bf16>>),
    Fp8(Box<ContextParallelFp8<'t>>),
}

impl Operation<'_> {
    fn plan(&self) -> &Plan {
        match self {
            Self::Bf16(operation) => operation.plan(),
            Self::Fp8(operation) => operation.plan(),
        }
    }
}

/// What attends.
#[derive(Clone, Copy)]
enum Attends<'a, 't> {
    Ranks(&'a Operation<'t>),
    OneGpu(&'a Attention<bf16>, &'a AttentionBackward<bf16>),
}

/// One call of a side.
enum Call<'a> {
    Passes(Vec<Bound<'a>>),
    /// Puts of so many bytes.
    Puts(&'a Wire, u64),
}

impl Serving<'_> {
    fn run<C: Communicator + Send + Sync>(&self, comm: &C, rank: &impl ArenaRank, backend: BackendName) -> Result<()> {
        let world = comm.world();
        let member = Team::all(world).member(comm.rank()).context("every rank is of the world")?;
        let options = ArenaOptions { backend, bytes: self.memory(world), deadline: DEADLINE, ..ArenaOptions::default() };
        let arena = self.seat.gate.after(DEADLINE, || Ok(Arena::open(rank, options)))?;
        let result = self.attend(comm, arena.as_ref().map_err(ToString::to_string), &member);
        // An arena that cannot be closed keeps its memory, until the process ends.
        _ = arena.map(|arena| arena.close().map(|closing| closing.finish()));
        result
    }

    /// Bytes of a rank's keys and values.
    fn shard(&self, world: WorldSize) -> u64 {
        let Row { tokens, key_heads, head_size, .. } = self.row;
        2 * size_of::<bf16>() as u64 * tokens / u64::from(world.get()) * key_heads * head_size
    }

    /// Symmetric memory: of two operations that pull, of one of 8 bits, and of what is put.
    fn memory(&self, world: WorldSize) -> u64 {
        let config = ContextParallelConfig::new(self.row.config());
        let pulled = config.arena_bytes(world, size_of::<bf16>() as u64);
        // Of each schedule, and of the ones that are chosen.
        2 * pulled + ContextParallelFp8::arena_bytes(&config, world) + PUT * self.shard(world) + (1 << 20)
    }

    /// `arena`, or why there is none.
    fn attend<C: Communicator + Send + Sync>(&self, comm: &C, arena: Result<&Arena, String>, member: &Member) -> Result<()> {
        let Self { seat, row, requests, answers, .. } = self;
        let transport = match &arena {
            Ok(arena) => Transport::both(comm, arena, member),
            Err(_) => Transport::collective(comm),
        };
        let memory = arena.as_ref().map(|_| ()).map_err(|why| format!("there is no symmetric memory: {why}"));
        let [here, there] = places(&row.tokens_of(comm.rank(), comm.world()));
        let mut ready = self.part(By::OneGpu, || self.prepare(comm, arena.ok()))?;
        let expected = self.part(By::OneGpu, || ready.expect(&there))?;
        for by in By::OPERATIONS {
            let left_out = self.left_out.iter().find(|(of, _)| *of == by).map(|(_, why)| why.clone());
            let without = |why| Made { by, plan: Err(why), check: None };
            let made = match (left_out, &memory) {
                (Some(why), _) => without(why),
                (None, Err(why)) if by == By::Pull => without(why.clone()),
                _ => self.make(by, transport, &mut ready, &here, expected.as_ref())?,
            };
            ready.tell(seat, made)?;
        }
        for by in [By::OneGpu, By::EachGpu] {
            ready.tell(seat, Made { by, plan: Ok(None), check: None })?;
        }
        ready.tell(seat, Made { by: By::Wire, plan: memory.map(|()| None), check: None })?;
        // All have made theirs before the first request is answered.
        self.part(By::Auto, || Ok(()))?;
        answers.send(Ok(Times::default())).context("the ranks are not wanted any more")?;
        while let Ok(request) = requests.recv() {
            let times = ready.round(request, seat)?;
            answers.send(Ok(times)).context("the ranks are not wanted any more")?;
        }
        Ok(())
    }

    /// Does a rank's part of something, and waits for all ranks. Where one fails, its error is told, and all end.
    fn part<R>(&self, by: By, part: impl FnOnce() -> Result<R>) -> Result<R> {
        let gate = &self.seat.gate;
        let result = gate.after(PREPARATION, || part().inspect_err(|error| gate.fail(by, format!("{error:#}"))))?;
        match gate.failed() {
            Some((by, why)) => bail!("{} failed: {why}", by.label()),
            None => Ok(result),
        }
    }

    /// Tensors, attention on this GPU alone, and what is put.
    fn prepare<'t>(&self, comm: &impl Communicator, arena: Option<&Arena>) -> Result<Ready<'t>> {
        let Self { seat, row, .. } = self;
        let (rank, world, runtime) = (comm.rank(), comm.world(), &seat.runtime);
        let stream = seat.rank.device().stream()?;
        let values = Random::new(1).normal(VALUES);
        let tensors = |tokens: &[u64]| Tensors::new(&stream, row, world.get(), tokens, &values);
        let whole = tensors(&(0..row.tokens).collect::<Vec<_>>())?;
        let (forward, backward) =
            (Attention::new(runtime, row.config())?, AttentionBackward::new(runtime, row.config(), Order::default())?);
        let alone = Alone { forward, backward, whole };
        let part = tensors(&row.tokens_of(rank, world))?;
        let wire = |arena: &Arena| -> Result<Wire> {
            let (bytes, next) = (PUT * self.shard(world), Rank::new((rank.index() + 1) % world.get(), world));
            Ok(Wire {
                next: next.context("the next rank is of the world")?,
                source: Buffer::zeros(&stream, bytes)?,
                target: arena.buffer(bytes)?,
            })
        };
        let (wire, copy) = (arena.map(wire).transpose()?, runtime.load()?);
        wait(&stream, &stream.record()?)?;
        Ok(Ready { rank, stream, copy, operations: Vec::new(), part, alone, wire })
    }

    /// Makes an operation, unless it is refused, and tries it.
    fn make<'t>(
        &self,
        by: By,
        transport: Transport<'t>,
        ready: &mut Ready<'t>,
        here: &[Place],
        expected: Option<&Sampled>,
    ) -> Result<Made> {
        let schedule = by.schedule().context("it is by a schedule")?;
        let config = ContextParallelConfig::new(self.row.config()).by(schedule);
        let make = || match by {
            By::Fp8 => Ok(Operation::Fp8(Box::new(ContextParallelFp8::new(&ready.stream, transport, config)?))),
            _ => Ok(Operation::Bf16(Box::new(ContextParallel::new(&ready.stream, transport, config)?))),
        };
        let made = self.part(by, || match make() {
            Ok(operation) => Ok(Ok(operation)),
            // All ranks are refused the same.
            Err(why @ oxtile::Error::Invalid { .. }) => Ok(Err(why.to_string())),
            Err(error) => Err(error.into()),
        })?;
        let operation = match made {
            Ok(operation) => operation,
            Err(why) => return Ok(Made { by, plan: Err(why), check: None }),
        };
        let plan = planned(operation.plan());
        let found = self.part(by, || {
            if let (Some(packed), Operation::Bf16(operation)) = (ready.part.packed(), &operation) {
                operation.set_sequences(&ready.stream, packed, packed)?;
            }
            Attends::Ranks(&operation).attempt(&ready.stream, &mut ready.part, &ready.copy, here)
        })?;
        ready.operations.push((by, operation));
        let tolerance = if by == By::Fp8 { TOLERANCE_FP8 } else { TOLERANCE };
        Ok(Made { by, plan: Ok(Some(plan)), check: expected.map(|expected| compare(&found, expected, tolerance)) })
    }
}

impl<'t> Attends<'_, 't> {
    /// Passes that are ready to run.
    fn bind<'a>(self, stream: &Stream, tensors: &'a mut Tensors, passes: Passes) -> oxtile::Result<Vec<Bound<'a>>>
    where
        Self: 'a,
    {
        let Views { forward: (inputs, outputs), backward: (reads, gradients) } = tensors.views(matches!(self, Self::OneGpu(..)));
        let mut bound = vec![match self {
            Self::Ranks(Operation::Bf16(operation)) => operation.bind_forward(stream, inputs, outputs)?,
            Self::Ranks(Operation::Fp8(operation)) => operation.bind_forward(stream, inputs, outputs)?,
            Self::OneGpu(attention, _) => attention.bind(stream, inputs, outputs)?,
        }];
        if passes == Passes::Both {
            bound.push(match self {
                Self::Ranks(Operation::Bf16(operation)) => operation.bind_backward(stream, reads, gradients)?,
                Self::Ranks(Operation::Fp8(operation)) => operation.bind_backward(stream, reads, gradients)?,
                Self::OneGpu(_, attention) => attention.bind(stream, reads, gradients)?,
            });
        }
        Ok(bound)
    }

    /// Runs both passes once, and samples what they wrote.
    fn attempt(self, stream: &Stream, tensors: &mut Tensors, copy: &Loaded<CopyWords>, at: &[Place]) -> Result<Sampled> {
        self.bind(stream, tensors, Passes::Forward)?.iter_mut().try_for_each(|pass| pass.run(stream))?;
        // Binding waits on the host: not for other ranks that have not come so far.
        wait(stream, &stream.record()?)?;
        tensors.save(stream)?;
        self.bind(stream, tensors, Passes::Both)?.iter_mut().try_for_each(|pass| pass.run(stream))?;
        wait(stream, &stream.record()?)?;
        tensors.sample(copy, stream, at)
    }
}

impl Ready<'_> {
    fn tell(&self, seat: &Seat, made: Made) -> Result<()> {
        if self.rank == Rank::ZERO { seat.gate.made(made) } else { Ok(()) }
    }

    /// What our single GPU finds, on rank 0.
    fn expect(&mut self, at: &[Place]) -> Result<Option<Sampled>> {
        let Self { stream, copy, alone: Alone { forward, backward, whole }, .. } = self;
        let attend = || Attends::OneGpu(forward, backward).attempt(stream, whole, copy, at);
        (self.rank == Rank::ZERO).then(attend).transpose()
    }

    /// Times calls, after one that is not timed: ranks begin together, where it ends.
    fn round(&mut self, request: Request, seat: &Seat) -> Result<Times> {
        let stream = self.stream.clone();
        let Some(mut call) = seat.gate.after(DEADLINE, || self.call(request))? else { return Ok(Times::default()) };
        call.run(&stream)?;
        let (begin, start) = (Instant::now(), stream.record()?);
        (0..request.calls).try_for_each(|_| call.run(&stream))?;
        let end = stream.record()?;
        wait(&stream, &end)?;
        let (took, ended) = (begin.elapsed(), SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?);
        let [wall, device] = [took, end.elapsed_since(&start)?].map(|time| time.as_secs_f64() * 1e3);
        Ok(Times { wall, device, ended: Some(ended), ..Times::default() })
    }

    /// What a rank does in a call; nothing, if another does it alone.
    fn call(&mut self, request: Request) -> Result<Option<Call<'_>>> {
        let Work::ContextParallel { by, passes, .. } = request.work else { bail!("ranks of a row do not run {:?}", request.work) };
        let Self { rank, stream, operations, part, alone, wire, .. } = self;
        Ok(match by {
            By::OneGpu if *rank != Rank::ZERO => None,
            By::OneGpu | By::EachGpu => {
                let bound = Attends::OneGpu(&alone.forward, &alone.backward).bind(stream, &mut alone.whole, passes)?;
                Some(Call::Passes(bound))
            }
            By::Wire => Some(Call::Puts(wire.as_ref().context("there is no symmetric memory")?, request.bytes)),
            _ => {
                let (_, operation) = operations.iter().find(|(of, _)| *of == by).with_context(|| format!("{by:?} was not made"))?;
                Some(Call::Passes(Attends::Ranks(operation).bind(stream, part, passes)?))
            }
        })
    }
}

impl Call<'_> {
    fn run(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Passes(passes) => passes.iter_mut().try_for_each(|pass| pass.run(stream))?,
            Self::Puts(Wire { next, source, target }, bytes) => {
                let mut left = *bytes;
                while left > 0 {
                    let now = left.min(source.len());
                    target.peer(*next)?.put(stream, source, 0..now, 0)?;
                    left -= now;
                }
            }
        }
        Ok(())
    }
}

/// Waits for a stream's work within the deadline, and sees its end within microseconds. On virtual GPUs a wait of the driver would end with an error where
/// another rank has not come so far, and their kernels need the processors.
fn wait(stream: &Stream, end: &Event) -> Result<()> {
    let (begin, is_virtual) = (Instant::now(), stream.device().runtime().kind() == Kind::Emulated);
    while !end.is_done()? {
        ensure!(begin.elapsed() < DEADLINE, "work was not done after {DEADLINE:?}");
        if is_virtual {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Whether values are those of our single GPU, within the tolerance.
fn compare(found: &Sampled, expected: &Sampled, tolerance: f64) -> Check {
    let names = ["out", "the gradient of q", "the gradient of k", "the gradient of v"];
    let differs = names.into_iter().zip(found.iter().zip(expected)).filter_map(|(name, (found, expected))| {
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let error = squares(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
        let error = (error / squares(&mut expected.iter().map(|value| f64::from(*value))).max(f64::MIN_POSITIVE)).sqrt();
        (error.is_nan() || error > tolerance).then(|| format!("{name} of rank 0 is off by {error:.2e}, relative L2"))
    });
    let detail = differs.collect::<Vec<_>>().join("; ");
    Check { equal: detail.is_empty(), detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let of = |value: f32| [vec![1.0, 2.0], vec![3.0], vec![4.0], vec![value]];
        assert!(compare(&of(5.0), &of(5.0), TOLERANCE).equal);
        assert!(compare(&of(5.01), &of(5.0), TOLERANCE).equal);
        assert!(compare(&of(5.2), &of(5.0), TOLERANCE_FP8).equal);
        for wrong in [5.2, f32::NAN, 0.0] {
            let Check { equal, detail } = compare(&of(wrong), &of(5.0), TOLERANCE);
            assert!(!equal && detail.starts_with("the gradient of v of rank 0 is off by "), "{detail}");
        }
    }
}
