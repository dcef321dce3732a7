//! Messages by kernels that wait for flags of other GPUs. Ranks are processes: what one does in the driver must not wait for another's
//! kernel.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use oxtile::comm::HostRank;
use oxtile::comm::bootstrap::Environment;
use oxtile::symmetric::{Arena, ArenaOptions, Exchange, ExchangeOptions, SymmetricError};
use oxtile::{Buffer, Error, Result, Runtime};

use crate::gpu::{self, LIMIT, QUEUES, device, later, numbers, options};
use crate::{gpus, ranks};

pub fn trials() -> Vec<Trial> {
    let required = std::env::var("OXTILE_REQUIRE").is_ok_and(|required| required == "vmm");
    let found = Runtime::cuda().map(|runtime| runtime.device_count());
    // Kernels of processes that share a GPU take turns: a GPU each.
    let lacking = move |world| match &found {
        Ok(count) if *count >= world => None,
        Ok(count) => Some(format!("it needs a GPU a rank, {world}, there are {count}")),
        Err(reason) => Some(reason.to_string()),
    };
    let case = |name: &'static str, world: u32| {
        let lacking = lacking(world);
        let is_skipped = lacking.is_some() && !required;
        if let (true, Some(why)) = (is_skipped, &lacking) {
            eprintln!("vmm: exchange::{name}::{world} skipped: {why}");
        }
        let test = move || {
            lacking.map_or(Ok(()), |why| Err(Failed::from(why)))?;
            let _gpus = gpus();
            for (rank, child) in ranks::start(world, &format!("exchange:{name}"), &[QUEUES]).into_iter().enumerate() {
                let (code, said) = ranks::end(child, LIMIT);
                if code != Some(0) {
                    return Err(Failed::from(format!("rank {rank} ended with {code:?} and said {said:?}")));
                }
            }
            Ok(())
        };
        Trial::test(format!("exchange::{name}::{world}"), test).with_ignored_flag(is_skipped)
    };
    vec![case("program", 1), case("program", 2), case("program", 4), case("silence", 2)]
}

/// A program of a test.
pub fn child(case: &str) -> ExitCode {
    gpu::run(|| {
        let environment = Environment::read()?;
        let rank = HostRank::connect(&environment, &device(environment.local_rank)?, Duration::from_secs(10))?;
        match case {
            "program" => program(rank),
            "silence" => silence(rank),
            _ => panic!("{case}"),
        }
    })
}

/// Gathers and all-to-alls of many lengths, on the same flags, checked word by word.
fn program(rank: HostRank) -> Result<()> {
    let (me, world, stream) = (rank.rank(), rank.world(), rank.device().stream()?);
    let arena = Arena::open(&rank, options())?;
    let mut exchange = Exchange::new(&arena, &stream, ExchangeOptions { lanes: 4, slot_bytes: 1 << 10, ..ExchangeOptions::default() })?;
    for (round, len) in (0..).zip([1, 256, 1000, 0, 1024, 10_000, 16_384, 3]) {
        let mut shard = Buffer::<u32>::zeros(&stream, len.into())?;
        later(&mut shard, &stream, &numbers(me, round, len))?;
        let mut whole = Buffer::<u32>::zeros(&stream, u64::from(len * world.get()))?;
        exchange.all_gather(&stream, &shard, &mut whole)?;
        let expected: Vec<_> = world.ranks().flat_map(|from| numbers(from, round, len)).collect();
        exchange.check(&stream)?;
        assert_eq!(whole.to_vec(&stream)?, expected, "{me}, round {round}: gathered");

        // Part `p` of what a rank sends is told from its other parts by the first words' round.
        let part = |from, to: u32| numbers(from, 16 * round + to, len);
        let mut input = Buffer::<u32>::zeros(&stream, u64::from(len * world.get()))?;
        later(&mut input, &stream, &world.ranks().flat_map(|to| part(me, to.index())).collect::<Vec<_>>())?;
        exchange.all_to_all(&stream, &input, &mut whole)?;
        exchange.check(&stream)?;
        let expected: Vec<_> = world.ranks().flat_map(|from| part(from, me.index())).collect();
        assert_eq!(whole.to_vec(&stream)?, expected, "{me}, round {round}: all to all");
    }
    // Many in a row, without the host between them.
    let shard = Buffer::from_slice(&stream, &numbers(me, 0, 2048))?;
    let mut whole = Buffer::<u32>::zeros(&stream, 2048 * u64::from(world.get()))?;
    for _ in 0..200 {
        exchange.all_gather(&stream, &shard, &mut whole)?;
    }
    exchange.check(&stream)?;
    let expected: Vec<_> = world.ranks().flat_map(|from| numbers(from, 0, 2048)).collect();
    assert_eq!(whole.to_vec(&stream)?, expected, "{me}: the last of many");
    drop(exchange);
    arena.close()?.finish()?;
    rank.close()
}

/// Rank 1 does not launch: rank 0's kernel ends, names it, and reads nothing of it.
fn silence(rank: HostRank) -> Result<()> {
    let (me, stream, deadline) = (rank.rank(), rank.device().stream()?, Duration::from_secs(3));
    let arena = Arena::open(&rank, ArenaOptions { deadline, ..options() })?;
    let mut exchange = Exchange::new(&arena, &stream, ExchangeOptions { compare_calls: false, ..ExchangeOptions::default() })?;
    // Once with all: what follows is not the loading of the kernel.
    let (shard, mut whole) = (Buffer::from_slice(&stream, &[7_u32; 4])?, Buffer::from_slice(&stream, &[9_u32; 8])?);
    exchange.all_gather(&stream, &shard, &mut whole)?;
    exchange.check(&stream)?;
    assert_eq!(whole.to_vec(&stream)?, [7; 8]);
    if me.index() == 0 {
        whole.copy_from_slice(&stream, &[9_u32; 8])?;
        let start = Instant::now();
        exchange.all_gather(&stream, &shard, &mut whole)?;
        let error = exchange.check(&stream).expect_err("no rank answers");
        assert!((deadline..LIMIT / 2).contains(&start.elapsed()), "{:?}", start.elapsed());
        let Error::Symmetric(SymmetricError::Deadline { missing, .. }) = &error else { panic!("{error}") };
        assert_eq!(missing[0].index(), 1, "{error}");
        assert_eq!(whole.to_vec(&stream)?, [7, 7, 7, 7, 9, 9, 9, 9]);
        assert!(exchange.all_gather(&stream, &shard, &mut whole).is_err(), "the arena has ended");
    } else {
        // Until rank 0 has ended the arena for all; how long that takes is rank 0's to say.
        let start = Instant::now();
        while exchange.check(&stream).is_ok() {
            assert!(start.elapsed() < LIMIT / 2, "rank 0 did not end the arena");
        }
    }
    Ok(())
}
