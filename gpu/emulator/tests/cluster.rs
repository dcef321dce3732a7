//! Clusters: blocks that start together and reach each other's shared memory.

mod common;
use common::*;
use oxtile_emulator::tensor_map::{self, Swizzle, TensorMap};
use oxtile_emulator::{FaultKind, GridRun, Memory, Options, device};

/// What a kernel does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Bug {
    None,
    NoFirstSync,
    NoLastSync,
    ReleaseOwnAlone,
    NoEmptyWait,
    NoSuchRank,
    OverMbarrier,
}

const BOX: u32 = 32;
const BYTES: u32 = BOX * 4;
const ROUNDS: u32 = 5;
/// Two boxes of one stage, then the two mbarriers.
const FULL: u32 = 2 * BYTES;
const EMPTY: u32 = FULL + 8;
const SHARED: u32 = EMPTY + 8;

/// In each round either block of a cluster loads one box into both; a warp of each adds the two up.
fn share(arguments: &[u64], bug: Bug) {
    let rank = device::cluster_rank();
    let cluster = device::block_index()[0] / 2;
    if thread() == 0 {
        device::mbarrier_init(FULL, 1);
        // A warp of either block releases the stage.
        device::mbarrier_init(EMPTY, if bug == Bug::ReleaseOwnAlone { 1 } else { 2 });
        if bug == Bug::OverMbarrier && rank == 1 {
            device::mbarrier_init(0, 1);
        }
        device::fence_mbarrier_init();
    }
    if bug == Bug::NoFirstSync {
        device::barrier_sync(0, 64);
    } else {
        device::cluster_sync();
    }
    for round in 0..ROUNDS {
        let parity = round % 2;
        let number = cluster * ROUNDS + round;
        if thread() == 0 {
            if bug != Bug::NoEmptyWait {
                device::mbarrier_wait_parity(EMPTY, parity ^ 1);
            }
            device::mbarrier_arrive_expect_transaction(FULL, 2 * BYTES);
            let x = ((2 * number + rank) * BOX) as i32;
            device::tensor_load_multicast(rank * BYTES, arguments[2], [x], FULL, if bug == Bug::NoSuchRank { 0b100 } else { 0b11 });
        } else if thread() >= 32 {
            device::mbarrier_wait_parity(FULL, parity);
            let lane = thread() - 32;
            let sum = shared_load(lane * 4) + shared_load(BYTES + lane * 4);
            device::warp_sync(!0);
            match lane {
                0 | 1 if bug != Bug::ReleaseOwnAlone => device::mbarrier_arrive_remote(EMPTY, lane),
                0 => device::mbarrier_arrive(EMPTY),
                _ => {}
            }
            store(arguments[1] + u64::from((2 * number + rank) * BOX + lane) * 4, sum);
        }
    }
    if bug != Bug::NoLastSync {
        device::cluster_sync();
    }
}

/// Two clusters; the third argument is a map of the input, in boxes of 32 words.
fn job(bug: fn(&[u64])) -> Job {
    let words = 4 * ROUNDS * BOX;
    let mut job = Job::new("share", 4, 64, words, SHARED, bug);
    let map = TensorMap {
        address: job.input,
        element_bytes: 4,
        dimensions: vec![words.into()],
        strides: vec![],
        box_dimensions: vec![BOX],
        swizzle: Swizzle::None,
    };
    let encoded = job.memory.allocate("map", 128, 0);
    job.memory.write(encoded, &tensor_map::encode(&map).unwrap()).unwrap();
    job.launch = job.launch.arguments(&[job.input, job.output, encoded]).cluster(2);
    job
}

macro_rules! share {
    ($bug:expr) => {
        || job(|arguments| share(arguments, $bug))
    };
}

#[test]
fn blocks_fill_each_others_memory() {
    silent(share!(Bug::None), |output| {
        for (i, &word) in (0..).zip(output) {
            let (number, lane) = (i / (2 * BOX), i % BOX);
            assert_eq!(word, (2 * number * BOX + lane) * 2 + BOX, "word {i}");
        }
    });
}

#[test]
fn mbarriers_of_other_blocks_are_ready_before_they_are_used() {
    // Whether the other block's mbarrier is not there yet or not known to be there is a matter of the seed.
    let kinds = [FaultKind::MbarrierMisuse, FaultKind::Race, FaultKind::MissingProxyFence];
    for seed in SEEDS {
        let fault = share!(Bug::NoFirstSync)().run(Options::check(seed)).expect_err("used before the cluster met");
        assert!(kinds.contains(&fault.kind), "seed {seed}: {fault}");
    }
}

#[test]
fn a_copy_does_not_overwrite_an_mbarrier_of_another_block() {
    let fault = reported(share!(Bug::OverMbarrier), FaultKind::MbarrierMisuse);
    assert!(fault.message.starts_with("an asynchronous copy of 128 bytes"), "{fault}");
}

#[test]
fn a_stage_is_free_when_both_blocks_say_so() {
    // A producer that does not wait runs ahead of its own full barrier.
    reported(share!(Bug::NoEmptyWait), FaultKind::MbarrierMisuse);
    let kinds = [FaultKind::MbarrierMisuse, FaultKind::Race];
    let faults: Vec<_> = SEEDS.filter_map(|seed| share!(Bug::ReleaseOwnAlone)().run(Options::check(seed)).err()).collect();
    assert!(faults.iter().any(|fault| fault.kind == FaultKind::Race), "no race among {faults:?}");
    assert!(faults.iter().all(|fault| kinds.contains(&fault.kind)), "{faults:?}");
}

#[test]
fn no_block_ends_while_others_may_reach_it() {
    let found = SEEDS.filter_map(|seed| share!(Bug::NoLastSync)().run(Options::check(seed)).err()).next();
    let fault = found.expect("a seed lets one block end early");
    assert_eq!(fault.kind, FaultKind::ClusterMisuse, "{fault}");
    assert!(fault.message.contains("has ended"), "{fault}");
    reported(share!(Bug::NoSuchRank), FaultKind::ClusterMisuse);
}

#[test]
fn a_grid_is_whole_clusters() {
    let memory = Memory::new();
    let launch = oxtile_emulator::Launch::new("odd", 3, 32, |_| {}).cluster(2);
    let fault = GridRun::new(&memory, launch, Options::fast()).err().expect("three blocks are no clusters of two");
    assert_eq!(fault.kind, FaultKind::Launch);
    assert!(fault.message.contains("cluster"), "{fault}");
}

/// What a kernel does wrong that writes to the memory of other blocks.
#[derive(Clone, Copy, PartialEq)]
enum WriteBug {
    None,
    NoSyncBefore,
    NoSyncAfter,
    UsedBefore,
    NoSuchRank,
    Unwritten,
}

/// Each block of a cluster of three writes a word a thread to all of them; each then adds up what it got, after a barrier.
fn write(arguments: &[u64], bug: WriteBug) {
    let (rank, block) = (device::cluster_rank(), device::block_index()[0]);
    let place = |rank: u32| (32 * rank + thread()) * 4;
    if bug == WriteBug::UsedBefore {
        shared_store(place((rank + 1) % 3), 0);
    }
    if bug == WriteBug::NoSyncBefore {
        device::barrier_sync(0, 32);
    } else if bug != WriteBug::UsedBefore {
        device::cluster_sync();
    }
    let ranks = if bug == WriteBug::NoSuchRank { 4 } else { 3 };
    for to in (0..ranks).filter(|to| bug != WriteBug::Unwritten || (rank, *to) != (1, 0)) {
        device::cluster_write(place(rank), to, (100 * block + thread()).to_le_bytes());
    }
    if bug == WriteBug::NoSyncAfter {
        device::barrier_sync(0, 32);
    } else {
        device::cluster_sync();
    }
    let sum = (0..3).map(|rank| shared_load(place(rank))).sum::<u32>();
    store(arguments[1] + u64::from(block * 32 + thread()) * 4, sum);
}

macro_rules! write {
    ($bug:expr) => {
        || {
            let mut job = Job::new("write", 6, 32, 6 * 32, 3 * 128, |arguments| write(arguments, $bug));
            job.launch = job.launch.cluster(3);
            job
        }
    };
}

#[test]
fn blocks_write_to_each_others_memory() {
    silent(write!(WriteBug::None), |output| {
        for (i, &word) in (0..).zip(output) {
            let first = i / 32 / 3 * 3;
            assert_eq!(word, (0..3).map(|rank| 100 * (first + rank) + i % 32).sum(), "word {i}");
        }
    });
}

#[test]
fn what_blocks_write_to_others_meets_no_other_use() {
    let found = |bug: fn() -> Job, kinds: &[FaultKind]| {
        let faults: Vec<_> = SEEDS.filter_map(|seed| bug().run(Options::check(seed)).err()).collect();
        assert!(!faults.is_empty() && faults.iter().all(|fault| kinds.contains(&fault.kind)), "{faults:?}");
    };
    // Without the barrier after them, writes are late, or their blocks are gone.
    found(write!(WriteBug::NoSyncAfter), &[FaultKind::Race, FaultKind::Uninitialised, FaultKind::ClusterMisuse]);
    reported(write!(WriteBug::UsedBefore), FaultKind::Race);
    reported(write!(WriteBug::NoSuchRank), FaultKind::ClusterMisuse);
    reported(write!(WriteBug::Unwritten), FaultKind::Uninitialised);
    // All memory is written by others alone: there is nothing to meet before.
    silent(write!(WriteBug::NoSyncBefore), |_| ());
}
