//! Ranks that are processes on GPUs and die, or stop, at work: while they copy, while they wait, in a graph's replay, between the handovers of
//! another, between the calls of a gathered product, while they pull weights or scatter gradients, and when all is to be given back. What comes before, until memory is mapped, is [`faults`](crate::faults)'.
//!
//! The others return an error that names the rank, in time, leave no descriptor and no memory of the device behind, and make a world without it. Memory is
//! physical until the last process that has it mapped unmaps it or ends: while a stopped rank is there, it keeps what the others have given back. So they
//! measure twice, before and after the test has ended it.

use std::fmt;
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use libtest_mimic::{Failed, Trial};
use oxtile::comm::bootstrap::Environment;
use oxtile::comm::{HostRank, Rank, WorldSize};
use oxtile::symmetric::{Arena, ArenaOptions, Epoch, Handover};
use oxtile::{Buffer, Error, Graph, Result, Runtime, Stream};

use crate::faults::strike;
use crate::gpu::{QUEUES, device, meet, options, program, run};
use crate::watch::{doing, settle};
use crate::{gathered, gpus, ranks, sharded};

const WORLD: u32 = 3;
const DEADLINE: Duration = Duration::from_secs(3);
/// In which no survivor can be any more.
const LIMIT: Duration = Duration::from_secs(40);
/// 64 MiB, which take a link a fifth of a millisecond.
const WORDS: u64 = 16 << 20;
const COPIES: u32 = 64;
/// In which the test ends the rank that died or stopped, once all survivors have measured.
const ENDING: Duration = Duration::from_secs(9);
/// Of a rank's arena, rounded up as the driver does.
const ARENA: usize = (4 * WORDS as usize) + (2 << 20);
/// What the driver may take or give meanwhile.
const SLACK: usize = 32 << 20;
const NOTHING: &str = "nothing leaked";
const FIRST: Epoch = Epoch::ZERO.next();
/// Set where nothing but these cases, one at a time, uses the GPUs: then what is free of their memory is a measure.
const ALONE: &str = "OXTILE_TEST_ALONE";
/// Where the survivors meet again.
const SECOND_PORT: &str = "OXTILE_TEST_SECOND_PORT";

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for phase in ["copy", "wait", "graph", "handover", "gathered", "sharded", "gradients", "teardown"] {
        for (kind, victim) in [("kill", 1), ("panic", 1), ("exit", 1), ("stop", 1), ("kill", 0)] {
            trials.push(Trial::test(format!("gpu::deaths::{phase}::{kind}::rank{victim}"), move || death(phase, kind, victim)));
        }
    }
    trials
}

/// One at a time: processes that start wait for one another in the driver, and the survivors have deadlines.
static TURN: Mutex<()> = Mutex::new(());

fn death(phase: &str, kind: &str, victim: u32) -> std::result::Result<(), Failed> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let _gpus = gpus();
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let second = listener.local_addr()?.port().to_string();
    drop(listener);
    let mut children: Vec<_> =
        ranks::start(WORLD, &format!("deaths:{phase}:{kind}:{victim}"), &[QUEUES, (SECOND_PORT, &second)]).into_iter().map(Some).collect();
    let mut wrong = Vec::new();
    for rank in (0..WORLD).filter(|rank| *rank != victim) {
        let held = ranks::line(children[rank as usize].as_mut().expect("not ended yet"));
        println!("{kind} of rank {victim}, {phase}: before it is ended, rank {rank} finds {held}");
    }
    if let Some(mut victim) = children[victim as usize].take() {
        // A stopped one is still there.
        let _ = victim.kill();
        let _ = victim.wait();
    }
    for rank in (0..WORLD).filter(|rank| *rank != victim) {
        let (code, said) = ranks::end(children[rank as usize].take().expect("not ended yet"), LIMIT);
        let fields: Vec<_> = said.lines().last().unwrap_or_default().split('|').collect();
        if code != Some(3) || fields.len() != 5 || fields[..4] != ["named", "in time", NOTHING, "again"] {
            wrong.push(format!("rank {rank} ended with {code:?} and said {said:?}"));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    // At once: what is said at the end is lost where a run is cut short.
    let wrong = wrong.join("\n");
    eprintln!("{kind} of rank {victim}, {phase}: {wrong}");
    Err(wrong.into())
}

/// One rank. A survivor ends with 3 and says: what is held before the victim is ended; then, in a line, whether the error names the victim, in time or late, what
/// leaked, whether there is a new world, and the error.
pub fn child(case: &str) -> ExitCode {
    let parts: Vec<_> = case.split(':').collect();
    let [phase, kind, victim] = parts[..] else { panic!("{case}") };
    let environment = Environment::read().expect("the variables are set");
    let victim = Rank::new(victim.parse().expect("a number"), environment.world).expect("of the world");
    let mut is_over = false;
    let ended = run(|| {
        println!("{}", survive(&environment, phase, kind, victim)?);
        is_over = true;
        Ok(())
    });
    if is_over { ExitCode::from(3) } else { ended }
}

fn survive(environment: &Environment, phase: &str, kind: &str, victim: Rank) -> Result<String> {
    let device = device(environment.local_rank)?;
    let devices = Runtime::cuda()?.device_count();
    // Where the victim was on the same device, the memory of its process is no measure.
    let is_alone = std::env::var_os(ALONE).is_some() && environment.local_rank % devices != victim.index() % devices;
    let rank = HostRank::connect(environment, &device, Duration::from_secs(20))?;
    let (streams, me) = ([device.stream()?, device.stream()?], rank.rank());
    doing(me, "its life without a fault");
    let scale = Scale { options: ArenaOptions { deadline: DEADLINE, ..options() }, words: WORDS, copies: COPIES };
    // What the driver opens, and what its pool keeps, when it is first used is no leak.
    life(&rank, &streams, &scale, phase, &|| ()).map_err(|(error, _)| error)?;
    // Neither while another is giving back, nor while another takes again.
    meet(&rank)?;
    let before = Resources::now();
    meet(&rank)?;
    doing(me, "its life with a fault");
    let strike = || {
        if me == victim {
            strike(kind).expect("it ends the process")
        }
    };
    let (error, begin) = life(&rank, &streams, &scale, phase, &strike).expect_err("a rank is gone");
    let took = begin.map_or(Duration::MAX, |begin| begin.elapsed());
    let late = if took <= DEADLINE + Duration::from_secs(1) { "in time".into() } else { format!("{took:?}") };
    // A stopped rank has mapped the memory of each survivor on this device.
    let survivors = environment.world.ranks().filter(|rank| *rank != victim && rank.index() % devices == environment.local_rank % devices);
    let kept = if kind == "stop" { survivors.count() * ARENA } else { 0 };
    let held = Resources::beyond_after_a_while(&before, is_alone, kept, DEADLINE);
    println!("{held}");
    let within = if held.is_nothing(kept) { "" } else { "before it was ended, " };
    let held = Resources::beyond_after_a_while(&before, is_alone, 0, ENDING);
    let leaked = if within.is_empty() && held.is_nothing(0) { NOTHING.to_owned() } else { format!("{within}{held} leaked") };
    drop(rank);
    doing(me, "its life in another world");
    let second = Environment {
        rank: Rank::new(me.index() - u32::from(me > victim), world_without_one(environment)).expect("one is gone"),
        world: world_without_one(environment),
        master_port: std::env::var(SECOND_PORT).ok().and_then(|port| port.parse().ok()).expect("a port"),
        ..environment.clone()
    };
    program(HostRank::connect(&second, &device, Duration::from_secs(20))?, options())?;
    let error = error.to_string();
    let named = if error.contains(&victim.to_string()) { "named" } else { "not named" };
    Ok(format!("{named}|{late}|{leaked}|again|{error}"))
}

fn world_without_one(environment: &Environment) -> WorldSize {
    WorldSize::new(environment.world.get() - 1).expect("more than one")
}

/// How much a life takes.
pub struct Scale {
    pub options: ArenaOptions,
    pub words: u64,
    pub copies: u32,
}

/// An arena, work on it, and its end. `strike` is called in the phase. An error comes with the time at which all ranks were there; with `before`, at
/// which the life began.
pub fn life(rank: &HostRank, streams: &[Stream; 2], scale: &Scale, phase: &str, strike: &dyn Fn()) -> Result<(), (Error, Option<Instant>)> {
    let mut begin = (phase == "before").then(Instant::now);
    work(rank, streams, scale, phase, strike, &mut begin).map_err(|error| (error, begin))
}

fn work(
    rank: &HostRank,
    [stream, side]: &[Stream; 2],
    &Scale { ref options, words, copies }: &Scale,
    phase: &str,
    strike: &dyn Fn(),
    begin: &mut Option<Instant>,
) -> Result<()> {
    let (me, world) = (rank.rank(), rank.world());
    if phase == "before" {
        strike();
    }
    let arena = Arena::open(rank, ArenaOptions { bytes: 4 * words, ..options.clone() })?;
    let words = words - gathered::ROOM;
    let (buffer, ready, begun) = (arena.buffer::<u32>(words)?, arena.channel()?, arena.channel()?);
    let own = Buffer::<u32>::zeros(stream, words)?;
    let next = Rank::new((me.index() + 1) % world.get(), world).expect("of this world");
    let others = || world.ranks().filter(|rank| *rank != me);
    // All are there before anything happens.
    others().try_for_each(|peer| arena.signal(stream, begun, peer, FIRST))?;
    others().try_for_each(|peer| arena.wait(stream, begun, peer, FIRST))?;
    settle(stream)?;
    begin.get_or_insert_with(Instant::now);
    let put = || buffer.peer(next)?.put(stream, &own, 0..words, 0);
    match phase {
        "copy" => {
            (0..copies).try_for_each(|_| put())?;
            strike();
        }
        "wait" => {
            arena.wait(stream, ready, next, FIRST)?;
            strike();
        }
        "graph" => {
            let graph = Graph::capture(&[stream], || {
                put()?;
                // Each replay waits for it, the first one long.
                arena.wait(stream, ready, next, FIRST)
            })?;
            (0..copies).try_for_each(|_| graph.replay(stream))?;
            strike();
        }
        "handover" => {
            let place = Handover::take(&arena)?;
            let previous = Rank::new((me.index() + world.get() - 1) % world.get(), world).expect("of this world");
            place.open(stream, previous)?;
            let graph = Graph::capture(&[stream], || {
                place.acquire(stream, next)?;
                put()?;
                place.publish(stream, next)?;
                place.accept(stream, previous)?;
                place.release(stream, previous)
            })?;
            for turn in 0..copies {
                // The others are in the middle of it, whichever is ahead.
                if turn == copies / 2 {
                    strike();
                }
                graph.replay(stream)?;
            }
        }
        // The kernels of the others wait for chunks.
        "gathered" => gathered::turns(&arena, [stream, side], copies, strike)?,
        // The others pull weights of the one that is struck, and wait for its next step.
        "sharded" => sharded::turns(&arena, stream, copies, strike)?,
        // The others have sent rows to the one that is struck, and wait for its rows.
        "gradients" => sharded::scatters(&arena, stream, copies, strike)?,
        _ => {}
    }
    others().try_for_each(|peer| arena.signal(side, ready, peer, FIRST))?;
    others().try_for_each(|peer| arena.wait(stream, ready, peer, FIRST))?;
    let target = Buffer::uninitialised(stream, 1)?;
    buffer.peer(me)?.get(stream, 0..1, target, 0)?.wait()?;
    settle(side)?;
    drop(buffer);
    if phase == "teardown" {
        strike();
    }
    arena.close()?.finish()
}

/// What a process has that it could leave behind.
struct Resources {
    descriptors: usize,
    free: usize,
}

impl Resources {
    fn now() -> Self {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places for two numbers; the library has made the device's context current on this thread.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
        Self { descriptors: std::fs::read_dir("/proc/self/fd").expect("proc is mounted").count(), free }
    }

    /// What stays. Memory that another survivor, or a process that is just being ended, still has mapped goes when they unmap it.
    fn beyond_after_a_while(before: &Self, is_alone: bool, kept: usize, limit: Duration) -> Beyond {
        let begin = Instant::now();
        loop {
            let beyond = Self::now().beyond(before, is_alone);
            if beyond.is_nothing(kept) || begin.elapsed() > limit {
                return beyond;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What is there now that was not before. Other users of the device make its memory no measure.
    fn beyond(&self, before: &Self, is_alone: bool) -> Beyond {
        let bytes = is_alone.then(|| before.free.saturating_sub(self.free));
        Beyond { descriptors: self.descriptors.saturating_sub(before.descriptors), bytes }
    }
}

/// What a process has more than before.
struct Beyond {
    descriptors: usize,
    /// Of the device, where that is a measure.
    bytes: Option<usize>,
}

impl Beyond {
    /// Whether it is no more than so many bytes that another rank keeps.
    fn is_nothing(&self, kept: usize) -> bool {
        self.descriptors == 0 && self.bytes.is_none_or(|bytes| bytes <= kept + SLACK)
    }
}

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.bytes.map_or_else(|| "memory that is not measured".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        write!(f, "{} descriptors and {memory}", self.descriptors)
    }
}
