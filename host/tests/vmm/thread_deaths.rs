//! Ranks that are threads of one process, on virtual GPUs, one of which panics or stands still: before it opens its arena, while it copies, while it
//! waits, in a graph's replay, between the handovers of another, while it pulls weights or scatters gradients, and before it gives its arena back. What lies between, until memory is mapped, is
//! [`threads`](crate::threads)', on files in memory; nothing is exported within a process.
//!
//! The others return an error that names it, in time, and make a world without it. Each case is a process of its own, whose descriptors and
//! threads are its own: in the end it has no more of them than before.

use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use oxtile::comm::HostRank;
use oxtile::symmetric::{ArenaOptions, BackendName};
use oxtile::{Device, EmulatedOptions, Result, Runtime};

use crate::deaths::{Scale, life};
use crate::program::{resources, resources_after};
use crate::{gathered, gpu, ranks, trial};

const WORLD: u32 = 3;
const DEADLINE: Duration = Duration::from_secs(2);
/// In which the process can be no more.
const LIMIT: Duration = Duration::from_secs(40);
/// A patience of the cluster that is longer than any deadline.
const LONG: Duration = Duration::from_secs(60);

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for phase in ["before", "copy", "wait", "graph", "handover", "gathered", "sharded", "gradients", "teardown"] {
        for kind in ["panic", "stop"] {
            for victim in [0, 1] {
                trials.push(trial(format!("threads::{phase}::{kind}::rank{victim}"), move || in_a_process(phase, kind, victim)));
            }
        }
    }
    trials
}

/// This program as one that has such a rank; it ends well.
pub fn in_a_process(phase: &str, kind: &str, victim: u32) {
    let run =
        || ranks::start(1, &format!("threads:{phase}:{kind}:{victim}"), &[]).into_iter().map(|child| ranks::end(child, LIMIT)).collect();
    let mut ends: Vec<_> = run();
    // A deadline comes out otherwise where the machine stands still for a second: the worlds before and after the loss have one too.
    for _ in 1..3 {
        if ends[0].0 != Some(0) {
            ends = run();
        }
    }
    assert_eq!(ends, [(Some(0), String::new())]);
}

/// A process of a test.
pub fn child(phase: &str, kind: &str, victim: u32) -> ExitCode {
    gpu::run(|| {
        // What is made once for all is no leak.
        worlds("none", "none", None)?;
        let before = resources();
        worlds(phase, kind, Some(victim))?;
        let after = resources_after(before);
        assert_eq!(after, before, "descriptors, threads and mapped files");
        Ok(())
    })
}

/// A world of which a rank is lost, if one is named, and another of the others.
fn worlds(phase: &str, kind: &str, victim: Option<u32>) -> Result<()> {
    let runtime = Runtime::emulated_with(EmulatedOptions { devices: WORLD, patience: LONG, ..EmulatedOptions::default() })?;
    let mut devices = (0..WORLD).map(|index| runtime.device(index)).collect::<Result<Vec<_>>>()?;
    world(&devices, phase, kind, victim)?;
    victim.map(|victim| devices.remove(victim as usize));
    world(&devices, "none", "none", None)
}

/// The ranks of these devices, a thread each.
fn world(devices: &[Device], phase: &str, kind: &str, victim: Option<u32>) -> Result<()> {
    let (let_go, held) = mpsc::channel::<()>();
    let mut held = Some(held);
    let ranks = HostRank::threads(devices)?;
    thread::scope(|scope| {
        let start = |rank: HostRank| {
            let is_victim = victim == Some(rank.rank().index());
            let held = if is_victim { held.take() } else { None };
            let strike = move || {
                let Some(held) = &held else { return };
                if kind == "stop" {
                    // Until the others are through.
                    let _ = held.recv();
                }
                std::panic::resume_unwind(Box::new("meant"));
            };
            (is_victim, scope.spawn(move || one(&rank, phase, &strike)))
        };
        let (of_victim, others): (Vec<_>, Vec<_>) = ranks.into_iter().map(start).collect::<Vec<_>>().into_iter().partition(|(is, _)| *is);
        let results: Vec<_> = others.into_iter().map(|(_, thread)| thread.join().expect("it does not panic")).collect();
        drop(let_go);
        of_victim.into_iter().for_each(|(_, thread)| assert!(thread.join().is_err(), "it was not struck"));
        results.into_iter().try_for_each(|result| match (result, victim) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(victim)) => panic!("a rank did not notice that rank {victim} is lost"),
            (Err((error, _)), None) => Err(error),
            (Err((error, took)), Some(victim)) => {
                assert!(error.to_string().contains(&format!("rank {victim}")), "rank {victim} is not named: {error}");
                assert!(took <= DEADLINE + Duration::from_secs(1), "after {took:?}: {error}");
                Ok(())
            }
        })
    })
}

/// The life of one rank; an error comes with how long it took since all were there.
fn one(rank: &HostRank, phase: &str, strike: &dyn Fn()) -> Result<(), (oxtile::Error, Duration)> {
    let streams = [(); 2].map(|()| rank.device().stream().expect("a stream"));
    let options = ArenaOptions { backend: BackendName::Emulated, deadline: DEADLINE, ..gpu::options() };
    let scale = Scale { options, words: (1 << 10) + gathered::ROOM, copies: 8 };
    life(rank, &streams, &scale, phase, strike).map_err(|(error, begin)| (error, begin.map_or(Duration::ZERO, |begin| begin.elapsed())))
}
