//! Arenas in memory of NCCL: the programs of `vmm`, a GPU a rank, and what the arena's communicator does on it. And communicators of processes that come
//! together by the launcher's variables, of which one is killed.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use oxtile::comm::bootstrap::Environment;
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, NcclOptions, Rank, ReduceOp};
use oxtile::symmetric::{Arena, Epoch, SymmetricError};
use oxtile::{Buffer, Error, Result, Runtime};

use crate::faults::strike;
use crate::gpu::{self, BACKEND, QUEUES, device, later, numbers, options, process, threads};
use crate::watch::doing;
use crate::{all_gpus, gathered_layouts, ranks};

/// Of a communicator of processes: NCCL takes some seconds to join.
const DEADLINE: Duration = Duration::from_secs(8);

/// NCCL takes no two ranks of one GPU. Multicast stays off, here as everywhere.
pub fn trials() -> Vec<Trial> {
    let found = || -> Result<u32> {
        NcclCommunicator::version()?;
        Ok(Runtime::cuda()?.device_count())
    };
    let missing = match found() {
        Ok(count) if count >= 2 => None,
        Ok(_) => Some("there is one GPU: two ranks need two".to_owned()),
        Err(error) => Some(error.to_string()),
    };
    let required = std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "nccl");
    let missing = missing.filter(|_| !required);
    let case = |name: &'static str, world: u32| {
        let test = move || {
            let variables = [QUEUES, (BACKEND, "nccl"), ("NCCL_NVLS_ENABLE", "0")];
            let _alone = all_gpus();
            for (rank, child) in ranks::start(world, &format!("nccl:{name}"), &variables).into_iter().enumerate() {
                let (code, said) = ranks::end(child, gpu::limit_of(name));
                let is_killed = name.starts_with("killed") && rank == 1;
                if code != Some(0) && !is_killed {
                    return Err(Failed::from(format!("rank {rank} ended with {code:?} and said {said:?}")));
                }
            }
            Ok(())
        };
        Trial::test(format!("nccl::{name}::{world}"), test).with_ignored_flag(missing.is_some())
    };
    let trials =
        vec![case("threads-2", 1), case("process", 2), case("silence", 1), case("collectives", 1), case("gathered", 2), case("context", 2)];
    let connected = ["connected", "connected-unheard", "killed", "killed-unheard"].map(|name| case(name, 2));
    let trials: Vec<_> = trials.into_iter().chain(connected).collect();
    if let Some(reason) = &missing {
        eprintln!("symmetric memory of NCCL: {} tests skipped: {reason}", trials.len());
    }
    trials
}

/// A program of a test.
pub fn child(case: &str) -> ExitCode {
    match case {
        "collectives" => gpu::run(|| threads(2, &collectives)),
        "gathered" => gpu::run(|| process(&|rank| gathered_layouts::beside_collectives(rank, options()))),
        "connected" | "connected-unheard" | "killed" | "killed-unheard" => {
            gpu::run(|| connected(!case.ends_with("unheard"), case.starts_with("killed")))
        }
        _ => gpu::child(case),
    }
}

/// Two processes that are told their ranks by variables alone, with and without a comparison of what they call. The second may be killed: the
/// first has a typed error in time, which names it where calls are compared.
fn connected(compare_calls: bool, is_killed: bool) -> Result<()> {
    let environment = Environment::read()?;
    let (me, device) = (environment.rank, device(environment.local_rank)?);
    doing(me, "connecting");
    let comm = NcclCommunicator::connect(&environment, &device, &NcclOptions { deadline: DEADLINE, compare_calls })?;
    assert_eq!((comm.rank(), comm.world()), (me, environment.world));
    let stream = device.stream()?;
    let mut sum = Buffer::from_slice(&stream, &[me.index() + 1; 1000])?;
    doing(me, "in collectives");
    comm.all_reduce(&stream, &mut sum, ReduceOp::Sum)?;
    let turned = comm.split(Some(0), 1 - me.index())?.expect("a part");
    assert_eq!(turned.rank().index(), 1 - me.index());
    turned.barrier(&stream)?;
    turned.synchronize(&stream)?;
    comm.synchronize(&stream)?;
    assert_eq!(sum.to_vec(&stream)?, [3; 1000]);
    drop(turned);
    if !is_killed {
        comm.barrier(&stream)?;
        return comm.synchronize(&stream);
    }
    if me != Rank::ZERO {
        return strike("kill");
    }
    doing(me, "in a collective without the other");
    let begin = Instant::now();
    let error = comm.all_reduce(&stream, &mut sum, ReduceOp::Sum).and_then(|()| comm.synchronize(&stream)).expect_err("it is gone");
    let is_typed = matches!(&error, Error::Deadline { .. } | Error::Nccl { .. } | Error::Symmetric(SymmetricError::Aborted { .. }));
    assert!(is_typed && (!compare_calls || error.to_string().contains("rank 1")), "{error}");
    assert!(begin.elapsed() <= DEADLINE + Duration::from_secs(1), "after {:?}: {error}", begin.elapsed());
    doing(me, "dropping its communicator");
    Ok(())
}

/// Collectives on buffers of the arena, in turn with puts into them: the arena's own communicator knows its memory.
fn collectives(rank: HostRank) -> Result<()> {
    const LEN: u32 = 1 << 16;
    let (me, world, stream) = (rank.rank(), rank.world(), rank.device().stream()?);
    let arena = Arena::open(&rank, options())?;
    let communicator = arena.communicator().expect("memory of NCCL has a communicator");
    assert_eq!((communicator.rank(), communicator.world()), (me, world));
    let (shard, mut whole) = (arena.buffer::<u32>(LEN.into())?, arena.buffer::<u32>(u64::from(LEN * world.get()))?);
    let (put, read) = (arena.channel()?, arena.channel()?);
    let other = Rank::new(1 - me.index(), world).expect("of two");
    for round in 0..3 {
        // The peer's shard comes by a put, and goes back to all by a gather.
        let epoch = Epoch::ZERO.later(u64::from(round) + 1);
        arena.wait(&stream, read, other, Epoch::ZERO.later(round.into()))?;
        let mut numbers_of_me = Buffer::<u32>::zeros(&stream, LEN.into())?;
        later(&mut numbers_of_me, &stream, &numbers(me, round, LEN))?;
        shard.peer(other)?.put(&stream, &numbers_of_me, 0..LEN.into(), 0)?;
        arena.signal(&stream, put, other, epoch)?;
        arena.wait(&stream, put, other, epoch)?;
        communicator.all_gather(&stream, shard.local(), whole.local_mut())?;
        arena.signal(&stream, read, other, epoch)?;
        communicator.synchronize(&stream)?;
        // In the order of ranks, each shard the other's.
        let expected: Vec<_> =
            world.ranks().map(|rank| if rank == me { other } else { me }).flat_map(|from| numbers(from, round, LEN)).collect();
        assert_eq!(whole.local().to_vec(&stream)?, expected, "{me}, round {round}");
    }
    drop((communicator, shard, whole));
    arena.close()?.finish()?;
    rank.close()
}
