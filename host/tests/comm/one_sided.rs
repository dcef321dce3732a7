//! Planted bugs of one-sided operations: each is reported under every seed tried. The right programs are silent.

use oxtile::runtime::{RaceKind, StreamRace};
use oxtile::symmetric::{Arena, ArenaOptions, Channel, Epoch, SymmetricBuffer};
use oxtile::{Buffer, Error, Result};

use crate::support::World;

/// Two ranks with a symmetric buffer and two channels each.
struct Pair {
    world: World,
    arenas: Vec<Arena>,
    buffers: Vec<SymmetricBuffer<u32>>,
    ready: Vec<Channel>,
    done: Vec<Channel>,
}

const FIRST: Epoch = Epoch::ZERO.next();

impl Pair {
    fn new(seed: u64) -> Result<Self> {
        let world = World::new(2, seed);
        let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default())).collect::<Result<_>>()?;
        let buffers = arenas.iter().map(|arena| arena.buffer(4)).collect::<Result<_>>()?;
        let channels = || arenas.iter().map(Arena::channel).collect::<Result<Vec<_>>>();
        let (ready, done) = (channels()?, channels()?);
        Ok(Self { world, arenas, buffers, ready, done })
    }
}

/// Rank 1 publishes its buffer, rank 0 gets it and copies it on, rank 1 writes it again and rank 0 gets that.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// #2737: no signal says that the keys are there before they are fetched.
    GetBeforeReady,
    /// #2737: the flag goes before the data.
    SignalBeforeData,
    /// #2737: the attention reads on its own stream what the copy stream fetches.
    NoEdgeAfterGet,
    /// #2960: the owner writes the shard again before the others have it.
    OverwrittenBeforeDone,
    /// #2443: two streams share one flag.
    TwoWritersOfOneSignal,
    /// #2443: a flag is used again for the next round, so that the old one is taken for the new one.
    EpochUsedAgain,
}

fn program(pair: &mut Pair, bug: Bug) -> Result<()> {
    let [zero, one] = [0, 1].map(|rank| pair.world.rank(rank));
    let [first, second] = [0, 1].map(|rank| pair.world.streams[rank].clone());
    let (fetch, extra) = (pair.world.ranks[0].device().stream()?, pair.world.ranks[1].device().stream()?);

    if bug == Bug::SignalBeforeData {
        pair.arenas[1].signal(&second, pair.ready[1], zero, FIRST)?;
    }
    pair.buffers[1].local_mut().fill_zero(&second)?;
    if bug != Bug::SignalBeforeData {
        pair.arenas[1].signal(&second, pair.ready[1], zero, FIRST)?;
    }
    if bug == Bug::TwoWritersOfOneSignal {
        pair.arenas[1].signal(&extra, pair.ready[1], zero, FIRST.next())?;
    }

    if bug != Bug::GetBeforeReady {
        pair.arenas[0].wait(&fetch, pair.ready[0], one, FIRST)?;
    }
    let target = Buffer::<u32>::uninitialised(&fetch, 4)?;
    // SAFETY: the address is of emulated memory, which is looked up at each use; the ticket keeps it.
    let raw = unsafe { Buffer::<u32>::borrow_raw(&target.device(), target.address(), 4)? };
    let ticket = pair.buffers[0].peer(one)?.get(&fetch, 0..4, target, 0)?;
    pair.arenas[0].signal(&fetch, pair.done[0], one, FIRST)?;
    let mut used = Buffer::uninitialised(&first, 4)?;
    let kept = if bug == Bug::NoEdgeAfterGet {
        used.copy_from(&first, &raw)?;
        Err(ticket)
    } else {
        let target = ticket.then(&first)?;
        used.copy_from(&first, &target)?;
        Ok(target)
    };

    if bug != Bug::OverwrittenBeforeDone {
        pair.arenas[1].wait(&second, pair.done[1], zero, FIRST)?;
    }
    pair.buffers[1].local_mut().fill_zero(&second)?;
    let next = if bug == Bug::EpochUsedAgain { FIRST } else { FIRST.next() };
    pair.arenas[1].signal(&second, pair.ready[1], zero, next)?;
    pair.arenas[0].wait(&fetch, pair.ready[0], one, next)?;
    let again = Buffer::<u32>::uninitialised(&fetch, 4)?;
    let _again = pair.buffers[0].peer(one)?.get(&fetch, 0..4, again, 0)?;
    [first, second, fetch, extra].iter().try_for_each(|stream| stream.synchronize())?;
    drop(kept);
    Ok(())
}

fn run(bug: Bug, seed: u64) -> Result<()> {
    program(&mut Pair::new(seed)?, bug)
}

fn planted(bug: Bug, kinds: &[RaceKind]) -> StreamRace {
    let report = |seed| match run(bug, seed) {
        Err(Error::Race(race)) => *race,
        other => panic!("seed {seed}: {other:?}"),
    };
    for seed in 0..32 {
        let race = report(seed);
        assert!(kinds.contains(&race.kind), "{race}");
        assert_eq!(race.to_string(), report(seed).to_string(), "seed {seed} replays its report");
        assert!([&race.first, &race.second].iter().all(|by| by.at.is_some_and(|at| at.file().ends_with("one_sided.rs"))), "{race}");
    }
    report(0)
}

#[test]
fn the_right_program_is_silent_under_a_thousand_seeds() {
    for seed in 0..1000 {
        run(Bug::None, seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn a_get_before_the_data_are_ready() {
    let race = planted(Bug::GetBeforeReady, &[RaceKind::Unordered]);
    assert_eq!((race.memory.as_str(), race.device, race.bytes), ("arena", 1, 16));
}

#[test]
fn a_signal_before_its_data() {
    planted(Bug::SignalBeforeData, &[RaceKind::Unordered]);
}

#[test]
fn a_get_whose_ticket_is_not_used() {
    planted(Bug::NoEdgeAfterGet, &[RaceKind::Unordered]);
}

#[test]
fn a_shard_overwritten_before_it_is_read() {
    planted(Bug::OverwrittenBeforeDone, &[RaceKind::Unordered]);
}

#[test]
fn a_signal_with_two_writers() {
    // Where the waiter takes the other writer's signal, what is missing is the edge to the data.
    planted(Bug::TwoWritersOfOneSignal, &[RaceKind::Signal, RaceKind::Unordered]);
}

/// Only where the old signal is still the last: the new one, of the same epoch, is as good as the right one.
#[test]
fn an_epoch_that_is_used_again() {
    let found: Vec<_> = (0..32).filter_map(|seed| run(Bug::EpochUsedAgain, seed).err().map(|error| (seed, error.to_string()))).collect();
    assert!(found.len() > 4, "{} of 32 seeds", found.len());
    for (seed, report) in found {
        assert!(report.contains("one_sided.rs"), "{report}");
        assert_eq!(run(Bug::EpochUsedAgain, seed).unwrap_err().to_string(), report, "seed {seed} replays its report");
    }
}
