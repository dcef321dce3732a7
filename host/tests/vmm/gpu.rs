//! Arenas of mapped GPU memory. Each test is a program of its own, or as many as there are ranks, with a limit: what hangs says where, and is
//! ended.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use oxtile::comm::bootstrap::Environment;
use oxtile::comm::{ArenaRank, HostRank, Rank, Team};
use oxtile::symmetric::{
    Arena, ArenaOptions, BackendName, ChunkedGather, Epoch, GatherMemory, PullGather, PushGather, PushMemory, Ready, Step, SymmetricError,
};
use oxtile::{Buffer, Device, Error, PinnedBuffer, Result, Runtime, Stream};

use crate::context::{self, By};
use crate::soak::{self, Length};
use crate::watch::{self, doing, settle};
use crate::{all_gpus, chunks, contiguous, deaths, gathered, gpus, hosts, ranks, sharded, teams};

/// After which a program is killed, which says before where it hangs.
pub const LIMIT: Duration = Duration::from_secs(30);
/// The same of programs that compute attention in `f64` too, whose ranks share processors.
const LONG_LIMIT: Duration = Duration::from_secs(90);
const FIRST: Epoch = Epoch::ZERO.next();
/// Of what each rank puts, and of shards.
const LEN: u32 = 10_000;

/// Streams that wait for signals must not share a hardware queue with those that are to signal: a queue each, for all ranks of a device.
pub const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");
/// A wait delays what comes after it on other streams too, of any priority.
const ONE_QUEUE: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "1");
/// The driver's own number.
const EIGHT_QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "8");

/// The back end of a program's arenas, if it is not vmm.
pub const BACKEND: &str = "OXTILE_TEST_BACKEND";
/// The tests that need a GPU, but for those of [`deaths`].
const CASES: [(&str, u32, (&str, &str)); 33] = [
    ("threads-1", 1, QUEUES),
    ("threads-2", 1, QUEUES),
    ("threads-4", 1, QUEUES),
    ("process", 1, QUEUES),
    ("process", 2, QUEUES),
    ("process", 3, QUEUES),
    ("process", 4, QUEUES),
    ("silence", 1, QUEUES),
    ("silence-of-one-queue", 1, ONE_QUEUE),
    ("silence-of-two-in-eight-queues", 1, EIGHT_QUEUES),
    ("refusals", 1, QUEUES),
    ("teams-of-threads", 1, QUEUES),
    ("teams", 3, QUEUES),
    ("gathered", 1, QUEUES),
    ("gathered", 2, QUEUES),
    ("gathered", 4, QUEUES),
    ("gathered-of-one-queue", 2, ONE_QUEUE),
    ("gathered-of-eight-queues", 2, EIGHT_QUEUES),
    ("context-threads-2", 1, QUEUES),
    ("context", 2, QUEUES),
    ("context", 4, QUEUES),
    ("context-by-puts", 2, QUEUES),
    ("context-by-puts", 4, QUEUES),
    ("context-by-messages", 2, QUEUES),
    ("context-by-messages", 4, QUEUES),
    ("gathered-soak", 2, QUEUES),
    ("gathered-soak", 4, QUEUES),
    ("sharded", 1, QUEUES),
    ("sharded", 2, QUEUES),
    ("sharded", 4, QUEUES),
    ("soak-threads-2", 1, QUEUES),
    ("soak", 2, QUEUES),
    ("soak", 4, QUEUES),
];

pub fn trials() -> Vec<Trial> {
    let required = std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "vmm");
    let missing = Runtime::cuda().err().filter(|_| !required);
    let case = |(name, world, queues): (&'static str, u32, (&'static str, &'static str))| {
        let test = move || {
            // Kernels that wait for other processes take turns with those of other tests on a device.
            let (_shared, _alone) = if name.starts_with("gathered") { (None, Some(all_gpus())) } else { (Some(gpus()), None) };
            let children = ranks::start(world, &format!("gpu:{name}"), &[queues]);
            let ends: Vec<_> =
                children.into_iter().map(|child| ranks::end(child, limit_of(name) + Length::from_variables().least())).collect();
            let rank = |(rank, (code, said)): (usize, &(Option<i32>, String))| format!("rank {rank} ended with {code:?} and said {said:?}");
            let all: Vec<_> = ends.iter().enumerate().map(rank).collect();
            if ends.iter().any(|(code, _)| *code != Some(0)) {
                return Err(Failed::from(all.join("\n")));
            }
            // How much was checked.
            ends.iter().filter(|(_, said)| !said.is_empty()).for_each(|(_, said)| println!("{said}"));
            Ok(())
        };
        Trial::test(format!("gpu::{name}::{world}"), test)
    };
    let trials: Vec<_> = CASES.into_iter().map(case).chain(deaths::trials()).collect();
    if let Some(reason) = &missing {
        eprintln!("vmm: {} tests skipped: {reason}", trials.len());
    }
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(missing.is_some()));
    trials.chain(hosts::trials()).collect()
}

/// How long a program may take.
pub fn limit_of(case: &str) -> Duration {
    if case.starts_with("context") { LONG_LIMIT } else { LIMIT }
}

/// A program of a test.
pub fn child(case: &str) -> ExitCode {
    let length = Length::from_variables();
    let soak = |rank: HostRank| soak::soak(rank, options().backend, length).map(|soaked| println!("{soaked}"));
    let program = |rank: HostRank| program(rank, options());
    run_within(limit_of(case), || match case {
        "threads-1" => threads(1, &program),
        "threads-2" => threads(2, &program),
        "threads-4" => threads(4, &program),
        "process" => process(&program),
        "silence" | "silence-of-one-queue" | "silence-of-two-in-eight-queues" => threads(2, &silence),
        "refusals" => refusals(),
        "teams-of-threads" => threads(3, &teams::rank),
        "teams" => process(&teams::rank),
        "soak-threads-2" => threads(2, &soak),
        "soak" => process(&soak),
        "context-threads-2" => threads(2, &|rank| context::program(rank, options(), By::Memory)),
        // Kernels that wait for keys want a GPU each.
        "context" => process(&|rank| {
            let share_devices = rank.device().runtime().device_count() < rank.world().get();
            context::program(rank, ArenaOptions { share_devices, ..options() }, By::Memory)
        }),
        "context-by-puts" => process(&|rank| context::program(rank, options(), By::Puts)),
        "context-by-messages" => process(&|rank| context::program(rank, options(), By::Messages)),
        "gathered" | "gathered-of-one-queue" | "gathered-of-eight-queues" => process(&|rank| gathered::program(rank, options())),
        "sharded" => process(&|rank| sharded::program(rank, options())),
        "gathered-soak" => process(&|rank| gathered::soak(rank, options(), length).map(|soaked| println!("{soaked}"))),
        "hosts" => hosts::rank(),
        _ => panic!("{case}"),
    })
}

/// Runs a program, and says how it ended, or where it hangs, where the test looks for it.
pub fn run(program: impl FnOnce() -> Result<()>) -> ExitCode {
    run_within(LIMIT, program)
}

/// The same of a program that the test gives so long.
pub fn run_within(limit: Duration, program: impl FnOnce() -> Result<()>) -> ExitCode {
    std::panic::set_hook(Box::new(|panic| println!("{panic}")));
    watch::limit(watch::given().unwrap_or(limit - Duration::from_secs(5)) + Length::from_variables().least());
    match program() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A GPU a rank, as far as they go.
pub fn device(index: u32) -> Result<Device> {
    let runtime = Runtime::cuda()?;
    let count = runtime.device_count();
    runtime.device(index % count)
}

pub fn options() -> ArenaOptions {
    ArenaOptions {
        backend: std::env::var(BACKEND).map_or(BackendName::Vmm, |name| name.parse().expect("a back end")),
        bytes: 8 << 20,
        share_devices: true,
        deadline: Duration::from_secs(10),
        ..ArenaOptions::default()
    }
}

pub fn threads(world: u32, body: &(dyn Fn(HostRank) -> Result<()> + Sync)) -> Result<()> {
    // A runtime each: nothing is ordered but by signals.
    let devices: Vec<_> = (0..world).map(device).collect::<Result<_>>()?;
    let ranks = HostRank::threads(&devices)?;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })
}

pub fn process(body: &dyn Fn(HostRank) -> Result<()>) -> Result<()> {
    let environment = Environment::read()?;
    body(HostRank::connect(&environment, &device(environment.local_rank)?, Duration::from_secs(20))?)
}

/// How long ranks wait for each other where that is not what a test is about: processes start slowly beside others.
const START: Duration = Duration::from_secs(20);

/// Waits until all ranks are here.
pub fn meet(rank: &impl ArenaRank) -> Result<()> {
    let meeting = rank.next_meeting();
    meeting.publish("here", Vec::new())?;
    meeting.gather("here", START)?;
    Ok(())
}

pub fn numbers(rank: Rank, round: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (rank.index() + 1) << 24 | round << 16 | i).collect()
}

/// Without waiting for the stream, which may wait for other ranks.
pub fn later(buffer: &mut Buffer<u32>, stream: &Stream, values: &[u32]) -> Result<()> {
    buffer.copy_from_pinned(stream, &PinnedBuffer::from_slice(stream, values)?)
}

/// What a rank does: puts, gets, and gathers by copy engines in three rounds, both ways.
pub fn program(rank: HostRank, options: ArenaOptions) -> Result<()> {
    let (me, world) = (rank.rank(), rank.world());
    let (compute, copies, side) = (rank.device().stream()?, rank.device().stream()?, rank.device().stream()?);
    let is_virtual = options.backend == BackendName::Emulated;
    doing(me, "opening its arena");
    let arena = Arena::open(&rank, options)?;
    let capabilities = arena.capabilities();
    assert!(capabilities.processes || is_virtual);

    // Every rank puts its numbers to every rank and signals; a rank that has seen the signal reads them, here and at the peers.
    let buffer = arena.buffer::<u32>(u64::from(LEN * world.get()))?;
    let (arrived, read) = (arena.channel()?, arena.channel()?);
    let mut own = Buffer::<u32>::zeros(&compute, LEN.into())?;
    for (round, epoch) in (0..3).zip(1..) {
        let epoch = Epoch::ZERO.later(epoch);
        doing(me, format!("round {round}: putting"));
        later(&mut own, &compute, &numbers(me, round, LEN))?;
        for peer in world.ranks() {
            // The peer has read the round before.
            arena.wait(&compute, read, peer, Epoch::ZERO.later(round.into()))?;
            buffer.peer(peer)?.put(&compute, &own, 0..LEN.into(), u64::from(LEN * me.index()))?;
            arena.signal(&compute, arrived, peer, epoch)?;
        }
        world.ranks().try_for_each(|peer| arena.wait(&compute, arrived, peer, epoch))?;
        let expected: Vec<_> = world.ranks().flat_map(|from| numbers(from, round, LEN)).collect();
        doing(me, format!("round {round}: reading what was put"));
        settle(&compute)?;
        assert_eq!(buffer.local().to_vec(&compute)?, expected, "{me}, round {round}: what was put");
        let next = Rank::new((me.index() + 1) % world.get(), world).expect("of this world");
        let mine = u64::from(LEN * me.index());
        doing(me, format!("round {round}: getting"));
        let target = Buffer::uninitialised(&compute, LEN.into())?;
        let target = buffer.peer(next)?.get(&compute, mine..mine + u64::from(LEN), target, 0)?.wait()?;
        doing(me, format!("round {round}: reading what it got"));
        assert_eq!(target.to_vec(&compute)?, numbers(me, round, LEN), "{me}, round {round}: what is got from {next}");
        world.ranks().try_for_each(|peer| arena.signal(&compute, read, peer, epoch))?;
    }
    doing(me, "waiting for the rounds");
    // A rank that has read the last round has all of it, and so has one that has seen that.
    world.ranks().try_for_each(|peer| arena.wait(&compute, read, peer, Epoch::ZERO.later(3)))?;
    settle(&compute)?;
    let last: Vec<_> = world.ranks().flat_map(|from| numbers(from, 2, LEN)).collect();
    contiguous::read_all(&arena, &compute, &buffer, &last)?;
    chunks::exchange(&arena, [&compute, &copies])?;

    for chunks in [3, 1] {
        gathers(&rank, &arena, [&compute, &copies, &side], &mut own, chunks)?;
    }
    doing(me, "closing its arena");
    drop(buffer);
    let closing = arena.close()?;
    doing(me, "closing: until all have, and giving the memory back");
    closing.finish()?;
    doing(me, "leaving the board");
    rank.close()
}

/// Three rounds of both gathers, pushes from elsewhere and in place, each word compared.
fn gathers(rank: &HostRank, arena: &Arena, [compute, copies, side]: [&Stream; 3], own: &mut Buffer<u32>, chunks: u64) -> Result<()> {
    let (me, world) = (rank.rank(), rank.world());
    let member = Team::all(world).member(me).expect("of the world");
    let memory = GatherMemory::<u32>::take(arena, LEN.into())?;
    let mut pull = PullGather::new(arena, &member, memory, copies, chunks)?;
    let memory = PushMemory::<u32>::take(arena, LEN.into(), world.get())?;
    let mut push = PushGather::new(arena, &member, memory, [copies, side], chunks)?;
    for round in 0..3 {
        let expected: Vec<_> = world.ranks().flat_map(|from| numbers(from, round, LEN)).collect();
        doing(me, format!("round {round}: pulling"));
        later(pull.shard(compute)?, compute, &numbers(me, round, LEN))?;
        let pulled = pull.start()?;
        compare(&pulled, compute, &expected)?;
        pull.release(pulled)?;
        doing(me, format!("round {round}: pushing"));
        later(own, compute, &numbers(me, round, LEN))?;
        let pushed = push.start_from(&[own])?;
        compare(&pushed, compute, &expected)?;
        push.release(pushed)?;
        // Twice what was written once.
        let expected: Vec<_> = world.ranks().flat_map(|from| numbers(from, round + 3, LEN)).collect();
        later(push.shard(compute)?, compute, &numbers(me, round + 3, LEN))?;
        for time in 0..2 {
            doing(me, format!("round {round}: pushing in place, time {time}"));
            let pushed = push.start()?;
            assert_eq!(pushed.chunk(compute, me, chunks - 1)?.len(), u64::from(LEN) - (chunks - 1) * u64::from(LEN).div_ceil(chunks));
            compare(&pushed, compute, &expected)?;
            push.release(pushed)?;
        }
    }
    settle(copies)
}

/// Compares what was gathered, once the host has waited for it.
fn compare(ready: &Ready<u32>, stream: &Stream, expected: &[u32]) -> Result<()> {
    ready.wait()?;
    assert!(ready.whole(stream)?.to_vec(stream)? == expected, "{ready:?}: not what was gathered");
    Ok(())
}

/// How many streams of a rank wait in [`silence`], if more than one: two ranks on one GPU have twice as many.
const WAITS: &str = "OXTILE_TEST_WAITS";
/// Whether rank 0 ends the arena of [`silence`] itself (`abort`), not by a deadline: the arena's stream has read no word then before it writes
/// poison.
const END: &str = "OXTILE_TEST_END";

/// A signal that does not come: the rank that waits for it is named in time, the streams let go, and the same ranks can open another arena.
pub fn silence(rank: HostRank) -> Result<()> {
    let me = rank.rank();
    let stream = rank.device().stream()?;
    // A library takes longer to close an arena.
    let deadline = Duration::from_millis(if options().backend == BackendName::Vmm { 500 } else { 5000 });
    let waits = std::env::var(WAITS).map_or(1, |waits| waits.parse().expect("a number"));
    let others = (1..waits).map(|_| rank.device().stream()).collect::<Result<Vec<_>>>()?;
    doing(me, "meeting the other");
    meet(&rank)?;
    doing(me, "opening its arena");
    let arena = Arena::open(&rank, ArenaOptions { deadline, rendezvous: Some(START), ..options() })?;
    let (buffer, channel) = (arena.buffer::<u32>(4)?, arena.channel()?);
    let other = Rank::new(1 - me.index(), rank.world()).expect("of two");
    buffer.peer(other)?;
    doing(me, "waiting for a signal that is never sent");
    let wait = |stream: &Stream| arena.wait(stream, channel, other, FIRST).and_then(|()| stream.record());
    let ends = others.iter().chain([&stream]).map(wait).collect::<Result<Vec<_>>>()?;
    // Neither ends the arena before both have so many streams that wait, and are seen to.
    thread::sleep(Duration::from_millis(20));
    for end in &ends {
        assert!(!end.is_done()?, "{me}: a stream went on without its signal");
    }
    meet(&rank)?;
    let is_aborted = std::env::var(END).is_ok_and(|end| end == "abort") && me == Rank::ZERO;
    let start = Instant::now();
    let error = if is_aborted {
        arena.abort("the test")?;
        arena.check().expect_err("it has ended")
    } else {
        let target = Buffer::uninitialised(&stream, 4)?;
        buffer.peer(other)?.get(&stream, 0..4, target, 0).and_then(|ticket| ticket.wait()).expect_err("no rank signals")
    };
    assert!(start.elapsed() < deadline + Duration::from_secs(1), "{me}: {:?}", start.elapsed());
    let is_told = |error: &Error| matches!(error, Error::Symmetric(SymmetricError::Deadline { .. } | SymmetricError::Aborted { .. }));
    assert!(is_told(&error), "{me}: {error}");
    assert!(is_told(&arena.check().expect_err("it has ended")));
    doing(me, "draining its streams");
    others.iter().chain([&stream]).try_for_each(settle)?;
    doing(me, "opening another arena");
    let again = Arena::open(&rank, options())?;
    let channel = again.channel()?;
    again.signal(&stream, channel, other, FIRST)?;
    // Where all streams share one queue, a wait would delay the other's signal after it: both signals come first.
    meet(&rank)?;
    doing(me, "waiting for the other's signal");
    again.wait(&stream, channel, other, FIRST)?;
    settle(&stream)?;
    drop((buffer, arena));
    again.close()?.finish()?;
    rank.close()
}

/// What cannot be done is an error of every rank, at once, and leaves nothing.
fn refusals() -> Result<()> {
    let step = |result: Result<Arena>| match result.expect_err("a refusal") {
        Error::Symmetric(SymmetricError::Step { rank, step, .. }) => (rank.index(), step),
        other => panic!("{other}"),
    };
    let huge = |rank: HostRank| {
        let bytes = if rank.rank().index() == 0 { 8 << 20 } else { 1 << 50 };
        // Sizes that differ are found before anything is allocated.
        let error = Arena::open(&rank, ArenaOptions { bytes, ..options() }).expect_err("they differ");
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Rendezvous { .. })), "{error}");
        let (rank_of, at) = step(Arena::open(&rank, ArenaOptions { bytes: 1 << 50, ..options() }));
        assert!(rank_of < 2 && at == Step::Create, "{at}");
        rank.close()
    };
    threads(2, &huge)?;
    let devices = [device(0)?, device(0)?];
    let ranks = HostRank::threads(&devices)?;
    thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(move || {
                let found = step(Arena::open(&rank, ArenaOptions { share_devices: false, ..options() }));
                assert_eq!(found, (1, Step::Agree), "both are on device 0");
            });
        }
    });
    let error = Arena::open(&HostRank::threads(&devices[..1])?.remove(0), ArenaOptions { backend: BackendName::Emulated, ..options() })
        .expect_err("there are GPUs");
    assert!(matches!(&error, Error::Symmetric(SymmetricError::Unavailable { .. })), "{error}");
    Ok(())
}
