//! What ranks do wrong is an error that names ranks, calls and the number of the call.

use std::time::{Duration, Instant};

use oxtile::comm::{Communicator, EmulatedCommunicator, Rank, ReduceOp, Team, WorldSize};
use oxtile::{Buffer, EmulatedOptions, Error, Result, Runtime};

use crate::support::World;

/// What two ranks' streams say after rank 0 did one thing and rank 1 another, one all-reduce having gone right.
fn outcome(first: impl Fn(&World) -> Result<()>, second: impl Fn(&World) -> Result<()>) -> Error {
    let world = World::new(2, 1);
    let mut values = world.zeros(4);
    for (i, rank) in world.ranks.iter().enumerate() {
        rank.all_reduce(&world.streams[i], &mut values[i], ReduceOp::Max).unwrap();
    }
    first(&world).unwrap();
    second(&world).unwrap();
    let error = world.streams[0].synchronize().unwrap_err();
    assert_eq!(world.streams[1].synchronize().unwrap_err().to_string(), error.to_string(), "every rank gets the error");
    assert!(world.ranks[0].barrier(&world.streams[0]).is_err(), "nothing runs any more");
    error
}

fn reduce(world: &World, rank: usize, len: u64, op: ReduceOp) -> Result<()> {
    world.ranks[rank].all_reduce(&world.streams[rank], &mut Buffer::<u32>::zeros(&world.streams[rank], len)?, op)
}

#[test]
fn lengths_differ() {
    let error = outcome(|world| reduce(world, 0, 4, ReduceOp::Sum), |world| reduce(world, 1, 5, ReduceOp::Sum));
    let Error::Mismatch { sequence: 1, rank, other, found, expected, .. } = &error else { panic!("{error}") };
    assert_eq!(rank.index() + other.index(), 1);
    let mut both = [found.as_str(), expected.as_str()];
    both.sort_unstable();
    assert_eq!(both, ["all_reduce (Sum of U32) of 16 bytes", "all_reduce (Sum of U32) of 20 bytes"]);
}

#[test]
fn operations_differ() {
    let error = outcome(|world| reduce(world, 0, 4, ReduceOp::Sum), |world| reduce(world, 1, 4, ReduceOp::Max));
    assert!(matches!(error, Error::Mismatch { sequence: 1, .. }), "{error}");
    let error = outcome(|world| reduce(world, 0, 4, ReduceOp::Sum), |world| world.ranks[1].barrier(&world.streams[1]));
    assert!(error.to_string().contains("called barrier"), "{error}");
    assert!(error.to_string().starts_with("call 1 of the world: rank "), "{error}");
}

#[test]
fn messages_of_other_lengths_are_refused() {
    let send = |world: &World| world.ranks[0].send(&world.streams[0], &world.zeros(3)[0], world.rank(1));
    let receive = |world: &World| world.ranks[1].recv(&world.streams[1], &mut world.zeros(2)[1], world.rank(0));
    let error = outcome(send, receive);
    assert!(error.to_string().starts_with("call 0 of the world from rank 0 to rank 1"), "{error}");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let world = World::new(3, 2);
    (0..3).for_each(|i| world.ranks[i].barrier(&world.streams[i]).unwrap());
    (0..2).for_each(|i| world.ranks[i].barrier(&world.streams[i]).unwrap());
    // All ranks are driven by this thread, which waits: no other rank can come.
    let error = world.streams[0].synchronize().unwrap_err();
    let Error::Stuck { waits } = &error else { panic!("{error}") };
    assert_eq!(waits.lines().skip(1).count(), 2, "{waits}");
    let came = ["call 1 of the world, barrier: only rank 0, rank 1 came", "call 1 of the world, barrier: only rank 1, rank 0 came"];
    assert!(came.iter().any(|came| waits.contains(came)), "{waits}");
}

#[test]
fn two_that_send_first_wait_for_ever() {
    let world = World::new(2, 2);
    let mut buffers = world.zeros(3);
    let own = world.zeros(3);
    for i in 0..2 {
        let peer = world.rank(1 - i as u32);
        world.ranks[i].send(&world.streams[i], &own[i], peer).unwrap();
        world.ranks[i].recv(&world.streams[i], &mut buffers[i], peer).unwrap();
    }
    let error = world.streams[0].synchronize().unwrap_err();
    let Error::Stuck { waits } = &error else { panic!("{error}") };
    assert!(waits.contains("waits for the others of rank 1 (call 0 of the world from rank 1 to rank 0"), "{waits}");
}

#[test]
fn patience_ends_when_another_thread_may_come() {
    let options = EmulatedOptions { devices: 2, patience: Duration::from_millis(50), ..EmulatedOptions::default() };
    let runtime = Runtime::emulated_with(options).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap()).unwrap();
    let stream = ranks[0].device().stream().unwrap();
    ranks[0].barrier(&stream).unwrap();
    let start = Instant::now();
    let error = stream.synchronize().unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(50), "rank 1 might have come");
    assert!(error.to_string().contains("call 0 of the world, barrier: only rank 0 came"), "{error}");
}

#[test]
fn what_a_rank_can_see_alone_is_refused_before_anything_is_enqueued() {
    let world = World::new(2, 0);
    let (rank, stream) = (&world.ranks[0], &world.streams[0]);
    let mut short = world.zeros(3);
    let shard = world.zeros(2);
    let error = rank.all_gather(stream, &shard[0], &mut short[0]).unwrap_err();
    assert!(matches!(error, Error::Length { expected: 4, found: 3, .. }), "{error}");
    assert!(matches!(rank.all_to_all(stream, &shard[0], &mut short[0]), Err(Error::Length { expected: 2, found: 3, .. })));
    let input = world.zeros(3);
    assert!(matches!(rank.all_to_all(stream, &input[0], &mut short[0]), Err(Error::Length { expected: 2, found: 3, .. })));
    let far = Rank::new(2, WorldSize::new(3).unwrap()).unwrap();
    assert!(matches!(rank.broadcast(stream, &mut short[0], far), Err(Error::Invalid { .. })));
    assert!(matches!(rank.send(stream, &shard[0], far), Err(Error::Invalid { .. })));
    assert!(matches!(rank.barrier(&world.streams[1]), Err(Error::Invalid { .. })));
    assert!(matches!(rank.all_reduce(stream, &mut short[1], ReduceOp::Sum), Err(Error::WrongDevice { .. })));
    assert!(rank.team(&Team::all(WorldSize::new(3).unwrap())).is_err());
    // Nothing of this was counted as a call.
    for (rank, stream) in world.ranks.iter().zip(&world.streams) {
        rank.barrier(stream).unwrap();
    }
    world.streams.iter().for_each(|stream| stream.synchronize().unwrap());
}
