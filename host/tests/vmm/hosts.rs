//! Ranks of two hosts that are one machine: NCCL takes processes with different `NCCL_HOSTID`s for those of different hosts, and goes through
//! sockets between them (NCCL user guide, "Environment Variables"). What it says of its channels shows that it did.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use oxtile::comm::bootstrap::{Environment, Store};
use oxtile::comm::{Communicator, NcclCommunicator, NcclOptions, Rank, ReduceOp, UniqueId};
use oxtile::{Buffer, Result, Runtime};

use crate::gpu::{LIMIT, device};
use crate::watch::doing;
use crate::{all_gpus, ranks};

const LEN: u32 = 1 << 20;

pub fn trials() -> Vec<Trial> {
    let count = Runtime::cuda().map_or(0, |runtime| runtime.device_count());
    let has_nccl = NcclCommunicator::version().is_ok();
    let required = std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "vmm");
    let trial = |world| {
        let lacking = (!has_nccl || count < world).then(|| format!("it needs NCCL and {world} GPUs, there are {count}"));
        let is_skipped = lacking.is_some() && !required;
        if let (true, Some(why)) = (is_skipped, &lacking) {
            eprintln!("vmm: gpu::hosts::{world} skipped: {why}");
        }
        let test = move || lacking.map_or_else(|| two_hosts(world), |why| Err(why.into()));
        Trial::test(format!("gpu::hosts::{world}"), test).with_ignored_flag(is_skipped)
    };
    [2, 4].map(trial).into()
}

/// Where a rank's NCCL says what it does.
fn log_of(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("nccl.{rank}.txt"))
}

fn two_hosts(world: u32) -> std::result::Result<(), Failed> {
    let _alone = all_gpus();
    let folder = tempfile::tempdir()?;
    let of_rank = |rank: u32| {
        let host = if rank < world / 2 { "first" } else { "second" };
        let log = log_of(folder.path(), rank).display().to_string();
        let fixed = [("NCCL_NET", "Socket"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_DEBUG", "INFO")];
        let own = [("NCCL_HOSTID", host.to_owned()), ("NCCL_DEBUG_FILE", log)];
        fixed.map(|(name, value)| (name, value.to_owned())).into_iter().chain(own).collect()
    };
    let ends: Vec<_> = ranks::start_each(world, "gpu:hosts", of_rank).into_iter().map(|child| ranks::end(child, LIMIT)).collect();
    if ends.iter().any(|(code, _)| *code != Some(0)) {
        return Err(format!("{ends:?}").into());
    }
    // The last rank of the first host and the first of the second are neighbours in every ring.
    let logs: Vec<_> = (0..world).map(|rank| fs::read_to_string(log_of(folder.path(), rank)).unwrap_or_default()).collect();
    if logs.iter().any(|log| log.contains("via NET/Socket")) {
        return Ok(());
    }
    let lines: Vec<_> = logs.iter().flat_map(|log| log.lines().filter(|line| line.contains(" via ")).take(4)).collect();
    Err(format!("no channel went through sockets: {lines:?}").into())
}

/// One rank: every kind of collective once.
pub fn rank() -> Result<()> {
    let environment = Environment::read()?;
    let mut store = Store::connect(&environment, Duration::from_secs(20))?;
    let (me, world) = (store.rank(), store.world());
    let id = if me == Rank::ZERO { NcclCommunicator::unique_id()?.as_bytes().to_vec() } else { Vec::new() };
    let id = store.broadcast(Rank::ZERO, &id)?.try_into().expect("as many bytes as were sent");
    doing(me, "joining");
    let device = device(environment.local_rank)?;
    let comm = NcclCommunicator::join(
        &device,
        UniqueId::from_bytes(id),
        me,
        world,
        &NcclOptions { deadline: Duration::from_secs(20), ..NcclOptions::default() },
    )?;
    let stream = device.stream()?;
    let numbers = |rank: Rank| (0..LEN).map(|i| rank.index() << 24 | i).collect::<Vec<u32>>();
    let own = Buffer::from_slice(&stream, &numbers(me))?;
    let mut whole = Buffer::zeros(&stream, u64::from(LEN * world.get()))?;
    let mut sum = Buffer::from_slice(&stream, &numbers(me))?;
    let mut part = Buffer::zeros(&stream, u64::from(LEN / world.get()))?;
    let mut received = Buffer::zeros(&stream, LEN.into())?;
    let shifted = |by: u32| Rank::new((me.index() + by) % world.get(), world).expect("of this world");
    let (next, last) = (shifted(1), shifted(world.get() - 1));
    doing(me, "in collectives");
    comm.all_gather(&stream, &own, &mut whole)?;
    comm.all_reduce(&stream, &mut sum, ReduceOp::Sum)?;
    comm.reduce_scatter(&stream, &own, &mut part, ReduceOp::Sum)?;
    comm.exchange(&stream, &[(next, own.view())], &[(last, received.view_mut())])?;
    comm.synchronize(&stream)?;
    let sums: Vec<u32> = (0..LEN).map(|i| world.ranks().map(|rank| rank.index() << 24 | i).fold(0, u32::wrapping_add)).collect();
    assert_eq!(whole.to_vec(&stream)?, world.ranks().flat_map(numbers).collect::<Vec<_>>(), "{me}: gathered");
    assert_eq!(sum.to_vec(&stream)?, sums, "{me}: reduced");
    let begin = (LEN / world.get() * me.index()) as usize;
    assert_eq!(part.to_vec(&stream)?, sums[begin..begin + part.len() as usize], "{me}: scattered");
    assert_eq!(received.to_vec(&stream)?, numbers(last), "{me}: received");
    Ok(store.close()?)
}
