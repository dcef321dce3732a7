//! Ranks that are threads of one process: handles are passed on, no descriptors.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use oxtile::comm::bootstrap::{self, BootstrapError, StoreBoard};
use oxtile::comm::{ArenaRank, HostRank, Rank, Team, WorldSize};
use oxtile::symmetric::vmm::{Driver, FlatOptions, Memfd};
use oxtile::symmetric::{Arena, ArenaOptions, BackendName, ChunkedGather, GatherMemory, PullGather, Step, SymmetricError};
use oxtile::{Error, Result, Runtime};

use crate::context::{self, By};
use crate::program::{DEADLINE, Fault, Faulty, device, options, refused, resources, resources_after, write_and_read};
use crate::thread_deaths::{self, in_a_process};
use crate::{gpu, soak, trial};

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> =
        [1, 2, 4].map(|world| trial(format!("threads::write_and_read::{world}"), move || all_goes_well(world))).into();
    for (call, step) in [("create", Step::Create), ("reserve", Step::Reserve), ("map", Step::Map), ("access", Step::Map)] {
        trials.push(trial(format!("threads::{call}::error"), move || an_error_of_one_is_an_error_of_all(call, step)));
    }
    for phase in ["rendezvous", "create", "map"] {
        for victim in 0..3 {
            for kind in ["panic", "stop"] {
                trials.push(trial(format!("threads::{phase}::{kind}::rank{victim}"), move || in_a_process(phase, kind, victim)));
            }
        }
    }
    trials.push(trial("threads::arenas_of_host_ranks", arenas_of_host_ranks));
    trials.push(trial("threads::back_ends_by_name", back_ends_by_name));
    for world in [1, 2, 3] {
        trials.push(trial(format!("threads::program_of_gpus_on_virtual_ones::{world}"), move || program_of_gpus(world)));
    }
    for (name, world, by) in [("context", 2, By::Memory), ("context", 3, By::Memory), ("context_by_messages", 2, By::Messages)] {
        trials.push(trial(format!("threads::{name}_on_virtual_gpus::{world}"), move || context_on_virtual_gpus(world, by)));
    }
    for world in [2, 3] {
        trials.push(trial(format!("threads::soak_on_virtual_gpus::{world}"), move || soak::on_virtual_gpus(world)));
    }
    trials
}

/// Runs a rank a thread.
pub fn run<R: Send>(world: u32, body: impl Fn(&Arc<StoreBoard>) -> R + Sync) -> Vec<thread::Result<R>> {
    let stores = bootstrap::threads(WorldSize::new(world).expect("not zero"), Duration::from_secs(10)).expect("a rendezvous");
    let body = &body;
    thread::scope(|scope| {
        let start = |store: bootstrap::Store| scope.spawn(move || body(&Arc::new(store.into_board().expect("a board"))));
        let threads: Vec<_> = stores.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

fn all_goes_well(world: u32) {
    let exports = AtomicU32::new(0);
    let exports: &'static AtomicU32 = Box::leak(Box::new(exports));
    let ended = run(world, |board| {
        let count = move || {
            exports.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let driver: Arc<dyn Driver> = Arc::new(Faulty::new(device(board.rank()), "export", Box::new(count)));
        // No deadline is too long.
        write_and_read(driver, board, "arena", FlatOptions { deadline: Duration::MAX, ..options() })?;
        board.close()
    });
    ended.into_iter().for_each(|rank| rank.expect("no panic").expect("no error"));
    assert_eq!(exports.load(Ordering::Relaxed), 0, "within a process nothing is exported");
}

fn an_error_of_one_is_an_error_of_all(call: &str, expected: Step) {
    let ended = run(3, |board| {
        let fault = if board.rank().index() == 1 { call } else { "" };
        let driver: Arc<dyn Driver> = Arc::new(Faulty::new(device(board.rank()), fault, Box::new(|| Err(refused()))));
        let result = write_and_read(driver, board, "first", options());
        let driver: Arc<dyn Driver> = Arc::new(Memfd::new(device(board.rank())));
        write_and_read(driver, board, "second", options()).expect("another can be opened");
        board.close().expect("all are there");
        result
    });
    for result in ended {
        let error = result.expect("no panic").expect_err("the fault struck");
        let Error::Symmetric(SymmetricError::Step { rank, step, why }) = &error else { panic!("{error}") };
        assert_eq!((rank.index(), *step), (1, expected), "{why}");
        assert!(why.contains("told to refuse"), "{why}");
    }
}

/// A process of a test of one thread that is lost; it leaves nothing behind.
pub fn child(case: &str) -> ExitCode {
    let parts: Vec<_> = case.split(':').collect();
    let [phase, kind, victim] = parts[..] else { panic!("{case}") };
    let victim = victim.parse().expect("a number");
    let stops = kind == "stop";
    match phase {
        "rendezvous" | "create" | "map" => gpu::run(|| {
            all_goes_well(3);
            let before = resources();
            if phase == "rendezvous" {
                a_thread_that_does_not_come(victim, stops);
            } else {
                a_thread_that_is_missing(phase, victim, stops);
            }
            let after = resources_after(before);
            assert_eq!(after, before, "descriptors, threads and mapped files");
            all_goes_well(2);
            Ok(())
        }),
        _ => thread_deaths::child(phase, kind, victim),
    }
}

/// A thread that ends, or stops, before it has come to where all ranks make their board.
fn a_thread_that_does_not_come(victim: u32, stops: bool) {
    let stores = bootstrap::threads(WorldSize::new(3).expect("not zero"), DEADLINE).expect("a rendezvous");
    let (let_go, held) = mpsc::channel::<()>();
    let (mut held, start) = (Some(held), Instant::now());
    let of_rank = |store: bootstrap::Store| -> Option<(BootstrapError, Duration)> {
        Some((store.into_board().map(drop).expect_err("a rank is missing"), start.elapsed()))
    };
    let of_victim = |store: bootstrap::Store, held: Option<mpsc::Receiver<()>>| {
        if stops {
            _ = held.expect("one victim").recv();
        }
        drop(store);
        None
    };
    let ended: Vec<_> = thread::scope(|scope| {
        let start = |store: bootstrap::Store| {
            let held = if store.rank().index() == victim { held.take() } else { None };
            scope.spawn(move || if store.rank().index() == victim { of_victim(store, held) } else { of_rank(store) })
        };
        let mut threads: Vec<_> = stores.into_iter().map(start).collect();
        let last = threads.remove(victim as usize);
        let others: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        drop(let_go);
        last.join().expect("no panic");
        others
    });
    for (error, took) in ended.into_iter().map(|ended| ended.expect("not the victim")) {
        let named = match &error {
            BootstrapError::Lost { rank, .. } if !stops => vec![rank.index()],
            BootstrapError::Deadline { missing, .. } if stops => missing.iter().map(|rank| rank.index()).collect(),
            other => panic!("{other}"),
        };
        assert_eq!(named, [victim], "{error}");
        assert!(took <= DEADLINE + Duration::from_secs(1), "after {took:?}: {error}");
    }
}

/// A thread that panics, or stops until the others are through: they return an error that names it, within the deadline and a second, and at once
/// where it is gone.
fn a_thread_that_is_missing(call: &str, victim: u32, stops: bool) {
    let (let_go, held) = mpsc::channel::<()>();
    let (held, through) = (Mutex::new(Some(held)), AtomicU32::new(0));
    let (let_go, start) = (Mutex::new(Some(let_go)), Instant::now());
    let ended = run(3, |board| {
        let is_victim = board.rank().index() == victim;
        let held = if is_victim { held.lock().unwrap().take().map(Mutex::new) } else { None };
        let fault: Fault = Box::new(move || {
            if stops && let Some(held) = &held {
                _ = held.lock().unwrap().recv();
            }
            std::panic::resume_unwind(Box::new("meant"))
        });
        let driver: Arc<dyn Driver> = Arc::new(Faulty::new(device(board.rank()), if is_victim { call } else { "" }, fault));
        let result = write_and_read(driver, board, "first", options());
        let took = start.elapsed();
        if through.fetch_add(1, Ordering::AcqRel) == 1 {
            drop(let_go.lock().unwrap().take());
        }
        (result, took)
    });
    for (rank, result) in (0..).zip(ended) {
        let Ok((result, took)) = result else {
            assert_eq!(rank, victim);
            continue;
        };
        let error = result.expect_err("a rank is missing");
        let named = match &error {
            Error::Symmetric(SymmetricError::Step { rank, .. }) => vec![rank.index()],
            // The first whose deadline is over tells the others.
            Error::Symmetric(SymmetricError::Missing { ranks, .. }) if stops => ranks.iter().map(|rank| rank.index()).collect(),
            other => panic!("rank {rank}: {other}"),
        };
        assert_eq!(named, [victim], "rank {rank}: {error}");
        let limit = if stops { DEADLINE + Duration::from_secs(1) } else { DEADLINE };
        assert!(took < limit, "rank {rank} after {took:?}: {error}");
    }
}

/// The arenas of a host's ranks, on virtual GPUs: the same program runs on `vmm`.
fn arenas_of_host_ranks() {
    let runtime = Runtime::emulated(3).unwrap();
    let devices: Vec<_> = (0..3).map(|index| runtime.device(index).unwrap()).collect();
    let ranks = HostRank::threads(&devices).unwrap();
    let program = |rank: HostRank| -> Result<Vec<u32>> {
        let (compute, copies) = (rank.device().stream()?, rank.device().stream()?);
        let arena = Arena::open(&rank, ArenaOptions::default())?;
        let memory = GatherMemory::<u32>::take(&arena, 2)?;
        let me = Team::all(rank.world()).member(rank.rank()).expect("of the world");
        let mut gather = PullGather::new(&arena, &me, memory, &copies, 2)?;
        gather.shard(&compute)?.copy_from_slice(&compute, &[rank.rank().index(), 7])?;
        let ready = gather.start()?;
        ready.wait()?;
        let all = ready.whole(&compute)?.to_vec(&compute)?;
        drop((gather, ready));
        arena.close()?.finish()?;
        rank.close()?;
        Ok(all)
    };
    let found: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| program(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
    });
    assert_eq!(found, vec![vec![0, 7, 1, 7, 2, 7]; 3]);
    assert!(HostRank::threads(&[]).is_err());
}

fn program_of_gpus(world: u32) {
    on_virtual_gpus(Runtime::emulated(world).unwrap(), gpu::program);
}

fn context_on_virtual_gpus(world: u32, by: By) {
    on_virtual_gpus(Runtime::emulated_fast(world).unwrap(), |rank, options| context::program(rank, options, by));
}

/// A program of GPUs, by a thread a rank.
fn on_virtual_gpus(runtime: Runtime, program: impl Fn(HostRank, ArenaOptions) -> Result<()> + Sync) {
    let devices: Vec<_> = (0..runtime.device_count()).map(|index| runtime.device(index).unwrap()).collect();
    let program = &program;
    thread::scope(|scope| {
        let rank = |rank| scope.spawn(move || program(rank, ArenaOptions { backend: BackendName::Emulated, ..gpu::options() }));
        let threads: Vec<_> = HostRank::threads(&devices).unwrap().into_iter().map(rank).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
}

fn back_ends_by_name() {
    let runtime = Runtime::emulated(1).unwrap();
    let device = runtime.device(0).unwrap();
    let ranks = HostRank::threads(&[device.clone(), device]).unwrap();
    assert_eq!(ArenaRank::device(&ranks[0]).index(), 0);
    let open = |rank: &HostRank, backend| {
        Arena::open(rank, ArenaOptions { backend, deadline: Duration::from_millis(200), ..ArenaOptions::default() })
    };
    for (name, why) in
        [(BackendName::Nvshmem, "virtual cluster"), (BackendName::Vmm, "virtual cluster"), (BackendName::Nccl, "virtual cluster")]
    {
        let error = open(&ranks[0], name).unwrap_err();
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Unavailable { backend, .. }) if *backend == name), "{error}");
        assert!(error.to_string().contains(why), "{error}");
        // The other rank, which opens what it can, learns that the first opened something else.
        let other = open(&ranks[1], BackendName::Emulated).unwrap();
        let error = other.buffer::<u8>(1).unwrap().peer(Rank::ZERO).unwrap_err();
        assert!(matches!(&error, Error::Symmetric(SymmetricError::Rendezvous { .. })), "{error}");
    }
}
