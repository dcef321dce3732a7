//! What goes wrong on one rank's host, while its streams are at work.

use oxtile::Error;
use oxtile::comm::Team;
use oxtile::symmetric::{Arena, ArenaOptions, ChunkedGather, Epoch, GatherMemory, PullGather, SymmetricError};

use crate::support::World;

/// Rank 1 took something else than the gather's second channel, which rank 0 finds when its own shard is on its way already: the output is not freed
/// under the copy.
#[test]
fn the_output_of_a_gather_that_fails_is_freed_behind_its_copies() {
    for seed in 0..32 {
        let world = World::new(2, seed);
        let arenas: Vec<_> = world.ranks.iter().map(|rank| Arena::open(rank, ArenaOptions::default()).unwrap()).collect();
        let memory = GatherMemory::<u32>::take(&arenas[0], 64).unwrap();
        let (_shard, ready, _other) =
            (arenas[1].buffer::<u32>(64).unwrap(), arenas[1].channel().unwrap(), arenas[1].buffer::<u32>(1).unwrap());
        let member = Team::all(world.size()).member(world.rank(0)).unwrap();
        let (stream, compute) = (&world.streams[0], world.ranks[0].device().stream().unwrap());
        let mut gather = PullGather::new(&arenas[0], &member, memory, stream, 1).unwrap();
        gather.shard(&compute).unwrap().fill_zero(&compute).unwrap();
        let error = gather.start().map(|_| ()).unwrap_err();
        drop(gather);
        assert!(matches!(error, Error::Symmetric(SymmetricError::Layout { .. })), "{error}");
        arenas[1].signal(&world.streams[1], ready, world.rank(0), Epoch::ZERO.next()).unwrap();
        [stream, &compute].iter().try_for_each(|stream| stream.synchronize()).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}
