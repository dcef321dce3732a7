//! Collectives in a world of one rank.

use oxtile::comm::{Communicator, Rank, ReduceMax, ReduceOp, SingleRank, WorldSize};
use oxtile::{Buffer, Error};

use crate::support::{emulated, everywhere, filled, stream, streams};

#[test]
fn one_rank_is_the_whole_world() {
    for runtime in everywhere() {
        let [stream, other] = streams(&runtime);
        let comm = SingleRank::new(&runtime.device(0).unwrap());
        assert_eq!((comm.rank(), comm.world()), (Rank::ZERO, WorldSize::ONE));
        let (mut values, expected) = filled(&other, 100, 3);
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            comm.all_reduce(&stream, &mut values, op).unwrap();
        }
        comm.broadcast(&stream, &mut values, Rank::ZERO).unwrap();
        comm.barrier(&stream).unwrap();
        let mut gathered = Buffer::zeros(&other, 100).unwrap();
        comm.all_gather(&stream, &values, &mut gathered).unwrap();
        let mut shard = Buffer::zeros(&other, 100).unwrap();
        comm.reduce_scatter(&stream, &gathered, &mut shard, ReduceOp::Sum).unwrap();
        assert_eq!(shard.to_vec(&other).unwrap(), expected);
    }
}

#[test]
fn amaxes_of_one_rank_are_agreed() {
    let runtime = emulated(0, 1);
    let stream = stream(&runtime);
    let comm = SingleRank::new(&runtime.device(0).unwrap());
    let world: &dyn ReduceMax = &comm;
    let mut slots = Buffer::from_slice(&stream, &[1.0_f32, 0.0, f32::INFINITY]).unwrap();
    world.reduce_max(&stream, &mut slots).unwrap();
    assert_eq!(slots.to_vec(&stream).unwrap(), [1.0, 0.0, f32::INFINITY]);
    world.reduce_max(&stream, &mut Buffer::zeros(&stream, 0).unwrap()).unwrap();
}

#[test]
fn wrong_lengths_roots_and_devices_are_errors() {
    let runtime = emulated(0, 2);
    let (near, far) = (stream(&runtime), runtime.device(1).unwrap().stream().unwrap());
    let comm = SingleRank::new(&runtime.device(0).unwrap());
    let mut buffer = Buffer::<f32>::zeros(&near, 2).unwrap();
    let shard = Buffer::<f32>::zeros(&near, 1).unwrap();
    assert!(matches!(comm.all_gather(&near, &shard, &mut buffer), Err(Error::Length { expected: 2, found: 1, .. })));
    let root = Rank::new(1, WorldSize::new(2).unwrap()).unwrap();
    let error = comm.broadcast(&near, &mut buffer, root).unwrap_err();
    assert_eq!(error.to_string(), "Communicator::broadcast: rank 1 is not of this world, which has rank 0 alone");
    assert!(matches!(comm.barrier(&far), Err(Error::Invalid { what: "Communicator::barrier", .. })));
    let mut elsewhere = Buffer::<f32>::zeros(&far, 2).unwrap();
    assert!(matches!(comm.all_reduce(&near, &mut elsewhere, ReduceOp::Max), Err(Error::WrongDevice { .. })));
}
