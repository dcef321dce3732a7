//! Weights in shards: what ranks pull is the cast of the whole, byte by byte.

use oxtile::comm::Team;
use oxtile::quantize::Direction;
use oxtile::sharded::{self, Bf16, Chain, ChainConfig, Fp8, PullStreams, ShardSet, Weight, WeightFormat};
use oxtile::symmetric::{Arena, ArenaOptions};
use oxtile::{Result, Stream};

use crate::sharded_ranks::{Holder, Oracle, expected, weights};
use crate::support::{World, is_long};

/// Takes a set a rank for all ranks of a world.
pub fn holders<F: WeightFormat>(world: &World, weights: &[Weight]) -> Vec<Holder<F>> {
    let team = Team::all(world.size());
    let bytes = ShardSet::<F>::arena_bytes(&team, weights).unwrap();
    let open = |(rank, stream): (&_, &Stream)| {
        let arena = Arena::open(rank, ArenaOptions { bytes: bytes + (64 << 10), ..ArenaOptions::default() })?;
        let member = team.member(arena.rank()).unwrap();
        Holder::new(stream, &arena, &member, weights)
    };
    world.ranks.iter().zip(&world.streams).map(open).collect::<Result<_>>().unwrap()
}

/// Every rank pulls the cast of the whole, in both passes, of two steps.
fn pulls_the_cast_of_the_whole<F: Oracle>() {
    for ranks in 1..=5 {
        for seed in 0..if is_long() { 32 } else { 1 } {
            let world = World::new(ranks, seed);
            let weights = weights::<F>();
            let mut holders = holders::<F>(&world, &weights);
            let mut chains: Vec<_> = holders
                .iter()
                .zip(&world.streams)
                .map(|(holder, stream)| {
                    let order = holder.set.weights().map(|(id, _)| id);
                    let streams = [PullStreams::One, PullStreams::Two][ranks as usize / 2 % 2];
                    let config = ChainConfig { distance: ranks % 3, streams, ..ChainConfig::new(&holder.set, order).unwrap() };
                    Chain::new(stream, &holder.set, &config).unwrap()
                })
                .collect();
            for step in 0..2 {
                for (holder, stream) in holders.iter_mut().zip(&world.streams) {
                    holder.publish(stream, step).unwrap();
                }
                let expected = |at, direction| expected::<F>(&world.streams[0], &weights, (step, at), direction);
                let forward: Vec<_> = (0..weights.len()).map(|at| expected(at, Direction::Rows)).collect();
                let backward: Vec<_> = (0..weights.len() - 1).rev().map(|at| expected(at, Direction::Columns)).collect();
                for ((holder, chain), stream) in holders.iter().zip(&mut chains).zip(&world.streams) {
                    for (is_backward, expected) in [(false, &forward), (true, &backward)] {
                        let found = holder.pass(chain, stream, is_backward).unwrap();
                        for (found, (expected, at)) in found.iter().zip(expected.iter().zip(0..)) {
                            assert_eq!(found, expected, "{}, {ranks} ranks, step {step}, backward: {is_backward}, position {at}", F::NAME);
                        }
                        assert_eq!(found.len(), expected.len());
                    }
                }
            }
        }
    }
}

#[test]
fn bf16() {
    pulls_the_cast_of_the_whole::<Bf16>();
}

#[test]
fn fp8() {
    pulls_the_cast_of_the_whole::<Fp8>();
}

#[test]
fn mxfp8() {
    pulls_the_cast_of_the_whole::<sharded::Mxfp8>();
}

#[test]
fn nvfp4() {
    pulls_the_cast_of_the_whole::<sharded::Nvfp4>();
}

#[test]
fn nvfp4_squares() {
    pulls_the_cast_of_the_whole::<sharded::Nvfp4Squares>();
}
