//! Ranks that are threads, of which one panics or stops: the others return an error that names it, in time.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use oxtile::comm::{ArenaRank, Communicator, EmulatedCommunicator, HostRank, ReduceOp, WorldSize};
use oxtile::symmetric::{Arena, ArenaOptions, Epoch, SymmetricError};
use oxtile::{Buffer, EmulatedOptions, Error, Result, Runtime, Stream};

const WORLD: u32 = 3;
/// The deadline of ranks that are told of nothing.
pub const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);
/// Within which all has to be over that is known at once.
const SOON: Duration = Duration::from_secs(20);
const FIRST: Epoch = Epoch::ZERO.next();

/// How a thread ends: by a panic, or not before the others have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Panic,
    Stop,
}

const ENDS: [(End, Duration); 2] = [(End::Panic, LONG), (End::Stop, SHORT)];

/// A rank a thread, which is dropped with it; the victim ends as told where the others go on. What these return, and whether that took long.
pub fn run<R: Send>(ranks: Vec<R>, victim: usize, end: End, body: impl Fn(&R, &dyn Fn()) -> Result<()> + Sync) -> Vec<(Error, Duration)> {
    let (body, start) = (&body, Instant::now());
    let (let_go, held) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let mut held = Some(held);
        let rank = |(i, rank): (usize, R)| {
            let held = (i == victim).then(|| held.take()).flatten();
            scope.spawn(move || {
                let strike = || {
                    match (&held, end) {
                        (None, _) => return,
                        (Some(_), End::Panic) => {}
                        // Until the others are through.
                        (Some(held), End::Stop) => _ = held.recv(),
                    }
                    std::panic::resume_unwind(Box::new("meant"));
                };
                (body(&rank, &strike).err(), start.elapsed())
            })
        };
        let mut threads: Vec<_> = ranks.into_iter().enumerate().map(rank).collect();
        let of_victim = threads.remove(victim);
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect();
        drop(let_go);
        assert!(of_victim.join().is_err(), "the victim ended");
        ends.into_iter().map(|(error, took)| (error.expect("a rank is missing"), took)).collect()
    })
}

fn emulated(patience: Duration) -> Runtime {
    Runtime::emulated_with(EmulatedOptions { devices: WORLD, patience, ..EmulatedOptions::default() }).unwrap()
}

fn collective(rank: &EmulatedCommunicator, strike: &dyn Fn()) -> Result<()> {
    let stream = rank.device().stream()?;
    let mut sum = Buffer::from_slice(&stream, &[1_u32])?;
    rank.all_reduce(&stream, &mut sum, ReduceOp::Sum)?;
    assert_eq!(sum.to_vec(&stream)?, [WORLD]);
    strike();
    rank.all_reduce(&stream, &mut sum, ReduceOp::Sum)?;
    stream.synchronize()
}

/// The ranks that came are named, and those that did not: at once where the missing one is gone, after the patience where it may still come.
#[test]
fn a_collective_without_one_of_its_threads() {
    for victim in 0..WORLD {
        for (end, patience) in ENDS {
            let ranks = EmulatedCommunicator::world_of(&emulated(patience), WorldSize::new(WORLD).unwrap()).unwrap();
            for (error, took) in run(ranks, victim as usize, end, collective) {
                let Error::Stuck { waits } = &error else { panic!("{end:?} of {victim}: {error}") };
                let came = |rank: u32| waits.contains(&format!("rank {rank}, rank")) || waits.contains(&format!("rank {rank} came"));
                assert!(waits.contains("call 1 of the world, all_reduce"), "{waits}");
                (0..WORLD).for_each(|rank| assert_eq!(came(rank), rank != victim, "{end:?} of {victim}: {waits}"));
                assert!(took < SOON, "{end:?} of {victim} after {took:?}");
            }
        }
    }
}

fn split(rank: &EmulatedCommunicator, strike: &dyn Fn()) -> Result<()> {
    rank.split(Some(0), 0)?;
    strike();
    rank.split(Some(0), 0).map(drop)
}

#[test]
fn a_split_without_one_of_its_threads() {
    for victim in 0..WORLD {
        for (end, patience) in ENDS {
            let ranks = EmulatedCommunicator::world_of(&emulated(patience), WorldSize::new(WORLD).unwrap()).unwrap();
            for (error, took) in run(ranks, victim as usize, end, split) {
                let named = match &error {
                    Error::Symmetric(SymmetricError::Aborted { rank, .. }) if end != End::Stop => vec![rank.index()],
                    Error::Symmetric(SymmetricError::Missing { ranks, .. }) if end == End::Stop => {
                        ranks.iter().map(|r| r.index()).collect()
                    }
                    _ => panic!("{end:?} of {victim}: {error}"),
                };
                assert_eq!(named, [victim], "{end:?}");
                assert!(took < SOON, "{end:?} of {victim} after {took:?}");
            }
        }
    }
}

/// Every rank signals every other one and waits for all, twice; then all wait again.
fn one_sided(rank: &impl ArenaRank, deadline: Duration, strike: &dyn Fn()) -> Result<()> {
    let stream: Stream = rank.device().stream()?;
    let arena = Arena::open(rank, ArenaOptions { deadline, ..ArenaOptions::default() })?;
    let (buffer, ready) = (arena.buffer::<u32>(1)?, arena.channel()?);
    for epoch in [FIRST, FIRST.next()] {
        if epoch != FIRST {
            strike();
        }
        arena.world().ranks().try_for_each(|to| arena.signal(&stream, ready, to, epoch))?;
        arena.world().ranks().try_for_each(|from| arena.wait(&stream, ready, from, epoch))?;
        let target = Buffer::uninitialised(&stream, 1)?;
        buffer.peer(arena.rank())?.get(&stream, 0..1, target, 0)?.wait()?;
    }
    Ok(())
}

fn check_one_sided(victim: u32, end: End, results: Vec<(Error, Duration)>) {
    // The first that notices ends the arena for the others, which are told by it.
    let (mut of_victim, mut of_others) = (0, 0);
    for (error, took) in results {
        let text = error.to_string();
        match error {
            Error::Symmetric(SymmetricError::Deadline { missing, .. }) if end == End::Stop => {
                assert_eq!(missing.iter().map(|rank| rank.index()).collect::<Vec<_>>(), [victim], "{text}");
                of_victim += 1;
            }
            Error::Symmetric(SymmetricError::Aborted { rank, .. }) if rank.index() == victim && end != End::Stop => of_victim += 1,
            Error::Symmetric(SymmetricError::Aborted { .. }) if text.contains(&format!("rank {victim}")) => of_others += 1,
            other => panic!("{end:?} of {victim}: {other}"),
        }
        assert!(took < SOON, "{end:?} of {victim} after {took:?}");
    }
    assert!(of_victim >= 1 && of_victim + of_others == WORLD as usize - 1, "{end:?} of {victim}");
}

#[test]
fn an_arena_without_one_of_its_threads() {
    for victim in 0..WORLD {
        for (end, deadline) in ENDS {
            let ranks = EmulatedCommunicator::world_of(&emulated(LONG), WorldSize::new(WORLD).unwrap()).unwrap();
            check_one_sided(victim, end, run(ranks, victim as usize, end, |rank, strike| one_sided(rank, deadline, strike)));

            let runtime = emulated(LONG);
            let devices: Vec<_> = (0..WORLD).map(|index| runtime.device(index).unwrap()).collect();
            let ranks = HostRank::threads(&devices).unwrap();
            check_one_sided(victim, end, run(ranks, victim as usize, end, |rank, strike| one_sided(rank, deadline, strike)));
        }
    }
}

/// A wait on the host takes no rank that enqueues late for one that never does.
#[test]
fn a_late_thread_is_waited_for() {
    let runtime = emulated(LONG);
    let devices: Vec<_> = (0..WORLD).map(|index| runtime.device(index).unwrap()).collect();
    let late = |rank: HostRank| -> Result<()> {
        let stream = rank.device().stream()?;
        let arena = Arena::open(&rank, ArenaOptions::default())?;
        let ready = arena.channel()?;
        thread::sleep(SHORT * rank.rank().index());
        arena.world().ranks().try_for_each(|to| arena.signal(&stream, ready, to, FIRST))?;
        arena.world().ranks().try_for_each(|from| arena.wait(&stream, ready, from, FIRST))?;
        stream.synchronize()?;
        arena.close()?.finish()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = HostRank::threads(&devices).unwrap().into_iter().map(|rank| scope.spawn(move || late(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
}
