//! What a rank does: it makes every operation, tries each, and times what it is asked for.

use std::sync::mpsc::{Receiver, SyncSender};

use anyhow::{Context, Result, bail};
use oxtile::attention::{Attention, AttentionBackward, Order};
use oxtile::comm::{ArenaRank, Communicator, Member, Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, ContextParallelFp8, Schedule, Transport};
use oxtile::kernels::copy::CopyWords;
use oxtile::num::bf16;
use oxtile::runtime::{Bound, Loaded};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, SymmetricBuffer};
use oxtile::{Buffer, Stream};

use super::super::member::DEADLINE;
use super::super::workers::Seat;
use super::super::{Request, Times, Work};
use super::attends::{Attends, Operation, Sampled, TOLERANCE, TOLERANCE_FP8, compare, timed, wait};
use super::meeting::{Joined, join, together};
use super::rows::Row;
use super::tensors::{Place, Tensors, VALUES, places};
use super::{By, Made, planned};
use crate::random::Random;

/// Channels of the arena: those of all operations of a row.
const CHANNELS: u32 = 128;
/// A put is of so many shards of keys and values at most.
const PUT: u64 = 2;

/// Serves requests of one row. The first answer says that the rank is ready.
pub fn serve(seat: &Seat, row: Row, left_out: &[(By, String)], requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
    let (rank, world) = (seat.rank.rank(), seat.rank.world());
    if let Err(error) = join(seat, &Serving { seat, row, left_out, requests, answers }) {
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
    /// What a rank does alone, if it does.
    alone: Option<Alone>,
    /// Whether a call that is not timed comes first: not where it takes seconds.
    is_warmed: bool,
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

/// One call of a side.
enum Call<'a> {
    Passes(Vec<Bound<'a>>),
    /// Puts of so many bytes.
    Puts(&'a Wire, u64),
}

impl Joined for Serving<'_> {
    fn run<C: Communicator + Send + Sync>(&self, comm: &C, rank: &impl ArenaRank, backend: BackendName) -> Result<()> {
        let world = comm.world();
        let member = Team::all(world).member(comm.rank()).context("every rank is of the world")?;
        let options =
            ArenaOptions { backend, bytes: self.memory(world), channels: CHANNELS, deadline: DEADLINE, ..ArenaOptions::default() };
        let arena = self.seat.gate.after(DEADLINE, || Ok(Arena::open(rank, options)))?;
        let result = self.attend(comm, arena.as_ref().map_err(ToString::to_string), &member);
        // An arena that cannot be closed keeps its memory, until the process ends.
        _ = arena.map(|arena| arena.close().map(|closing| closing.finish()));
        result
    }
}

impl Serving<'_> {
    /// Bytes of a rank's keys and values.
    fn shard(&self, world: WorldSize) -> u64 {
        let Row { tokens, key_heads, head_size, .. } = self.row;
        2 * size_of::<bf16>() as u64 * tokens / u64::from(world.get()) * key_heads * head_size
    }

    /// Symmetric memory: of two operations that pull, of one of 8 bits, and of what is put.
    fn memory(&self, world: WorldSize) -> u64 {
        let config = self.config();
        if self.row.is_longest() {
            return config.by(Schedule::Fused).arena_bytes(world, size_of::<bf16>() as u64) + (1 << 20);
        }
        let pulled = config.arena_bytes(world, size_of::<bf16>() as u64);
        // Of each schedule, and of the ones that are chosen.
        2 * pulled + ContextParallelFp8::arena_bytes(&config, world) + PUT * self.shard(world) + (1 << 20)
    }

    fn config(&self) -> ContextParallelConfig {
        ContextParallelConfig { gathered_bytes: self.row.gathered_bytes(), ..ContextParallelConfig::new(self.row.config()) }
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
        for by in By::operations(row).iter().copied() {
            let left_out = self.left_out.iter().find(|(of, _)| *of == by).map(|(_, why)| why.clone());
            let without = |why| Made { by, plan: Err(why), check: None };
            let made = match (left_out, &memory) {
                (Some(why), _) => without(why),
                (None, Err(why)) if by == By::Pull => without(why.clone()),
                _ => self.make(by, transport, &mut ready, &here, expected.as_ref())?,
            };
            ready.tell(seat, made)?;
        }
        ready.tell(seat, Made { by: By::OneGpu, plan: Ok(None), check: None })?;
        if !row.is_longest() {
            ready.tell(seat, Made { by: By::EachGpu, plan: Ok(None), check: None })?;
            ready.tell(seat, Made { by: By::Wire, plan: memory.map(|()| None), check: None })?;
        }
        // All have made theirs before the first request is answered.
        self.part(By::Auto, || Ok(()))?;
        answers.send(Ok(Times::default())).context("the ranks are not wanted any more")?;
        while let Ok(request) = requests.recv() {
            let times = ready.round(request, seat)?;
            answers.send(Ok(times)).context("the ranks are not wanted any more")?;
        }
        Ok(())
    }

    fn part<R>(&self, by: By, part: impl FnOnce() -> Result<R>) -> Result<R> {
        together(&self.seat.gate, by, part)
    }

    /// Tensors, attention on this GPU alone, and what is put.
    fn prepare<'t>(&self, comm: &impl Communicator, arena: Option<&Arena>) -> Result<Ready<'t>> {
        let Self { seat, row, .. } = self;
        let (rank, world, runtime) = (comm.rank(), comm.world(), &seat.runtime);
        let stream = seat.rank.device().stream()?;
        let values = Random::new(1).normal(VALUES);
        let tensors = |tokens: &[u64]| Tensors::new(&stream, row, world.get(), tokens, &values);
        // Of the longest ones the first rank alone attends to the whole, once.
        let attends_alone = rank == Rank::ZERO || !row.is_longest();
        let alone = || -> Result<Alone> {
            let whole = tensors(&(0..row.tokens).collect::<Vec<_>>())?;
            let backward = AttentionBackward::new(runtime, row.config(), Order::default())?;
            Ok(Alone { forward: Attention::new(runtime, row.config())?, backward, whole })
        };
        let alone = attends_alone.then(alone).transpose()?;
        let part = tensors(&row.tokens_of(rank, world))?;
        let wire = |arena: &Arena| -> Result<Wire> {
            let (bytes, next) = (PUT * self.shard(world), Rank::new((rank.index() + 1) % world.get(), world));
            Ok(Wire {
                next: next.context("the next rank is of the world")?,
                source: Buffer::zeros(&stream, bytes)?,
                target: arena.buffer(bytes)?,
            })
        };
        let (wire, copy) = (arena.filter(|_| !row.is_longest()).map(wire).transpose()?, runtime.load()?);
        wait(&stream, &stream.record()?)?;
        Ok(Ready { rank, stream, copy, operations: Vec::new(), part, alone, is_warmed: !row.is_longest(), wire })
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
        let config = self.config().by(schedule);
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

impl Ready<'_> {
    fn tell(&self, seat: &Seat, made: Made) -> Result<()> {
        if self.rank == Rank::ZERO { seat.gate.made(made) } else { Ok(()) }
    }

    /// What our single GPU finds, on rank 0.
    fn expect(&mut self, at: &[Place]) -> Result<Option<Sampled>> {
        let Self { rank: Rank::ZERO, stream, copy, alone: Some(Alone { forward, backward, whole }), .. } = self else { return Ok(None) };
        Ok(Some(Attends::OneGpu(forward, backward).attempt(stream, whole, copy, at)?))
    }

    /// Times calls, after one that is not timed, unless a call takes seconds: ranks begin together, where it ends.
    fn round(&mut self, request: Request, seat: &Seat) -> Result<Times> {
        let (stream, is_warmed) = (self.stream.clone(), self.is_warmed);
        let Some(mut call) = seat.gate.after(DEADLINE, || self.call(request))? else { return Ok(Times::default()) };
        timed(&stream, request.calls, is_warmed, || call.run(&stream))
    }

    /// What a rank does in a call; nothing, if another does it alone.
    fn call(&mut self, request: Request) -> Result<Option<Call<'_>>> {
        let Work::ContextParallel { by, passes, .. } = request.work else { bail!("ranks of a row do not run {:?}", request.work) };
        let Self { rank, stream, operations, part, alone, wire, .. } = self;
        Ok(match by {
            By::OneGpu if *rank != Rank::ZERO => None,
            By::OneGpu | By::EachGpu => {
                let Alone { forward, backward, whole } = alone.as_mut().context("this rank does not attend alone")?;
                let bound = Attends::OneGpu(forward, backward).bind(stream, whole, passes)?;
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
