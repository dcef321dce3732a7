//! Grouped calls and parts of a world on the virtual cluster, and by a rank alone.

use std::thread;
use std::time::{Duration, Instant};

use oxtile::comm::{Communicator, EmulatedCommunicator, Rank, ReduceOp, SingleRank, Team, WorldSize};
use oxtile::symmetric::SymmetricError;
use oxtile::{Buffer, Error, Graph, Runtime};

use crate::schedules::{Case, Dtypes, Failed, Halves, Misuse, Rings, Teams, Together, TwoStreams};
use crate::support::{WORLDS, World, numbers};

/// A rank a thread, under a few seeds.
fn run(case: &impl Case) {
    for size in WORLDS {
        for seed in 0..6 {
            let world = World::new(size, seed);
            thread::scope(|scope| {
                let rank = |rank: &EmulatedCommunicator| {
                    let streams = [0, 1].map(|_| rank.device().stream().unwrap());
                    case.run(rank, [&streams[0], &streams[1]]).unwrap_or_else(|error| panic!("{size} ranks, seed {seed}: {error}"));
                };
                let threads: Vec<_> = world.ranks.iter().map(|comm| scope.spawn(move || rank(comm))).collect();
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
        }
    }
    let device = Runtime::emulated(1).unwrap().device(0).unwrap();
    let streams = [0, 1].map(|_| device.stream().unwrap());
    case.run(&SingleRank::new(&device), [&streams[0], &streams[1]]).unwrap();
}

#[test]
fn rings_in_a_group_do_not_wait_for_each_other() {
    run(&Rings);
}

#[test]
fn calls_of_every_kind_are_made_as_one() {
    run(&Together);
}

#[test]
fn a_group_holds_calls_on_several_streams() {
    run(&TwoStreams);
}

#[test]
fn parts_by_colour_and_key() {
    run(&Halves);
}

#[test]
fn parts_by_teams() {
    run(&Teams);
}

#[test]
fn what_does_not_belong_into_a_group() {
    run(&Misuse);
}

#[test]
fn a_body_that_fails() {
    run(&Failed);
}

#[test]
fn every_type_is_reduced() {
    run(&Dtypes);
}

/// One thread drives all ranks: groups do not wait, and a graph holds them.
#[test]
fn a_graph_holds_a_group() {
    for seed in 0..16 {
        let world = World::new(3, seed);
        let (mut theirs, mine) = (world.zeros(4), world.buffers(|rank| numbers(rank, 4)));
        let graphs: Vec<_> = (0..3)
            .map(|i| {
                let (comm, stream) = (&world.ranks[i], &world.streams[i]);
                let [to, from] = [1, 2].map(|by| world.rank((i as u32 + by) % 3));
                Graph::capture(&[stream], || {
                    comm.group(|| {
                        comm.send(stream, &mine[i], to)?;
                        comm.recv(stream, &mut theirs[i], from)
                    })
                })
                .unwrap()
            })
            .collect();
        for _ in 0..2 {
            graphs.iter().zip(&world.streams).for_each(|(graph, stream)| graph.replay(stream).unwrap());
        }
        assert_eq!(world.read(&theirs), [2, 0, 1].map(|from| numbers(from, 4)));
    }
}

/// A buffer that the body drops is there until the calls of the group are done.
#[test]
fn what_a_body_drops_is_kept_for_its_calls() {
    let world = World::new(2, 4);
    let mut theirs = world.zeros(4);
    for (i, theirs) in theirs.iter_mut().enumerate() {
        let (comm, stream, peer) = (&world.ranks[i], &world.streams[i], world.rank(1 - i as u32));
        comm.group(|| {
            comm.send(stream, &Buffer::from_slice(stream, &numbers(i as u32, 4))?, peer)?;
            comm.recv(stream, theirs, peer)
        })
        .unwrap();
    }
    assert_eq!(world.read(&theirs), [1, 0].map(|from| numbers(from, 4)));
}

/// A panic in a body does not leave its rank in a group.
#[test]
fn a_body_that_panics() {
    let world = World::new(1, 0);
    let (comm, stream) = (&world.ranks[0], &world.streams[0]);
    let mut sum = Buffer::from_slice(stream, &[5_u32]).unwrap();
    let body = || {
        comm.group(|| {
            comm.all_reduce(stream, &mut sum, ReduceOp::Sum)?;
            if comm.world() == WorldSize::ONE {
                std::panic::resume_unwind(Box::new("meant"));
            }
            Ok(())
        })
    };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err());
    comm.group(|| comm.all_reduce(stream, &mut sum, ReduceOp::Sum)).unwrap();
    assert_eq!(sum.to_vec(stream).unwrap(), [5]);
}

/// A rank alone copies at once, yet a stream of the group goes on when the copies of the others are done, whichever comes first.
#[test]
fn streams_of_a_group_wait_for_each_others_copies() {
    for (seed, copies_first) in (0..8).flat_map(|seed| [(seed, true), (seed, false)]) {
        let world = World::new(1, seed);
        let comm = SingleRank::new(world.ranks[0].device());
        let [copies, other] = [0, 1].map(|_| world.ranks[0].device().stream().unwrap());
        let shard = Buffer::from_slice(&copies, &numbers(0, 4)).unwrap();
        let mut whole = Buffer::<u32>::zeros(&copies, 4).unwrap();
        // SAFETY: the elements of a buffer that outlives its alias; that streams use both in order is what is tested.
        let alias = unsafe { Buffer::<u32>::borrow_raw(world.ranks[0].device(), whole.address(), 4) }.unwrap();
        let group = comm.group(|| {
            if !copies_first {
                comm.barrier(&other)?;
            }
            comm.all_gather(&copies, &shard, &mut whole)?;
            if copies_first { comm.barrier(&other) } else { Ok(()) }
        });
        group.unwrap();
        assert_eq!(alias.to_vec(&other).unwrap(), numbers(0, 4), "seed {seed}, copies first: {copies_first}");
    }
}

/// Another thread's group on the same rank alone leaves this one's messages to it.
#[test]
fn each_thread_delivers_the_messages_of_its_own_group() {
    let device = Runtime::emulated(1).unwrap().device(0).unwrap();
    let comm = SingleRank::new(&device);
    let message = |comm: &SingleRank, value: u32, meanwhile: &dyn Fn()| {
        let stream = device.stream().unwrap();
        let (mine, mut theirs) = (Buffer::from_slice(&stream, &[value]).unwrap(), Buffer::<u32>::zeros(&stream, 1).unwrap());
        let group = comm.group(|| {
            comm.send(&stream, &mine, Rank::ZERO)?;
            meanwhile();
            comm.recv(&stream, &mut theirs, Rank::ZERO)
        });
        group.unwrap();
        assert_eq!(theirs.to_vec(&stream).unwrap(), [value]);
    };
    let another = || thread::scope(|scope| scope.spawn(|| message(&comm.clone(), 7, &|| {})).join().unwrap());
    message(&comm, 5, &another);
}

/// Another thread's group on the same rank of a cluster does not enqueue what this one's body has called so far.
#[test]
fn each_thread_enqueues_the_calls_of_its_own_group() {
    let world = World::new(1, 0);
    let (comm, stream) = (&world.ranks[0], &world.streams[0]);
    let gather = |value: u32, meanwhile: &dyn Fn()| {
        let (shard, mut all) = (Buffer::from_slice(stream, &[value]).unwrap(), Buffer::<u32>::zeros(stream, 1).unwrap());
        let group = comm.group(|| {
            comm.all_gather(stream, &shard, &mut all)?;
            meanwhile();
            assert_eq!(all.to_vec(stream)?, [0], "before the end");
            Ok(())
        });
        group.unwrap();
        assert_eq!(all.to_vec(stream).unwrap(), [value]);
    };
    gather(5, &|| thread::scope(|scope| scope.spawn(|| gather(7, &|| {})).join().unwrap()));
}

/// By the cluster's own method, as by the trait's.
#[test]
fn a_team_is_not_made_in_a_group() {
    let world = World::new(2, 0);
    let team = Team::all(world.size());
    let comm = &world.ranks[0];
    let error = comm.group(|| comm.team(&team).map(|_| ())).unwrap_err().to_string();
    assert!(error.starts_with("EmulatedCommunicator::team: a group is under way"), "{error}");
}

/// A rank that does not come to a split is named: at once where this thread drives all ranks or the other is gone, else after the patience.
#[test]
fn a_rank_that_does_not_split_is_named() {
    let missing = |error: Error| match error {
        Error::Symmetric(SymmetricError::Missing { ranks, .. }) => ranks.iter().map(|rank| rank.index()).collect::<Vec<_>>(),
        Error::Symmetric(SymmetricError::Aborted { rank, .. }) => vec![rank.index()],
        other => panic!("{other}"),
    };
    let world = World::new(3, 0);
    (0..3).for_each(|i| world.ranks[i].barrier(&world.streams[i]).unwrap());
    let start = Instant::now();
    assert_eq!(missing(world.ranks[1].split(Some(0), 0).unwrap_err()), [0, 2]);
    assert!(start.elapsed() < Duration::from_secs(2), "no rank can come");

    let mut world = World::new(2, 0);
    let (gone, stays) = (world.ranks.remove(0), world.ranks.remove(0));
    thread::scope(|scope| {
        let waits = scope.spawn(|| missing(stays.split(Some(0), 0).unwrap_err()));
        drop(gone);
        assert_eq!(waits.join().unwrap(), [0]);
    });
    assert!(start.elapsed() < Duration::from_secs(8), "it was told");
}
