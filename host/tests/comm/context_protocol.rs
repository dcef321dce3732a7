//! Planted bugs of the flags of context parallelism: its two protocols by hand, with one step of them left out, are reported under every seed.
//!
//! | | as in |
//! |---|---|
//! | [`Side::pull`] | `host/src/context_parallel/pull.rs`: READY, DONE, GIVEN |
//! | [`Side::trade`] | `host/src/context_parallel/carrier.rs`: GIVEN, TAKEN, and no flag that memory is free |

use std::time::Duration;

use oxtile::runtime::RaceKind;
use oxtile::symmetric::{Arena, ArenaOptions, Flags, SymmetricBuffer};
use oxtile::{Buffer, Error, Result, Stream};

use crate::arenas::{Arenas, options};
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
    /// A flag is waited for and not reset, as in a graph whose second replay finds it set.
    NotReset,
}

const RANKS: u32 = 3;
const ROUNDS: u32 = 4;
/// By pull: the first round that gives gradients, whose flags would tell that keys were read.
const BACKWARD: u32 = 2;
/// Elements of a block.
const LEN: u64 = 4;

const READY: u32 = 0;
const DONE: u32 = 1;
const GIVEN: u32 = 2;
const TAKEN: u32 = 3;

/// One rank.
struct Side {
    arena: Arena,
    me: u32,
    /// The caller's stream, and the one that carries keys or heads.
    stream: Stream,
    comm: Stream,
    flags: Flags,
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
    fn new(world: &World, arena: &Arena, me: u32) -> Result<Self> {
        let device = world.ranks[me as usize].device();
        let (stream, comm, all) = (device.stream()?, device.urgent_stream()?, LEN * u64::from(RANKS));
        let numbers = || Buffer::<u32>::zeros(&stream, all);
        let side = Self {
            arena: arena.clone(),
            me,
            flags: arena.flags("planted context parallelism", 4)?,
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
        let me = self.me;
        (1..RANKS).map(move |step| (me + step) % RANKS)
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

    /// A round by pull: each rank reads the keys of all owners, and from [`BACKWARD`] on gives each its gradient.
    fn pull(&mut self, world: &World, round: u32, bug: Bug) -> Result<()> {
        if bug != Bug::ReadyBeforeSum {
            self.comm.wait(&self.stream.record()?)?;
        }
        let own = Buffer::from_slice(&self.comm, &[value(self.me, round); LEN as usize])?;
        if bug != Bug::NotFree {
            self.take(world, &self.comm, DONE, self.others(), bug)?;
        }
        let tell = || self.others().try_for_each(|reader| self.flags.set(&self.comm, READY, world.rank(reader)));
        if bug == Bug::FlagBeforeData {
            tell()?;
        }
        alias(self.shard.local())?.copy_from(&self.comm, &own)?;
        if bug != Bug::FlagBeforeData {
            tell()?;
        }
        for owner in self.others() {
            let is_left_out = bug == Bug::NotReady || bug == Bug::OneLeftOut && owner == (self.me + 1) % RANKS;
            if !is_left_out {
                self.take(world, &self.comm, READY, std::iter::once(owner), bug)?;
            }
            let target = alias(&self.keys)?;
            drop(self.shard.peer(world.rank(owner))?.get(&self.comm, 0..LEN, target, LEN * u64::from(owner))?);
            self.flags.set(&self.comm, DONE, world.rank(owner))?;
        }
        self.keep(&alias(&own)?, 0, &self.slots, world)?;
        self.stream.wait(&self.comm.record()?)?;
        alias(&self.computed)?.copy_from(&self.stream, &alias(&self.keys)?)?;
        if round < BACKWARD {
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
        Ok(())
    }

    /// A round by traded heads: each rank gives its heads to all, attends to all that came, and gives the results back.
    fn trade(&mut self, world: &World, round: u32, bug: Bug) -> Result<()> {
        self.comm.wait(&self.stream.record()?)?;
        let own = Buffer::from_slice(&self.comm, &[value(self.me, round); LEN as usize])?;
        for to in self.others() {
            self.put(world, &own, 0, (to, &self.slots), GIVEN, bug)?;
        }
        self.keep(&alias(&own)?, 0, &self.slots, world)?;
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

fn run(round: Round, bug: Bug, seed: u64) -> Result<()> {
    let deadline = Duration::from_secs(if bug == Bug::Nothing { 30 } else { 5 });
    let all = Arenas::with(RANKS, seed, ArenaOptions { bytes: 1 << 12, deadline, ..options() });
    let mut sides = all.arenas.iter().zip(0..).map(|(arena, me)| Side::new(&all.world, arena, me)).collect::<Result<Vec<_>>>()?;
    for side in &sides {
        side.others().try_for_each(|owner| side.flags.open(&side.stream, DONE, all.world.rank(owner)))?;
    }
    for number in 0..ROUNDS {
        for side in &mut sides {
            round(side, &all.world, number, bug)?;
        }
    }
    for side in &sides {
        [&side.stream, &side.comm].into_iter().try_for_each(|stream| stream.synchronize())?;
        side.arena.ticket(&side.stream)?.wait()?;
        let found = side.out.to_vec(&side.stream)?;
        for other in side.others() {
            let block = &found[(LEN * u64::from(other)) as usize..][..LEN as usize];
            // What comes back from another rank is what this one gave it.
            if block != [value(side.me, ROUNDS - 1); LEN as usize] {
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
fn planted(round: Round, bug: Bug) {
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
    for seed in 0..32 {
        for (name, round) in [("pull", Side::pull as Round), ("trade", Side::trade)] {
            run(round, Bug::Nothing, seed).unwrap_or_else(|error| panic!("{name}, seed {seed}: {error}"));
        }
    }
}

#[test]
fn what_pull_may_not_leave_out() {
    let of_both = [Bug::FlagBeforeData, Bug::NotReady, Bug::OneLeftOut, Bug::NotFree, Bug::NotReset];
    of_both.into_iter().chain([Bug::SumBeforeGiven, Bug::ReadyBeforeSum]).for_each(|bug| planted(Side::pull, bug));
}

#[test]
fn what_traded_heads_may_not_leave_out() {
    let of_both = [Bug::FlagBeforeData, Bug::NotReady, Bug::OneLeftOut, Bug::NotFree, Bug::NotReset];
    of_both.into_iter().chain([Bug::OnePlace]).for_each(|bug| planted(Side::trade, bug));
}
