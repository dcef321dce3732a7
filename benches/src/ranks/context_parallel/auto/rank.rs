//! What a rank does: it makes the operations of one configuration after another, tries each, and times their passes.

use std::sync::mpsc::{Receiver, SyncSender};

use anyhow::{Context, Result, bail};
use half::bf16 as Half;
use oxtile::Stream;
use oxtile::comm::{ArenaRank, Communicator, Rank, Team, WorldSize};
use oxtile::context_parallel::{ContextParallel, ContextParallelConfig, Transport};
use oxtile::kernels::copy::CopyWords;
use oxtile::num::bf16;
use oxtile::runtime::{Bound, Loaded};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName};

use super::super::attends::{Attends, Operation, Sampled, TOLERANCE, compare, timed, wait};
use super::super::meeting::{Joined, join, together};
use super::super::tensors::{Place, Tensors, VALUES, places};
use super::super::{By, Direction, Made, planned};
use super::{Configuration, SCHEDULES, Step};
use crate::random::Random;
use crate::ranks::gate::Gate;
use crate::ranks::member::DEADLINE;
use crate::ranks::workers::Seat;
use crate::ranks::{Request, Times, Work};

/// Signal channels of an arena: enough for operations of all schedules.
const CHANNELS: u32 = 128;
/// Operations of each schedule that have room in an arena: one of its own, that of `Auto`, and one of a single pass.
const ROOM: u64 = 3;

/// Serves requests of one configuration after another.
pub fn serve(seat: &Seat, requests: &Receiver<Request>, answers: &SyncSender<Result<Times>>) {
    let values = Random::new(1).normal(VALUES);
    if let Err(error) = join(seat, &Serving { seat, values, requests, answers }) {
        // The last one: the thread ends with it.
        _ = answers.send(Err(error));
    }
}

/// What a rank serves.
struct Serving<'s> {
    seat: &'s Seat,
    /// Of which tensors are filled.
    values: Vec<Half>,
    requests: &'s Receiver<Request>,
    answers: &'s SyncSender<Result<Times>>,
}

/// A rank that is ready for a configuration.
struct Ready<'t> {
    rank: Rank,
    stream: Stream,
    copy: Loaded<CopyWords>,
    part: Tensors,
    /// Where results are compared.
    here: Vec<Place>,
    /// What the first operation wrote there.
    expected: Option<Sampled>,
    operations: Vec<(By, Operation<'t>)>,
}

impl Joined for Serving<'_> {
    fn run<C: Communicator + Send + Sync>(&self, comm: &C, rank: &impl ArenaRank, backend: BackendName) -> Result<()> {
        let (world, member) = (comm.world(), Team::all(comm.world()).member(comm.rank()).context("every rank is of the world")?);
        let mut next = self.requests.recv().ok();
        while let Some(request) = next {
            let Work::Choice { of, step: Step::Make } = request.work else { bail!("nothing was made for {:?}", request.work) };
            // Memory stays taken until an arena is closed: each configuration has its own.
            let options =
                ArenaOptions { backend, bytes: memory(&of, world), channels: CHANNELS, deadline: DEADLINE, ..ArenaOptions::default() };
            let arena = together(&self.seat.gate, By::Auto, || Ok(Arena::open(rank, options)?))?;
            next = self.attend(Transport::both(comm, &arena, &member), of)?;
            // Without the gate: after the last configuration it does not open.
            arena.close().map_err(oxtile::Error::from)?.finish()?;
        }
        Ok(())
    }
}

/// Symmetric memory of a configuration.
fn memory(of: &Configuration, world: WorldSize) -> u64 {
    ROOM * ContextParallelConfig::new(of.config()).arena_bytes(world, size_of::<bf16>() as u64) + (1 << 20)
}

impl Serving<'_> {
    /// Serves a configuration until something else is asked for: returns that.
    fn attend(&self, transport: Transport<'_>, of: Configuration) -> Result<Option<Request>> {
        const UNWANTED: &str = "the ranks are not wanted any more";
        let Self { seat, values, requests, answers } = self;
        let mut ready = together(&seat.gate, By::Auto, || Ready::new(seat, &of, values))?;
        ready.make(transport, &of, &seat.gate)?;
        // All have made theirs before the request is answered.
        together(&seat.gate, By::Auto, || Ok(()))?;
        answers.send(Ok(Times::default())).context(UNWANTED)?;
        while let Ok(request) = requests.recv() {
            match request.work {
                Work::Choice { of: asked, step: Step::Time(by, pass) } if asked == of => {
                    let times = ready.round(by, pass, request.calls, &seat.gate)?;
                    answers.send(Ok(times)).context(UNWANTED)?;
                }
                _ => return Ok(Some(request)),
            }
        }
        Ok(None)
    }
}

impl<'t> Ready<'t> {
    /// Fills this rank's part of the tensors.
    fn new(seat: &Seat, of: &Configuration, values: &[Half]) -> Result<Self> {
        let (rank, world) = (seat.rank.rank(), seat.rank.world());
        let (stream, tokens) = (seat.rank.device().stream()?, of.tokens_of(rank, world));
        let part = Tensors::new(&stream, &of.row, world.get(), &tokens, values)?;
        let (copy, [here, _]) = (seat.runtime.load()?, places(&tokens));
        wait(&stream, &stream.record()?)?;
        Ok(Self { rank, stream, copy, part, here, expected: None, operations: Vec::new() })
    }

    /// Tells what `Auto` chooses, and makes an operation of each schedule that can be taken.
    fn make(&mut self, transport: Transport<'t>, of: &Configuration, gate: &Gate) -> Result<()> {
        let config = ContextParallelConfig::new(of.config());
        let auto = together(gate, By::Auto, || Ok(ContextParallel::<bf16>::new(&self.stream, transport, config)?))?;
        // Ranks tell each other what they made.
        together(gate, By::Auto, || wait(&self.stream, &self.stream.record()?))?;
        self.tell(gate, Made { by: By::Auto, plan: Ok(Some(planned(auto.plan()))), check: None })?;
        // Each of its passes is that of an operation below.
        drop(auto);
        for by in SCHEDULES {
            let schedule = by.schedule().context("it is by a schedule")?;
            let Some(why) = self.add(by, config.by(schedule), transport, gate)? else { continue };
            self.tell(gate, Made { by, plan: Err(why), check: None })?;
            // What is refused in one pass may be taken in the other.
            let [forward, backward] =
                [ContextParallelConfig { forward: schedule, ..config }, ContextParallelConfig { backward: schedule, ..config }];
            self.add(by, forward, transport, gate)?;
            self.add(by, backward, transport, gate)?;
        }
        Ok(())
    }

    /// Makes an operation and tries it, or returns why it is refused.
    fn add(&mut self, by: By, config: ContextParallelConfig, transport: Transport<'t>, gate: &Gate) -> Result<Option<String>> {
        let made = together(gate, by, || match ContextParallel::new(&self.stream, transport, config) {
            Ok(operation) => Ok(Ok(Operation::Bf16(Box::new(operation)))),
            // All ranks are refused the same.
            Err(why @ oxtile::Error::Invalid { .. }) => Ok(Err(why.to_string())),
            Err(error) => Err(error.into()),
        })?;
        let operation = match made {
            Ok(operation) => operation,
            Err(why) => return Ok(Some(why)),
        };
        let found = together(gate, by, || {
            if let (Some(packed), Operation::Bf16(operation)) = (self.part.packed(), &operation) {
                operation.set_sequences(&self.stream, packed, packed)?;
            }
            Attends::Ranks(&operation).attempt(&self.stream, &mut self.part, &self.copy, &self.here)
        })?;
        let check = self.expected.as_ref().map(|expected| compare(&found, expected, TOLERANCE));
        if self.expected.is_none() {
            self.expected = Some(found);
        }
        self.tell(gate, Made { by, plan: Ok(Some(planned(operation.plan()))), check })?;
        self.operations.push((by, operation));
        Ok(None)
    }

    fn tell(&self, gate: &Gate, made: Made) -> Result<()> {
        if self.rank == Rank::ZERO { gate.made(made) } else { Ok(()) }
    }

    /// Times calls of a pass.
    fn round(&mut self, by: By, pass: Direction, calls: u64, gate: &Gate) -> Result<Times> {
        let stream = self.stream.clone();
        let mut bound = gate.after(DEADLINE, || self.bind(by, pass))?;
        timed(&stream, calls, true, || Ok(bound.run(&stream)?))
    }

    fn bind(&mut self, by: By, pass: Direction) -> Result<Bound<'_>> {
        let Self { stream, part, operations, .. } = self;
        // One that was made for a single pass has the other by another schedule.
        let is_taken = |operation: &Operation<'_>| Some(pass.of(operation.plan()).schedule) == by.schedule();
        let found = operations.iter().find(|(of, operation)| *of == by && is_taken(operation));
        let (_, operation) = found.with_context(|| format!("{by:?} was not made"))?;
        Ok(Attends::Ranks(operation).bind_one(stream, part, pass)?)
    }
}
