//! Planted bugs of the flags of context parallelism: its two protocols by hand, with one step of them left out, are reported under every seed. Right ones are silent in every order, and so are
//! the library's own passes.
//!
//! | | as in |
//! |---|---|
//! | [`Side::pull`] | `host/src/context_parallel/pull.rs`: READY, DONE, GIVEN |
//! | [`Side::trade`] | `host/src/context_parallel/carrier.rs`: GIVEN, TAKEN, and no flag that memory is free |

use std::time::Duration;

use oxtile::attention::AttentionConfig;
use oxtile::context_parallel::Schedule;
use oxtile::num::bf16;
use oxtile::runtime::{Exploration, Mode, RaceKind, explore};
use oxtile::symmetric::{Arena, ArenaOptions, Flags, SymmetricBuffer};
use oxtile::{Buffer, EmulatedOptions, Error, Graph, Result, Stream};

use crate::arenas::{Arenas, options};
use crate::context_bugs::SMALL;
use crate::context_case::Case;
use crate::context_ranks::Ranks;
use crate::support::World;

/// Which step is left out, or done in another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    Nothing,
    /// A flag is set before the copy that it tells of.
    FlagBeforeData,
    /// What is read is not waited for: READY by pull, GIVEN by traded heads.
    NotReady,
    /// It is waited for from all ranks but one.
    OneLeftOut,
    /// Memory is written again before others have read it: DONE by pull; TAKEN, and no other flag, by traded heads.
    NotFree,
    /// By pull: gradients are added up before they are there.
    SumBeforeGiven,
    /// By pull: keys of the next pass are told of before the gradients of this one were added up.
    ReadyBeforeSum,
    /// By traded heads: results are put where heads arrive.
    OnePlace,
    /// A flag is waited for and not reset, also in a graph, whose second replay finds it set.
    NotReset,
}

const OF_PULL: [Bug; 7] =
    [Bug::FlagBeforeData, Bug::NotReady, Bug::OneLeftOut, Bug::NotFree, Bug::NotReset, Bug::SumBeforeGiven, Bug::ReadyBeforeSum];
const OF_TRADE: [Bug; 6] = [Bug::FlagBeforeData, Bug::NotReady, Bug::OneLeftOut, Bug::NotFree, Bug::NotReset, Bug::OnePlace];

/// How much is run.
#[derive(Clone, Copy)]
struct Extent {
    ranks: u32,
    rounds: u32,
    /// By pull: the first round that gives gradients, whose flags would tell that keys were read.
    backward: u32,
}

/// Under seeds.
const MUCH: Extent = Extent { ranks: 3, rounds: 4, backward: 2 };
/// In every order.
const LITTLE: Extent = Extent { ranks: 2, rounds: 3, backward: 1 };

/// Elements of a block.
const LEN: u64 = 4;

const READY: u32 = 0;
const DONE: u32 = 1;
const GIVEN: u32 = 2;
const TAKEN: u32 = 3;

/// One rank.
struct Side {
    arena: Arena,
    extent: Extent,
    me: u32,
    /// The caller's stream, and the one that carries keys or heads.
    stream: Stream,
    comm: Stream,
    flags: Flags,
    /// Own keys, or heads, of the round.
    own: Buffer<u32>,
    /// What others read: own keys.
    shard: SymmetricBuffer<u32>,
    /// What others write, a block each: gradients, or heads; and results.
    slots: SymmetricBuffer<u32>,
    results: SymmetricBuffer<u32>,
    /// The keys of each owner.
    keys: Buffer<u32>,
    computed: Buffer<u32>,
    /// What the round ends with.
    out: Buffer<u32>,
}

/// The same memory again, whose uses the runtime does not connect with the first buffer's.
fn alias(buffer: &Buffer<u32>) -> Result<Buffer<u32>> {
    // SAFETY: the address is of emulated memory, which is looked up at each use: a wrong use is a report.
    unsafe { Buffer::borrow_raw(&buffer.device(), buffer.address(), buffer.len()) }
}

/// What a rank's block holds in a round.
fn value(rank: u32, round: u32) -> u32 {
    100 * (rank + 1) + round
}

impl Side {
    fn new(world: &World, arena: &Arena, extent: Extent, me: u32) -> Result<Self> {
        let device = world.ranks[me as usize].device();
        let (stream, comm, all) = (device.stream()?, device.urgent_stream()?, LEN * u64::from(extent.ranks));
        let numbers = || Buffer::<u32>::zeros(&stream, all);
        let side = Self {
            arena: arena.clone(),
            extent,
            me,
            flags: arena.flags("planted context parallelism", 4)?,
            own: Buffer::zeros(&stream, LEN)?,
            shard: arena.buffer(LEN)?,
            slots: arena.buffer(all)?,
            results: arena.buffer(all)?,
            keys: numbers()?,
            computed: numbers()?,
            out: numbers()?,
            stream,
            comm,
        };
        side.comm.wait(&side.stream.record()?)?;
        Ok(side)
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (me, ranks) = (self.me, self.extent.ranks);
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    /// Waits for a flag of ranks, and resets it.
    fn take(&self, world: &World, stream: &Stream, flag: u32, from: impl Iterator<Item = u32>, bug: Bug) -> Result<()> {
        for from in from {
            let batch = self.arena.batch(stream);
            let rank = world.rank(from);
            let batch =
                if bug == Bug::NotReset { batch.wait_flag(&self.flags, flag, rank)? } else { batch.take_back(&self.flags, flag, rank)? };
            batch.enqueue()?;
        }
        Ok(())
    }

    /// Copies a block to another rank's memory and tells it.
    fn put(&self, world: &World, source: &Buffer<u32>, at: u64, to: (u32, &SymmetricBuffer<u32>), flag: u32, bug: Bug) -> Result<()> {
        let (to, target) = to;
        let rank = world.rank(to);
        if bug == Bug::FlagBeforeData {
            self.flags.set(&self.comm, flag, rank)?;
        }
        target.peer(rank)?.put(&self.comm, &alias(source)?, at..at + LEN, LEN * u64::from(self.me))?;
        if bug == Bug::FlagBeforeData { Ok(()) } else { self.flags.set(&self.comm, flag, rank) }
    }

    /// Copies a block to its place here.
    fn keep(&self, source: &Buffer<u32>, at: u64, target: &SymmetricBuffer<u32>, world: &World) -> Result<()> {
        target.peer(world.rank(self.me))?.put(&self.comm, source, at..at + LEN, LEN * u64::from(self.me))
    }

    /// What the rank gives in a round, by work on one of its streams.
    fn fill(&self, stream: &Stream, round: u32) -> Result<()> {
        let values = Buffer::from_slice(stream, &[value(self.me, round); LEN as usize])?;
        alias(&self.own)?.copy_from(stream, &values)
    }

    /// A round by pull: each rank reads the keys of all owners, and from [`Extent::backward`] on gives each its gradient.
    fn pull(&mut self, world: &World, round: u32, bug: Bug) -> Result<()> {
        if bug != Bug::ReadyBeforeSum {
            self.comm.wait(&self.stream.record()?)?;
        }
        if bug != Bug::NotFree {
            self.take(world, &self.comm, DONE, self.others(), bug)?;
        }
        let tell = || self.others().try_for_each(|reader| self.flags.set(&self.comm, READY, world.rank(reader)));
        if bug == Bug::FlagBeforeData {
            tell()?;
        }
        alias(self.shard.local())?.copy_from(&self.comm, &alias(&self.own)?)?;
        if bug != Bug::FlagBeforeData {
            tell()?;
        }
        for owner in self.others() {
            let is_left_out = bug == Bug::NotReady || bug == Bug::OneLeftOut && owner == (self.me + 1) % self.extent.ranks;
            if !is_left_out {
                self.take(world, &self.comm, READY, std::iter::once(owner), bug)?;
            }
            let target = alias(&self.keys)?;
            drop(self.shard.peer(world.rank(owner))?.get(&self.comm, 0..LEN, target, LEN * u64::from(owner))?);
            self.flags.set(&self.comm, DONE, world.rank(owner))?;
        }
        self.keep(&alias(&self.own)?, 0, &self.slots, world)?;
        self.stream.wait(&self.comm.record()?)?;
        alias(&self.computed)?.copy_from(&self.stream, &alias(&self.keys)?)?;
        if round < self.extent.backward {
            return Ok(());
        }
        self.comm.wait(&self.stream.record()?)?;
        for owner in self.others() {
            self.put(world, &self.computed, LEN * u64::from(owner), (owner, &self.slots), GIVEN, Bug::Nothing)?;
        }
        if bug != Bug::SumBeforeGiven {
            self.take(world, &self.stream, GIVEN, self.others(), bug)?;
        }
        alias(&self.out)?.copy_from(&self.stream, &alias(self.slots.local())?)?;
        if bug == Bug::SumBeforeGiven {
            self.take(world, &self.stream, GIVEN, self.others(), bug)?;
        }
        self.stream.wait(&self.comm.record()?)
    }

    /// A round by traded heads: each rank gives its heads to all, attends to all that came, and gives the results back.
    fn trade(&mut self, world: &World, _: u32, bug: Bug) -> Result<()> {
        self.comm.wait(&self.stream.record()?)?;
        for to in self.others() {
            self.put(world, &self.own, 0, (to, &self.slots), GIVEN, bug)?;
        }
        self.keep(&alias(&self.own)?, 0, &self.slots, world)?;
        let awaited: Vec<_> = match bug {
            Bug::NotReady => Vec::new(),
            Bug::OneLeftOut => self.others().skip(1).collect(),
            _ => self.others().collect(),
        };
        self.take(world, &self.comm, GIVEN, awaited.into_iter(), bug)?;
        self.stream.wait(&self.comm.record()?)?;
        alias(&self.computed)?.copy_from(&self.stream, &alias(self.slots.local())?)?;
        self.comm.wait(&self.stream.record()?)?;
        let results = if bug == Bug::OnePlace { &self.slots } else { &self.results };
        for to in self.others() {
            // Those of its tokens.
            self.put(world, &self.computed, LEN * u64::from(to), (to, results), TAKEN, Bug::Nothing)?;
        }
        self.keep(&alias(&self.computed)?, LEN * u64::from(self.me), results, world)?;
        if bug != Bug::NotFree {
            self.take(world, &self.comm, TAKEN, self.others(), bug)?;
        }
        alias(&self.out)?.copy_from(&self.comm, &alias(results.local())?)?;
        self.stream.wait(&self.comm.record()?)
    }
}

/// Which protocol.
type Round = fn(&mut Side, &World, u32, Bug) -> Result<()>;

/// Runs it under a seed.
type Run = fn(Round, Bug, u64) -> Result<()>;

fn eager(round: Round, bug: Bug, seed: u64) -> Result<()> {
    run_in(World::new(MUCH.ranks, seed), MUCH, bug, |sides, world| all_rounds(sides, world, MUCH, round, bug))
}

/// One round after another, of all ranks.
fn all_rounds(sides: &mut [Side], world: &World, extent: Extent, round: Round, bug: Bug) -> Result<()> {
    for number in 0..extent.rounds {
        for side in &mut *sides {
            side.fill(&side.comm, number)?;
            round(side, world, number, bug)?;
        }
    }
    Ok(())
}

/// A graph of a round, which is replayed.
fn captured(round: Round, bug: Bug, seed: u64) -> Result<()> {
    run_in(World::new(MUCH.ranks, seed), MUCH, bug, |sides, world| {
        let capture = |side: &mut Side| {
            let streams = [side.stream.clone(), side.comm.clone()];
            Graph::capture(&streams.each_ref(), || round(side, world, MUCH.backward, bug))
        };
        let graphs = sides.iter_mut().map(capture).collect::<Result<Vec<_>>>()?;
        for number in 0..MUCH.rounds {
            for (side, graph) in sides.iter().zip(&graphs) {
                side.fill(&side.stream, number)?;
                graph.replay(&side.stream)?;
            }
        }
        Ok(())
    })
}

/// The ranks of a world, all their rounds, and what comes back in the last one.
fn run_in(world: World, extent: Extent, bug: Bug, rounds: impl FnOnce(&mut [Side], &World) -> Result<()>) -> Result<()> {
    let deadline = Duration::from_secs(if bug == Bug::Nothing { 30 } else { 5 });
    let all = Arenas::over(world, ArenaOptions { bytes: 1 << 12, deadline, ..options() });
    let side = |(arena, me)| Side::new(&all.world, arena, extent, me);
    let mut sides = all.arenas.iter().zip(0..).map(side).collect::<Result<Vec<_>>>()?;
    for side in &sides {
        side.others().try_for_each(|owner| side.flags.open(&side.stream, DONE, all.world.rank(owner)))?;
    }
    rounds(&mut sides, &all.world)?;
    for side in &sides {
        [&side.stream, &side.comm].into_iter().try_for_each(|stream| stream.synchronize())?;
        side.arena.ticket(&side.stream)?.wait()?;
        let found = side.out.to_vec(&side.stream)?;
        for other in side.others() {
            let block = &found[(LEN * u64::from(other)) as usize..][..LEN as usize];
            // What comes back from another rank is what this one gave it.
            if block != [value(side.me, extent.rounds - 1); LEN as usize] {
                return Err(Error::Invalid {
                    what: "planted context parallelism",
                    why: format!("rank {} from {other}: {block:?}", side.me),
                });
            }
        }
    }
    Ok(())
}

/// Reported under each of 32 seeds, by the sanitizer or by what comes back; a seed replays its report.
fn planted(run: Run, round: Round, bug: Bug) {
    for seed in 0..32 {
        let reports = [0, 1].map(|_| run(round, bug, seed).err().unwrap_or_else(|| panic!("{bug:?} is silent under seed {seed}")));
        let [first, again] = reports.each_ref().map(ToString::to_string);
        assert_eq!(first, again, "{bug:?}: seed {seed} replays its report");
        match &reports[0] {
            Error::Race(race) => assert!([RaceKind::Unordered, RaceKind::Signal].contains(&race.kind), "{race}"),
            Error::Fault(fault) => assert!(fault.to_string().contains("was never written"), "{bug:?}: {fault}"),
            Error::Invalid { what: "planted context parallelism", .. } => (),
            other => panic!("{bug:?}, seed {seed}: {other}"),
        }
    }
}

#[test]
fn the_right_protocols_are_silent() {
    for (seed, (name, round)) in (0..32).flat_map(|seed| [("pull", Side::pull as Round), ("trade", Side::trade)].map(|of| (seed, of))) {
        for run in [eager as Run, captured] {
            run(round, Bug::Nothing, seed).unwrap_or_else(|error| panic!("{name}, seed {seed}: {error}"));
        }
    }
}

/// The same, three rounds of two ranks, under every order of signals and waits; what is left out is found by some.
#[test]
fn every_order_is_right() {
    let in_every_order = |round, bug| {
        explore(|exploration: &Exploration| {
            let exploration = Some(exploration.clone());
            let options = EmulatedOptions { devices: LITTLE.ranks, mode: Mode::Check, exploration, ..EmulatedOptions::default() };
            run_in(World::with(options), LITTLE, bug, |sides, world| all_rounds(sides, world, LITTLE, round, bug))
        })
    };
    for (name, round, bugs) in [("pull", Side::pull as Round, &OF_PULL[..]), ("trade", Side::trade, &OF_TRADE)] {
        let explored = in_every_order(round, Bug::Nothing).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(explored.schedules > 1, "{name}: {explored:?}");
        for bug in bugs {
            assert!(in_every_order(round, *bug).is_err(), "{name}: {bug:?} is silent in every order");
        }
    }
}

/// The library's own passes of two ranks, forward and backward, under every order of signals, waits and messages.
#[test]
fn every_order_of_passes_is_right() {
    let tiny = AttentionConfig { queries: 4, keys: 4, ..SMALL };
    let heads = AttentionConfig { heads: 2, key_heads: 2, ..tiny };
    for case in [Case::new(2, tiny).by(Schedule::Pull), Case::new(2, heads).by_puts()] {
        let whole = case.whole();
        let expected = whole.solve();
        let program = |exploration: &Exploration| {
            let exploration = Some(exploration.clone());
            let options = EmulatedOptions { devices: LITTLE.ranks, mode: Mode::Check, exploration, ..EmulatedOptions::default() };
            let found = Ranks::over(&Case { mode: Mode::Check, ..case.clone() }, World::with(options))?.run::<bf16>(&whole)?;
            case.world().ranks().zip(found).for_each(|(rank, found)| case.compare(rank, &found, &expected));
            Ok(())
        };
        let explored = explore(program).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        assert!(explored.schedules > 1, "{explored:?}");
    }
}

#[test]
fn what_pull_may_not_leave_out() {
    OF_PULL.into_iter().for_each(|bug| planted(eager, Side::pull, bug));
}

#[test]
fn what_traded_heads_may_not_leave_out() {
    OF_TRADE.into_iter().for_each(|bug| planted(eager, Side::trade, bug));
}

/// Flags that a graph waits for and does not reset: its second replay finds them set.
#[test]
fn what_graphs_may_not_leave_out() {
    for round in [Side::pull as Round, Side::trade] {
        [Bug::NotReset, Bug::NotReady].into_iter().for_each(|bug| planted(captured, round, bug));
    }
}
