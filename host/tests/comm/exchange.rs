//! Messages by kernels that wait for each other, as far as the virtual cluster runs them.

use oxtile::comm::WorldSize;
use oxtile::symmetric::{Arena, ArenaOptions, Exchange, ExchangeOptions, SymmetricError};
use oxtile::{Buffer, Error, Graph, Runtime, comm::EmulatedCommunicator};

use super::support::World;

#[test]
fn one_rank_exchanges_with_itself() {
    let world = World::new(1, 0);
    let (stream, arena) = (&world.streams[0], Arena::open(&world.ranks[0], ArenaOptions::default()).unwrap());
    let mut exchange = Exchange::new(&arena, stream, ExchangeOptions { lanes: 2, slot_bytes: 16, ..ExchangeOptions::default() }).unwrap();
    for len in [3, 0, 40] {
        let shard = Buffer::from_slice(stream, &(0..len).collect::<Vec<u32>>()).unwrap();
        let mut whole = Buffer::zeros(stream, len.into()).unwrap();
        exchange.all_gather(stream, &shard, &mut whole).unwrap();
        exchange.check(stream).unwrap();
        assert_eq!(whole.to_vec(stream).unwrap(), shard.to_vec(stream).unwrap());
    }
    let (shard, mut short) = (world.zeros(4), world.zeros(3));
    let error = exchange.all_gather(stream, &shard[0], &mut short[0]).unwrap_err();
    assert!(matches!(error, Error::Length { expected: 4, found: 3, .. }), "{error}");
    let error = Exchange::new(&arena, stream, ExchangeOptions { lanes: 1, slot_bytes: 24, ..ExchangeOptions::default() }).unwrap_err();
    assert!(error.to_string().contains("slots of 24 bytes"), "{error}");
    let error = Graph::capture(&[stream], || exchange.all_gather(stream, &shard[0], &mut short[0])).unwrap_err();
    assert!(matches!(error, Error::NotCapturable { .. }), "{error}");
    drop(exchange);
    arena.close().unwrap().finish().unwrap();
}

#[test]
fn kernels_that_run_one_at_a_time_cannot_wait_for_each_other() {
    let runtime = Runtime::emulated(2).unwrap();
    let ranks = EmulatedCommunicator::world_of(&runtime, WorldSize::new(2).unwrap()).unwrap();
    let arena = Arena::open(&ranks[0], ArenaOptions::default()).unwrap();
    let error = Exchange::new(&arena, &ranks[0].device().stream().unwrap(), ExchangeOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::Symmetric(SymmetricError::Unavailable { .. })), "{error}");
    assert!(error.to_string().contains("use PullGather"), "{error}");
}
