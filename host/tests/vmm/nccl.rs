//! Arenas in memory of NCCL: the programs of `vmm`, a GPU a rank, and what the arena's communicator does on it.

use std::process::ExitCode;

use libtest_mimic::{Failed, Trial};
use oxtile::comm::{Communicator, HostRank, NcclCommunicator, Rank};
use oxtile::symmetric::{Arena, Epoch};
use oxtile::{Buffer, Result, Runtime};

use crate::gpu::{self, BACKEND, LIMIT, QUEUES, later, numbers, options, threads};
use crate::{all_gpus, ranks};

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
                let (code, said) = ranks::end(child, LIMIT);
                if code != Some(0) {
                    return Err(Failed::from(format!("rank {rank} ended with {code:?} and said {said:?}")));
                }
            }
            Ok(())
        };
        Trial::test(format!("nccl::{name}::{world}"), test).with_ignored_flag(missing.is_some())
    };
    let trials = vec![case("threads-2", 1), case("process", 2), case("silence", 1), case("collectives", 1)];
    if let Some(reason) = &missing {
        eprintln!("symmetric memory of NCCL: {} tests skipped: {reason}", trials.len());
    }
    trials
}

/// A program of a test.
pub fn child(case: &str) -> ExitCode {
    match case {
        "collectives" => gpu::run(|| threads(2, &collectives)),
        _ => gpu::child(case),
    }
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
