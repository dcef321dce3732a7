//! Gathers that differ between ranks are named where a ticket is waited for, and no rank waits for that.

use std::time::{Duration, Instant};

use oxtile::comm::{Rank, Team, WorldSize};
use oxtile::symmetric::{ArenaOptions, ChunkedGather, GatherMemory, PullGather, PushGather, PushMemory, Ready, SymmetricError};
use oxtile::{Buffer, Error, Result};

use crate::arenas::{Arenas, options};

/// A deadline that no rank waits for.
const LONG: Duration = Duration::from_secs(30);
/// One that a rank waits for in vain, long enough that the other keeps it.
const SHORT: Duration = Duration::from_secs(1);

/// A gather that is to start.
type Start<'a> = Box<dyn FnOnce() -> Result<Ready<u32>> + 'a>;

/// What waits for two ranks' epochs give, the first rank's first. Both have taken their memory before either runs. Where calls are compared no rank waits
/// for the deadline, so it is one that a busy machine keeps.
fn outcome(compare_calls: bool, seed: u64, start: impl for<'a> Fn(&'a Arenas, usize) -> Start<'a>) -> [Result<()>; 2] {
    let deadline = if compare_calls { LONG } else { SHORT };
    let all = Arenas::with(2, seed, ArenaOptions { compare_calls, deadline, ..options() });
    let running = [0, 1].map(|rank| start(&all, rank)).map(|start| start().unwrap());
    running.map(|ready| ready.wait())
}

fn push(all: &Arenas, rank: usize, chunks: u64) -> Start<'_> {
    let member = Team::all(all.world.size()).member(all.world.rank(rank as u32)).unwrap();
    let memory = PushMemory::<u32>::take(&all.arenas[rank], 6, 2).unwrap();
    let out = all.world.ranks[rank].device().stream().unwrap();
    let mut gather = PushGather::new(&all.arenas[rank], &member, memory, [&out, all.stream(rank)], chunks).unwrap();
    Box::new(move || gather.start_from(&[&Buffer::zeros(&out, 6)?]))
}

fn pull<'a>(all: &'a Arenas, rank: usize, team: &Team) -> Start<'a> {
    let member = team.member(all.world.rank(rank as u32)).unwrap();
    let memory = GatherMemory::<u32>::take(&all.arenas[rank], 12).unwrap();
    let stream = all.stream(rank);
    let mut gather = PullGather::new(&all.arenas[rank], &member, memory, stream, 1).unwrap();
    Box::new(move || {
        gather.shard(stream)?.fill_zero(stream)?;
        gather.start()
    })
}

fn mismatch(results: [Result<()>; 2], expected: &str) {
    let texts = results.map(|result| {
        let error = result.expect_err("they differ");
        assert!(matches!(error, Error::Mismatch { .. } | Error::Symmetric(SymmetricError::Aborted { .. })), "{error}");
        error.to_string()
    });
    assert!(texts.iter().all(|text| text.contains(expected)), "{texts:?}");
}

#[test]
fn gathers_of_other_chunks_are_named_on_both_ranks() {
    for seed in 0..16 {
        let start = Instant::now();
        let results = outcome(true, seed, |all, rank| push(all, rank, 2 + rank as u64));
        mismatch(results, "called PushGather of 3 chunks of elements of 4 bytes");
        assert!(start.elapsed() < LONG / 2, "nothing waited for a deadline");
    }
    // The same without the comparison: one rank takes what it got for good, the other has a deadline.
    for seed in 0..4 {
        let [first, second] = outcome(false, seed, |all, rank| push(all, rank, 2 + rank as u64));
        first.unwrap();
        assert!(matches!(second, Err(Error::Symmetric(SymmetricError::Deadline { .. }))), "{second:?}");
    }
}

/// The same ranks in another order: each would take the shards for those of the other.
#[test]
fn other_members_are_named() {
    let world = WorldSize::new(2).unwrap();
    let turned = [1, 0].map(|index| Rank::new(index, world).unwrap());
    let results = outcome(true, 1, |all, rank| {
        let team = if rank == 0 { Team::all(world) } else { Team::new(world, &turned).unwrap() };
        pull(all, rank, &team)
    });
    mismatch(results, "called PullGather of elements of 4 bytes");
}

#[test]
fn gathers_that_are_the_same_end_well() {
    for seed in 0..16 {
        outcome(true, seed, |all, rank| push(all, rank, 2)).into_iter().for_each(|result| result.unwrap());
        outcome(true, seed, |all, rank| pull(all, rank, &Team::all(all.world.size()))).into_iter().for_each(|result| result.unwrap());
    }
}
